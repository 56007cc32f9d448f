"""What comes in under one seed: each replica's requests with arrival time, class, lengths and place in the text.

Requests are dealt to the living replicas in turn. All policies of a seed see the same traffic.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from cluster.simulate.acceptance import offset_levels, places, text_keys
from cluster.simulate.scenario import Bursty, Closed, Curve, Lengths, Mix, ReplicaGroup, Scenario, Wave

_CLOSED_REQUESTS = 8192  # of a replica in a closed loop, taken over and over


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaTraffic:
    """One replica's requests, N of them, in order. kinds_N: class; -1: drawn at admission from `draws_N` and the mix.

    prompt_CN, output_CN: lengths of request n if it is of class c. levels_N: its offset level. places_N: its place.
    """

    arrivals_N: np.ndarray
    kinds_N: np.ndarray
    draws_N: np.ndarray
    prompt_CN: np.ndarray
    output_CN: np.ndarray
    levels_N: np.ndarray
    places_N: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """All of a seed. texts_CP: keys of the classes' texts."""

    replicas: tuple[ReplicaTraffic, ...]
    texts_CP: np.ndarray


def curve_values(curve: Curve, times: np.ndarray) -> np.ndarray:
    """A curve at times in seconds. Before the first level it has that level's value."""
    if isinstance(curve, Wave):
        return curve.low + (curve.high - curve.low) * (1.0 - np.cos(2.0 * np.pi * times / curve.period_s)) / 2.0
    if isinstance(curve, tuple):
        starts = [level.at_s for level in curve]
        index = np.maximum(np.searchsorted(starts, times, side="right") - 1, 0)
        return np.array([level.value for level in curve])[index]
    return np.full(len(times), float(curve))


def mix_shares(mix: Mix, names: tuple[str, ...], times: np.ndarray) -> np.ndarray:
    """Cumulative shares of the classes at times in seconds; [times, classes], the last 1."""
    starts = [phase.at_s for phase in mix.phases]
    within = times % mix.repeat_s if mix.repeat_s is not None else times
    shares = np.array([[phase.shares.get(name, 0.0) for name in names] for phase in mix.phases])
    shares = np.cumsum(shares / shares.sum(axis=1, keepdims=True), axis=1)
    shares[:, -1] = 1.0
    return shares[np.searchsorted(starts, within, side="right") - 1]


def replica_groups(scenario: Scenario) -> tuple[ReplicaGroup, ...]:
    """One group per replica, groups in order."""
    return tuple(group for group in scenario.replicas for _ in range(group.count))


def make_traffic(scenario: Scenario, seed: int) -> Traffic:
    """The traffic of a seed."""
    rng = np.random.default_rng([seed, 1])
    groups = replica_groups(scenario)
    names = tuple(scenario.classes)
    if isinstance(scenario.arrivals, Closed):
        replicas = tuple(_closed_replica(scenario, rng) for _ in groups)
    else:
        replicas = _open_replicas(scenario, groups, names, rng)
    texts = np.stack([text_keys(rng, kind) for kind in scenario.classes.values()])
    return Traffic(replicas=replicas, texts_CP=texts)


def _closed_replica(scenario: Scenario, rng: np.random.Generator) -> ReplicaTraffic:
    count = _CLOSED_REQUESTS
    return _replica(scenario, rng, np.zeros(count), np.full(count, -1, dtype=np.int32), rng.random(count))


def _open_replicas(
    scenario: Scenario, groups: tuple[ReplicaGroup, ...], names: tuple[str, ...], rng: np.random.Generator
) -> tuple[ReplicaTraffic, ...]:
    times = _arrival_times(scenario, rng)
    draws = rng.random(len(times))
    kinds = (draws[:, None] >= mix_shares(scenario.mix, names, times)[:, :-1]).sum(axis=1).astype(np.int32)
    owners = np.full(len(times), -1)
    for kind, name in enumerate(names):
        owners[kinds == kind] = _deal(groups, name, times[kinds == kind])
    if (owners < 0).any():
        at_s = float(times[owners < 0][0])
        raise ValueError(f"replicas: none takes a request of class {names[kinds[owners < 0][0]]} at {at_s:.0f} s")
    return tuple(
        _replica(scenario, rng, times[owners == index], kinds[owners == index], draws[owners == index])
        for index in range(len(groups))
    )


def _deal(groups: tuple[ReplicaGroup, ...], name: str, times: np.ndarray) -> np.ndarray:
    """Replica of each request of a class, in turn over those that live and serve it; -1 where there is none."""
    serving = [index for index, group in enumerate(groups) if group.serves in (None, name)]
    owners = np.full(len(times), -1)
    edges = sorted({0.0, np.inf} | {groups[i].from_s for i in serving} | {groups[i].until_s or np.inf for i in serving})
    for start, end in itertools.pairwise(edges):
        alive = [i for i in serving if groups[i].from_s <= start and (groups[i].until_s or np.inf) >= end]
        inside = np.flatnonzero((times >= start) & (times < end))
        if alive:
            owners[inside] = np.array(alive)[np.arange(len(inside)) % len(alive)]
    return owners


def _arrival_times(scenario: Scenario, rng: np.random.Generator) -> np.ndarray:
    """Poisson arrivals by thinning, ascending; bursts multiply the rate."""
    arrivals, duration = scenario.arrivals, scenario.duration_s
    assert not isinstance(arrivals, Closed)
    grid = np.linspace(0.0, duration, 4096)
    highest = float(curve_values(arrivals.rate, grid).max())
    high = low = 1.0
    switches = np.array([0.0])
    if isinstance(arrivals, Bursty):
        low = (arrivals.burst_s + arrivals.calm_s) / (arrivals.factor * arrivals.burst_s + arrivals.calm_s)
        high = low * arrivals.factor
        cycles = int(4 * duration / (arrivals.burst_s + arrivals.calm_s)) + 8
        lasting = rng.exponential(np.tile([arrivals.calm_s, arrivals.burst_s], cycles))
        switches = np.concatenate([[0.0], np.cumsum(lasting)])
    bound = highest * high
    count = rng.poisson(bound * duration)
    times = np.sort(rng.random(count) * duration)
    bursting = (np.searchsorted(switches, times, side="right") - 1) % 2 == 1
    rate = curve_values(arrivals.rate, times) * np.where(bursting, high, low)
    return times[rng.random(count) * bound < rate]


def _replica(
    scenario: Scenario, rng: np.random.Generator, times: np.ndarray, kinds: np.ndarray, draws: np.ndarray
) -> ReplicaTraffic:
    count = len(times)
    classes = scenario.classes.values()
    longest = max(kind.output.at_most for kind in classes)
    return ReplicaTraffic(
        arrivals_N=times,
        kinds_N=kinds,
        draws_N=draws,
        prompt_CN=np.stack([_lengths(kind.prompt, rng, count) for kind in classes]),
        output_CN=np.stack([_lengths(kind.output, rng, count) for kind in classes]),
        levels_N=offset_levels(rng, count),
        places_N=places(rng, count, longest),
    )


def _lengths(lengths: Lengths, rng: np.random.Generator, count: int) -> np.ndarray:
    drawn = lengths.median * np.exp(lengths.spread * rng.standard_normal(count))
    return np.clip(np.rint(drawn), lengths.at_least, lengths.at_most).astype(np.int32)
