"""How the few-row matrix kernels are cut, and where cuBLAS is taken instead. Pure arithmetic on shapes.

`MEASURED` holds what `benchmarks/gpu_linear.py` found best; a shape that is not in it gets the rule below.
Shapes: K inputs, N outputs.
"""

from dataclasses import dataclass

MAX_ROWS = 64  # rows up to which the kernels are considered at all
_SMALL_WEIGHT = 1 << 22  # elements; below, a product costs its latency, and fused kernels beat everything
_SPLIT_BELOW = 2  # output tiles per SM under which a long sum is shared
_HEAD_ELEMENTS = 1 << 17  # of one head's weights: above, a program per head leaves SMs without work


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
    num_stages: int = 4


# (K, N, SwiGLU) -> ((most rows, cut or None for cuBLAS), ..) ascending by rows.
MEASURED: dict[tuple[int, int, bool], tuple[tuple[int, GemmCut | None], ...]] = {}


def gemm_cut(*, rows: int, K: int, N: int, swiglu: bool = False, num_sms: int) -> GemmCut | None:
    """The cut of a product, or None where cuBLAS is the better choice."""
    if rows > MAX_ROWS:
        return None
    for most_rows, cut in MEASURED.get((K, N, swiglu), ()):
        if rows <= most_rows:
            return cut
    if N * K <= _SMALL_WEIGHT:
        return GemmCut(outputs=16, inputs=64 if K <= 1024 else 128)
    outputs = 64 if 8 * 64 * num_sms <= N else 32
    tiles = -(-N // outputs)
    splits = 1 if swiglu else max(1, min(4, _SPLIT_BELOW * num_sms // tiles, K // 1024))
    return GemmCut(outputs=outputs, inputs=128, num_splits=splits)


def head_cut(*, K: int, head_dim: int) -> HeadCut | None:
    """The cut of the kernel that makes whole heads; None where a program per head would read too much."""
    if head_dim < 32 or head_dim & (head_dim - 1) or K * head_dim > _HEAD_ELEMENTS:
        return None
    return HeadCut()
