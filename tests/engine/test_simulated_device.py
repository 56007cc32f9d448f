"""The simulated device: output that no K changes, acceptance that follows the curves, time that follows the table."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.config.resolve import resolve_engine_config
from engine.core import EngineCore
from engine.request import EngineRequest
from engine.simulated.profile import AcceptanceProfile, HazardClass, Simulation, SimulationOptions, load_acceptance
from engine.simulated.runner import SimulatedRunner
from engine.simulated.story import RequestStory
from engine.simulated.timeline import DeviceTimeline
from engine.step_table import StepTable
from tests.conftest import REPO_ROOT
from tests.engine.fake_runner import EOS, VOCAB_SIZE, make_config

HAZARDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
IDS = np.array([i for i in range(VOCAB_SIZE) if i != EOS])
TABLE = StepTable(
    accelerator="test",
    model="test",
    source="test",
    measured=(),
    reference_context=10,
    context_token_s=0.01,
    prefill_base_s=2.0,
    prefill_token_s=0.1,
    draft_lens=(0, 1, 2, 3, 5, 7),
    buckets=(1, 4),
    seconds=((1.0, 2.0, 3.0, 4.0, 6.0, 8.0), (4.0, 8.0, 12.0, 16.0, 24.0, 32.0)),
)


class Clock:
    """Time that passes only when something sleeps or the test says so; sleeping takes `oversleep_s` too long."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.oversleep_s = oversleep_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.oversleep_s

    def timeline(self, speed: float = 1.0) -> DeviceTimeline:
        return DeviceTimeline(speed=speed, now=self.now, sleep=self.sleep)


def simulation(**classes: HazardClass) -> Simulation:
    kinds = classes or {"only": HazardClass(hazards=HAZARDS)}
    return Simulation(steps=TABLE, acceptance=AcceptanceProfile(description="test", classes=kinds), speed=1.0)


def run(requests: int, draft_len: int, *, kind: HazardClass | None = None, **changes: Any) -> tuple[dict, EngineCore]:
    """Tokens of every request under a fixed K, and the engine that made them."""
    device = simulation(only=kind) if kind else simulation()
    config = make_config(**{"draft_len_schedule": ((64, draft_len),), "simulation": device, **changes})
    core = EngineCore(config=config, runner=SimulatedRunner(config, token_ids=IDS, timeline=Clock().timeline()))
    for number in range(requests):
        params = SamplingParams(seed=number, max_tokens=40, ignore_eos=True)
        core.add_request(
            EngineRequest(request_id=f"r{number}", prompt_token_ids=(1, 2, number % VOCAB_SIZE), params=params)
        )
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for delta in core.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    core.check_integrity()
    return tokens, core


@pytest.mark.parametrize("depth", [0, 1])
def test_output_is_the_seed_s_whatever_k_and_preemption(depth: int) -> None:
    stories = {}
    for number in range(6):
        story = RequestStory(seed=number, first_position=3, kind=HazardClass(hazards=HAZARDS), token_ids=IDS, width=7)
        stories[f"r{number}"] = story.tokens(3, 43)
    assert len({tuple(tokens) for tokens in stories.values()}) == 6
    for draft_len in (0, 1, 7):
        tokens, core = run(6, draft_len, pipeline_depth=depth)
        assert tokens == stories
        assert core.counters().preemptions == 0
    tokens, core = run(6, 7, pipeline_depth=depth, num_blocks=30, max_model_len=48)
    assert tokens == stories
    assert core.counters().preemptions > 0


@pytest.mark.parametrize("draft_len", [1, 3, 7])
def test_acceptance_follows_the_hazards_at_any_k(draft_len: int) -> None:
    _, core = run(400, draft_len)
    cells = core.counters().cells
    for position, hazard in enumerate(HAZARDS[:draft_len]):
        at_risk = sum(cell.at_risk[position] for cell in cells if len(cell.at_risk) > position)
        accepted = sum(cell.accepted[position] for cell in cells if len(cell.accepted) > position)
        assert at_risk > 200
        assert accepted / at_risk == pytest.approx(hazard, abs=3.5 * math.sqrt(hazard * (1 - hazard) / at_risk))


def test_requests_differ_and_remember() -> None:
    """With a spread, the first-draft rates of requests vary more than coins do; with a memory, so do neighbours."""

    def first_rights(kind: HazardClass, seed: int) -> np.ndarray:
        story = RequestStory(seed=seed, first_position=0, kind=kind, token_ids=IDS, width=1)
        return np.array([story.num_right(position) for position in range(1500)])

    def variance_of_rates(kind: HazardClass) -> float:
        return float(np.var([first_rights(kind, seed).mean() for seed in range(60)]))

    def autocorrelation(kind: HazardClass) -> float:
        series = np.stack([first_rights(kind, seed) for seed in range(30)]) - 0.5
        return float((series[:, 1:] * series[:, :-1]).mean() / (series**2).mean())

    coin = HazardClass(hazards=(0.5,))
    assert variance_of_rates(coin) == pytest.approx(0.25 / 1500, rel=0.6)
    assert variance_of_rates(HazardClass(hazards=(0.5,), spread=1.0)) > 0.02
    assert abs(autocorrelation(coin)) < 0.02
    assert autocorrelation(HazardClass(hazards=(0.5,), wobble=2.0, memory=0.95)) > 0.2
    assert abs(autocorrelation(HazardClass(hazards=(0.5,), wobble=2.0, memory=0.0))) < 0.02


def test_classes_follow_seeds_by_shares() -> None:
    profile = simulation(a=HazardClass(hazards=(1.0,)), b=HazardClass(hazards=(0.0,), share=2)).acceptance
    assert [profile.class_of(seed) for seed in range(6)] == ["a", "b", "b", "a", "b", "b"]
    assert profile.class_of(-1) == "b"


def test_certain_and_impossible_drafts() -> None:
    _, core = run(1, 7, kind=HazardClass(hazards=(1.0,), wobble=1.0))
    assert core.counters().num_accepted_tokens == core.counters().num_draft_tokens > 0
    _, core = run(1, 7, kind=HazardClass(hazards=(0.0,), wobble=1.0))
    assert core.counters().num_accepted_tokens == 0


def test_steps_take_the_table_s_time() -> None:
    """One request of 3 prompt tokens, four outputs, K = 0: a prefill and three decode steps."""
    config = make_config(draft_len_schedule=((64, 0),), simulation=simulation())
    clock = Clock()
    core = EngineCore(config=config, runner=SimulatedRunner(config, token_ids=IDS, timeline=clock.timeline()))
    params = SamplingParams(seed=0, max_tokens=4, ignore_eos=True)
    core.add_request(EngineRequest(request_id="r", prompt_token_ids=(1, 2, 3), params=params))
    while core.has_work():
        core.step()
    expected_s = (0.1 * 3 + 2.0) + (1.0 - 0.07) + (1.0 - 0.06) + (1.0 - 0.05)
    assert clock.now_s - 100.0 == pytest.approx(expected_s)
    assert core.counters().device_time_s == pytest.approx(expected_s)


def test_late_wakes_do_not_add_up_and_a_late_host_does() -> None:
    for depth in (0, 1):
        clock = Clock(oversleep_s=0.3)
        timeline = clock.timeline()
        deadlines = [timeline.queue(1.0) for _ in range(depth)]
        for _ in range(50):
            deadlines.append(timeline.queue(1.0))
            timeline.wait(deadlines.pop(0))
        assert clock.now_s - 100.0 == pytest.approx(50.0 + 0.3)
        assert timeline.busy_s == 50.0 + depth
    clock = Clock()
    timeline = clock.timeline(speed=10.0)
    for _ in range(50):
        timeline.wait(timeline.queue(1.0))
        clock.now_s += 0.05  # the host works
    assert clock.now_s - 100.0 == pytest.approx(50 * (0.1 + 0.05))


def test_stops_min_tokens_and_logprobs() -> None:
    reference, _ = run(1, 0)
    stop = reference["r0"][5]
    first = reference["r0"].index(stop)
    config = make_config(simulation=simulation())
    core = EngineCore(config=config, runner=SimulatedRunner(config, token_ids=IDS, timeline=Clock().timeline()))

    def ask(name: str, **params: Any) -> tuple[list[int], Any, list[Any]]:
        sampling = SamplingParams(seed=0, max_tokens=40, ignore_eos=True, **params)
        core.add_request(EngineRequest(request_id=name, prompt_token_ids=(1, 2, 0), params=sampling))
        tokens, reason, logprobs = [], None, []
        while core.has_work():
            for delta in core.step():
                tokens += delta.token_ids
                logprobs += delta.logprobs or ()
                reason = delta.finish_reason
        return tokens, reason, logprobs

    assert ask("stopped", stop_token_ids=[stop])[:2] == (reference["r0"][: first + 1], "stop")
    tokens, _, _ = ask("late", stop_token_ids=[stop], min_tokens=20)
    assert stop not in tokens[:20]
    tokens, reason, logprobs = ask("logprobs", logprobs=2)
    assert (tokens, reason) == (reference["r0"], "length")
    assert [entry.token_id for entry in logprobs] == tokens
    assert all(entry.top_ids[0] == entry.token_id and len(entry.top_ids) == 2 for entry in logprobs)
    assert logprobs[0].logprob == pytest.approx(-math.log(len(IDS)))
    ask("scored", prompt_logprobs=3)


# ---------------------------------------------------------------------------------------- configuration

SIM_DIR = REPO_ROOT / "configs" / "sim"
FILES = SimulationOptions(
    steps=str(SIM_DIR / "steps" / "cpu2-smollm2-135m.yaml"),
    acceptance=str(SIM_DIR / "acceptance" / "easy-and-hard.yaml"),
    speed=1000.0,
)
SPEC = {"speculative_model": REPO_ROOT / "models" / "simulated-dflash", "max_draft_len": 7}
MODEL = str(REPO_ROOT / "models" / "simulated")


def options(**changes: Any) -> dict[str, Any]:
    return {"device": "simulated", "simulation": FILES, "max_model_len": 512, **changes}


def test_no_weights_no_memory_and_a_queue_of_one() -> None:
    config = resolve_engine_config(model=MODEL, speculative_config=DFlashDecodingConfig(**SPEC), **options())
    assert (config.pipeline_depth, config.num_blocks) == (1, 16 * (512 + 16) // 16 + 1)
    assert config.simulation is not None
    assert config.simulation.steps.accelerator == "cpu2"


def test_offline_text_is_words() -> None:
    spec = DFlashDecodingConfig(**SPEC)
    with LLM(MODEL, speculative_config=spec, **options(debug_checks=True)) as llm:
        texts = [
            llm.generate("Hello", SamplingParams(seed=seed, max_tokens=32))[0].outputs[0].text for seed in (4, 4, 5)
        ]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0].split()) == 32


def test_a_simulated_rank_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from engine.config.resolve import resolve_engine_config\n"
        "from engine.core import EngineCore\n"
        "from engine.rank_factory import make_rank\n"
        "from engine.simulated.profile import SimulationOptions\n"
        f"files = SimulationOptions(steps={FILES.steps!r}, acceptance={FILES.acceptance!r})\n"
        f"config = resolve_engine_config(model={MODEL!r}, device='simulated', simulation=files)\n"
        "EngineCore(config=config, runner=make_rank(config, rank=0, init_method=None).runner)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO_ROOT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulation": None}, "simulation: device 'simulated' needs it"),
        ({"device": "cpu"}, "no other device takes it"),
        ({"max_num_seqs": 17}, "simulation.steps: .* ends at 16 rows, max_num_seqs is 17"),
        ({"simulation": SimulationOptions(steps="none", acceptance="")}, "simulation.steps: .*No such file"),
        (
            {"simulation": SimulationOptions(steps=FILES.steps, acceptance=FILES.steps)},
            "simulation.acceptance: .*unknown field",
        ),
        (
            {"simulation": SimulationOptions(steps=FILES.steps, acceptance=FILES.acceptance, speed=0.0)},
            "simulation.speed: must be a finite number above 0",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_engine_config(model=MODEL, **options(**changes))


def test_a_draft_length_outside_the_table_is_refused() -> None:
    spec = DFlashDecodingConfig(**{**SPEC, "max_draft_len": 6})
    with pytest.raises(ValueError, match=r"has no times for the draft lengths \[6\]"):
        resolve_engine_config(model=MODEL, speculative_config=spec, **options())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{description: x, classes: {}}", "at least one"),
        ("{description: x, classes: {a: {hazards: [1.5]}}}", r"classes.a.hazards: must be probabilities"),
        ("{description: x, classes: {a: {hazards: []}}}", r"classes.a.hazards"),
        ("{description: x, classes: {a: {hazards: [1], memory: 1}}}", r"classes.a.memory"),
        ("{description: x, classes: {a: {hazards: [1], spread: -1}}}", r"classes.a.spread"),
        ("{description: x, classes: {a: {hazards: [1], share: 0}}}", r"classes.a.share"),
        ("{description: x, classes: {a: {hazard: [1]}}}", "hazard"),
        ("[1]", "Expected `object`"),
        ("a: [", "profile.yaml: line 1, column 5: not valid YAML"),
    ],
)
def test_a_wrong_acceptance_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_acceptance(file)


def test_shipped_profiles_load() -> None:
    files = sorted((SIM_DIR / "acceptance").glob("*.yaml"))
    assert files
    for file in files:
        assert load_acceptance(file).description
