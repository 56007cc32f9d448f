"""Hazards are right where acceptance per step is censored, and their uncertainty is what repeated trials show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cluster.control.hazards import Belief, changed_since, expected_tokens, token_gradients
from tests.control.messages import CountingReplica

HAZARDS = st.integers(1, 8).flatmap(lambda width: arrays(float, width, elements=st.floats(0.0, 1.0)))


def summed(replica: CountingReplica, width: int) -> tuple[np.ndarray, np.ndarray]:
    at_risk, accepted = np.zeros(width), np.zeros(width)
    for cell in replica.cells:
        at_risk[: len(cell.at_risk)] += cell.at_risk
        accepted[: len(cell.accepted)] += cell.accepted
    return at_risk, accepted


def test_varying_draft_lengths_censor_acceptance_per_step_but_not_hazards() -> None:
    hazards = [0.7, 0.6, 0.45]
    true_third = 0.7 * 0.6 * 0.45  # 0.189
    replica = CountingReplica("r", seed=3, static={8: 3})
    for draft_len in (1, 3):  # half of the steps never try a third draft
        replica.decode(rows=8, draft_len=draft_len, hazards=hazards, steps=20000)
    at_risk, accepted = summed(replica, 3)
    assert accepted[2] / sum(cell.rows for cell in replica.cells) == pytest.approx(true_third / 2, abs=0.003)
    belief = Belief.from_reports(at_risk[None], accepted[None], np.ones(1))
    assert belief.tokens[3] - belief.tokens[2] == pytest.approx(true_third, abs=0.003)


@given(HAZARDS)
def test_expected_tokens_equal_the_sum_over_outcomes(hazards: np.ndarray) -> None:
    for draft_len in range(len(hazards) + 1):
        expected, alive = 0.0, 1.0
        for accepted in range(draft_len):  # exactly `accepted` drafts, then the target's own token
            expected += alive * (1 - hazards[accepted]) * (accepted + 1)
            alive *= hazards[accepted]
        expected += alive * (draft_len + 1)
        assert expected_tokens(hazards)[draft_len] == pytest.approx(expected)


@given(HAZARDS)
def test_gradients_equal_differences(hazards: np.ndarray) -> None:
    gradients = token_gradients(hazards)
    for index in range(len(hazards)):
        up, down = hazards.copy(), hazards.copy()
        up[index] += 1e-4
        down[index] -= 1e-4
        difference = (expected_tokens(up) - expected_tokens(down)) / 2e-4
        assert np.allclose(gradients[:, index], difference, atol=1e-6)


@pytest.mark.parametrize("counted_at", [0, 3, 15])
def test_tokens_are_those_of_a_schedule_whatever_length_the_hazards_were_counted_at(counted_at: int) -> None:
    """Requests of equal length that differ in their log-odds; at K each is in so many steps as it needs there."""
    rng = np.random.default_rng(0)
    hazards = 1.0 / (1.0 + np.exp(-(1.2 + 0.5 * rng.standard_normal((4000, 1)))))
    survival = np.cumprod(np.repeat(hazards, 15, axis=1), axis=1)
    of_request = np.concatenate([np.ones((4000, 1)), 1.0 + np.cumsum(survival, axis=1)], axis=1)
    steps = 1.0 / of_request[:, counted_at]
    alive = np.concatenate([np.ones((4000, 1)), survival[:, :-1]], axis=1)
    counted = (steps @ (alive * hazards)) / (steps @ alive)
    truth = 1.0 / (1.0 / of_request).mean(axis=0)  # tokens over steps, if all steps are at K
    origins = np.zeros(16)
    origins[counted_at] = 1.0
    found = Belief.of(counted, np.zeros((15, 15)), origins=origins).tokens
    uncorrected = Belief.of(counted, np.zeros((15, 15))).tokens
    wrong, wrong_uncorrected = (np.abs(tokens / truth - 1.0) for tokens in (found, uncorrected))
    assert wrong[:8].max() < 0.012 and wrong.max() < 0.035
    if counted_at == 0:
        assert wrong_uncorrected[5] > 0.03 and wrong_uncorrected[15] > 0.08


@pytest.mark.parametrize("request_spread", [0.0, 0.15])
def test_the_deviation_of_a_gain_is_what_repeated_trials_show(request_spread: float) -> None:
    """Reports of a few requests each; the requests differ by `request_spread` in hazard."""
    rng = np.random.default_rng(5)
    logs, deviations = [], []
    for _ in range(300):
        at_risk, accepted = np.zeros((20, 3)), np.zeros((20, 3))
        for row in range(20):
            hazard = np.clip(rng.normal(0.6, request_spread), 0.05, 0.95)
            alive = 60
            for position in range(3):
                at_risk[row, position] = alive
                alive = rng.binomial(alive, hazard)
                accepted[row, position] = alive
        belief = Belief.from_reports(at_risk, accepted, np.exp2(-np.arange(20) / 8.0))
        logs.append(np.log(belief.tokens[3] / belief.tokens[1]))
        deviations.append(belief.log_ratio_deviation(3, 1))
    assert np.mean(deviations) == pytest.approx(np.std(logs), rel=0.2)


def test_an_unobserved_position_is_guessed_from_the_one_before_with_little_certainty() -> None:
    at_risk, accepted = np.array([[1000.0, 800.0, 0.0, 0.0]]), np.array([[800.0, 640.0, 0.0, 0.0]])
    belief = Belief.from_reports(at_risk, accepted, np.ones(1))
    assert belief.hazards == pytest.approx([0.8] * 4, abs=0.01)
    assert np.sqrt(np.diag(belief.covariance))[2:] == pytest.approx([0.2, 0.2], abs=0.01)


def reports(hazards: list[float], times: np.ndarray, *, seed: int, replica: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    at_risk, accepted = np.zeros((len(times), len(hazards))), np.zeros((len(times), len(hazards)))
    alive = np.full(len(times), 200)
    for position, hazard in enumerate(hazards):
        at_risk[:, position] = alive
        alive = rng.binomial(alive, hazard)
        accepted[:, position] = alive
    return times, at_risk, accepted, np.full(len(times), replica)


def test_a_change_of_traffic_is_found_where_it_was_and_nowhere_else() -> None:
    false_alarms = 0
    for seed in range(40):
        times, at_risk, accepted, _ = reports([0.7] * 5, np.arange(100) * 0.1, seed=seed)
        weights = np.exp2((times - times[-1]) / 5)
        false_alarms += changed_since(times, at_risk, accepted, weights, deviations=4.5) is not None
        changed = reports([0.5] * 5, times, seed=seed + 1000)
        is_late = times > 8.0
        mixed = [
            np.where(is_late[:, None], new, old) for new, old in zip(changed[1:3], (at_risk, accepted), strict=True)
        ]
        found = changed_since(times, *mixed, weights, deviations=4.5)
        assert found is not None and abs(found - 8.0) <= 0.5
    assert false_alarms == 0


@pytest.mark.parametrize("hazard", [0.9, 0.2])
def test_seconds_without_a_draft_are_no_change_of_traffic(hazard: float) -> None:
    """As when K is 0 and prompts are read all the time: steps and rows, but nothing at risk."""
    times, at_risk, accepted, _ = reports([hazard] * 5, np.arange(100) * 0.1, seed=7)
    weights = np.exp2((times - times[-1]) / 5)
    for silent in (times > 6.0, times < 3.0):
        counts = (np.where(silent[:, None], 0.0, kept) for kept in (at_risk, accepted))
        assert changed_since(times, *counts, weights, deviations=4.5) is None


def test_reports_of_the_same_few_requests_do_not_pass_for_a_change() -> None:
    times = np.arange(32) * 1.0
    weights = np.exp2((times - times[-1]) / 5)
    false_alarms = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        hazards = rng.uniform(0.4, 0.9, size=8).repeat(4)  # a request lasts four reports
        at_risk = np.full((32, 1), 40)
        accepted = rng.binomial(40, hazards)[:, None]
        false_alarms += changed_since(times, at_risk, accepted, weights, deviations=4.5) is not None
    assert false_alarms <= 12


@pytest.mark.parametrize(("num_running", "is_change"), [(64, True), (4, False)])
def test_what_a_few_requests_do_is_no_change_of_traffic(num_running: int, is_change: bool) -> None:
    times = np.arange(40) * 0.25
    weights = np.exp2((times - times[-1]) / 5)
    rng = np.random.default_rng(1)
    hazards = np.where(times > 6.0, 0.85, 0.5)[:, None].repeat(4, axis=1)
    alive = np.full((40, 1), 200)
    at_risk, accepted = [], []
    for position in range(4):
        at_risk.append(alive[:, 0])
        alive = rng.binomial(alive[:, 0], hazards[:, position])[:, None]
        accepted.append(alive[:, 0])
    found = changed_since(
        times,
        np.array(at_risk).T,
        np.array(accepted).T,
        weights,
        deviations=4.5,
        ended_P=np.full(40, num_running / 40),
        num_running=num_running,
    )
    assert (found is not None) is is_change
