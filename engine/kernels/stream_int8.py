"""Weights of 8 bits in `engine.kernels.stream_gemm`: how a tile lies in shared memory and how it is multiplied."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.kernels.stream_copies import TILE

SHARED_INT8 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def widened(tile, BK: gl.constexpr, SUMS: gl.constexpr):
    """A tile [TILE, BK] of 8 bits, its columns in `in_stream_order`, as the left operand of a product."""
    NEAR: gl.constexpr = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]]
    FAR: gl.constexpr = [[0, 128]] if BK == 256 else []
    READ: gl.constexpr = gl.DistributedLinearLayout(
        NEAR + FAR,
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [TILE, BK],
    )
    wide = tile.load(READ).to(gl.bfloat16).reshape([TILE, BK // 128, 4, 8, 2, 2])
    wide = wide.permute([0, 1, 3, 4, 2, 5]).reshape([TILE, BK])
    return gl.convert_layout(wide, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
