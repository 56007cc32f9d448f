"""The measuring code of the comparison with another engine, on an engine that takes known times."""

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def modules(repo_root: Path) -> tuple[ModuleType, ModuleType]:
    """engine_load and vs_report, which import each other by their bare names."""
    sys.path.insert(0, str(repo_root / "benchmarks"))
    try:
        import engine_load
        import vs_report
    finally:
        sys.path.pop(0)
    return engine_load, vs_report


class Clockwork:
    """Every step takes 2 ms and gives each request one token first, then three."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most = 0

    def add(self, name: str, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        self.left[name] = -max_tokens  # negative until the first token

    def step(self) -> list[tuple[str, int, bool]]:
        time.sleep(0.002)
        self.most = max(self.most, len(self.left))
        out = []
        for name, left in list(self.left.items()):
            count = 1 if left < 0 else min(3, left)
            self.left[name] = abs(left) - count
            out.append((name, count, self.left[name] == 0))
            if self.left[name] == 0:
                del self.left[name]
        return out


def test_figures_follow_from_when_tokens_came(modules: tuple[ModuleType, ModuleType]) -> None:
    load, _ = modules
    jobs = [load.Job(prompt=[1], max_tokens=n, ignore_eos=True) for n in (11, 12, 30)]
    traces, seconds = load.drive(Clockwork(), jobs)
    assert [trace.num_tokens for trace in traces] == [11, 12, 30]
    row = load.figures(traces, seconds)
    assert row["tokens"] == 53 and row["tokens_per_s"] == pytest.approx(53 / seconds, rel=1e-2)
    assert 2 <= row["first_token_ms"] < 20 and 2 <= row["gap_p50_ms"] < 20
    assert row["token_p50_ms"] == pytest.approx(row["gap_p50_ms"] / 3, rel=0.3)
    # 11 = 1, 3, 3, 3, 1 and 12 = 1, 3, 3, 3, 2 and 30 = 1, nine of 3, 2: without first and last.
    assert load.step_counts(traces) == (3 + 3 + 9, 45)
    assert row["acceptance_length"] == 3.0


def test_arrivals_are_kept_and_so_is_the_limit(modules: tuple[ModuleType, ModuleType]) -> None:
    load, _ = modules
    jobs = [load.Job(prompt=[1], max_tokens=4, ignore_eos=True, arrival_s=at) for at in (0.05, 0.0)]
    traces, seconds = load.drive(Clockwork(), jobs)
    assert [trace.start_s for trace in traces] == [0.0, 0.05] and seconds >= 0.05
    assert all(trace.outputs[0][0] >= trace.start_s for trace in traces)
    engine = Clockwork()
    load.drive(engine, [load.Job(prompt=[1], max_tokens=7, ignore_eos=True) for _ in range(9)], at_once=2)
    assert engine.most == 2


def test_intervals_hold_the_mean_and_shrink_with_prompts(modules: tuple[ModuleType, ModuleType]) -> None:
    load, _ = modules
    few = [(50, 150 + 10 * (i % 5)) for i in range(10)]
    a, b = load.bootstrap(few), load.bootstrap(few * 20)
    assert a["low"] < a["mean"] < a["high"] and a["mean"] == b["mean"] == pytest.approx(170 / 50)
    assert b["high"] - b["low"] < 0.5 * (a["high"] - a["low"]) and b["steps"] == 10000


def test_the_report_names_what_does_not_hold(modules: tuple[ModuleType, ModuleType]) -> None:
    _, vs_report = modules
    rows = []
    for side, speed, step in (("ours", 300.0, 0.8), ("vllm", 100.0, 2.0)):
        for draft_len, factor in ((15, 1.0), (0, 0.5)):
            for concurrency, name in ((1, "chat"), (8, "all")):
                for repeat in range(3):
                    value = speed * factor * concurrency * (1 if side == "vllm" or concurrency == 1 else 0.3)
                    rows.append(
                        dict(
                            side=side,
                            workload="smol",
                            part="speed",
                            draft_len=draft_len,
                            set=name,
                            repeat=repeat,
                            concurrency=concurrency,
                            tokens_per_s=value + repeat,
                            tokens_per_s_per_user=value,
                            step_ms=step,
                        )
                    )
        rows.append(
            dict(
                side=side,
                workload="smol",
                part="accept",
                draft_len=15,
                set="chat",
                wish=0,
                pairs=[[50, 150 if side == "ours" else 250]] * 8,
            )
        )
        rows.append(dict(side=side, workload="smol", part="speed", draft_len=15, cut_after_s=9.0))
    rows.append(
        dict(side="ours", workload="q8", part="context", draft_len=15, context=1000, tokens_per_s=1.0, step_ms=6.5)
    )
    rows.append(
        dict(
            side="ours", workload="q8", part="floor", weights=3e9, weights_with_drafts=4e9, kv_per_token=5e5,
            kv_per_token_with_drafts=1e6, bytes_per_s=1e12,
        )
    )  # fmt: skip
    found = vs_report.report(rows)
    assert [row["ratio"] for row in found["best"]] == pytest.approx([301 / 101, 721 / 801], abs=1e-3)
    assert all(row[side]["draft_len"] == 15 for row in found["best"] for side in ("ours", "vllm"))
    bad = {bar["bar"] for bar in found["bars"] if not bar["ok"]}
    assert bad == {
        "smol all, 8 at once: tokens/s over vLLM's, best K of each",
        "smol all, 8 at once, K = 15: tokens/s over vLLM's",
        "smol all, 8 at once, K = 0: tokens/s over vLLM's",
        "smol, K = 15: intervals of acceptance touch",
        "q8, context 1000, K = 15: step over what reading takes",
    }
    assert found["context"][0]["floor_ms"] == 5.0 and found["context"][0]["ours"]["over_floor"] == 1.3
    assert len(found["cut"]) == 2 and vs_report.draw(found["curve"], "smol").count("<circle") == 4
