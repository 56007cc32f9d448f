"""The 64-bit words that the row-wise CPU kernels are told. Memory is contiguous unless a stride is given (elements)."""

from enum import IntEnum, auto

WIDE = "_wide"  # suffix of the kernels whose output is float32, rounded to the kind: what the matrix kernel reads
MAX_HEAD_DIM = 512  # of rotate_and_write, which holds one head on the stack


class NormWord(IntEnum):
    X = 0  # [ROWS, SIZE]
    OUT = auto()  # [ROWS, SIZE]
    WEIGHT = auto()  # [SIZE]
    ROWS = auto()
    SIZE = auto()  # a multiple of 8
    EPS = auto()  # float32 bits
    COUNTER = auto()  # 0 at the start; the next row
    DELTA = auto()  # add_rms_norm: [ROWS, SIZE]
    SUM = auto()  # add_rms_norm: [ROWS, SIZE], out


class SiluWord(IntEnum):
    X = 0  # [ROWS, 2 * SIZE], gate then up
    OUT = auto()  # [ROWS, SIZE]
    ROWS = auto()
    SIZE = auto()  # a multiple of 8
    COUNTER = auto()


class PeakWord(IntEnum):
    X = 0  # float32 [ROWS, SIZE]
    VALUE = auto()  # float32 [ROWS], out; NaN where the row holds one
    INDEX = auto()  # int64 [ROWS], out; the lowest of equal values
    FIRST = auto()  # what is added to every index
    ROWS = auto()
    SIZE = auto()  # at least 8
    COUNTER = auto()


class RotateWord(IntEnum):
    QKV = 0  # [ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM], rows QKV_STRIDE apart
    QKV_STRIDE = auto()
    Q = auto()  # out [ROWS, HEADS, HEAD_DIM]
    K = auto()  # caches, [slots, KV_HEADS, HEAD_DIM]
    V = auto()
    COS = auto()  # [ROWS, HEAD_DIM], rows ANGLE_STRIDE apart
    SIN = auto()  # the first half negated
    ANGLE_STRIDE = auto()
    SLOTS = auto()  # int64 [ROWS]
    NORM_WEIGHT = auto()  # [HEADS + KV_HEADS, HEAD_DIM], or 0: no norm of q and k
    EPS = auto()  # float32 bits
    ROWS = auto()
    HEADS = auto()
    KV_HEADS = auto()
    HEAD_DIM = auto()  # a multiple of 16, at most MAX_HEAD_DIM
    COUNTER = auto()
