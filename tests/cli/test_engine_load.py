"""The measuring code of the comparison with another engine, on an engine that takes known times."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

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
        dict(
            side="ours", workload="q8", part="context", draft_len=15, context=2000, tokens_per_s=1.0, step_ms=7.5,
            gap_p50_ms=7.0,
        )
    )  # fmt: skip
    rows.append(
        dict(
            side="ours", workload="q8", part="floor", weights=3e9, weights_with_drafts=4e9, kv_per_token=25e4,
            kv_per_token_with_drafts=5e5, bytes_per_s=1e12,
        )
    )  # fmt: skip
    found = vs_report.report(rows)
    assert [row["ratio"] for row in found["best"]] == pytest.approx([301 / 101, 721 / 801], abs=1e-3)
    assert all(row[side]["draft_len"] == 15 for row in found["best"] for side in ("ours", "vllm"))
    bad = {bar["bar"] for bar in found["bars"] if bar["ok"] is False}
    assert bad == {
        "smol all, 8 at once: tokens/s over vLLM's, best of K = 0, 15 each",
        "smol all, 8 at once, K = 15: tokens/s over vLLM's",
        "smol all, 8 at once, K = 0: tokens/s over vLLM's",
        "smol, K = 15: intervals of acceptance touch",
        "q8, context 2000, K = 15: step over what reading takes",
    }
    assert lacking(found) == {"q8, context 2000, K = 15: step over vLLM's": ["vllm"]}
    assert vs_report.exit_code(found["bars"]) == vs_report.FAIL == 1
    assert found["context"][0]["floor_ms"] == 5.0 and found["context"][0]["ours"]["over_floor"] == 1.4
    assert found["context"][0]["ours"]["mean_over_floor"] == 1.5
    assert len(found["cut"]) == 2 and vs_report.draw(found["curve"], "smol").count("<circle") == 4


def speed_row(side: str, draft_len: int, tokens_per_s: float) -> dict[str, Any]:
    place = dict(side=side, workload="smol", part="speed", draft_len=draft_len, set="all", concurrency=8, repeat=1)
    return place | dict(tokens_per_s=tokens_per_s, tokens_per_s_per_user=tokens_per_s / 8, step_ms=1.0)


def lacking(found: dict[str, Any]) -> dict[str, list[str]]:
    return {bar["bar"]: bar["lacks"] for bar in found["bars"] if bar["ok"] is None}


def test_the_best_draft_lengths_are_compared_over_those_that_both_have(modules: tuple[ModuleType, ModuleType]) -> None:
    _, vs_report = modules
    ours = {3: 900.0, 7: 500.0, 15: 600.0}
    vllm = {7: 400.0, 15: 300.0, 11: 800.0}
    rows = [speed_row("ours", k, v) for k, v in ours.items()] + [speed_row("vllm", k, v) for k, v in vllm.items()]
    found = vs_report.report(rows)
    (best,) = found["best"]
    assert best["draft_lens"] == {"ours": [3, 7, 15], "vllm": [7, 11, 15]}
    assert (best["ours"]["draft_len"], best["vllm"]["draft_len"], best["ratio_of_all"]) == (3, 11, 900 / 800)
    assert (best["best_common"], best["ratio"]) == ({"ours": 15, "vllm": 7}, 600 / 400)
    bar = found["bars"][0]
    assert bar["bar"] == "smol all, 8 at once: tokens/s over vLLM's, best of K = 7, 15 each"
    assert bar["value"] == 1.5 and bar["ok"]
    # The same lengths on both sides: one ratio, and nothing more to say.
    same = vs_report.report([speed_row(side, k, ours[k]) for side in ("ours", "vllm") for k in (3, 7)])["best"][0]
    assert same["ratio"] == 1.0 and "ratio_of_all" not in same
    # None in common: no ratio is made of what cannot be compared.
    apart = vs_report.report([speed_row("ours", 3, 900.0), speed_row("vllm", 7, 400.0)])
    assert "ratio" not in apart["best"][0] and apart["best"][0]["ratio_of_all"] == 2.25
    assert lacking(apart) == {
        "smol all, 8 at once: tokens/s over vLLM's, best K of each": ["a draft length that both have"]
    }
    assert vs_report.exit_code(apart["bars"]) == vs_report.NOT_MEASURED == 3


def test_a_bar_without_rows_is_said_to_be_not_measured(modules: tuple[ModuleType, ModuleType]) -> None:
    _, vs_report = modules
    both = [speed_row(side, 15, 100.0) for side in ("ours", "vllm")]
    assert vs_report.exit_code(vs_report.report(both, [("smol", "speed", 15)])["bars"]) == vs_report.HOLD == 0
    asked = [("smol", part, k) for part in ("speed", "first", "poisson") for k in (15, 0)]
    found = vs_report.report([*both, speed_row("ours", 0, 50.0)], asked)
    assert lacking(found) == {
        "smol all, 8 at once, K = 0: tokens/s over vLLM's": ["vllm"],
        "smol, K = 15: the part first": ["ours", "vllm"],
        "smol, K = 0: the part first": ["ours", "vllm"],
        "smol, arrivals: p99 of a token's time": ["ours at vLLM's rate", "vllm at its own"],
        "smol, arrivals: p99 between outputs": ["ours at vLLM's rate", "vllm at its own"],
        "smol, arrivals: tokens/s": ["ours at vLLM's rate", "vllm at its own"],
    }
    assert vs_report.exit_code(found["bars"]) == 3
    # A part that was cut before its first row is due without being asked for.
    cut = vs_report.report([dict(side="vllm", workload="smol", part="first", draft_len=7, cut_after_s=60.0)])
    assert lacking(cut) == {"smol, K = 7: the part first": ["ours", "vllm"]}


def arrival_row(side: str, **more: Any) -> dict[str, Any]:
    times = dict(token_p99_ms=4.0, gap_p99_ms=9.0, tokens_per_s=1000.0)
    place = dict(side=side, workload="smol", part="poisson", draft_len=15, requests_per_s=70.0)
    return place | times | more


def test_arrivals_are_compared_at_the_rate_of_the_peer(modules: tuple[ModuleType, ModuleType]) -> None:
    _, vs_report = modules
    rows = [arrival_row("ours", saturated=True), arrival_row("ours", rate="own"), arrival_row("vllm", saturated=True)]
    rows.append(arrival_row("vllm", rate="own", gap_p99_ms=5.0))
    assert list(lacking(vs_report.report(rows)).values()) == [["ours at vLLM's rate"]] * 3
    found = vs_report.report([*rows, arrival_row("ours", rate="given", tokens_per_s=980.0)])
    assert [(bar["value"], bar["limit"], bar["ok"]) for bar in found["bars"]] == [
        (4.0, 4.0, True),
        (9.0, 5.0, False),
        (980.0, 970.0, True),
    ]


def test_arrivals_at_a_target_count_where_it_helps_and_are_named(modules: tuple[ModuleType, ModuleType]) -> None:
    _, vs_report = modules
    rows = [arrival_row(side, saturated=True) for side in ("ours", "vllm")] + [arrival_row("vllm", rate="own")]
    targets = [
        arrival_row("ours", rate="given", inter_token_target_ms=10.0, gap_p99_ms=7.0, tokens_per_s=900.0),
        arrival_row("ours", rate="given", inter_token_target_ms=20.0, gap_p99_ms=8.0),
        arrival_row("ours", rate="given", inter_token_target_ms=30.0, gap_p99_ms=8.5),
    ]

    def bars(*more: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        return [(bar["bar"], bar["value"], bar["ok"]) for bar in vs_report.report([*rows, *more])["bars"]]

    plain = arrival_row("ours", rate="given", gap_p99_ms=9.5)
    assert bars(*targets, plain) == [
        ("smol, arrivals, inter_token_target_ms 20: p99 of a token's time", 4.0, True),
        ("smol, arrivals, inter_token_target_ms 20: p99 between outputs", 8.0, True),
        ("smol, arrivals, inter_token_target_ms 20: tokens/s", 1000.0, True),
    ]
    assert bars(plain, targets[0])[1] == ("smol, arrivals: p99 between outputs", 9.5, False)
    assert bars(*targets, plain | dict(gap_p99_ms=9.0))[1] == ("smol, arrivals: p99 between outputs", 9.0, True)


def test_arrivals_at_other_rates_are_no_arrivals_at_the_peer_s(modules: tuple[ModuleType, ModuleType]) -> None:
    """Rates that somebody asked for come first, and the peer's is told with another rounding."""
    _, vs_report = modules
    rows = [arrival_row(side, saturated=True) for side in ("ours", "vllm")] + [arrival_row("vllm", rate="own")]
    light = arrival_row("ours", rate="given", requests_per_s=10.0, gap_p99_ms=1.0)
    assert list(lacking(vs_report.report([*rows, light])).values()) == [["ours at vLLM's rate"]] * 3
    found = vs_report.report([*rows, light, arrival_row("ours", rate="given", requests_per_s=70.01, gap_p99_ms=9.5)])
    assert [(bar["value"], bar["ok"]) for bar in found["bars"]] == [(4.0, True), (9.5, False), (1000.0, True)]


def test_arrivals_are_compared_where_both_had_them(modules: tuple[ModuleType, ModuleType]) -> None:
    """At the draft length that was put under the peer's rate, though another one serves more at saturation."""
    _, vs_report = modules
    common = dict(workload="smol", part="poisson", tokens_per_s=1000.0, gap_p99_ms=9.0, token_p99_ms=3.0)

    def rows(side: str, draft_len: int, most: float, **rates: float) -> list[dict[str, Any]]:
        saturated = common | dict(side=side, draft_len=draft_len, saturated=True, requests_per_s=most)
        return [
            saturated,
            *(common | dict(side=side, draft_len=draft_len, rate=n) | {"requests_per_s": r} for n, r in rates.items()),
        ]

    mine = [*rows("ours", 3, 90.0, own=63.0), *rows("ours", 15, 80.0, own=56.0, given=35.0)]
    found = vs_report.report([*mine, *rows("vllm", 15, 50.0, own=35.0)])["poisson"]
    assert [(row["side"], row["draft_len"]) for row in found] == [("ours", 15), ("vllm", 15)]
    assert [row["requests_per_s"] for row in found[0]["given"]] == [35.0]
    assert vs_report.report(rows("ours", 3, 90.0) + rows("ours", 15, 80.0))["poisson"][0]["draft_len"] == 3


def test_the_drafter_s_width_and_weights_are_told(modules: tuple[ModuleType, ModuleType]) -> None:
    _, vs_report = modules
    rows = [
        speed_row(side, k, speed) | {"block_width": width if k else 0} | more
        for side, width, speed, more in (("ours", 16, 300.0, {"drafter_weights": "int8"}), ("vllm", 4, 200.0, {}))
        for k in (3, 0)
    ]
    found = vs_report.report([*rows, speed_row("vllm", 7, 100.0)])  # of before rows told it
    assert found["block_widths"] == [
        {"workload": "smol", "draft_len": 3, "ours": 16, "vllm": 4},
        {"workload": "smol", "draft_len": 0, "ours": 0, "vllm": 0},
    ]
    assert [found["best"][0][side]["block_width"] for side in ("ours", "vllm")] == [16, 4]
    assert found["drafter_weights"] == ["int8"]


def test_floors_of_several_engines_come_together(modules: tuple[ModuleType, ModuleType]) -> None:
    """The engine without a drafter, which comes last, has no figure for what a drafter reads."""
    _, vs_report = modules
    plain = dict(side="ours", workload="q8", part="floor", weights=3e9, kv_per_token=25e4, bytes_per_s=1e12)
    drafting = plain | dict(weights_with_drafts=4e9, kv_per_token_with_drafts=5e5)
    steps = [
        dict(
            side="ours",
            workload="q8",
            part="context",
            draft_len=k,
            context=2000,
            tokens_per_s=1.0,
            step_ms=7.0,
            gap_p50_ms=7.0,
        )
        for k in (7, 0)
    ]
    assert [row["floor_ms"] for row in vs_report.report([drafting, plain, *steps])["context"]] == [5.0, 3.5]
    assert ["floor_ms" in row for row in vs_report.report([plain, *steps])["context"]] == [False, True]
    short = [step | dict(context=1024) for step in steps]
    assert [row["floor_ms"] for row in vs_report.report([drafting, plain, *short])["context"]] == [4.0, 3.0]


@pytest.mark.parametrize(
    ("option", "asked", "kept"), [("--block-width", "drafts", "trained"), ("--drafter-weights", "int8", "model")]
)
def test_rows_of_two_drafters_are_not_mixed(
    repo_root: Path, tmp_path: Path, option: str, asked: str, kept: str
) -> None:
    start = dict(side="ours", workload="smol", part="start", draft_len=None)
    (tmp_path / "out.rows.json").write_text(json.dumps([start]))
    command = [sys.executable, "benchmarks/gpu_vs_vllm.py", str(tmp_path / "out.json"), "--resume", "--skip", "peer"]
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    command += [option, asked]
    refused = subprocess.run(command, capture_output=True, text=True, env=env, cwd=repo_root, check=False)
    assert f"{option}: OUT.rows.json has rows of {kept}, asked for is {asked}" in refused.stderr
    assert json.loads((tmp_path / "out.rows.json").read_text()) == [start]
