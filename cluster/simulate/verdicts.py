"""What an experiment shows: the scenario's bars against the scores, and the figures that are kept as JSON."""

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from cluster.simulate.experiment import CLAIRVOYANT, OURS, PER_REPLICA, STATIC, Experiment, Outcome
from cluster.simulate.scenario import Scenario

_GAP_THAT_COUNTS = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One bar. holds None: it does not apply, `note` says why."""

    name: str
    value: float
    bar: str
    holds: bool | None
    note: str = ""


def judge(scenario: Scenario, experiment: Experiment) -> list[Verdict]:
    """All bars of the scenario, in the order of the file's keys."""
    bars = scenario.bars
    ours, static, best = (experiment.mean(policy) for policy in (OURS, STATIC, CLAIRVOYANT))
    verdicts = []
    if bars.over_static is not None:
        ratio = ours / static
        verdicts.append(_at_least("ours / static", ratio, bars.over_static))
    if bars.over_per_replica is not None:
        verdicts.append(_at_least("ours / per-replica", ours / experiment.mean(PER_REPLICA), bars.over_per_replica))
    if bars.regret is not None:
        regret = 1.0 - ours / best
        verdicts.append(
            Verdict(name="regret to clairvoyant", value=regret, bar=f"<= {bars.regret:g}", holds=regret <= bars.regret)
        )
    if bars.recovered is not None:
        gap = 1.0 - static / best
        recovered = (ours - static) / (best - static) if best > static else 1.0
        applies = gap > _GAP_THAT_COUNTS
        verdicts.append(
            Verdict(
                name="share of the gap recovered",
                value=recovered,
                bar=f">= {bars.recovered:g}",
                holds=recovered >= bars.recovered if applies else None,
                note="" if applies else f"the gap is {gap:.1%}, not above {_GAP_THAT_COUNTS:.0%}",
            )
        )
    if scenario.cold_replicas_s is not None:
        cold = [_mean_cold(experiment.of(policy)) for policy in (OURS, PER_REPLICA)]
        verdicts.append(
            Verdict(
                name=f"cold replicas' first {scenario.cold_replicas_s:g} s, ours / per-replica",
                value=cold[0] / cold[1],
                bar="",
                holds=None,
                note="compared, no bar",
            )
        )
    return verdicts


def _at_least(name: str, value: float, bar: float) -> Verdict:
    return Verdict(name=name, value=value, bar=f">= {bar:g}", holds=value >= bar)


def _mean_cold(outcomes: Sequence[Outcome]) -> float:
    scores = [outcome.cold_score for outcome in outcomes if outcome.cold_score is not None]
    assert scores, "cold_replicas_s needs replicas that join later; the scenario's schema checks it"
    return statistics.fmean(scores)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over the seeds; 0 for one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def as_record(
    scenario: Scenario, experiment: Experiment, verdicts: Sequence[Verdict], *, command: str
) -> dict[str, Any]:
    """The figures to keep, with everything needed to repeat them."""
    return {
        "command": command,
        "description": scenario.description,
        "machine": {"cpu": platform.machine(), "seconds": round(experiment.wall_s, 1)},
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "seeds": list(scenario.seeds),
        "duration_s": scenario.duration_s,
        "measured_step_times": experiment.measured,
        "static_schedule": {str(bound): length for bound, length in experiment.static_schedule.items()},
        "bars": [
            {"name": v.name, "value": round(v.value, 4), "bar": v.bar, "holds": v.holds, "note": v.note}
            for v in verdicts
        ],
        "policies": {policy: _figures(experiment, policy) for policy in experiment.policies},
    }


def _figures(experiment: Experiment, policy: str) -> dict[str, Any]:
    outcomes = experiment.of(policy)
    scores = [outcome.score for outcome in outcomes]

    def mean(name: str, digits: int) -> float:
        return round(statistics.fmean(getattr(outcome, name) for outcome in outcomes), digits)

    cold = [outcome.cold_score for outcome in outcomes if outcome.cold_score is not None]
    return {
        "score": round(statistics.fmean(scores), 4),
        "score_spread": round(spread(scores), 4),
        "scores": [round(score, 4) for score in scores],
        "of_clairvoyant": round(statistics.fmean(scores) / experiment.mean(CLAIRVOYANT), 4),
        "tokens_per_s": mean("tokens_per_s", 1),
        "busy_share": mean("busy_share", 3),
        "mean_rows": mean("mean_rows", 2),
        "mean_draft_len": mean("mean_draft_len", 2),
        "token_ms_p50_p99": [round(statistics.fmean(o.token_s[i] for o in outcomes) * 1e3, 2) for i in (0, 1)],
        "first_token_ms_p50_p99": [
            round(statistics.fmean(o.first_token_s[i] for o in outcomes) * 1e3, 1) for i in (0, 1)
        ],
        "finished": round(statistics.fmean(outcome.finished for outcome in outcomes)),
        "preemptions": mean("preemptions", 1),
        "changes": mean("changes", 1),
    } | ({"cold_score": round(statistics.fmean(cold), 4)} if cold else {})
