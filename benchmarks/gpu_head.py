"""Head and largest logits of few rows on a GPU: by cuBLAS and a search, and by one kernel in each of its cuts.

    python benchmarks/gpu_head.py --out gpu_head.json

A cut is timed here only after a process of its own has found its results right in time (--check-s): one that waits for
ever is killed there, named, and the exit code is 1.
Each time is that of one norm with the head behind it, as a decode step has them, in graphs of four; the head's weight
is larger than the L2 cache. All ways are timed in turn, several rounds of them. --steps adds whole decode steps of one
request (`gpu_forward.py`), with the head as it was and by the fastest cuts.
"""

import argparse
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_forward import Step
from gpu_read import read_us
from gpu_timing import graph_us, write
from torch import Tensor

from engine.kernels.available import dependent_launch
from engine.kernels.gemm_choice import PeakCut
from engine.kernels.row_ops import rms_norm
from engine.kernels.shard_argmax import shard_argmax
from engine.kernels.stream_head import stream_argmax, stream_logits
from engine.kernels.wide_choice import WideCut
from engine.kernels.wide_gemm import wide_argmax
from engine.layers import cuda_rows
from engine.layers.linear import Linear

K, VOCAB = 4096, 151936
Way = Callable[[Tensor], tuple[Tensor, Tensor]]
PEAK_CUTS = [
    PeakCut(),
    PeakCut(outputs=128, inputs=128, num_stages=6),
    PeakCut(num_stages=4),
]
# Of tiles of fewer or more rows.
OTHER_CUTS = [
    PeakCut(rows=8, num_stages=6),
    PeakCut(rows=32, num_stages=4),
    PeakCut(rows=32, outputs=128, inputs=128),
    PeakCut(rows=64, outputs=128, inputs=128, num_stages=4),
]
WIDE_CUTS = [
    WideCut(outputs=256),
    WideCut(outputs=256, num_stages=4),
    WideCut(outputs=128, num_stages=5),
    WideCut(rows=64, outputs=256, num_stages=4),
    WideCut(rows=64, outputs=128, num_warps=4, num_stages=6),
]


def name_of(cut: PeakCut | WideCut) -> str:
    if isinstance(cut, WideCut):
        return f"wide {cut.rows} rows {cut.outputs} x {cut.inputs}, {cut.num_stages} stages"
    return f"{cut.rows} rows {cut.outputs} x {cut.inputs}, {cut.num_stages} stages"


class Ways:
    """What finds the largest logits of rows in one weight."""

    def __init__(self, vocab: int) -> None:
        self.weight = torch.randn(vocab, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
        self.norm = torch.ones(K, device="cuda", dtype=torch.bfloat16)
        self.pdl = dependent_launch()
        self.head = Linear(K, 0, dtype=torch.bfloat16, device="cuda", out_dtype=torch.float32)
        self.head.weight = torch.nn.Parameter(self.weight, requires_grad=False)

    def as_it_is(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The engine's product, which is not cuBLAS's for few rows."""
        return shard_argmax(self.head.forward(x), 0, pdl=self.pdl)

    def cublas(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return shard_argmax(torch.mm(x, self.weight.t(), out_dtype=torch.float32), 0, pdl=self.pdl)

    def of(self, cut: PeakCut | WideCut) -> Way:
        if isinstance(cut, PeakCut):
            return lambda x: stream_argmax(x, self.weight, 0, cut=cut, pdl=self.pdl)
        return lambda x: wide_argmax(x, self.weight, 0, cut=cut, pdl=self.pdl)

    def with_logits(self, cut: PeakCut) -> Way:
        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            return shard_argmax(stream_logits(x, self.weight, cut=cut, pdl=self.pdl), 0, pdl=self.pdl)

        return run

    def us(self, way: Way, x: Tensor, *, normed: bool = True) -> float:
        def run() -> object:
            return way(rms_norm(x, self.norm, 1e-6, pdl=self.pdl) if normed else x)

        return graph_us([run] * 4, repeats=3, least_us=2000.0)


def check(name: str) -> None:
    """Raises AssertionError where a cut's results are not right. Hangs where its kernel does."""
    cut = next(cut for cut in (*PEAK_CUTS, *OTHER_CUTS) if name_of(cut) == name)
    ways = Ways(VOCAB)
    for rows in sorted({1, cut.rows // 2, cut.rows}):
        x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
        logits = stream_logits(x, ways.weight, cut=cut, pdl=ways.pdl)
        torch.testing.assert_close(logits, torch.mm(x, ways.weight.t(), out_dtype=torch.float32), rtol=1e-3, atol=1e-3)
        value, index = shard_argmax(logits, 0)
        for _ in range(50):
            found = ways.of(cut)(x)
            assert torch.equal(found[0], value) and torch.equal(found[1], index)
        ways.us(ways.of(cut), x)


def checked(cuts: list[PeakCut], seconds: float) -> tuple[list[PeakCut], dict[str, str]]:
    """(those that are right, what became of the others); each has a process of its own, all at once."""
    names, deadline = [name_of(cut) for cut in cuts], time.monotonic() + seconds
    found: dict[str, str] = {}
    processes = [
        subprocess.Popen([sys.executable, __file__, "--check", name], stderr=subprocess.PIPE, text=True)
        for name in names
    ]
    for name, process in zip(names, processes, strict=True):
        try:
            _, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            found[name] = "right" if process.returncode == 0 else errors[-500:]
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            found[name] = f"not done after {seconds} s"
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return (
        [cut for cut, name in zip(cuts, names, strict=True) if found[name] == "right"],
        {name: what for name, what in found.items() if what != "right"},
    )


def timed(ways: Ways, rows: int, named: dict[str, Way], rounds: int) -> dict[str, Any]:
    """Medians of the rounds, fastest first; ways that fail, and those whose ids are not cuBLAS's, are told of."""
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    want = ways.cublas(x)[1]
    times: dict[str, list[float]] = {name: [] for name in named}
    wrong: dict[str, str] = {}
    for name in [name for _ in range(rounds) for name in named]:
        if name in wrong:
            continue
        first = not times[name]
        if first:
            print(f"{rows} rows, {name}:", end=" ", file=sys.stderr, flush=True)  # one that hangs has been named
        try:
            times[name].append(ways.us(named[name], x))
            if first:
                print(f"{times[name][0]:.1f} us", file=sys.stderr, flush=True)
            same = float((named[name](x)[1] == want).float().mean())
        except Exception:
            wrong[name] = traceback.format_exc()[-500:]
            print("failed", file=sys.stderr, flush=True)
            continue
        if same < 0.9:  # near ties may fall either way
            wrong[name] = f"{same:.2f} of the ids"
    us = {name: round(statistics.median(found), 2) for name, found in times.items() if found}
    record = {"rows": rows, "us": dict(sorted(us.items(), key=lambda item: item[1])), "wrong": wrong}
    print(record, file=sys.stderr, flush=True)
    return record


def same_logits(ways: Ways, right: list[PeakCut]) -> dict[str, bool]:
    """Whether tiles of other sizes give eight rows the very bits of the first cut."""
    x = torch.randn(8, K, device="cuda", dtype=torch.bfloat16)
    found = [stream_logits(x, ways.weight, cut=cut) for cut in right]
    return {name_of(cut): torch.equal(logits, found[0]) for cut, logits in zip(right, found, strict=True)}


@contextmanager
def choosing(cut: PeakCut | None) -> Iterator[None]:
    """Heads of up to 16 rows take this cut."""
    original = cuda_rows.peak_cut
    cuda_rows.peak_cut = lambda *, rows, K, N: cut if rows <= 16 else None
    try:
        yield
    finally:
        cuda_rows.peak_cut = original


def steps(cuts: list[PeakCut | None], rounds: int) -> list[dict[str, Any]]:
    """Target and drafter of one request at K = 15 and a context of 1024, in turn."""
    step = Step("qwen3-8b")
    step.prepare(sequences=1, context=1024, draft_len=15)
    times: list[list[tuple[float, float]]] = [[] for _ in cuts]
    for _ in range(rounds):
        for cut, found in zip(cuts, times, strict=True):
            with choosing(cut):
                found.append((graph_us([step.run_target], repeats=3), graph_us([step.run_drafter], repeats=3)))
    return [
        {
            "head": "as it is" if cut is None else name_of(cut),
            "target_us": round(statistics.median([target for target, _ in found]), 1),
            "drafter_us": round(statistics.median([drafter for _, drafter in found]), 1),
        }
        for cut, found in zip(cuts, times, strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 15, 8, 1])
    parser.add_argument("--more-rows", type=int, nargs="*", default=[32, 64, 128, 192, 256])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--cuts", type=int, default=len(PEAK_CUTS), help="so many of those of 16 rows, likely ones first"
    )
    parser.add_argument("--check-s", type=float, default=60.0, help="seconds until a cut counts as one that hangs")
    parser.add_argument("--check", default=None, help="the name of a cut: its results alone, no times")
    parser.add_argument("--steps", action="store_true", help="whole decode steps as well")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        if args.check is not None:
            check(args.check)
            return 0
        began = time.perf_counter()
        others = [cut for cut in OTHER_CUTS if cut.rows in args.more_rows or (cut.rows == 8 and min(args.rows) <= 8)]
        right, not_right = checked([*PEAK_CUTS[: args.cuts], *others], args.check_s)
        ways, results = Ways(VOCAB), []
        by_cut = {name_of(cut): cut for cut in right if cut in PEAK_CUTS}
        best: list[str] = []
        record: dict[str, Any] = {"K": K, "vocab": VOCAB, "not_right": not_right}
        for rows in args.rows:
            named: dict[str, Way] = {"cublas": ways.cublas, "as it is": ways.as_it_is}
            named |= {name: ways.of(by_cut[name]) for name in best or by_cut}
            if best:  # all cuts at the first number of rows alone
                named |= {name_of(cut): ways.of(cut) for cut in right if cut.rows < 16 and rows <= cut.rows}
            results.append(timed(ways, rows, named, args.rounds))
            if not best:
                wrong = results[0]["wrong"]
                best = [name for name in results[0]["us"] if name in by_cut and name not in wrong][:4]
                logits = {f"logits of {name}": ways.with_logits(by_cut[name]) for name in best}
                results.append(timed(ways, rows, {"cublas": ways.cublas, **logits}, args.rounds))
            write(args.out, results, **record)
        for rows in args.more_rows:
            larger: list[PeakCut | WideCut] = [*WIDE_CUTS, *[cut for cut in right if cut.rows == rows]]
            named = {"cublas": ways.cublas, **{name_of(cut): ways.of(cut) for cut in larger}}
            results.append(timed(ways, rows, named, args.rounds))
        x = torch.randn(16, K, device="cuda", dtype=torch.bfloat16)
        bare: dict[str, Way] = {
            "cublas": ways.cublas,
            "as it is": ways.as_it_is,
            **{name: ways.of(by_cut[name]) for name in best},
        }
        record["without_norm_us"] = {name: round(ways.us(way, x, normed=False), 2) for name, way in bare.items()}
        record["same_logits"] = same_logits(ways, right)
        record["read_us"] = round(read_us([ways.weight]), 1)
        write(args.out, results, **record)
        if args.steps:
            del ways
            torch.cuda.empty_cache()
            found = steps([None, *[by_cut[name] for name in best[:2]]], args.rounds)
            print(found, file=sys.stderr)
            write(args.out, results, **record, steps=found, seconds=round(time.perf_counter() - began, 1))
    return 1 if not_right else 0


if __name__ == "__main__":
    sys.exit(main())
