"""Small device functions that several kernels share.

PDL (programmatic dependent launch, SM90): a kernel launched with it may start while the kernel before it still runs. It
asks for its weights first, which nobody writes, and waits before it touches anything else. Every kernel that may be
launched so calls `begin`; then what it follows has ended, with all its writes visible, and so has all before that.
"""

import triton
import triton.language as tl

# Policy of what soon is read again, small as it is: rows between two products, lengths, norms. Else the weights of one
# layer, seven times L2, push it out of there, to memory if it was written and from memory once it is wanted.
KEPT = tl.constexpr("evict_last")


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernel before this one, then lets the next one start up to its own wait.

    The other way round takes 0.7 us off a layer of 8B shapes on an H200, and SmolLM2's step takes longer with it. But
    then more than two kernels are on their way at once, and products begun so once gave a wrong result, why is unknown.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(ptr, num_elements, LINES: tl.constexpr, LINE_ELEMENTS: tl.constexpr):
    """Asks for the first LINES lines of 128 bytes from ptr, at most num_elements, to be brought into L2."""
    if LINES > 0:
        at = tl.minimum(tl.arange(0, LINES) * LINE_ELEMENTS, num_elements - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(ptr + at).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_rows(row_ptr, bytes_of_half, ITEM_BYTES: tl.constexpr):
    """Asks for the first 2 * bytes_of_half bytes (halves: multiples of 16) from each row pointer to be brought into L2.

    SM90: the copy engine takes a request for half a row; asked line by line a tile would take microseconds to ask for.
    """
    if bytes_of_half > 0:
        half = tl.arange(0, 2) * (bytes_of_half // ITEM_BYTES)
        at = (row_ptr[:, None] + half[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [at, (at * 0).to(tl.int32) + bytes_of_half],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def forget(line_ptr):
    """Drops the 128 bytes at each pointer, a multiple of 128, from L2: they need not be written to memory.

    They may then hold anything. Whoever reads them must have done so, in all warps.
    """
    tl.inline_asm_elementwise(
        "discard.global.L2 [$1], 128; mov.u32 $0, 0;",
        "=r,l",
        [line_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rounded(x, like_ptr):
    """float32 x rounded to the type that like_ptr points to, as float32: where the layer's torch form rounds."""
    return x.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def row_squares(squares_ptr, row_m, real_m, num_parts, PARTS: tl.constexpr):
    """The parts [BM, PARTS] of rows' sums of squares, out of [rows, num_parts] float32."""
    part = tl.arange(0, PARTS)
    read = real_m[:, None] & (part < num_parts)[None, :]
    return tl.load(squares_ptr + row_m[:, None] * num_parts + part[None, :], mask=read, other=0.0)


@triton.jit
def inverse_rms(squares_ptr, row_m, real_m, num_parts, eps, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of rows [BM] from their `row_squares`."""
    return tl.rsqrt(tl.sum(row_squares(squares_ptr, row_m, real_m, num_parts, PARTS), 1) / SIZE + eps)
