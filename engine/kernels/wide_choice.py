"""Which products of many rows go to `engine.kernels.wide_gemm`, and how they are cut. Pure arithmetic on shapes.

cuBLAS multiplies as fast; what is gained are the bytes that the kernel behind it would read again. From
`benchmarks/gpu_large.py` on an H200: at 8B shapes gate, up and SwiGLU of 2,048 rows take 543 us (559 apart), of 512 143
(148), of 256 93 at best (79); head and largest logits 3,297 (3,722), 893 (955) and 485 us (514). Shapes: K inputs, N
outputs.
"""

from dataclasses import dataclass

# Rows from .. to that take each; (0, 0): none do.
SWIGLU_ROWS = (512, 1 << 20)
ARGMAX_ROWS = (256, 1 << 20)
_LEAST_WEIGHT = 1 << 24  # elements of a matrix; smaller ones were not measured
_LEAST_FILLED = 0.85  # of the tiles that the SMs could do in the time: cuBLAS has tiles of more sizes
_PROGRAMS = 132  # SMs of the GPU that this was measured on


@dataclass(frozen=True, kw_only=True, slots=True)
class WideCut:
    """rows, outputs, inputs: of a tile and a step over K; num_programs: at most, which take tiles in turn."""

    rows: int = 128
    outputs: int
    inputs: int = 64
    num_programs: int = _PROGRAMS
    num_warps: int = 8
    num_stages: int = 3


def swiglu_cut(*, rows: int, K: int, N: int, item_bytes: int = 2) -> WideCut | None:
    """The cut of the kernel that joins gate and up within the product; None: cuBLAS and a kernel behind it."""
    return _cut(WideCut(outputs=128, num_stages=4), SWIGLU_ROWS, rows, K, N, item_bytes)


def argmax_cut(*, rows: int, K: int, N: int, item_bytes: int = 2) -> WideCut | None:
    """The cut of the kernel that finds a row's largest product; None: cuBLAS and a kernel behind it."""
    return _cut(WideCut(outputs=256), ARGMAX_ROWS, rows, K, N, item_bytes)


def _cut(cut: WideCut, taken: tuple[int, int], rows: int, K: int, N: int, item_bytes: int) -> WideCut | None:
    if not taken[0] <= rows <= taken[1] or N * K <= _LEAST_WEIGHT or item_bytes != 2 or K % cut.inputs:
        return None
    tiles = -(-rows // cut.rows) * -(-N // cut.outputs)
    turns = -(-tiles // cut.num_programs)
    return cut if tiles >= _LEAST_FILLED * turns * cut.num_programs else None
