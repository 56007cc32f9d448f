"""How the few-row matrix kernels are cut, and where cuBLAS is taken instead. Pure arithmetic on shapes.

From `benchmarks/gpu_layer.py` on an H200. Products of small models cost their latency, and the Triton kernel's is half
of cuBLAS's. Those of an 8B model cost the reading of their weights: at 16 rows the kernel, with what surrounds the
product fused into it, is faster than cuBLAS; 17 to 64 rows were measured one product at a time, before the last
changes. Shapes: K inputs, N outputs.
"""

from dataclasses import dataclass

MAX_ROWS = 256  # rows up to which the kernels are considered at all
_SMALL_WEIGHT = 1 << 22  # most elements of a weight whose product costs its latency
_LONG_SUM = 1024  # inputs above which a few programs share a sum
_SHARED_ROWS = 64  # rows up to which they do
_LARGE_ROWS = 64  # rows up to which large weights are read here
_LEAST_INPUTS = 2048  # of such a weight
_TILE = 64  # rows of its tiles, the fewest that SM90's matrix units take as left operand
_LEAST_STEPS = 4  # of a program that shares a sum
_PROGRAMS = 132  # SMs of the GPU that this was measured on
_FEWEST_PROGRAMS = 96  # of a product whose weights the copy engine brings, one an SM: fewer were not measured
_MOST_UNITS = 8  # of one of them
_STREAM_INPUTS = 256  # of a step: five of them with their x fill shared memory
_MANY_STAGES = 3  # where programs have several units; fewer would leave room for two programs an SM, which loses
_LEAST_FILLED = 0.9  # of the tiles that a head's programs could do in the time; measured at 0.999 alone, not between
STREAM_ROWS = 16  # rows of x that such a program holds, and up to which bfloat16 weights are brought so
STREAM_TILE = 64  # weight rows of its tile, the fewest that SM90's matrix units take as left operand
SM90_SHARED_BYTES = 225 << 10  # of a program's stages: 227 KiB less what it keeps beside them


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCut:
    """outputs, inputs: of a program's weight tile (powers of two); num_splits: programs that share the sum over K.

    turned: the tile is the left operand of the product, as SM90's matrix units want it (64 weight rows or more).
    ahead: bytes of its weights that a program asks for before it waits for the kernel before it.
    staggered: programs begin with different columns.
    """

    outputs: int
    inputs: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    turned: bool = False
    ahead: int = 1 << 17
    staggered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCut:
    """How `engine.kernels.stream_gemm` is cut. inputs: of a step over K; num_stages: steps held or on their way.

    num_splits: programs that share the sum over K. units: such shares of tiles that a program takes one after another.
    staggered: programs begin with different columns. rows: of x, that a program holds.
    """

    num_splits: int
    units: int
    rows: int = STREAM_ROWS
    inputs: int = _STREAM_INPUTS
    num_stages: int = 5
    staggered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakCut:
    """How `engine.kernels.stream_head` is cut. rows, outputs: of x and of the weight in a tile; inputs: of a step over
    K; num_stages: steps held or on their way; num_programs: at most, which take tiles in turn.
    """

    rows: int = STREAM_ROWS
    outputs: int = STREAM_TILE
    inputs: int = _STREAM_INPUTS
    num_stages: int = 5
    num_programs: int = _PROGRAMS


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCut:
    """inputs: columns of a step over K."""

    inputs: int = 64
    num_warps: int = 4
    num_stages: int = 5


def gemm_cut(
    *, rows: int, K: int, N: int, swiglu: bool = False, item_bytes: int = 2, shared_bytes: int = SM90_SHARED_BYTES
) -> GemmCut | None:
    """The cut of a product, or None where cuBLAS is the better choice."""
    if not 0 < rows <= MAX_ROWS:
        return None
    if N * K > _SMALL_WEIGHT:
        cut = _large_cut(rows, K, N, swiglu)
        return cut if cut is not None and _stage_bytes(cut, rows, swiglu, item_bytes) <= shared_bytes else None
    if K <= _LONG_SUM or swiglu:
        return GemmCut(outputs=16, inputs=64)
    return GemmCut(outputs=16, inputs=128, num_splits=3 if rows <= _SHARED_ROWS else 1)


def _stage_bytes(cut: GemmCut, rows: int, swiglu: bool, item_bytes: int) -> int:
    """Shared memory of a program's stages: of weights and of x."""
    tile_rows = min(64, max(16, 1 << (rows - 1).bit_length()))
    return cut.num_stages * (cut.outputs * (2 if swiglu else 1) + tile_rows) * cut.inputs * item_bytes


def _large_cut(rows: int, K: int, N: int, swiglu: bool) -> GemmCut | None:
    """A program an SM, which holds long pieces of its rows, or several where there are many tiles."""
    outputs = _TILE // 2 if swiglu else _TILE
    tiles = -(-N // outputs)
    many = tiles > _PROGRAMS
    if rows > _LARGE_ROWS or K < _LEAST_INPUTS or (rows > 16 and many and not swiglu):
        return None
    inputs, stages = (128, 5) if rows > 16 else (128, 3) if many else (256, 3)
    steps = -(-K // inputs)
    of_each = -(-steps // max(1, min(_PROGRAMS // tiles, K // inputs // _LEAST_STEPS)))
    return GemmCut(
        outputs=outputs,
        inputs=inputs,
        num_splits=-(-steps // of_each),  # none without a step
        num_stages=stages,
        turned=True,
        ahead=0 if many else 32 << 10,
        staggered=not many,
    )


def stream_cut(*, rows: int, K: int, N: int, swiglu: bool = False) -> StreamCut | None:
    """The cut of a bfloat16 product of a decoder layer on SM90 whose weights the copy engine brings; None: it does not.

    At 16 rows a layer of Qwen3-8B's shapes takes 110.3 us by it and 113.8 by `gemm_cut`.
    """
    if not 0 < rows <= STREAM_ROWS or N * K <= _SMALL_WEIGHT or K < _LEAST_INPUTS:
        return None
    outputs, inputs = STREAM_TILE // 2 if swiglu else STREAM_TILE, _STREAM_INPUTS
    tiles, steps = N // outputs, K // inputs
    splits = max(1, min(_PROGRAMS // max(tiles, 1), steps // _LEAST_STEPS))
    units = next(
        (n for n in range(1, _MOST_UNITS + 1) if tiles * splits <= n * _PROGRAMS and tiles * splits % n == 0), 0
    )
    if tiles * outputs != N or steps * inputs != K or steps % splits or not units:
        return None
    if tiles * splits // units < _FEWEST_PROGRAMS:
        return None
    stages = 5 if units == 1 else _MANY_STAGES
    return StreamCut(num_splits=splits, units=units, num_stages=stages, staggered=units == 1)


def peak_cut(*, rows: int, K: int, N: int) -> PeakCut | None:
    """The cut of a bfloat16 head that finds its largest logits, on SM90; None: other kernels and a search.

    `benchmarks/gpu_head.py` on an H200: the largest logits of 16 rows at Qwen3-8B's shape take 280 us by it and 293 by
    `gemm_cut` and a search. Logits that are written, with a search behind, take 296.6 and 293.0, but by it as well: a
    row's have the same bits whether written or not, so what a request is given does not follow from what others beside
    it ask for.
    """
    if not 0 < rows <= STREAM_ROWS or K < _LEAST_INPUTS or K % _STREAM_INPUTS:
        return None
    tiles = -(-N // STREAM_TILE)
    if tiles < _LEAST_FILLED * _PROGRAMS * -(-tiles // _PROGRAMS):
        return None
    return PeakCut()


def head_cut(*, rows: int, K: int, head_dim: int) -> HeadCut | None:
    """The cut of the kernel that makes whole heads; None where it has no such form or reads too much per program."""
    if not 0 < rows <= MAX_ROWS or head_dim < 32 or head_dim & (head_dim - 1) or K * head_dim > _SMALL_WEIGHT >> 5:
        return None
    return HeadCut()
