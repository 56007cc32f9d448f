"""Which products of few rows take weights of 8 bits where a drafter has them, and how they are cut. Pure arithmetic on
shapes.

They cost the reading of their weights, of which 8 bits are half; the matrix units of SM80 and later take 8 weight rows
and 16 rows of x at a time from registers, where the weights become bfloat16. Shapes: K inputs, N outputs.
"""

from engine.kernels.gemm_choice import SM90_SHARED_BYTES, GemmCut

MAX_ROWS = 16  # above, the bfloat16 weights are read
_LEAST_WEIGHT = 1 << 22  # elements of a matrix; products of smaller ones cost their latency
_K_MULTIPLE = 16  # bytes of a load
_OUTPUTS = 64  # weight rows of a tile
_PROGRAMS = 264  # two on each SM of the GPU that this was measured on
_LEAST_STEPS = 4  # of a program that shares a sum


def keeps_int8(N: int, K: int) -> bool:
    """Whether a matrix of such a drafter is kept in 8 bits as well."""
    return N * K > _LEAST_WEIGHT and K % _K_MULTIPLE == 0


def int8_cut(
    *, rows: int, K: int, N: int, swiglu: bool = False, shared_bytes: int = SM90_SHARED_BYTES
) -> GemmCut | None:
    """The cut of `row_gemm` with weights of 8 bits; None where the bfloat16 weights are the better choice.

    With swiglu N counts gate rows alone.
    """
    if not 0 < rows <= MAX_ROWS or not keeps_int8(N * (2 if swiglu else 1), K):
        return None
    inputs = 256 if K >= 2048 else 64
    outputs = _OUTPUTS // 2 if swiglu else _OUTPUTS
    tiles, steps = -(-N // outputs), -(-K // inputs)
    of_each = -(-steps // max(1, min(_PROGRAMS // tiles, steps // _LEAST_STEPS)))
    stages = 4
    cut = GemmCut(
        outputs=outputs,
        inputs=inputs,
        num_splits=-(-steps // of_each),  # none without a step
        num_stages=stages,
        ahead=0,
        staggered=tiles <= _PROGRAMS,
    )
    held = stages * inputs * (_OUTPUTS + 2 * max(16, 1 << (rows - 1).bit_length()))
    return cut if held <= shared_bytes else None
