"""How the few-row matrix kernels are cut, and where cuBLAS is taken instead. Pure arithmetic on shapes.

From `benchmarks/gpu_linear.py` on an H200: products of small models cost their latency, and the Triton kernel's is half
of cuBLAS's; the large ones of an 8B model are read faster by cuBLAS. Shapes: K inputs, N outputs.
"""

from dataclasses import dataclass

MAX_ROWS = 256  # rows up to which the kernels are considered at all
_SMALL_WEIGHT = 1 << 22  # most elements of a weight whose product costs its latency
_LONG_SUM = 1024  # inputs above which a few programs share a sum
_SHARED_ROWS = 64  # rows up to which they do


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCut:
    """outputs, inputs: of a program's weight tile (powers of two); num_splits: programs that share the sum over K."""

    outputs: int
    inputs: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCut:
    """inputs: columns of a step over K."""

    inputs: int = 64
    num_warps: int = 4
    num_stages: int = 5


def gemm_cut(*, rows: int, K: int, N: int, swiglu: bool = False) -> GemmCut | None:
    """The cut of a product, or None where cuBLAS is the better choice."""
    if not 0 < rows <= MAX_ROWS or N * K > _SMALL_WEIGHT:
        return None
    if K <= _LONG_SUM or swiglu:
        return GemmCut(outputs=16, inputs=64)
    return GemmCut(outputs=16, inputs=128, num_splits=3 if rows <= _SHARED_ROWS else 1)


def head_cut(*, rows: int, K: int, head_dim: int) -> HeadCut | None:
    """The cut of the kernel that makes whole heads; None where it has no such form or reads too much per program."""
    if not 0 < rows <= MAX_ROWS or head_dim < 32 or head_dim & (head_dim - 1) or K * head_dim > _SMALL_WEIGHT >> 5:
        return None
    return HeadCut()
