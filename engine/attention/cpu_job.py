"""What the CPU attention kernel is told: the 64-bit words of its job, and the scratch it needs."""

from enum import IntEnum, auto


class Word(IntEnum):
    """Index of a word. Strides and sizes count elements; addresses are those of contiguous memory unless a stride is
    given. N rows, R sequences, U units, D head size."""

    Q = 0  # [N, Q_STRIDE], query heads of D side by side
    Q_STRIDE = auto()
    K = auto()  # [slots, KV_HEADS, D]
    V = auto()
    OUT = auto()  # [N, KV_HEADS * GROUP * D]
    TABLE = auto()  # int64 [R, TABLE_STRIDE], block ids
    TABLE_STRIDE = auto()
    BLOCK_SIZE = auto()
    KV_HEADS = auto()
    GROUP = auto()  # query heads per KV head
    HEAD_DIM = auto()  # a multiple of 8
    UNITS = auto()  # int64 [U, 3]: sequence, first row, rows
    NUM_UNITS = auto()
    VISIBLE = auto()  # int64 [N], at least 1
    SCRATCH = auto()  # float32 [threads, SCRATCH_STRIDE]
    SCRATCH_STRIDE = auto()
    MAX_QUERIES = auto()  # greatest rows * GROUP of a unit
    SCORE_STRIDE = auto()  # positions, a multiple of 8
    SCALE = auto()  # float32 bits
    TICKET = auto()  # 0 at the start; numbers the threads
    COUNTER = auto()  # 0 at the start; the next (unit, KV head)


def score_stride(max_visible: int) -> int:
    return -(-max_visible // 8) * 8


def scratch_floats(*, max_queries: int, head_dim: int, max_visible: int) -> int:
    """Per thread: the queries, their sums of V, eight positions of K or V, the scores."""
    return (2 * max_queries + 8) * head_dim + max_queries * score_stride(max_visible)
