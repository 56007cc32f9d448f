"""What a GPU reads per second when reading is all it does: the floor under every product of few rows."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from gpu_timing import graph_us
from torch import Tensor

from engine.kernels.available import dependent_launch
from engine.kernels.device_ops import begin

_CHUNK = 8192  # int32 of a turn


@triton.jit
def _read_kernel(ptr, out_ptr, per_program, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """A program reads per_program chunks that lie one behind the other."""
    begin(PDL)
    at = tl.arange(0, CHUNK)
    first = tl.program_id(0).to(tl.int64) * per_program * CHUNK
    mixed = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.range(0, per_program, num_stages=4):
        mixed = mixed ^ tl.load(ptr + first + chunk * CHUNK + at)
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(mixed, 0))


@triton.jit
def _read_tiles_kernel(ptr, out_ptr, row_words, num_steps, ROWS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr):
    """A program reads ROWS rows of a matrix, WORDS of each at a time, as a product does."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = ptr + rows[:, None] * row_words + tl.arange(0, WORDS)[None, :]
    mixed = tl.zeros([ROWS, WORDS], tl.int32)
    for step in tl.range(0, num_steps, num_stages=4):
        mixed = mixed ^ tl.load(at + step * WORDS)
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(tl.xor_sum(mixed, 1), 0))


def tiles_us(weights: Sequence[Tensor]) -> dict[str, float]:
    """Microseconds to read one of `weights` [N, K] by tiles of 64 rows, by bytes of a row that are read at a time."""
    pdl, found = dependent_launch(), {}
    words = [weight.view(torch.int32) for weight in weights]
    rows, row_words = words[0].shape
    out = torch.empty(rows // 64, dtype=torch.int32, device=words[0].device)

    def reading(matrix: Tensor, width: int) -> Callable[[], object]:
        return lambda: _read_tiles_kernel[(rows // 64,)](
            matrix, out, row_words, row_words // width, ROWS=64, WORDS=width, PDL=pdl, num_warps=4, launch_pdl=pdl
        )

    for width in (32, 64, 128):
        found[f"{4 * width} bytes"] = graph_us([reading(matrix, width) for matrix in words], repeats=3)
    return found


def _reading(words: Tensor, out: Tensor) -> Callable[[], object]:
    pdl = dependent_launch()
    programs = out.shape[0]
    per_program = words.numel() // _CHUNK // programs
    return lambda: _read_kernel[(programs,)](
        words, out, per_program, CHUNK=_CHUNK, PDL=pdl, num_warps=8, launch_pdl=pdl
    )


def read_us(weights: Sequence[Tensor]) -> float:
    """Microseconds to read one of `weights`, each as a launch of its own: the best of a few numbers of programs.

    The end of a weight that does not divide evenly stays unread and is added in proportion.
    """
    found = []
    for programs in (132, 264, 528, 1056):
        parts = [weight.view(-1).view(torch.int32) for weight in weights]
        chunks = parts[0].numel() // _CHUNK
        if chunks < programs:
            continue
        out = torch.empty(programs, dtype=torch.int32, device=parts[0].device)
        us = graph_us([_reading(part, out) for part in parts], repeats=3)
        found.append(us * parts[0].numel() / (chunks // programs * programs * _CHUNK))
    return min(found, default=float("nan"))


def stream_bandwidth(num_bytes: int = 8 << 30) -> dict[str, float]:
    """Bytes per second of long reads of fresh memory, by three programs."""
    matrix = torch.randn(num_bytes >> 17, 1 << 16, device="cuda", dtype=torch.bfloat16)
    vector = torch.randn(1 << 16, device="cuda", dtype=torch.bfloat16)
    reads = {
        "matrix times vector": lambda: torch.mv(matrix, vector),
        "largest of rows": lambda: matrix.view(torch.int64).amax(dim=1),
    }
    times = {name: graph_us([read], repeats=3) for name, read in reads.items()}
    times["reading alone"] = read_us([matrix])
    return {name: matrix.numel() * 2 / us * 1e6 for name, us in times.items()}
