"""Step times measured before serving are those of the device, and leave nothing behind that serving would notice."""

import itertools
from collections import deque

import msgspec
import pytest

from engine.core import EngineCore
from engine.speculative.measure import measure_step_times
from engine.step import RowResult, StepPlan, StepResult
from tests.engine.fake_runner import make_config


def device_seconds(plan: StepPlan) -> float:
    return 0.01 + 0.001 * len(plan.decode_slots) * (1 + plan.verify_len)


class TimedRunner:
    """Emits one token a row and step, never accepts a draft; each pair takes twice as long the first time."""

    def __init__(self) -> None:
        self._generations: dict[int, int] = {}
        self._launched: deque[StepResult] = deque()
        self._seen: set[tuple[int, int]] = set()

    def launch(self, plan: StepPlan) -> None:
        self._generations |= {init.slot: init.generation for init in plan.new_slots}
        slots = [(slot, plan.verify_len) for slot in plan.decode_slots]
        slots += [(chunk.slot, 0) for chunk in plan.prefill if chunk.samples]
        rows = tuple(
            RowResult(slot=slot, generation=self._generations[slot], token_ids=(1,), num_drafted=num_drafted)
            for slot, num_drafted in slots
        )
        key = (len(plan.decode_slots), plan.verify_len)
        factor = 1 if key in self._seen else 2
        self._seen.add(key)
        self._launched.append(StepResult(step_id=plan.step_id, rows=rows, duration_s=factor * device_seconds(plan)))

    def collect(self) -> StepResult:
        return self._launched.popleft()


@pytest.mark.parametrize(("pipeline_depth", "context"), [(0, 1), (1, 1), (1, 30)])
def test_every_pair_is_measured_and_the_engine_serves_as_if_nothing_had_been(pipeline_depth: int, context: int) -> None:
    config = make_config(max_num_seqs=6, pipeline_depth=pipeline_depth, max_model_len=200, num_blocks=400)
    runner = TimedRunner()
    found = {
        (entry.batch_bucket, entry.draft_len): entry.seconds
        for entry in measure_step_times(config, runner, budget_s=1e9, context=context)
    }
    assert set(found) == {(rows, k) for rows in (1, 2, 4, 6) for k in config.draft_len_choices}
    for (rows, draft_len), seconds in found.items():
        assert seconds == pytest.approx(0.01 + 0.001 * rows * (1 + draft_len))
    core = EngineCore(config=config, runner=runner)
    assert core.counters().num_steps == 0 and core.stats().free_blocks == core.stats().total_blocks


def test_a_short_budget_measures_the_shortest_and_the_longest_drafts_of_every_bucket_first() -> None:
    config = make_config(max_num_seqs=4, max_model_len=200, num_blocks=400)
    ticks = itertools.count()
    found = measure_step_times(config, TimedRunner(), budget_s=5.5, now=lambda: float(next(ticks)))
    assert [(entry.batch_bucket, entry.draft_len) for entry in found] == [
        (1, 0),
        (2, 0),
        (4, 0),
        (1, config.max_draft_len),
        (2, config.max_draft_len),
    ]


class DisturbedRunner(TimedRunner):
    """Somebody else has the host while the steps of one stretch run, all of some pairs' in one pass."""

    def __init__(self, disturbed: range) -> None:
        super().__init__()
        self._disturbed = disturbed

    def collect(self) -> StepResult:
        result = super().collect()
        return (
            msgspec.structs.replace(result, duration_s=3 * result.duration_s)
            if result.step_id in self._disturbed
            else result
        )


@pytest.mark.parametrize("disturbed", [range(0), range(20, 60), range(200, 300)])
def test_what_a_host_does_for_a_moment_does_not_stick_to_a_pair(disturbed: range) -> None:
    config = make_config(max_num_seqs=2, max_model_len=200, num_blocks=400)
    for entry in measure_step_times(config, DisturbedRunner(disturbed), budget_s=1e9):
        assert entry.seconds == pytest.approx(0.01 + 0.001 * entry.batch_bucket * (1 + entry.draft_len))


def test_more_passes_take_no_more_than_half_of_the_budget() -> None:
    config = make_config(max_num_seqs=2, max_model_len=200, num_blocks=400)
    num_pairs = 2 * len(config.draft_len_choices)
    asked = []
    for budget_s in (float(num_pairs), 1e9):  # the first pass takes as many ticks of the clock as there are pairs
        ticks = itertools.count()
        measure_step_times(config, TimedRunner(), budget_s=budget_s, now=lambda ticks=ticks: float(next(ticks)))
        asked.append(next(ticks))
    assert asked[0] <= num_pairs + 2 and asked[1] > 5 * num_pairs


def test_pairs_that_cannot_run_are_left_out() -> None:
    config = make_config(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=200, num_blocks=400)
    found = {(entry.batch_bucket, entry.draft_len) for entry in measure_step_times(config, TimedRunner(), budget_s=1e9)}
    assert (4, config.max_draft_len) not in found and (2, config.max_draft_len) in found
