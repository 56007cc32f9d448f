"""Scenario files: the shipped ones load and fit their tables, mistakes are named, arrivals are what was asked for."""

from pathlib import Path

import numpy as np
import pytest

from cluster.config_errors import ConfigError
from cluster.simulate.experiment import make_world
from cluster.simulate.lanes import Lanes, Run
from cluster.simulate.scenario import Bursty, Mix, MixPhase, Wave, load_scenario
from cluster.simulate.traffic import curve_values, make_traffic, mix_shares
from tests.conftest import REPO_ROOT
from tests.simulate.toy import LENGTHS, scenario

SHIPPED = sorted((REPO_ROOT / "configs" / "sim").glob("s*.yaml"))


def test_all_eight_are_shipped() -> None:
    assert [path.stem for path in SHIPPED] == [f"s{number}" for number in range(1, 9)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenarios_load_and_fit_their_tables(path: Path) -> None:
    shipped = load_scenario(path)
    assert len(shipped.seeds) == 5
    assert shipped.bars.model_fields_set
    shorter = shipped.model_copy(update={"seeds": (1,), "duration_s": 5.0})
    Lanes(make_world(shorter), [Run(policy="K=0", seed=1, schedule={1: 0})])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival": 1}, 'arrival: unknown key; did you mean "arrivals"?'),
        ({"duration_s": -1}, "duration_s: input should be greater than 0"),
        ({"draft_lens": [1, 3]}, "draft_lens: must ascend strictly and start with 0"),
        ({"configured_schedule": {4: 2}}, "configured_schedule[4]: 2 is not one of draft_lens"),
        ({"mix": {"phases": [{"at_s": 0, "shares": {"b": 1}}]}}, "there is no class 'b'; classes are a"),
        ({"mix": {"phases": [{"at_s": 3, "shares": {"a": 1}}]}}, "at_s must ascend strictly from 0"),
        ({"replicas": [{"steps": "none.yaml"}]}, "replicas[0].steps: no such file"),
        ({"replicas": [{"steps": "toy.yaml", "from_s": 9, "until_s": 8}]}, "until_s: must be after from_s"),
        ({"replicas": [{"steps": "toy.yaml", "serves": "b"}]}, "replicas[0].serves: there is no class 'b'"),
        ({"engine": {"max_num_seqs": 4, "max_num_batched_tokens": 15, "kv_blocks": 200}}, "does not split a decode"),
        (
            {"engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_blocks": 9}},
            "engine.kv_blocks: one request",
        ),
        ({"classes": {"a": {"hazards": [1.0]} | LENGTHS}}, "input should be less than 1"),
        ({"cold_replicas_s": 30}, "cold_replicas_s: no replica joins later"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        scenario(tmp_path, **changes)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"description: a\nmix: 2020-13-45",
            "line 2, column 6: not valid YAML: '2020-13-45' cannot be read as timestamp",
        ),
        (b"seeds: [1]\nseeds: [2]", 'line 2, column 1: not valid YAML: key "seeds" is given twice'),
        (b"[" * 3000, "not valid YAML: nested too deeply"),
        (b"\xff", "not valid YAML: it is not UTF-8 text"),
        (b"", "the file: must be a section of keys"),
    ],
    ids=["date", "twice", "deep", "bytes", "empty"],
)
def test_a_file_that_is_no_yaml_is_named_with_the_place(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_scenario(file)
    assert error.value.problems == (words,)


def test_a_table_without_a_draft_length_is_refused(tmp_path: Path) -> None:
    asked = scenario(tmp_path, draft_lens=[0, 2], configured_schedule={4: 2})
    with pytest.raises(ValueError, match="draft length 2 is not one of"):
        Lanes(make_world(asked), [])


def test_poisson_and_bursty_arrivals_have_the_asked_mean_and_only_bursts_clump(tmp_path: Path) -> None:
    spreads = {}
    for kind in ("poisson", "bursty"):
        more = {"factor": 6, "burst_s": 5, "calm_s": 20} if kind == "bursty" else {}
        asked = scenario(tmp_path, duration_s=4000.0, arrivals={"kind": kind, "rate": 5.0} | more)
        times = make_traffic(asked, 1).replicas[0].arrivals_N
        counts = np.histogram(times, bins=400, range=(0, 4000))[0]
        assert counts.mean() == pytest.approx(50, rel=0.1)
        spreads[kind] = counts.var() / counts.mean()
    assert spreads["poisson"] == pytest.approx(1, abs=0.3)
    assert spreads["bursty"] > 5


def test_a_wave_and_a_mix_over_time() -> None:
    wave = curve_values(Wave(low=2, high=10, period_s=40), np.array([0.0, 10.0, 20.0, 40.0]))
    assert wave == pytest.approx([2, 6, 10, 2])
    mix = Mix(repeat_s=10, phases=(MixPhase(at_s=0, shares={"a": 3, "b": 1}), MixPhase(at_s=5, shares={"b": 2})))
    shares = mix_shares(mix, ("a", "b"), np.array([4.9, 5.0, 10.0]))
    assert shares == pytest.approx(np.array([[0.75, 1], [0, 1], [0.75, 1]]))


def test_requests_are_dealt_in_turn_to_those_that_live_and_serve_their_class(tmp_path: Path) -> None:
    groups = [
        {"steps": "toy.yaml", "until_s": 20},
        {"steps": "toy.yaml", "from_s": 10},
        {"steps": "toy.yaml", "serves": "b"},
    ]
    asked = scenario(
        tmp_path,
        replicas=groups,
        classes={"a": {"hazards": [0.5]} | LENGTHS, "b": {"hazards": [0.5]} | LENGTHS},
        mix={"phases": [{"at_s": 0, "shares": {"a": 1, "b": 1}}]},
        arrivals={"kind": "poisson", "rate": 50.0},
    )
    first, second, third = make_traffic(asked, 1).replicas
    assert first.arrivals_N.max() < 20 and second.arrivals_N.min() >= 10
    assert set(third.kinds_N.tolist()) == {1}
    both = [part.arrivals_N[(part.arrivals_N > 10) & (part.arrivals_N < 20)].size for part in (first, second)]
    assert abs(both[0] - both[1]) <= 4
    lonely = scenario(
        tmp_path, replicas=[{"steps": "toy.yaml", "until_s": 20}], arrivals={"kind": "poisson", "rate": 5}
    )
    with pytest.raises(ValueError, match="none takes a request of class a at 20 s"):
        make_traffic(lonely, 1)


def test_bursty_needs_a_factor_above_one() -> None:
    with pytest.raises(ValueError, match="greater than 1"):
        Bursty(kind="bursty", rate=1, factor=1, burst_s=1, calm_s=1)
