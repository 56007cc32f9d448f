"""Lost, repeated and late reports change nothing; idle time ages nothing; old traffic fades."""

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.counts import HALF_LIFE_S, Difference, DifferenceLog, ReplicaCounts, TrafficClock
from cluster.control.messages import CellCounts, cell_counts, report_interval_s
from engine.speculative.counters import SpeculationCounters
from tests.control.messages import CountingReplica


def total(cells: list[CellCounts]) -> dict[str, object]:
    positions = np.zeros((2, 16), dtype=int)
    for cell in cells:
        positions[0, : len(cell.at_risk)] += np.array(cell.at_risk, dtype=int)
        positions[1, : len(cell.accepted)] += np.array(cell.accepted, dtype=int)
    return {
        "steps": sum(cell.steps for cell in cells),
        "rows": sum(cell.rows for cell in cells),
        "decode_steps": sum(cell.decode_steps for cell in cells),
        "positions": positions.tolist(),
    }


@given(st.integers(0, 2**32), st.integers(0, 3))
def test_any_loss_repetition_and_order_leaves_the_totals_right(seed: int, num_before: int) -> None:
    rng = random.Random(seed)
    replica = CountingReplica("r", seed=seed, static={8: 3})
    for _ in range(num_before):  # what a replica did before it registered is not learnt
        replica.decode(rows=4, draft_len=3, hazards=[0.7] * 7, steps=5)
    before = list(replica.cells)
    counts = ReplicaCounts(incarnation=1, sequence=0, cells=before, most_drafts=7)
    reports = []
    for _ in range(12):
        replica.decode(rows=rng.choice([1, 4]), draft_len=rng.choice([0, 3, 7]), hazards=[0.7] * 7, steps=3)
        reports.append(replica.report())
    delivered = [r for r in reports[:-1] if rng.random() < 0.6]
    delivered += rng.choices(delivered, k=4) if delivered else []
    rng.shuffle(delivered)
    delivered.append(reports[-1])
    learnt = [counts.absorb(incarnation=1, sequence=report.sequence, cells=report.cells) for report in delivered]
    everything, at_start = total(list(replica.cells)), total(before)
    programs = [program for difference in learnt for program in difference.programs]
    for key in ("steps", "rows", "decode_steps"):
        assert sum(getattr(program, key) for program in programs) == everything[key] - at_start[key]
    spent_s = sum(cell.decode_time_s for cell in replica.cells) - sum(cell.decode_time_s for cell in before)
    assert sum(program.decode_time_s for program in programs) == pytest.approx(spent_s)
    positions, origins = (sum(parts) for parts in zip(*[one.counts(16) for one in learnt], strict=True))
    assert np.array_equal(positions, np.subtract(everything["positions"], at_start["positions"]))
    for draft_len in (0, 3, 7):
        cells = [(1, cell) for cell in replica.cells] + [(-1, cell) for cell in before]
        first = sum(sign * sum(cell.at_risk[:1]) for sign, cell in cells if cell.draft_len == draft_len)
        assert origins[draft_len] == first


@pytest.mark.parametrize("wrong", [{"at_risk": (1,) * 8}, {"accepted": (0,) * 8}, {"draft_len": 8}], ids=str)
def test_counts_of_more_drafts_than_there_are_leave_nothing(wrong: dict[str, Any]) -> None:
    replica = CountingReplica("r", seed=1, static={8: 3})
    replica.decode(rows=4, draft_len=3, hazards=[0.7] * 7, steps=5)
    counts, (cell,) = ReplicaCounts(incarnation=1, sequence=0, cells=(), most_drafts=7), replica.cells
    with pytest.raises(ValueError, match="at most 7 drafts"):
        counts.absorb(incarnation=1, sequence=1, cells=[msgspec.structs.replace(cell, **wrong)])
    assert counts.absorb(incarnation=1, sequence=1, cells=[cell]).has_rows


def test_reports_of_another_incarnation_do_not_count() -> None:
    replica = CountingReplica("r", seed=1, static={8: 3})
    replica.decode(rows=4, draft_len=3, hazards=[0.7] * 7, steps=5)
    counts = ReplicaCounts(incarnation=2, sequence=0, cells=(), most_drafts=7)
    assert not counts.absorb(incarnation=1, sequence=9, cells=replica.cells).has_rows
    found, (cell,) = counts.absorb(incarnation=2, sequence=1, cells=replica.cells), replica.cells
    assert found.has_rows and (found.at_risk, found.accepted) == (cell.at_risk, cell.accepted)


def test_counts_that_shrink_are_refused() -> None:
    replica = CountingReplica("r", seed=1, static={8: 3})
    replica.decode(rows=4, draft_len=3, hazards=[0.7] * 7, steps=5)
    old = replica.cells
    replica.decode(rows=4, draft_len=3, hazards=[0.7] * 7, steps=5)
    counts = ReplicaCounts(incarnation=1, sequence=0, cells=replica.cells, most_drafts=7)
    with pytest.raises(ValueError, match="smaller"):
        counts.absorb(incarnation=1, sequence=1, cells=old)
    (cell,) = replica.cells
    for changes in ({"accepted": (*cell.accepted[:-1], cell.accepted[-1] - 1)}, {"at_risk": cell.at_risk[:-1]}):
        with pytest.raises(ValueError, match="smaller"):
            counts.absorb(incarnation=1, sequence=1, cells=(msgspec.structs.replace(cell, **changes),))


@pytest.mark.parametrize(
    "wrong",
    [{"decode_time_s": math.nan}, {"decode_time_s": math.inf}, {"steps": 0}],
    ids=["nan", "endless", "no steps"],
)
def test_steps_that_cannot_be_are_refused_and_leave_nothing(wrong: dict[str, float]) -> None:
    """One such time would make every draft length of an accelerator type look alike for ever."""
    replica = CountingReplica("r", seed=1, static={8: 3})
    replica.decode(rows=4, draft_len=3, hazards=[0.7] * 3, steps=5)
    counts = ReplicaCounts(incarnation=1, sequence=0, cells=(), most_drafts=7)
    (cell,) = replica.cells
    with pytest.raises(ValueError, match="no steps are counted so"):
        counts.absorb(incarnation=1, sequence=1, cells=[msgspec.structs.replace(cell, **wrong)])
    assert counts.absorb(incarnation=1, sequence=2, cells=[cell]).has_rows


def test_the_clock_counts_traffic_and_cuts_gaps() -> None:
    clock = TrafficClock()
    assert [clock.traffic_at(now, longest_gap_s=2.0) for now in (100.0, 101.0, 100.5, 600.0, 601.0)] == [
        0.0,
        1.0,
        1.0,
        3.0,
        4.0,
    ]


def test_weights_halve_and_old_rows_leave_a_log_that_grows_and_widens() -> None:
    difference = Difference(at_risk=(8, 4), accepted=(4, 2))
    log = DifferenceLog(width=2)
    for index in range(1000):
        log.add(time=index * 0.1, counts=difference.counts(log.width)[0], group=index)
        if index == 500:
            log.widen(5)
    assert log.at_risk_PW.shape == (301, 5)  # 30 s of 10 rows a second
    assert (log.at_risk_PW == (8, 4, 0, 0, 0)).all() and (log.accepted_PW == (4, 2, 0, 0, 0)).all()
    assert np.allclose(log.times_P, np.arange(699, 1000) * 0.1)
    weights = log.weights(log.times_P[-1])
    assert weights[-1] == 1.0 and weights[-1 - round(HALF_LIFE_S * 10)] == pytest.approx(0.5)


def test_replicas_of_a_group_share_a_row_of_the_log_for_half_a_second() -> None:
    log = DifferenceLog(width=1)
    for index in range(4000):
        log.add(time=index * 0.01, counts=np.array([[2.0], [1.0]]), group=index % 4, num_ended=1)
    assert len(log.times_P) == 4 * 2 * 30 and (np.diff(log.times_P) >= 0).all()
    assert (log.ended_P == log.accepted_PW[:, 0]).all() and set(log.ended_P) <= {12, 13}
    assert log.at_risk_PW.sum() == 2 * 3000 and log.ended_P.sum() == 3000


@pytest.mark.parametrize(("num", "seconds"), [(1, 1.0), (250, 1.0), (1000, 4.0), (9000, 10.0)])
def test_report_interval_keeps_the_rate_at_250_a_second(num: int, seconds: float) -> None:
    assert report_interval_s(num) == seconds


def test_shadow_counts_join_the_verified_ones_by_position() -> None:
    counters = SpeculationCounters(max_num_seqs=4)
    counters.record_decode(num_program_rows=1, verify_len=1, outcomes=[(1, 1)], num_tokens=2, steady_time_s=None)
    # The first of four drafts was verified; the second was right, the third wrong.
    counters.record_shadow(num_program_rows=1, verify_len=1, num_verified=1, num_drafted=4, num_accepted=2)
    # Rejected by the verify: nothing is left to compare.
    counters.record_shadow(num_program_rows=1, verify_len=1, num_verified=1, num_drafted=4, num_accepted=0)
    snapshot = counters.snapshot(
        preemptions=0, prompt_tokens=0, prefix_cache_queries=0, prefix_cache_hits=0, prefix_cache_evictions=0
    )
    (cell,) = cell_counts(snapshot)
    assert (cell.at_risk, cell.accepted) == ((1, 1, 1, 0), (1, 1, 0, 0))
    assert (snapshot.num_draft_tokens, snapshot.num_accepted_tokens) == (1, 1), "users see what was verified"
