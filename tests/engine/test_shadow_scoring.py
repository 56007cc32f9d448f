"""Shadow scoring: every position is counted once, as a brute-force recount says; nothing that is emitted changes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.core import EngineCore, Runner
from engine.request import EngineRequest
from engine.simulated.profile import AcceptanceProfile, HazardClass, Simulation
from engine.simulated.runner import SimulatedRunner
from engine.simulated.timeline import DeviceTimeline
from engine.speculative.shadow import ShadowBudget
from engine.step import StepPlan, StepResult
from engine.step_table import StepTable
from tests.engine.drafting import mixed_truth
from tests.engine.fake_runner import EOS, VOCAB_SIZE, make_config
from tests.toy import make_drafter, make_target

HAZARDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
IDS = np.array([i for i in range(VOCAB_SIZE) if i != EOS])
DRAFT_LENS = (0, 1, 2, 3, 5, 7)
TABLE = StepTable(
    accelerator="test",
    model="test",
    source="test",
    measured=(),
    reference_context=0,
    context_token_s=0.0,
    prefill_base_s=0.01,
    prefill_token_s=0.0001,
    draft_lens=DRAFT_LENS,
    buckets=(1, 2, 4),
    seconds=tuple(tuple(0.01 * rows * (1 + 0.2 * k + 0.3 * (k > 0)) for k in DRAFT_LENS) for rows in (1, 2, 4)),
)


class Recorder:
    """A runner that keeps what its steps reported, by the seed of the row's request."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: list[StepPlan] = []
        self._seeds: dict[tuple[int, int], int] = {}
        self.rows: dict[int, list[Any]] = {}
        self.num_shadow_steps = 0

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.num_shadow_steps += plan.report_drafts
        self._seeds |= {(init.slot, init.generation): init.seed for init in plan.new_slots}
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        for row in result.rows:
            if row.token_ids:
                self.rows.setdefault(self._seeds[row.slot, row.generation], []).append(row)
        return result

    def recount(self, outputs: dict[int, list[int]], aborted: frozenset[int]) -> tuple[list[int], list[int]]:
        """(at_risk, accepted) by position of all reported drafts behind those that a verify counted."""
        at_risk, accepted = [0] * 64, [0] * 64
        for seed, rows in self.rows.items():
            tokens, num_emitted = outputs[seed], 0
            for row, following in zip(rows, [*rows[1:], None], strict=True):
                num_emitted += len(row.token_ids)
                if not row.drafts or num_emitted >= len(tokens) or following is None:
                    continue
                if seed in aborted and num_emitted + len(following.token_ids) > len(tokens):
                    continue  # the abort came before the next row was read
                for index, draft in enumerate(row.drafts):
                    if num_emitted + index >= len(tokens):
                        break
                    is_right = tokens[num_emitted + index] == draft
                    if index >= following.num_drafted:
                        at_risk[index] += 1
                        accepted[index] += is_right
                    if not is_right:
                        break
        return at_risk, accepted


def counted(core: EngineCore) -> tuple[list[int], list[int]]:
    at_risk, accepted = [0] * 64, [0] * 64
    for cell in core.counters().cells:
        for index, (risk, right) in enumerate(zip(cell.shadow_at_risk, cell.shadow_accepted, strict=False)):
            at_risk[index] += risk
            accepted[index] += right
        assert len(cell.shadow_at_risk) == len(cell.shadow_accepted)
    return at_risk, accepted


def simulated(draft_len: int, share: float, **changes: Any) -> tuple[EngineCore, Recorder]:
    profile = AcceptanceProfile(description="test", classes={"only": HazardClass(hazards=HAZARDS)})
    config = make_config(
        **{
            "draft_len_schedule": ((64, draft_len),),
            "simulation": Simulation(steps=TABLE, acceptance=profile, speed=1.0),
            "shadow_time_share": share,
            "max_model_len": 256,
            "num_blocks": 300,
            **changes,
        }
    )
    timeline = DeviceTimeline(speed=1.0, now=lambda: 0.0, sleep=lambda seconds: None)
    timeline.wait = lambda deadline_s: None  # type: ignore[method-assign]
    recorder = Recorder(SimulatedRunner(config, token_ids=IDS, timeline=timeline))
    return EngineCore(config=config, runner=recorder), recorder


def run(
    core: EngineCore, num_requests: int, *, abort_every: int = 0, **params: Any
) -> tuple[dict[int, list[int]], frozenset[int]]:
    """Outputs by seed, and the seeds of those that were aborted on the way."""
    rng = random.Random(7)
    outputs: dict[int, list[int]] = {}
    aborted: set[int] = set()
    for seed in range(num_requests):
        length = 60 + seed % 50
        sampling = SamplingParams(**{"seed": seed, "max_tokens": length, "ignore_eos": True, **params})
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(1 + seed % 9))
        core.add_request(EngineRequest(request_id=str(seed), prompt_token_ids=prompt, params=sampling))
        outputs[seed] = []
    while core.has_work():
        for delta in core.step():
            seed = int(delta.request_id)
            outputs[seed] += delta.token_ids
            if delta.finish_reason is None and abort_every and seed % abort_every == 0 and len(outputs[seed]) > 40:
                core.abort(delta.request_id)
                aborted.add(seed)
    core.check_integrity()
    return outputs, frozenset(aborted)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("draft_len", "changes", "params"),
    [
        (0, {}, {}),
        (1, {}, {"stop_token_ids": [3, 4]}),
        (3, {"num_blocks": 45, "max_model_len": 128}, {}),
        (5, {}, {}),
    ],
)
def test_counts_equal_a_recount(depth: int, draft_len: int, changes: dict[str, Any], params: dict[str, Any]) -> None:
    core, recorder = simulated(draft_len, 0.5, pipeline_depth=depth, **changes)
    outputs, aborted = run(core, 40, abort_every=5, **params)
    assert recorder.num_shadow_steps > 10
    expected = recorder.recount(outputs, aborted)
    assert counted(core) == expected
    assert expected[0][draft_len] > 10
    assert bool(core.counters().preemptions) == ("num_blocks" in changes)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft_len", [0, 3])
def test_emitted_tokens_and_verified_counts_stay(depth: int, draft_len: int) -> None:
    plain, _ = simulated(draft_len, 0.0, pipeline_depth=depth)
    shadowed, recorder = simulated(draft_len, 0.5, pipeline_depth=depth)
    assert run(plain, 20) == run(shadowed, 20)
    assert recorder.num_shadow_steps > 10
    before, after = plain.counters(), shadowed.counters()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "num_steps"):
        assert getattr(before, name) == getattr(after, name), name
    assert [cell.at_risk for cell in before.cells] == [cell.at_risk for cell in after.cells]
    assert not any(cell.shadow_at_risk for cell in before.cells)
    # A step that also drafts for scoring is no sample of the steady program's time.
    assert sum(cell.decode_steps for cell in after.cells) < sum(cell.decode_steps for cell in before.cells)
    for cell in after.cells:
        if cell.decode_steps:
            expected_s = TABLE.step_s(num_rows=cell.batch_bucket, draft_len=cell.draft_len, context_tokens=0)
            assert cell.decode_time_s / cell.decode_steps == pytest.approx(expected_s)


@pytest.mark.parametrize("draft_len", [0, 1, 3])
def test_hazards_of_every_position_come_out_at_any_k(draft_len: int) -> None:
    core, _ = simulated(draft_len, 0.5)
    run(core, 250)
    cells = core.counters().cells
    for index, hazard in enumerate(HAZARDS):
        at_risk = sum(sum(c[index : index + 1]) for cell in cells for c in (cell.at_risk, cell.shadow_at_risk))
        accepted = sum(sum(c[index : index + 1]) for cell in cells for c in (cell.accepted, cell.shadow_accepted))
        assert at_risk > 30
        assert accepted / at_risk == pytest.approx(hazard, abs=3.5 * (hazard * (1 - hazard) / at_risk) ** 0.5)


@pytest.mark.parametrize("draft_len", [0, 1, 5])
def test_it_costs_at_most_its_share_and_uses_it(draft_len: int) -> None:
    core, recorder = simulated(draft_len, 0.01)
    run(core, 100)
    counters = core.counters()
    steps = sum(cell.steps for cell in counters.cells)
    allowed_s = 0.01 * min(counters.device_time_s, 30.0) + 0.001 * max(counters.device_time_s - 30.0, 0.0)
    assert 0.5 < counters.shadow_time_s / allowed_s <= 1.01
    extra_s = counters.device_time_s - _device_time_without(draft_len)
    assert counters.shadow_time_s == pytest.approx(extra_s, rel=0.02)
    assert recorder.num_shadow_steps < steps / 8


def _device_time_without(draft_len: int) -> float:
    core, _ = simulated(draft_len, 0.0)
    run(core, 100)
    return core.counters().device_time_s


def test_the_share_holds_with_noisy_steps() -> None:
    """Durations scatter by a fifth; a scoring step costs as much again as an ordinary one."""
    rng = random.Random(1)
    budget, total_s, extra_s = ShadowBudget(0.01), 0.0, 0.0
    for _ in range(30_000):
        is_due = budget.is_due((1, 0))
        duration_s = rng.gauss(1.0, 0.2) + (1.0 if is_due else 0.0)
        extra_s += 1.0 if is_due else 0.0
        total_s += duration_s
        budget.save(1, duration_s, draft_len=1)
        (budget.read_shadow if is_due else budget.read_ordinary)((1, 0), duration_s)
        if total_s < 30:
            early_s = extra_s
    assert early_s <= 0.01 * 31
    assert 0.0009 < extra_s / total_s < 0.0013, "a tenth of the share later"


@pytest.mark.parametrize(("rows", "draft_len", "share"), [(2, 0, 0.01), (3, 0, 0.001), (2, 1, 0.001)])
def test_few_rows_without_drafts_keep_the_whole_share(rows: int, draft_len: int, share: float) -> None:
    budget, total_s, extra_s = ShadowBudget(0.01), 0.0, 0.0
    for _ in range(20_000):
        is_due = budget.is_due((rows, draft_len))
        extra_s += is_due
        total_s += 1.0 + is_due
        budget.save(rows, 1.0 + is_due, draft_len=draft_len)
        (budget.read_shadow if is_due else budget.read_ordinary)((rows, draft_len), 1.0 + is_due)
    assert extra_s / total_s == pytest.approx(share, rel=0.1)


def test_small_batches_pay_for_what_large_ones_save() -> None:
    """Scoring costs an eighth of a step for each row, of which there are one or eight in turn."""
    budget, row_s, extra_row_s = ShadowBudget(0.01), 0.0, 0.0
    num_scored = {1: 0, 8: 0}
    for step in range(40_000):
        rows = 1 if step // 100 % 2 else 8
        is_due = budget.is_due((rows, 0))
        duration_s = 1.0 + rows / 8 * is_due
        num_scored[rows] += is_due
        row_s += rows * duration_s
        extra_row_s += rows * (duration_s - 1.0)
        budget.save(rows, duration_s, draft_len=1)
        (budget.read_shadow if is_due else budget.read_ordinary)((rows, 0), duration_s)
    assert extra_row_s / row_s < 0.0012 and sum(num_scored.values()) > 100
    assert num_scored[1] > 4 * num_scored[8]


def test_nothing_is_scored_at_full_length_or_once_the_gate_has_tripped() -> None:
    core, recorder = simulated(7, 0.5)
    run(core, 10)
    assert recorder.num_shadow_steps == 0
    core, recorder = simulated(3, 0.5, gate_window=5, gate_threshold=1.0)
    run(core, 20)
    assert core.stats().speculation_disabled
    assert recorder.num_shadow_steps <= 1


# ---------------------------------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("shadow")
    target = make_target(root / "target")
    return target, make_drafter(root / "drafter", target)


def check_real_drafter(models: tuple[Path, Path], draft_len: int, **options: Any) -> None:
    """Outputs with and without scoring are equal, and the counts those of a recount."""
    target, drafter = models
    prompts = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(5)]
    params = [SamplingParams(temperature=0.0, max_tokens=45, seed=i, ignore_eos=True) for i in range(5)]
    settings = {"max_model_len": 160, "max_num_seqs": 4, "block_size": 8, "num_blocks": 120, "dtype": "float32"}
    settings |= {"max_num_batched_tokens": 64, "threads": 1, "debug_checks": True, **options}
    spec = DFlashDecodingConfig(
        max_draft_len=7, speculative_model=str(drafter), draft_len_schedule={1: 7, 4: draft_len}
    )

    def generate(share: float, truth: dict[int, list[int]] | None) -> tuple[dict[int, list[int]], LLM, Recorder]:
        with LLM(str(target), speculative_config=spec, shadow_time_share=share, **settings) as llm:
            # Further ranks and captured programs draft by themselves.
            if truth is not None and llm.config.tensor_parallel_size == 1 and llm.config.decode_programs != "graphs":
                full = {seed: prompts[seed] + tokens for seed, tokens in truth.items()}
                mixed_truth(llm, full, p_right=0.8, seed=draft_len)
            recorder = Recorder(llm.core._runner)
            llm.core._runner = recorder
            outputs = llm.generate(prompts, params)
            return {i: list(output.outputs[0].token_ids) for i, output in enumerate(outputs)}, llm, recorder

    plain, _, _ = generate(0.0, None)
    shadowed, llm, recorder = generate(0.5, plain)
    assert shadowed == plain
    assert recorder.num_shadow_steps > 1
    expected = recorder.recount(plain, frozenset())
    assert counted(llm.core) == expected
    assert sum(expected[0]) > 5


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_depth": 0},
        {"pipeline_depth": 1, "num_blocks": 36},
        {"decode_programs": "repeated", "pipeline_depth": 1},
    ],
    ids=["plain", "preempted", "programs"],
)
@pytest.mark.parametrize("draft_len", [0, 3])
def test_a_real_drafter_is_scored_and_changes_nothing(
    models: tuple[Path, Path], draft_len: int, options: dict[str, Any]
) -> None:
    check_real_drafter(models, draft_len, **options)


@pytest.mark.slow
def test_two_ranks_follow_a_scoring_step(models: tuple[Path, Path]) -> None:
    check_real_drafter(models, 0, tensor_parallel_size=2)
