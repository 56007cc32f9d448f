"""Draft-length schedule, gate and counters: their rules, table-driven."""

import logging

import pytest

from engine.config.decoding import DFlashDecodingConfig
from engine.config.draft_lengths import resolve_schedule
from engine.speculative.counters import SpeculationCounters, batch_bucket, drafts_at_risk
from engine.speculative.gate import SpeculationGate
from engine.speculative.schedule import DraftLengthSchedule, round_down
from tests.engine.fake_runner import make_config
from tests.engine.host_harness import Harness

LIMITS = {"max_draft_len": 7, "choices": (0, 1, 3, 7)}


@pytest.mark.parametrize(
    ("batch_size", "draft_len"),
    [(0, 0), (1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (32, 1), (33, 0), (1000, 0)],
)
def test_schedule_keys_are_inclusive_upper_bounds(batch_size, draft_len):
    assert DraftLengthSchedule({8: 2, 4: 4, 32: 1}).draft_len(batch_size) == draft_len


def test_schedule_without_entries_never_drafts():
    assert DraftLengthSchedule({}).draft_len(1) == 0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "draft_len_schedule: at least one entry is needed"),
        ({0: 1}, "draft_len_schedule: batch size threshold must be >= 1, got 0"),
        ({1: -1}, "draft_len_schedule: draft length must be >= 0, got -1"),
        (
            {2: 7, 4: 8},
            "draft_len_schedule: all draft lengths must be <= max_draft_len. Got draft_len=8 for batch_size=4,",
        ),
    ],
)
def test_schedule_refuses(entries, message):
    with pytest.raises(ValueError, match="draft_len_schedule") as error:
        DraftLengthSchedule.live(entries, **LIMITS)
    assert str(error.value).startswith(message)


def test_schedule_is_rounded_down_and_says_so():
    schedule, why = DraftLengthSchedule.live({4: 6, 1: 7, 8: 2, 16: 0}, **LIMITS)
    assert schedule.entries == {1: 7, 4: 3, 8: 1, 16: 0}
    assert "batch size 4: 6 -> 3" in why
    assert "batch size 8: 2 -> 1" in why
    assert "batch size 1:" not in why
    assert [round_down(k, LIMITS["choices"]) for k in range(8)] == [0, 1, 1, 3, 3, 3, 3, 7]


def test_apply_schedule_takes_only_newer_versions():
    harness = Harness(make_config())
    before = harness.core.stats()
    assert before.schedule_version == (0, 0)
    assert before.schedule == {64: 7}
    ack = harness.core.apply_schedule((1, 5), {1: 4, 8: 2})
    assert ack.applied
    assert ack.version == (1, 5)
    assert ack.schedule == {1: 3, 8: 2}
    assert "4 -> 3" in ack.rounded
    for version in [(1, 5), (1, 4), (0, 99)]:
        ack = harness.core.apply_schedule(version, {1: 1})
        assert not ack.applied
        assert ack.version == (1, 5)
        assert ack.schedule == {1: 3, 8: 2}
        assert ack.rounded == ""
    assert harness.core.apply_schedule((2, 0), {1: 1}).applied
    with pytest.raises(ValueError, match="max_draft_len"):
        harness.core.apply_schedule((3, 0), {1: 8})
    assert harness.core.stats().schedule_version == (2, 0)


def test_configured_schedule_outside_the_choices_is_lowered_with_a_warning(caplog):
    """By the resolver, as a pushed one is by the engine; the core takes only resolved schedules."""
    config = DFlashDecodingConfig(max_draft_len=7, draft_len_schedule={2: 7, 4: 6})
    assert resolve_schedule(config, LIMITS["choices"], 8) == ((2, 7), (4, 3))
    assert "draft_len_schedule[4]: 6 is not one of draft_len_choices [0, 1, 3, 7]; using 3" in caplog.text
    with pytest.raises(AssertionError, match="resolved schedules are rounded"):
        Harness(make_config(draft_len_schedule=((4, 6),)))


@pytest.mark.parametrize(
    ("window", "threshold", "rates", "trips_at"),
    [
        (3, 0.5, [0.0, 0.0, 0.0], 2),  # not before the window is full
        (3, 0.3, [0.3] * 50, None),  # strictly below: equal never trips, also after much rolling
        (1, 0.5, [0.5, 0.49], 1),
        (2, 0.5, [1.0, 0.0, 0.0], 2),  # 0.5 is not below, then 0.0 is
        (2, 0.5, [None, 0.4, None, 0.4], 3),  # steps without drafts are no samples
        (2, 0.0, [0.0] * 10, None),
    ],
)
def test_gate_trips_strictly_below_from_the_nth_sample_on(window, threshold, rates, trips_at):
    gate = SpeculationGate(window=window, threshold=threshold)
    tripped = [gate.record_acceptance_rate(rate, index)[0] for index, rate in enumerate(rates)]
    assert tripped == [index == trips_at for index in range(len(rates))]
    assert gate.disabled == (trips_at is not None)


def test_gate_is_permanent_logs_once_and_resets(caplog):
    caplog.set_level(logging.INFO)
    gate = SpeculationGate(window=2, threshold=0.3)
    assert gate.record_acceptance_rate(0.1) == (False, None)
    disabled, average = gate.record_acceptance_rate(0.146)
    assert disabled
    assert average == pytest.approx(0.123)
    for _ in range(5):
        assert gate.record_acceptance_rate(1.0) == (False, None)
    assert gate.disabled
    text = "Speculative decoding disabled: rolling acceptance rate avg 0.123 < threshold 0.3 over last 2 iterations"
    assert [record.message for record in caplog.records] == [f"[SpeculationGate] {text}"]
    gate.reset()
    assert not gate.disabled
    assert gate.record_acceptance_rate(0.9) == (False, None)


@pytest.mark.parametrize("rate", [-0.01, 1.01, float("nan")])
def test_gate_refuses_a_rate_outside_the_unit_interval(rate):
    with pytest.raises(ValueError, match=r"acceptance_rate must be in the range \[0.0, 1.0\], got"):
        SpeculationGate(window=2, threshold=0.3).record_acceptance_rate(rate)


@pytest.mark.parametrize("depth", [0, 1])
def test_tripped_gate_stops_drafting_until_reset(depth):
    harness = Harness(make_config(pipeline_depth=depth, gate_window=3, gate_threshold=0.5), accept=0.0)
    harness.add([1, 2], max_tokens=40, ignore_eos=True)
    while not harness.core.stats().speculation_disabled:
        harness.step()
    assert harness.runner.recount.gate_rates == [0.0] * 3
    first = len(harness.runner.plans)
    for _ in range(4):
        harness.step()
    assert all((plan.verify_len, plan.draft_len) == (0, 0) for plan in harness.runner.plans[first:])
    harness.core.reset_gate()
    harness.step()
    harness.step()
    assert [(plan.verify_len, plan.draft_len) for plan in harness.runner.plans[-2:]] == [(0, 7), (7, 7)]
    harness.run()
    harness.check_outcomes()
    harness.check_idle()


def test_gate_with_live_schedules_warns_once(caplog):
    harness = Harness(make_config(gate_window=3, gate_threshold=0.5))
    harness.core.apply_schedule((1, 1), {1: 7})
    harness.core.apply_schedule((1, 2), {1: 5})
    assert caplog.text.count("together with live draft-length schedules") == 1


def test_schedule_follows_the_number_of_sampling_rows():
    config = make_config(draft_len_schedule=((1, 7), (2, 3)), max_num_batched_tokens=200)
    harness = Harness(config)
    for prompt_len in (3, 4, 5):
        harness.add([1] * prompt_len, max_tokens=30, ignore_eos=True)
        harness.step()
    harness.step()
    # 1 row prefilled: K 7. 1 decoding + 1 prefilled: 3. 2 + 1: above the last key. Then 3 decoding rows: 0.
    assert [plan.draft_len for plan in harness.runner.plans] == [7, 3, 0, 0]
    assert [plan.verify_len for plan in harness.runner.plans] == [0, 3, 0, 0]
    harness.run()
    harness.check_outcomes()


@pytest.mark.parametrize(
    ("num_tokens", "drafted", "accepted", "counted"),
    [
        (1, 0, 0, (0, 0)),
        (3, 5, 2, (5, 2)),  # whole block: every draft was at risk
        (2, 5, 4, (2, 2)),  # cut at the second token: drafts 1 and 2 were at risk, both right
        (1, 5, 5, (1, 1)),
        (6, 5, 5, (5, 5)),
    ],
)
def test_a_cut_block_counts_up_to_the_cut(num_tokens, drafted, accepted, counted):
    assert drafts_at_risk(num_tokens=num_tokens, num_drafted=drafted, num_accepted=accepted) == counted


def test_counters_expand_positions_and_sum_over_cells():
    counters = SpeculationCounters(max_num_seqs=6)
    counters.record_decode(
        num_program_rows=3, verify_len=3, outcomes=[(3, 3), (3, 1), (2, 0)], num_tokens=7, steady_time_s=0.5
    )
    counters.record_decode(
        num_program_rows=5, verify_len=1, outcomes=[(1, 0), (0, 0)], num_tokens=2, steady_time_s=None
    )
    snapshot = counters.snapshot(
        preemptions=0, prompt_tokens=0, prefix_cache_queries=0, prefix_cache_hits=0, prefix_cache_evictions=0
    )
    first, second = snapshot.cells
    assert (first.batch_bucket, first.draft_len, first.at_risk, first.accepted) == (4, 3, (3, 2, 1), (2, 1, 1))
    assert (second.batch_bucket, second.decode_steps, second.at_risk, second.accepted) == (6, 0, (1,), (0,))
    assert (snapshot.num_drafts, snapshot.num_draft_tokens, snapshot.num_accepted_tokens) == (4, 9, 4)
    assert snapshot.num_accepted_tokens_per_pos == (2, 1, 1)
    assert [batch_bucket(rows, 6) for rows in (0, 1, 2, 3, 4, 5, 6)] == [0, 1, 2, 4, 4, 6, 6]


def test_hazards_from_the_counters_recover_the_acceptance_rate():
    """At varying K, accepted_j / at_risk_j stays the rate of the drafts; accepted_j / steps would not."""
    harness = Harness(make_config(max_model_len=4000, num_blocks=1100), accept=0.6, seed=5)
    harness.runner.check_reads = False
    harness.add([1], max_tokens=3900, ignore_eos=True)
    for number in range(1, 100_000):
        if not harness.core.has_work():
            break
        harness.core.apply_schedule((1, number), {1: (7, 3, 1, 0)[number % 4]})
        harness.step()
    cells = harness.core.counters().cells
    for position in range(3):
        at_risk = sum(cell.at_risk[position] for cell in cells if len(cell.at_risk) > position)
        accepted = sum(cell.accepted[position] for cell in cells if len(cell.accepted) > position)
        assert accepted / at_risk == pytest.approx(0.6, abs=0.08)
    harness.check_counters()
