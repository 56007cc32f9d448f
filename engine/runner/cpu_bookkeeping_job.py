"""The 64-bit words that the CPU's bookkeeping kernels are told: addresses of contiguous int64 memory unless said, and
numbers. Shapes as in `engine.kernels.row_state`; STATE_.. and what it names there are indexed by slot."""

from enum import IntEnum, auto


class TargetWord(IntEnum):
    """`decode_block` and the rows of T made of it."""

    ROWS = 0
    WIDTH = auto()  # K
    SLOTS = auto()  # [R]
    COMMITTED = auto()  # [S]
    LAST = auto()  # [S]
    DRAFTS = auto()  # [S, DRAFT_STRIDE]
    DRAFT_STRIDE = auto()
    DRAFT_COUNT = auto()  # [S]
    FINISHED = auto()  # bool [S]
    MAX_LEN = auto()  # [S], LENGTH_STRIDE apart
    LENGTH_STRIDE = auto()
    TABLE = auto()  # [S, TABLE_STRIDE]
    TABLE_STRIDE = auto()
    BLOCK_SIZE = auto()
    OUT_DRAFTS = auto()  # [R, K]
    OUT_K = auto()  # [R]
    OUT_COMMITTED = auto()
    OUT_FINISHED = auto()  # bool
    OUT_KV_LEN = auto()
    OUT_IDS = auto()  # [R, Q]
    OUT_POSITIONS = auto()
    OUT_CACHE = auto()


class CommitWord(IntEnum):
    """Verify, commit and what D goes on with."""

    ROWS = 0
    WIDTH = auto()  # K
    SLOTS = auto()  # [R]
    DRAWN = auto()  # [R, Q]
    PEAK = auto()  # float32 [R, Q]
    DRAFTS = auto()  # [R, K]
    K = auto()  # [R]
    COMMITTED = auto()
    FINISHED = auto()  # bool
    SYNTHETIC = auto()  # [R], or 0
    ROW_CACHE = auto()  # [R, Q]
    ROW_POSITIONS = auto()
    STATE_COMMITTED = auto()  # [S]
    STATE_LAST = auto()
    STATE_FINISHED = auto()  # bool
    MAX_LEN = auto()  # [S], LENGTH_STRIDE apart
    MIN_LEN = auto()
    LENGTH_STRIDE = auto()
    STOPS = auto()  # [S, NUM_STOPS]
    NUM_STOPS = auto()
    TABLE = auto()  # [S, TABLE_STRIDE]
    TABLE_STRIDE = auto()
    BLOCK_SIZE = auto()
    BLOCK_WIDTH = auto()  # W; 0: nothing of a drafter is made
    MASK_ID = auto()
    POSITIONS = auto()  # of the drafter's table
    OUT_TOKENS = auto()  # [R, Q]
    OUT_EMITTED = auto()  # [R]
    OUT_ACCEPTED = auto()
    OUT_FINISH = auto()
    OUT_PACKED = auto()  # int32 [R, 4 + Q]
    OUT_CONTEXT_SLOTS = auto()  # [R, Q]
    OUT_CONTEXT_POSITIONS = auto()
    OUT_LIVE = auto()  # bool [R]
    OUT_START = auto()
    OUT_KV_LEN = auto()
    OUT_BLOCK_IDS = auto()  # [R, W]
    OUT_BLOCK_POSITIONS = auto()
    OUT_BLOCK_CACHE = auto()


class StoreWord(IntEnum):
    """New drafts into the slots."""

    ROWS = 0
    WIDTH = auto()  # K
    SLOTS = auto()  # [R]
    DRAFTS = auto()  # [R, K]
    LIVE = auto()  # bool [R]; the others get none
    STATE_DRAFTS = auto()  # [S, DRAFT_STRIDE]
    DRAFT_STRIDE = auto()
    STATE_COUNT = auto()  # [S]
