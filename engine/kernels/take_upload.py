"""A step's upload on its way from host memory to the device, by the first kernel of T.

Memory of the host is read once and at once: reads of one line do not overlap with each other, and each takes about a
microsecond.
"""

import triton
import triton.language as tl

from engine.kernels.device_ops import begin
from engine.kernels.row_state import ENTRIES, LENGTH_AT, HostUpload

_ENTRIES, _LENGTH_AT = tl.constexpr(ENTRIES), tl.constexpr(LENGTH_AT)
_LINE = 16  # numbers of a line of memory
_MOST_BLOCK = 4096  # numbers that are asked for at once


@triton.jit
def _take_upload_kernel(
    entries_ptr,
    number_ptr,
    out_ptr,
    capacity,
    usual_length,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    number = tl.load(number_ptr)
    entry = entries_ptr + number % _ENTRIES * capacity
    i = tl.arange(0, BLOCK)
    # volatile: what the host wrote, not what a cache may still hold of an earlier step.
    values = tl.load(entry + i, mask=i < usual_length, other=0, volatile=True)
    tl.store(out_ptr + i, values, mask=i < usual_length)
    if not ALL:
        length = tl.sum(tl.where(i == _LENGTH_AT, values, 0), 0).to(tl.int32)
        length = tl.cdiv(length, LINE) * LINE
        for first in range(usual_length, length, BLOCK):
            at = tl.multiple_of(first, LINE) + i
            tl.store(out_ptr + at, tl.load(entry + at, mask=at < length, other=0, volatile=True), mask=at < length)
    tl.debug_barrier()
    tl.store(number_ptr, number + 1)


def take_upload(upload: HostUpload, *, pdl: bool = False) -> None:
    """Copies the next upload to `upload.numbers_C`; the one behind it is next then."""
    entries, capacity = upload.entries_EC.shape
    assert entries == ENTRIES
    assert upload.entries_EC.is_contiguous()
    assert upload.numbers_C.shape == (capacity,)
    assert capacity % _LINE == 0  # so that whole lines are there
    usual = min(_MOST_BLOCK, triton.cdiv(upload.usual_length, _LINE) * _LINE)
    block = triton.next_power_of_2(usual)
    _take_upload_kernel[(1,)](
        upload.entries_EC,
        upload.number_1,
        upload.numbers_C,
        capacity,
        usual,
        BLOCK=block,
        LINE=_LINE,
        ALL=upload.most_length <= usual,
        PDL=pdl,
        num_warps=min(8, max(1, block // 128)),
        launch_pdl=pdl,
    )
