"""Which products of few rows take weights of 8 bits where a drafter has them, and how they are cut. Pure arithmetic on
shapes.

They cost the reading of their weights, of which 8 bits are half. From `benchmarks/gpu_int8.py` on an H200, 16 rows of
Qwen3-8B's shapes, us in bfloat16 and in 8 bits: gate and up 53.5 and 28.0, down 25.5 and 16.5, qkv 13.7 and 10.4, o
10.2 and 8.7, fc 44.2 and 24.9, the context's K and V 22.8 and 14.7, head 284 and 158.

Shapes: K inputs, N outputs, both of the matrix: with SwiGLU N counts gate and up rows.
"""

from engine.kernels.gemm_choice import SM90_SHARED_BYTES, STREAM_ROWS, STREAM_TILE, GemmCut, StreamCut

MAX_ROWS = STREAM_ROWS  # above, the bfloat16 weights are read
STREAM_COLUMNS = 128  # of a copy, within which `in_stream_order` moves them
_LEAST_WEIGHT = 1 << 22  # elements of a matrix; products of smaller ones cost their latency
_K_MULTIPLE = 16  # bytes of a load
_LEAST_INPUTS = 2048  # of a matrix whose weights the copy engine brings
_SMS = 132  # of the GPU that this was measured on
_FEWEST_PROGRAMS = 190  # that keep its memory busy
_LEAST_STEPS = 8  # of a program that shares a sum
_PROGRAM_STEPS = 9  # what a program takes beside its steps, in steps


def keeps_int8(N: int, K: int) -> bool:
    """Whether a matrix of such a drafter is kept in 8 bits as well."""
    return N * K > _LEAST_WEIGHT and K % _K_MULTIPLE == 0


def streams_int8(N: int, K: int) -> bool:
    """Whether `engine.kernels.stream_gemm` takes it, on GPUs that have that kernel."""
    return keeps_int8(N, K) and N % STREAM_TILE == 0 and K % STREAM_COLUMNS == 0 and K >= _LEAST_INPUTS


def int8_stream_cut(*, rows: int, K: int, N: int) -> StreamCut | None:
    """The cut of a matrix of which `streams_int8`; None where the bfloat16 weights are the better choice."""
    if not 0 < rows <= MAX_ROWS:
        return None
    tiles, steps = N // STREAM_TILE, K // STREAM_COLUMNS
    splits = _splits(tiles, steps)
    programs, of_each = tiles * splits, steps // splits
    units = -(-programs // (3 * _SMS))
    # Two programs an SM, with more on their way each, or three; the fewer are better beside the next kernel's.
    stages = 8 if programs <= 2 * _SMS and of_each > 8 else 5
    return StreamCut(num_splits=splits, units=units, inputs=STREAM_COLUMNS, num_stages=stages, staggered=units == 1)


def _splits(tiles: int, steps: int) -> int:
    """Programs that share a sum: where all run at once, the SM with most of them has least to do."""
    choices = [n for n in range(1, max(1, steps // _LEAST_STEPS) + 1) if steps % n == 0 and tiles * n <= 3 * _SMS]
    filling = [n for n in choices if tiles * n >= _FEWEST_PROGRAMS] or choices[-1:] or [1]
    return min(filling, key=lambda n: -(-tiles * n // _SMS) * (steps // n + _PROGRAM_STEPS))


def int8_cut(
    *, rows: int, K: int, N: int, swiglu: bool = False, shared_bytes: int = SM90_SHARED_BYTES
) -> GemmCut | None:
    """The cut of `engine.kernels.row_gemm`, for matrices and GPUs that the other kernel does not take; None where the
    bfloat16 weights are the better choice.

    The matrix units of SM80 and later take 8 weight rows and 16 rows of x at a time from registers.
    """
    if not 0 < rows <= MAX_ROWS or not keeps_int8(N, K):
        return None
    inputs, stages = 256 if K >= _LEAST_INPUTS else 64, 4
    outputs = STREAM_TILE // 2 if swiglu else STREAM_TILE
    tiles, steps = -(-N // STREAM_TILE), -(-K // inputs)
    of_each = -(-steps // max(1, min(2 * _SMS // tiles, steps // 4)))
    cut = GemmCut(
        outputs=outputs,
        inputs=inputs,
        num_splits=-(-steps // of_each),  # none without a step
        num_stages=stages,
        ahead=0,
        staggered=tiles <= 2 * _SMS,
    )
    return cut if stages * inputs * (STREAM_TILE + 2 * MAX_ROWS) <= shared_bytes else None
