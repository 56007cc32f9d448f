"""Every policy on every seed of a scenario, and the scores.

    K=0, K=1, ..    a fixed draft length; K=0 is plain decoding
    static          the best schedule batch size -> K that hindsight finds
    per-replica     every replica its own controller, from its own counts, without a network
    ours            one controller for all, over the scenario's network
    clairvoyant     at every step the K with the most expected tokens a second, from the truth about this step's rows

The score is output tokens a second and request in the system: the speed a request sees, waiting included. In a closed
loop it is throughput divided by concurrency.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.simulate.acceptance import AcceptanceTables
from cluster.simulate.control_link import ControlLink, Controls
from cluster.simulate.fleet import Control, Fleet
from cluster.simulate.lanes import Run, World, buckets_of
from cluster.simulate.scenario import Scenario
from cluster.simulate.tallies import DECODE_S, DRAFT_LEN_S, ROW_S, ROWS, SLICE_S, STEPS, TOKENS
from cluster.simulate.traffic import make_traffic, replica_groups
from engine.step_table import load_step_table

STATIC, PER_REPLICA, OURS, CLAIRVOYANT = "static", "per-replica", "ours", "clairvoyant"
_AGAIN = "static, second look"
_ENOUGH_STEPS = 200  # in a bucket, for hindsight to judge it


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One policy on one seed, all replicas together.

    score: see the module. tokens_per_s: of the whole cluster. token_s, first_token_s: percentiles 50 and 99 over
    finished requests. cold_score: tokens a second and request of the cold replicas' first seconds.
    curve: per slice, tokens a second and mean K over busy time.
    """

    policy: str
    seed: int
    score: float
    tokens: int
    tokens_per_s: float
    busy_share: float
    mean_rows: float
    mean_draft_len: float
    token_s: tuple[float, float]
    first_token_s: tuple[float, float]
    finished: int
    preemptions: int
    changes: int
    cold_score: float | None
    curve_speed: tuple[float, ...]
    curve_draft_len: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """All outcomes; static_schedule: hindsight's; slice_s: seconds of a point of the curves."""

    outcomes: tuple[Outcome, ...]
    static_schedule: dict[int, int]
    slice_s: float
    wall_s: float
    measured: bool  # all step times used were measured

    def of(self, policy: str) -> list[Outcome]:
        """A policy's outcomes, by seed."""
        return [outcome for outcome in self.outcomes if outcome.policy == policy]

    @property
    def policies(self) -> tuple[str, ...]:
        """In order of appearance."""
        return tuple(dict.fromkeys(outcome.policy for outcome in self.outcomes))

    def mean(self, policy: str) -> float:
        """Mean score over the seeds."""
        return _mean_score(self.outcomes, policy)


def make_world(scenario: Scenario) -> World:
    """Tables and traffic of a scenario.

    Raises:
        ValueError: a step table that lacks a draft length or a batch size of the scenario.
    """
    cache = {path: load_step_table(Path(path)) for path in {group.steps for group in scenario.replicas}}
    tables = tuple(cache[group.steps] for group in replica_groups(scenario))
    return World(
        scenario=scenario,
        tables=tables,
        acceptance=AcceptanceTables.of(tuple(scenario.classes.values()), scenario.draft_lens[-1]),
        traffics={seed: make_traffic(scenario, seed) for seed in scenario.seeds},
    )


def run_experiment(
    scenario: Scenario, *, progress: Callable[[str], None] = lambda _: None, pool: Executor | None = None
) -> Experiment:
    """Runs everything. pool: its processes take one policy each; without one all run here, in step.

    Raises:
        ValueError: see `make_world`.
    """
    start = time.monotonic()
    world = make_world(scenario)
    top, given = scenario.engine.max_num_seqs, dict(scenario.configured_schedule)
    fixed = {f"K={length}": {top: length} for length in scenario.draft_lens}
    num_seeds = len(scenario.seeds)
    progress(f"{len(fixed)} fixed draft lengths x {num_seeds} seeds")
    fixed_runs = _start(world, fixed, pool)
    progress(f"per-replica, ours, clairvoyant x {num_seeds} seeds")
    others = _start(world, {PER_REPLICA: given, OURS: given, CLAIRVOYANT: {top: 0}}, pool)
    outcomes, hindsight = _joined(fixed_runs)
    best = max(fixed, key=lambda policy: _mean_score(outcomes, policy))
    guess = hindsight[best]
    progress(f"static {guess} x {num_seeds} seeds")
    found, hindsight = _joined(_start(world, {STATIC: guess}, pool))
    outcomes += found
    candidates = fixed | {STATIC: guess}
    # the batch sizes that a schedule leads to are its own: look back once more from where the first guess led
    again = hindsight[STATIC]
    if again != guess:
        progress(f"static {again} x {num_seeds} seeds")
        candidates[_AGAIN] = again
        outcomes += _joined(_start(world, {_AGAIN: again}, pool))[0]
    best = max(candidates, key=lambda policy: _mean_score(outcomes, policy))
    static = [dataclasses.replace(outcome, policy=STATIC) for outcome in outcomes if outcome.policy == best]
    outcomes = [outcome for outcome in outcomes if outcome.policy not in (STATIC, _AGAIN)]
    buckets = set(buckets_of(top))
    return Experiment(
        outcomes=(*outcomes, *_joined(others)[0], *static),
        static_schedule=candidates[best],
        slice_s=SLICE_S,
        wall_s=time.monotonic() - start,
        measured=all(buckets <= set(table.measured) for table in world.tables),
    )


Ran = tuple[list[Outcome], dict[str, dict[int, int]]]  # outcomes, and by policy what hindsight says of its runs


def _start(world: World, schedules: Mapping[str, Mapping[int, int]], pool: Executor | None) -> list[Callable[[], Ran]]:
    """Policies by name with the schedule each starts from. Returns calls that wait for the results."""
    if pool is None:
        ran = _run(world, schedules)
        return [lambda: ran]
    return [pool.submit(_run, world, {policy: schedule}).result for policy, schedule in schedules.items()]


def _joined(runs: Sequence[Callable[[], Ran]]) -> Ran:
    outcomes: list[Outcome] = []
    hindsight: dict[str, dict[int, int]] = {}
    for result in runs:
        some, of_them = result()
        outcomes += some
        hindsight |= of_them
    return outcomes, hindsight


def _run(world: World, schedules: Mapping[str, Mapping[int, int]]) -> Ran:
    fleet, outcomes = run_policies(world, schedules)
    num_seeds = len(world.scenario.seeds)
    hindsight = {
        policy: hindsight_schedule(fleet, range(index * num_seeds, (index + 1) * num_seeds))
        for index, policy in enumerate(schedules)
    }
    return outcomes, hindsight


def _mean_score(outcomes: Sequence[Outcome], policy: str) -> float:
    return float(np.mean([outcome.score for outcome in outcomes if outcome.policy == policy]))


def run_policies(world: World, schedules: Mapping[str, Mapping[int, int]]) -> tuple[Fleet, list[Outcome]]:
    """Policies by name with the schedule each starts from, on every seed."""
    runs = [
        Run(
            policy=policy,
            seed=seed,
            schedule=schedule,
            clairvoyant=policy == CLAIRVOYANT,
            shadows=policy in (OURS, PER_REPLICA),
        )
        for policy, schedule in schedules.items()
        for seed in world.scenario.seeds
    ]
    fleet = Fleet(world, runs)
    controls: dict[int, Controls] = {}
    for index, run in enumerate(runs):
        lanes = list(fleet.lanes.lanes_of(index))
        if run.policy == OURS:
            link = ControlLink(fleet, lanes, seed=run.seed, network=world.scenario.network)
            controls[index] = Controls([link])
        elif run.policy == PER_REPLICA:
            controls[index] = Controls([ControlLink(fleet, [lane], seed=run.seed, network=None) for lane in lanes])
    by_index: dict[int, Control] = dict(controls)
    fleet.run(by_index)
    changes = [controls[index].num_changes if index in controls else 0 for index in range(len(runs))]
    return fleet, [_outcome(fleet, index, run, changes[index]) for index, run in enumerate(runs)]


def hindsight_schedule(fleet: Fleet, runs: Sequence[int]) -> dict[int, int]:
    """For each batch bucket the K with the most tokens a second, from all that some runs of a fleet went through.

    How many drafts were right is known of every row, whatever K was, so each K is judged on the same rows. A bucket
    that was hardly visited takes the next smaller one's K (the first: the next larger one's).
    """
    lanes, tallies = fleet.lanes, fleet.tallies
    mine = np.concatenate([np.array(lanes.lanes_of(run)) for run in runs])
    rows_LIW = tallies.right_LIW[mine][:, :, :-1]
    at_least_LIW = rows_LIW[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    tokens_LIJ = np.cumsum(at_least_LIW, axis=2)[:, :, lanes.draft_lens_J]  # rows x expected tokens
    sums_LI5 = tallies.cells_LIJ5[mine].sum(axis=2)
    steps_LI, looked_LI = sums_LI5[:, :, STEPS], rows_LIW.sum(axis=2)
    # rows of a step, by how many of all rows were looked at
    scale_LI = np.divide(sums_LI5[:, :, ROWS], looked_LI, where=looked_LI > 0, out=np.zeros(looked_LI.shape))
    mean_context = lanes.world.mean_context
    context_s_LI = lanes.context_s_L[mine][:, None] * mean_context * np.array(lanes.buckets)
    seconds_LIJ = lanes.step_s_AIJ[lanes.machine_L[mine]] + context_s_LI[:, :, None]
    # Tokens a second of each lane, weighted by its steps and by how long a plain step takes there.
    rate_IJ = (tokens_LIJ * scale_LI[:, :, None] / seconds_LIJ * seconds_LIJ[:, :, :1]).sum(axis=0)
    steps_I = steps_LI.sum(axis=0)
    visited = steps_I >= min(_ENOUGH_STEPS, steps_I.max())
    best = {
        bucket: int(lanes.draft_lens_J[rate_IJ[index].argmax()])
        for index, bucket in enumerate(lanes.buckets)
        if visited[index]
    }
    schedule = {}
    for bucket in lanes.buckets:
        smaller = [other for other in best if other <= bucket]
        schedule[bucket] = best[max(smaller) if smaller else min(best)]
    return schedule


def _outcome(fleet: Fleet, index: int, run: Run, changes: int) -> Outcome:
    lanes, tallies = fleet.lanes, fleet.tallies
    scenario = lanes.world.scenario
    mine = np.array(lanes.lanes_of(index))
    tokens = int(tallies.tokens_L[mine].sum())
    busy_s = float(tallies.busy_s_L[mine].sum())
    joins = np.array([group.from_s for group in replica_groups(scenario)])
    leaves = np.array([min(group.until_s or np.inf, scenario.duration_s) for group in replica_groups(scenario)])
    slices_T4 = tallies.slices_LT4[mine].sum(axis=0)
    sums_4 = slices_T4.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = slices_T4[:, TOKENS] / slices_T4[:, ROW_S]
        lengths = slices_T4[:, DRAFT_LEN_S] / slices_T4[:, DECODE_S]
    token_s, first_s = _percentiles(fleet, mine)
    return Outcome(
        policy=run.policy,
        seed=run.seed,
        score=tokens / float(tallies.request_s_L[mine].sum()),
        tokens=tokens,
        tokens_per_s=tokens / scenario.duration_s,
        busy_share=busy_s / float(np.maximum(leaves - joins, 0.0).sum()),
        mean_rows=float(sums_4[ROW_S]) / busy_s,
        mean_draft_len=float(sums_4[DRAFT_LEN_S] / sums_4[DECODE_S]),
        token_s=token_s,
        first_token_s=first_s,
        finished=int(tallies.finished_L[mine].sum()),
        preemptions=int(fleet.intake.num_preempted_L[mine].sum()),
        changes=changes,
        cold_score=_cold_score(fleet, mine),
        curve_speed=tuple(np.nan_to_num(speed).round(4).tolist()),
        curve_draft_len=tuple(np.nan_to_num(lengths).round(3).tolist()),
    )


def _percentiles(fleet: Fleet, mine: np.ndarray) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds a token after the first, and to the first: percentiles 50 and 99 over finished requests."""
    parts = fleet.tallies.latencies
    if not parts:
        return (0.0, 0.0), (0.0, 0.0)
    lane, token_s, first_s = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    inside = (lane >= mine[0]) & (lane <= mine[-1])
    if not inside.any():
        return (0.0, 0.0), (0.0, 0.0)
    pairs: Sequence[np.ndarray] = (token_s[inside], first_s[inside])
    shown = [tuple(float(value) for value in np.percentile(values, [50, 99])) for values in pairs]
    return (shown[0][0], shown[0][1]), (shown[1][0], shown[1][1])


def _cold_score(fleet: Fleet, mine: np.ndarray) -> float | None:
    """Of replicas that join later: tokens a row and second of their first `cold_replicas_s`."""
    scenario, tallies = fleet.lanes.world.scenario, fleet.tallies
    if scenario.cold_replicas_s is None:
        return None
    tokens = row_s = 0.0
    for lane, group in zip(mine.tolist(), replica_groups(scenario), strict=True):
        if group.from_s > 0:
            first = int(group.from_s / SLICE_S)
            last = first + round(scenario.cold_replicas_s / SLICE_S)
            tokens += float(tallies.slices_LT4[lane, first:last, TOKENS].sum())
            row_s += float(tallies.slices_LT4[lane, first:last, ROW_S].sum())
    return tokens / row_s if row_s else None
