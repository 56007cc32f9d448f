"""The numbers of rows that decode programs are recorded for. Pure arithmetic."""


def sizes_up_to(most: int) -> list[int]:
    """Ascending: powers of two, and from 8 on two values between.

    A batch pays for its bucket's rows. Beyond 8 requests of 8 tokens or more a GPU computes longer than it reads, so
    rows cost time there; recording another bucket costs a tenth of a second. Seven quarters of a power would cost what
    the next power does, in products by cuBLAS on an H200 (`benchmarks/gpu_sizes.py`): those of a layer of Qwen3-8B's
    shapes take 165 us for 224 tokens and 160 for 256.
    """
    powers = [1 << n for n in range(most.bit_length())]
    between = [power * quarter // 4 for power in powers if power >= 8 for quarter in (5, 6)]
    return sorted([size for size in (*powers, *between) if size <= most])


def row_buckets(largest: int) -> tuple[int, ...]:
    """`sizes_up_to` the largest batch, and the largest itself."""
    return tuple(sorted({*sizes_up_to(largest), largest}))
