"""How far back the controller looks: as long as traffic stays, anew when it changes, at the average when it swings."""

import pickle

import numpy as np
import pytest

from cluster.control.memory import Memory
from cluster.control.own_traffic import OwnTraffic
from cluster.control.record import Record

EASY, HARD = 0.9, 0.5


def counts(rng: np.random.Generator, hazard: float, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that draft two tokens."""
    first = rng.binomial(rows, hazard)
    return np.array([rows, first]), np.array([first, rng.binomial(first, hazard)])


def run(memory: Memory, rng: np.random.Generator, hazards: list[float], *, start: int, rows: int = 500) -> np.ndarray:
    """One count and one belief a second; the first hazard believed after each."""
    believed = []
    for second, hazard in enumerate(hazards, start):
        memory.add(second + 0.5, *counts(rng, hazard, rows))
        believed.append(memory.believe(second + 0.6).hazards[0])
    return np.array(believed)


def test_a_detected_change_is_followed_at_once_by_the_memory_that_starts_there() -> None:
    memory, rng = Memory(width=2), np.random.default_rng(1)
    run(memory, rng, [EASY] * 120, start=0)
    memory.changed(120.0, now=120.0)
    believed = run(memory, rng, [HARD] * 30, start=120)
    assert believed == pytest.approx(HARD, abs=0.06)
    assert memory.chosen == 0


def test_a_change_that_nobody_detected_is_found_and_the_first_memory_starts_behind_it() -> None:
    memory, rng = Memory(width=2), np.random.default_rng(2)
    run(memory, rng, [EASY] * 120, start=0)
    started = []
    for second in range(120, 150):
        believed = run(memory, rng, [HARD], start=second)
        started += [second] * memory.starts_anew
        if started:
            assert believed == pytest.approx(HARD, abs=0.06) and memory.chosen == 0
    assert len(started) == 1 and started[0] < 130


def test_what_a_few_rows_cannot_prove_at_once_they_prove_in_time_and_not_by_chance() -> None:
    """Two requests at a time, each its own hazard."""
    found, fooled, right = 0, 0, 0
    for seed in range(20):
        memory, rng = Memory(width=2), np.random.default_rng(seed)
        hazards = np.clip(np.concatenate([rng.normal(0.8, 0.05, 60), rng.normal(0.5, 0.05, 20)]), 0.0, 1.0)
        for start, hazard in enumerate(hazards):
            run(memory, rng, [hazard] * 2, start=2 * start, rows=15)
            found += memory.starts_anew and start >= 60
            fooled += memory.starts_anew and start < 60
        right += memory.believe(160.0).hazards[0] < 0.6
    assert fooled <= 2 and found >= 8 and right >= 18


def test_a_belief_of_many_rows_yields_to_the_few_that_are_counted_now() -> None:
    """As when K falls to 0: what is scored now and then is a trickle beside what was counted before."""
    memory, rng = Memory(width=2), np.random.default_rng(6)
    run(memory, rng, [EASY] * 60 + [HARD] * 15, start=0)
    believed = run(memory, rng, [EASY] * 60, start=75, rows=2)
    assert believed[0] == pytest.approx(HARD, abs=0.06)
    assert believed[-1] == pytest.approx(EASY, abs=0.12) and memory.knows_enough


def test_a_swing_faster_than_decisions_is_averaged_though_it_is_detected_each_time() -> None:
    memory, rng = Memory(width=2), np.random.default_rng(3)
    for start in range(0, 100, 5):
        memory.changed(float(start), now=float(start))
        believed = run(memory, rng, [EASY if start % 10 else HARD] * 5, start=start)
    assert believed == pytest.approx((EASY + HARD) / 2, abs=0.08)
    assert memory.chosen != 0


def test_chance_in_a_trickle_is_not_chased() -> None:
    memory, rng = Memory(width=2), np.random.default_rng(4)
    hazards = rng.uniform(0.4, 0.9, size=100).repeat(4).tolist()  # one request after the other, each its own hazard
    for start in range(0, 400, 8):
        memory.changed(float(start), now=float(start))  # and every other one is taken for a change
        believed = run(memory, rng, hazards[start : start + 8], start=start, rows=40)
    assert believed == pytest.approx(0.65, abs=0.08)


def test_neighbouring_seconds_of_the_same_requests_do_not_feign_certainty() -> None:
    rng = np.random.default_rng(5)
    spreads = []
    for lasting in (1, 8):
        memory = Memory(width=2)
        run(memory, rng, rng.uniform(0.4, 0.9, size=160 // lasting).repeat(lasting).tolist(), start=0)
        spreads.append(memory.believe(160.0).log_ratio_deviation(2, 0))
    assert spreads[1] > 1.5 * spreads[0]


def test_a_memory_with_too_few_rows_leaves_it_to_a_longer_one() -> None:
    """Where K is 0 a few rows are scored now and then; the shortest memory has proved best before."""
    memory, rng = Memory(width=2), np.random.default_rng(6)
    run(memory, rng, [EASY] * 8, start=0, rows=15)
    run(memory, rng, [HARD] * 7, start=8, rows=15)  # too soon after the start for the first to be old beside it
    assert memory.chosen == 1 and memory.knows_enough
    run(memory, rng, [HARD] * 9, start=15, rows=1)
    assert memory.chosen > 1 and memory.knows_enough and not memory.starts_anew


def test_a_record_judges_by_predictions_made_well_before() -> None:
    record = Record(2)
    record.predict(0.0, np.array([[0.5], [0.9]]))
    record.judge(3.0, np.array([10]), np.array([9]))
    assert not record.losses_M.any()  # too fresh
    record.predict(3.5, np.array([[0.9], [0.5]]))
    record.judge(4.5, np.array([10]), np.array([9]))
    by_hand = -(9 * np.log([0.5, 0.9]) + np.log([0.5, 0.1]))
    assert record.losses_M == pytest.approx(by_hand)
    assert record.is_better(1, by=0.5) and not record.is_better(0, by=0.0)


def test_an_idle_controller_that_goes_on_deciding_keeps_no_more_than_before() -> None:
    memory = Memory(width=2)
    run(memory, np.random.default_rng(6), [EASY] * 10, start=0)
    size = len(pickle.dumps(memory))
    for _ in range(500):
        memory.believe(9.6)  # the traffic clock stands
    assert len(pickle.dumps(memory)) == size


def test_a_lead_counts_from_when_it_began_whatever_was_lost_before() -> None:
    record = Record(2)
    for second, accepted in enumerate([9] * 40 + [1] * 6):
        record.predict(float(second), np.array([[0.9], [0.5]]))
        record.judge(float(second), np.array([10]), np.array([accepted]))
        if second == 39:
            assert not record.is_ahead(1, by_s=0.0, at_least=0.0)
    assert record.losses_M[1] > record.losses_M[0]  # of all that is on record the first is still the better one
    lost = -(np.log([0.9, 0.5]) + 9 * np.log([0.1, 0.5]))
    lead = 6 * float(lost[0] - lost[1])
    assert record.is_ahead(1, by_s=0.0, at_least=0.95 * lead) and not record.is_ahead(1, by_s=0.0, at_least=lead)
    assert record.is_ahead(1, by_s=0.95 * lead / lost[0], at_least=0.0)
    assert not record.is_ahead(1, by_s=1.05 * lead / lost[0], at_least=0.0)
    record.start_first_anew(46.0, like=1)
    assert record.losses_M[0] == record.losses_M[1]
    for second in range(46, 49):
        record.judge(float(second), np.array([10]), np.array([1]))  # it did not make these predictions
    assert not record.is_ahead(1, by_s=0.0, at_least=0.0) and record.losses_M[0] == record.losses_M[1]


def test_what_was_predicted_before_a_detected_change_gives_nobody_a_lead() -> None:
    record = Record(2)
    for second in range(10):
        record.predict(float(second), np.array([[0.9], [0.5]]))
    record.start_first_anew(10.0)
    for second in range(10, 17):
        record.predict(float(second), np.array([[0.1], [0.5]]))
        record.judge(float(second), np.array([10]), np.array([1]))
        assert not record.is_ahead(1, by_s=0.0, at_least=0.0)


def test_of_predictions_at_one_time_the_last_is_judged() -> None:
    record = Record(2)
    record.predict(0.0, np.array([[0.9], [0.5]]))
    record.predict(0.0, np.array([[0.5], [0.9]]))
    record.judge(4.0, np.array([10]), np.array([9]))
    assert record.losses_M == pytest.approx(-(9 * np.log([0.5, 0.9]) + np.log([0.5, 0.1])))


def own(rng: np.random.Generator, replica_hazard: float, seconds: int) -> tuple[OwnTraffic, Memory]:
    """A replica among four: the other three have EASY requests."""
    traffic, memory = OwnTraffic(width=2), Memory(width=2)
    for second in range(seconds):
        mine = counts(rng, replica_hazard, 100)
        others = counts(rng, EASY, 300)
        memory.add(second + 0.5, mine[0] + others[0], mine[1] + others[1])
        traffic.add(second + 0.5, *mine)
        traffic.believe(second + 0.6, memory.believe(second + 0.6))
    return traffic, memory


def test_a_replica_has_its_own_belief_only_with_traffic_of_its_own() -> None:
    same = [own(np.random.default_rng(seed), EASY, 60)[0].is_own for seed in range(20)]
    assert sum(same) <= 1
    traffic, memory = own(np.random.default_rng(1), HARD, 15)
    cluster = memory.believe(15.0)
    assert traffic.is_own and cluster.hazards[0] > 0.75
    assert traffic.believe(15.0, cluster).hazards[0] == pytest.approx(HARD, abs=0.05)


def test_a_replica_returns_to_the_cluster_when_its_traffic_does() -> None:
    rng = np.random.default_rng(2)
    traffic, memory = own(rng, HARD, 30)
    for second in range(30, 230):
        mine = counts(rng, EASY, 100)
        memory.add(second + 0.5, *(4 * np.array(mine)))
        traffic.add(second + 0.5, *mine)
        traffic.believe(second + 0.6, memory.believe(second + 0.6))
        if not traffic.is_own:
            break
    assert not traffic.is_own
