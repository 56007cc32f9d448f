"""What is claimed of the control loop against the committed results, from their raw figures and not their verdicts."""

import json
from statistics import fmean
from typing import Any

import pytest

from cluster.simulate.scenario import load_scenario
from tests.conftest import REPO_ROOT

POLICIES = {f"K={k}" for k in (0, 1, 2, 3, 5, 7, 11, 15)} | {"static", "per-replica", "ours", "clairvoyant"}


def result(name: str) -> dict[str, Any]:
    return json.loads((REPO_ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [f"s{n}" for n in range(1, 9)])
def test_every_scenario_keeps_its_bars(name: str) -> None:
    scenario, record = load_scenario(REPO_ROOT / "configs" / "sim" / f"{name}.yaml"), result(f"simulate_{name}")
    assert tuple(record["seeds"]) == scenario.seeds and len(scenario.seeds) == 5
    assert record["duration_s"] == scenario.duration_s and set(record["policies"]) == POLICIES
    score = {policy: fmean(figures["scores"]) for policy, figures in record["policies"].items()}
    ours, static, best, bars = score["ours"], score["static"], score["clairvoyant"], scenario.bars
    if name in ("s1", "s6"):
        assert bars.over_static == 0.99 and ours >= 0.99 * static
    elif name == "s5":
        assert bars.over_per_replica == 0.99 and ours >= 0.99 * score["per-replica"]
    else:
        assert (bars.regret, bars.recovered) == (0.03, 0.7)
        assert ours >= 0.97 * best
        assert static >= 0.97 * best or ours - static >= 0.7 * (best - static)


def test_live_every_phase_comes_near_its_best_fixed_length_in_time() -> None:
    record = result("control_live")
    assert record["options"]["replicas"] == 8 and record["options"]["phase_s"] == 60
    assert [phase["kind"] for phase in record["phases"]] == ["easy", "hard"] * 2
    fixed, best = record["fixed"], {}
    for kind in ("easy", "hard"):
        best[kind] = max(fixed[kind], key=fixed[kind].__getitem__)
    for kind, other in (("easy", "hard"), ("hard", "easy")):
        assert fixed[kind][best[other]] <= 0.9 * fixed[kind][best[kind]]
    for phase in record["phases"]:
        assert phase["tokens_per_s"] >= 0.97 * fixed[phase["kind"]][best[phase["kind"]]]
        assert phase["last_acknowledged_s"] <= 15.0 and phase["most_changes"] <= 2


def test_live_nothing_changes_while_traffic_stays() -> None:
    record = result("control_live_steady")
    warm, steady = record["phases"]
    assert steady["kind"] == warm["kind"] and steady["ended"] - steady["began"] >= 550
    assert steady["most_schedules"] <= 1


def test_the_simulator_foretells_the_live_run() -> None:
    live, foretold = result("control_live"), result("control_predict")
    assert [phase["live"] for phase in foretold["phases"]] == [round(p["tokens_per_s"], 1) for p in live["phases"]]
    for phase in foretold["phases"]:
        assert abs(phase["simulated"] / phase["live"] - 1) <= 0.03


def test_with_real_models_the_length_follows_the_text_and_greedy_output_stays() -> None:
    record = result("control_real")
    assert record["options"] == {"replicas": 2, "rows": 1, "phase_s": 60.0, "rounds": 2, "dtype": "float32"}
    assert [phase["kind"] for phase in record["phases"]] == ["easy", "hard"] * 2
    easy, hard = record["phases"][::2], record["phases"][1::2]
    assert min(min(phase["accepted"]) for phase in easy) > max(max(phase["accepted"]) for phase in hard)
    assert min(min(phase["draft_lens"]) for phase in easy) > max(max(phase["draft_lens"]) for phase in hard)
    assert len(record["acknowledged"]) == 2 and all(version == target for version, target in record["acknowledged"])
    assert record["greedy_outputs"] > 40 and record["greedy_outputs_that_differ"] == 0


def test_a_thousand_replicas_cost_less_than_a_third_of_a_core() -> None:
    record = result("control_scale")
    assert record["replicas"] == 1000 and record["reports_per_s"] >= 240 and record["seconds"] >= 550
    assert record["controller_share_of_a_core"] <= 0.30
    assert max(record["push_to_all_acknowledged_s"]) <= 2.0
    warm = [sample["rss_mib"] for sample in record["memory"] if sample["s"] >= 60]
    assert warm[-1] <= 1.02 * warm[0]
