"""The decision: which draft length for which batch size. A pure function of what is believed.

Tokens per second at a batch size of R rows are R x E(K) / T(R, K). K changes only for a gain above the margin, which is
positive at the lower 90 % bound too, and not before the dwell time since the last change is over.

Under the same traffic the margin doubles with every change of a batch size after the first, and comes back with time:
what is found better now and worse again differs by less than can be told, and trying on costs more than it gains.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from cluster.control.hazards import LOWER_90, Belief

_CALM_HALF_LIFE_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """margin: the least relative gain in tokens/s worth a change. dwell_s: the least time between two changes."""

    margin: float = 0.03
    dwell_s: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """K of one batch-size bound, since when, and why. moves: its changes up to then, old ones counting for less."""

    draft_len: int
    since: float = -math.inf
    reason: str = "the configured schedule"
    moves: float = 0.0

    def moves_at(self, now: float, *, same_since: float) -> float:
        """The moves as they count at `now`, none if the traffic is another one since."""
        return 0.0 if self.since < same_since else self.moves * 2.0 ** ((self.since - now) / _CALM_HALF_LIFE_S)


Schedule = dict[int, Setting]  # batch size (inclusive upper bound) -> setting
StepSeconds = Callable[[int, int], float | None]  # (batch size, K) -> seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What becomes of one bound.

    draft_len: K from now on. best: the length that was weighed against K in force: the best one that may be taken, else
    the best of all. gain, lower: its relative gain in tokens/s and the lower 90 % bound of it; None: not known.
    """

    draft_len: int
    best: int
    gain: float | None
    lower: float | None
    reason: str
    changes: bool = False


def decide(
    schedule: Mapping[int, Setting],
    *,
    draft_lens: Sequence[int],
    belief: Belief,
    step_seconds: StepSeconds,
    now: float,
    rules: Rules,
    step_deviation: Callable[[int, int], float] = lambda rows, draft_len: 0.0,
    idle: Collection[int] = (),
    fresh: Collection[int] = (),
    same_since: float = -math.inf,
) -> dict[int, Verdict]:
    """A verdict for every bound of the schedule.

    step_deviation: of the logarithm of step_seconds. same_since: when the traffic last changed. idle: bounds that
    nobody runs. A small gain is none there, so it waits for another change to ride along with. fresh: bounds that have
    only just come into use: while a batch grows, its first steps there are not what the others will be like.
    """
    verdicts = {
        bound: _decide_one(
            bound,
            setting,
            draft_lens=draft_lens,
            belief=belief,
            step_seconds=step_seconds,
            step_deviation=step_deviation,
            now=now,
            rules=dataclasses.replace(rules, margin=rules.margin * _strictness(setting, now, same_since)),
        )
        for bound, setting in schedule.items()
    }
    for bound in fresh:
        verdicts[bound] = _stay(
            verdicts[bound], schedule[bound].draft_len, "this batch size has only just come into use"
        )
    if not any(verdict.changes for bound, verdict in verdicts.items() if bound not in idle):
        for bound in idle:
            verdicts[bound] = _wait(verdicts[bound], schedule[bound].draft_len, rules)
    return verdicts


def _strictness(setting: Setting, now: float, same_since: float) -> float:
    return 2.0 ** max(setting.moves_at(now, same_since=same_since) - 1.0, 0.0)


def _wait(verdict: Verdict, draft_len: int, rules: Rules) -> Verdict:
    if verdict.gain is None or verdict.gain > 2 * rules.margin:
        return verdict
    return _stay(verdict, draft_len, "nobody runs this batch size, so it waits for another change")


def _stay(verdict: Verdict, draft_len: int, why_not: str) -> Verdict:
    if not verdict.changes:
        return verdict
    reason = f"K {draft_len} stays: {verdict.reason}; {why_not}"
    return dataclasses.replace(verdict, draft_len=draft_len, changes=False, reason=reason)


def apply(
    schedule: Mapping[int, Setting],
    verdicts: Mapping[int, Verdict],
    *,
    now: float,
    idle: Collection[int] = (),
    same_since: float = -math.inf,
) -> Schedule:
    """The schedule with the verdicts' changes. idle, same_since: as in `decide`."""
    return {
        bound: Setting(
            draft_len=verdict.draft_len,
            since=now,
            reason=verdict.reason,
            # what was configured was not found here, and nobody has tried what changes at an idle bound
            moves=setting.moves_at(now, same_since=same_since) + (bound not in idle and setting.since > -math.inf),
        )
        if (verdict := verdicts[bound]).changes
        else setting
        for bound, setting in schedule.items()
    }


def _decide_one(
    bound: int,
    setting: Setting,
    *,
    draft_lens: Sequence[int],
    belief: Belief,
    step_seconds: StepSeconds,
    step_deviation: Callable[[int, int], float],
    now: float,
    rules: Rules,
) -> Verdict:
    current = setting.draft_len
    seconds = {length: time for length in draft_lens if (time := step_seconds(bound, length)) is not None}
    if current not in seconds or len(seconds) < 2:
        reason = f"K {current} stays: step times at batch size {bound} are not known yet"
        return Verdict(draft_len=current, best=current, gain=None, lower=None, reason=reason)
    rate = {length: float(belief.tokens[length]) / time for length, time in seconds.items()}
    best_first = sorted(rate, key=lambda length: (-rate[length], length))
    if rate[best_first[0]] <= rate[current]:
        return Verdict(
            draft_len=current, best=current, gain=0.0, lower=0.0, reason=f"K {current} stays: none gains tokens/s"
        )
    first: Verdict | None = None
    for best in best_first:
        if rate[best] <= rate[current]:
            break
        log_gain = math.log(rate[best] / rate[current])
        times = (step_deviation(bound, length) for length in (best, current))
        deviation = math.hypot(belief.log_ratio_deviation(best, current), *times)
        gain, lower = math.expm1(log_gain), math.expm1(log_gain - LOWER_90 * deviation)
        facts = (
            f"K {best} instead of {current} gains {gain:.1%} tokens/s (lower 90 % bound {lower:.1%}; "
            f"{belief.tokens[current]:.2f} -> {belief.tokens[best]:.2f} tokens, "
            f"{seconds[current] * 1e3:.2f} -> {seconds[best] * 1e3:.2f} ms a step)"
        )
        if gain <= rules.margin:
            why_not = f"not above the margin of {100 * rules.margin:.3g}%"
        elif lower <= 0:
            why_not = "not certain enough"
        elif now - setting.since < rules.dwell_s:
            why_not = f"the last change was {now - setting.since:.1f} s ago, under {rules.dwell_s:g} s"
        else:
            return Verdict(draft_len=best, best=best, gain=gain, lower=lower, reason=facts, changes=True)
        if first is None:
            reason = f"K {current} stays: {facts}; {why_not}"
            first = Verdict(draft_len=current, best=best, gain=gain, lower=lower, reason=reason)
    assert first is not None, "the best length gains"
    return first
