"""The decision takes the length with most tokens per second, and leaves it for a large and sure gain only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.hazards import Belief, expected_tokens
from cluster.control.policy import Rules, Setting, apply, decide

LENGTHS = (0, 1, 2, 3, 5)
RULES = Rules(margin=0.03, dwell_s=5.0)


def belief(hazards: list[float], deviation: float = 0.0) -> Belief:
    return Belief.of(np.array(hazards), np.eye(len(hazards)) * deviation**2)


def seconds(rows: int, draft_len: int) -> float:
    return 0.02 + 0.002 * rows * draft_len


def verdict(
    current: int, known: Belief, *, rows: int = 1, since: float = 0.0, now: float = 100.0, rules: Rules = RULES
):
    schedule = {rows: Setting(draft_len=current, since=since)}
    found = decide(schedule, draft_lens=LENGTHS, belief=known, step_seconds=seconds, now=now, rules=rules)[rows]
    assert apply(schedule, {rows: found}, now=now)[rows].draft_len == found.draft_len
    return found


@given(st.lists(st.floats(0.01, 0.99), min_size=5, max_size=5), st.sampled_from([1, 4, 16]), st.sampled_from(LENGTHS))
def test_a_certain_belief_leads_to_the_best_length_or_within_the_margin_of_it(
    hazards: list[float], rows: int, current: int
) -> None:
    rate = {k: expected_tokens(np.array(hazards))[k] / seconds(rows, k) for k in LENGTHS}
    found = verdict(current, belief(hazards), rows=rows)
    best = max(rate.values())
    if best > rate[current] * 1.03:
        assert rate[found.draft_len] == best and found.changes
    else:
        assert found.draft_len == current and not found.changes


def test_each_condition_alone_keeps_the_length_and_says_so() -> None:
    easy = belief([0.9] * 5)
    assert verdict(0, easy).draft_len == 5
    kept = verdict(0, easy, rules=Rules(margin=5.0))
    assert kept.draft_len == 0 and "not above the margin of 500%" in kept.reason
    kept = verdict(0, belief([0.9] * 5, deviation=2.0))
    assert kept.draft_len == 0 and "not certain enough" in kept.reason
    kept = verdict(0, easy, since=97.0)
    assert kept.draft_len == 0 and "3.0 s ago" in kept.reason
    assert verdict(0, easy, since=95.0).draft_len == 5


def test_a_sure_smaller_gain_is_taken_when_the_largest_is_unsure() -> None:
    covariance = np.diag([1e-6, 4.0, 4.0, 4.0, 4.0])
    known = Belief.of(np.array([0.9] * 5), covariance)
    assert verdict(0, known).draft_len == 1


def test_a_small_gain_at_an_idle_batch_size_waits_for_another_change() -> None:
    known = belief([0.9] * 5)
    arguments = {"draft_lens": LENGTHS, "belief": known, "step_seconds": seconds, "now": 100.0}
    gains = {
        rows: decide({rows: Setting(draft_len=0)}, rules=Rules(margin=0.03), **arguments)[rows].gain for rows in (1, 2)
    }
    assert gains[1] > gains[2] > gains[1] / 2
    rules = Rules(margin=gains[1] / 1.9)  # both gains are above the margin, and below twice of it
    alone = decide({1: Setting(draft_len=0), 2: Setting(draft_len=5)}, rules=rules, idle=[1], **arguments)
    assert alone[1].draft_len == 0 and not alone[1].changes and "nobody runs" in alone[1].reason
    both = decide({1: Setting(draft_len=0), 2: Setting(draft_len=0)}, rules=rules, idle=[1], **arguments)
    assert both[1].draft_len == both[2].draft_len == 5
    large = decide({1: Setting(draft_len=0)}, rules=Rules(margin=0.03), idle=[1], **arguments)
    assert large[1].draft_len == 5


def test_a_batch_size_that_has_just_come_into_use_is_left_alone() -> None:
    known = belief([0.9] * 5)
    schedule = {1: Setting(draft_len=0), 2: Setting(draft_len=0)}
    arguments = {"draft_lens": LENGTHS, "belief": known, "step_seconds": seconds, "now": 100.0, "rules": RULES}
    found = decide(schedule, fresh=[2], **arguments)
    assert found[1].changes and not found[2].changes and found[2].draft_len == 0
    assert "gains" in found[2].reason and "just come into use" in found[2].reason
    assert decide(schedule, **arguments)[2].changes


def test_unknown_step_times_change_nothing() -> None:
    schedule = {4: Setting(draft_len=3)}
    found = decide(
        schedule, draft_lens=LENGTHS, belief=belief([0.1] * 5), step_seconds=lambda r, k: None, now=9.0, rules=RULES
    )
    assert found[4].draft_len == 3 and "not known" in found[4].reason


def test_the_lower_bound_is_the_one_sided_90_percent_bound() -> None:
    rng = np.random.default_rng(0)
    known = belief([0.6] * 5, deviation=0.03)
    found = verdict(5, known, rows=16)
    current, best = 5, found.best
    ratios = []
    for _ in range(4000):
        tokens = expected_tokens(np.clip(rng.normal(known.hazards, 0.03), 0, 1))
        ratios.append(tokens[best] / seconds(16, best) / (tokens[current] / seconds(16, current)) - 1)
    assert found.lower == pytest.approx(np.quantile(ratios, 0.1), rel=0.02)


def test_to_and_fro_needs_a_larger_gain_each_time_until_the_traffic_changes() -> None:
    easy = belief([0.9] * 5)
    rate = {k: float(easy.tokens[k]) / seconds(1, k) for k in LENGTHS}
    gain = rate[5] / rate[3] - 1
    rules = Rules(margin=gain / 3, dwell_s=5.0)

    def changes(moves: float, *, since: float = 90.0, same_since: float = -np.inf) -> bool:
        schedule = {1: Setting(draft_len=3, since=since, moves=moves)}
        found = decide(
            schedule,
            draft_lens=LENGTHS,
            belief=easy,
            step_seconds=seconds,
            now=100.0,
            rules=rules,
            same_since=same_since,
        )
        after = apply(schedule, found, now=100.0, same_since=same_since)[1]
        if found[1].changes:
            assert after.moves == pytest.approx(1.0 if since < same_since else moves + 1.0, rel=0.1)
        return found[1].changes

    assert changes(0.0) and changes(1.0) and changes(2.0) and not changes(3.0)
    assert changes(3.0, same_since=95.0), "other traffic: all over again"


def test_the_first_change_and_those_at_idle_batch_sizes_are_no_to_and_fro() -> None:
    easy = belief([0.9] * 5)
    schedule = {1: Setting(draft_len=0), 2: Setting(draft_len=0, since=0.0), 4: Setting(draft_len=0, since=0.0)}
    found = decide(schedule, draft_lens=LENGTHS, belief=easy, step_seconds=seconds, now=100.0, rules=RULES)
    after = apply(schedule, found, now=100.0, idle=[4])
    assert [setting.moves for setting in after.values()] == [0.0, 1.0, 0.0]


def test_a_gain_that_step_times_may_be_wrong_about_is_not_sure() -> None:
    known = belief([0.75] * 5)
    schedule = {1: Setting(draft_len=3, since=0.0)}
    found = {
        deviation: decide(
            schedule,
            draft_lens=LENGTHS,
            belief=known,
            step_seconds=seconds,
            step_deviation=lambda rows, draft_len, d=deviation: d if draft_len == 5 else 0.0,
            now=100.0,
            rules=RULES,
        )[1]
        for deviation in (0.0, 0.1)
    }
    assert found[0.0].lower == found[0.0].gain == found[0.1].gain > 0.03 and found[0.0].changes
    assert found[0.1].lower == pytest.approx((1 + found[0.1].gain) * np.exp(-0.12816) - 1, abs=1e-6)
    assert not found[0.1].changes
