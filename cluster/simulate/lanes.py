"""The state of all simulated replicas at once: one lane per replica, seed and policy, as arrays.

Lanes do not see each other. They are stepped together only because one array operation over a hundred lanes costs
little more than over one. Shapes: L lanes, B row slots, N requests of all lanes' traffic end to end, C classes, I batch
buckets, J draft lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.simulate.acceptance import NUM_PLACES, AcceptanceTables
from cluster.simulate.scenario import Closed, Scenario
from cluster.simulate.traffic import Traffic, curve_values, mix_shares, replica_groups
from engine.speculative.counters import batch_bucket
from engine.step_table import StepTable

NOISE_STEPS = 1 << 16  # step-time factors that are drawn, and taken over and over


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One policy on one seed. schedule: in force at the start. clairvoyant: K comes from the truth at every step.

    shadows: whether some steps also score drafts beyond K.
    """

    policy: str
    seed: int
    schedule: Mapping[int, int]
    clairvoyant: bool = False
    shadows: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What all runs of a scenario share."""

    scenario: Scenario
    tables: tuple[StepTable, ...]  # one per replica
    acceptance: AcceptanceTables
    traffics: Mapping[int, Traffic]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.scenario.classes)

    @property
    def mean_context(self) -> float:
        """Tokens of context of a row half-way through its output, over all requests of the traffic."""
        parts = [part for traffic in self.traffics.values() for part in traffic.replicas]
        return float(np.mean([part.prompt_CN.mean() + part.output_CN.mean() / 2 for part in parts]))


def buckets_of(max_num_seqs: int) -> tuple[int, ...]:
    """The batch buckets of an engine, ascending."""
    return tuple(sorted({batch_bucket(rows, max_num_seqs) for rows in range(1, max_num_seqs + 1)}))


class LaneTraffic:
    """The traffic of all lanes, requests end to end with an arrival at infinity after each replica's last."""

    def __init__(self, world: World, runs: Sequence[Run]) -> None:
        scenario = world.scenario
        groups = replica_groups(scenario)
        names = world.names
        self.closed = isinstance(scenario.arrivals, Closed)
        parts = [(seed, replica) for seed in world.traffics for replica in range(len(groups))]
        replicas = [world.traffics[seed].replicas[replica] for seed, replica in parts]
        sizes = [len(part.arrivals_N) for part in replicas]
        starts = dict(zip(parts, np.cumsum([0, *(size + 1 for size in sizes[:-1])]), strict=True))

        def joined(arrays: list[np.ndarray], end: float) -> np.ndarray:
            return np.concatenate([np.append(array, np.array(end, dtype=array.dtype)) for array in arrays])

        self.arrivals_N = joined([part.arrivals_N for part in replicas], np.inf)
        self.kinds_N = joined([part.kinds_N for part in replicas], 0)
        self.draws_N = joined([part.draws_N for part in replicas], 0.0)
        self.levels_N = joined([part.levels_N for part in replicas], 0)
        self.places_N = joined([part.places_N for part in replicas], 0)
        classes = range(len(names))
        self.prompt_CN = np.stack([joined([part.prompt_CN[kind] for part in replicas], 1) for kind in classes])
        self.output_CN = np.stack([joined([part.output_CN[kind] for part in replicas], 2) for kind in classes])
        lanes = [(run.seed, replica) for run in runs for replica in range(len(groups))]
        self.first_L = np.array([starts[lane] for lane in lanes])
        self.size_L = np.array([sizes[parts.index(lane)] for lane in lanes])
        # every text of every seed, end to end
        self.texts_P = np.concatenate([traffic.texts_CP.ravel() for traffic in world.traffics.values()])
        seeds = list(world.traffics)
        self.text_start_L = np.array([seeds.index(seed) * len(names) * NUM_PLACES for seed, _ in lanes])
        # class shares of every second, for each replica that serves one class alone and for the mix
        seconds = np.arange(int(scenario.duration_s) + 2, dtype=np.float64)
        mixes = [mix_shares(scenario.mix, names, seconds)[:, :-1]]
        for name in names:
            alone = np.broadcast_to(np.arange(len(names) - 1) >= names.index(name), mixes[0].shape)
            mixes.append(alone.astype(np.float64))
        self.mixes_MTC = np.stack(mixes)
        served = [0 if group.serves is None else 1 + names.index(group.serves) for group in groups]
        self.mix_L = np.array([served[replica] for _, replica in lanes])
        if isinstance(scenario.arrivals, Closed):
            self.limit_T = np.rint(curve_values(scenario.arrivals.concurrency, seconds)).astype(np.int64)


class Lanes:
    """Arrays of all lanes. `rows_*` are those of a slot: left_LB 0 means free."""

    def __init__(self, world: World, runs: Sequence[Run]) -> None:
        scenario = world.scenario
        engine = scenario.engine
        groups = replica_groups(scenario)
        self.world = world
        self.runs = tuple(runs)
        self.num_replicas = len(groups)
        self.traffic = LaneTraffic(world, runs)
        self.count = count = len(runs) * len(groups)
        slots = engine.max_num_seqs
        self.buckets = buckets_of(slots)
        self.draft_lens_J = np.array(scenario.draft_lens)
        replica_L = np.tile(np.arange(len(groups)), len(runs))

        # clocks and what a lane is
        joins = np.array([group.from_s for group in groups])[replica_L]
        self.clock_L = np.minimum(joins, scenario.duration_s)
        self.planned_L = self.clock_L.copy()  # when the next step is put together: what arrives later is not in it
        self.leaves_L = np.array([group.until_s or np.inf for group in groups])[replica_L]
        self.clairvoyant_L = np.repeat([run.clairvoyant for run in runs], len(groups))
        self.shadows_L = np.repeat([run.shadows for run in runs], len(groups))
        self.num_steps_L = np.zeros(count, dtype=np.int64)
        self.shadow_gap_L = np.zeros(count, dtype=np.int64)  # steps since one that scored all drafts
        self.shadow_saved_s_L = np.zeros(count)  # see engine.speculative.shadow.ShadowBudget
        self.shadow_saved_row_s_L = np.zeros(count)
        self.noise_L = np.array(
            [(run.seed * 7919 + replica * 104729) % NOISE_STEPS for run in runs for replica in range(len(groups))]
        )

        # truth about step times, without context
        machines = [
            _seconds(table, group.slowdown, self.buckets, scenario.draft_lens)
            for table, group in zip(world.tables, groups, strict=True)
        ]
        self.step_s_AIJ = np.stack(machines)
        self.machine_L = replica_L
        slow = np.array([group.slowdown for group in groups])
        self.slowdown_L = slow[replica_L]
        self.context_s_L = (np.array([table.context_token_s for table in world.tables]) * slow)[replica_L]
        self.prefill_base_s_L = (np.array([table.prefill_base_s for table in world.tables]) * slow)[replica_L]
        self.prefill_token_s_L = (np.array([table.prefill_token_s for table in world.tables]) * slow)[replica_L]
        bucket_of = [0] + [self.buckets.index(batch_bucket(rows, slots)) for rows in range(1, slots + 1)]
        self.bucket_index_R = np.array(bucket_of)

        # rows
        self.left_LB = np.zeros((count, slots), dtype=np.int32)
        self.place_LB = np.zeros((count, slots), dtype=np.int32)
        self.cell_LB = np.zeros((count, slots), dtype=np.int32)  # first cell * draws
        self.context_LB = np.zeros((count, slots), dtype=np.int32)  # minus place: place + this = tokens of context
        self.waiting_left_LB = np.zeros((count, slots), dtype=np.int32)  # tokens to emit, of a prompt still being read
        self.arrived_LB = np.zeros((count, slots))
        self.first_at_LB = np.zeros((count, slots))
        self.length_LB = np.zeros((count, slots), dtype=np.int32)
        self.order_LB = np.zeros((count, slots), dtype=np.int64)
        self.free_LB = np.tile(np.arange(slots - 1, -1, -1), (count, 1))
        self.num_free_L = np.full(count, slots)
        self.num_rows_L = np.zeros(count, dtype=np.int64)
        self.context_sum_L = np.zeros(count, dtype=np.int64)
        self.num_admitted_L = np.zeros(count, dtype=np.int64)
        self.num_ended_L = np.zeros(count, dtype=np.int64)  # rows that have ended and take part in one more step
        self.returns_LB = np.full((count, slots), -np.inf)  # when what follows a slot's last request arrives

        # control: index of K in draft_lens by number of rows
        self.schedule_LR = np.zeros((count, slots + 1), dtype=np.int64)
        for index, run in enumerate(runs):
            for lane in self.lanes_of(index):
                self.set_schedule(lane, run.schedule)
        self.last_index_L = self.schedule_LR[:, 1].copy()

    def lanes_of(self, run_index: int) -> range:
        """Lanes of a run, one per replica."""
        return range(run_index * self.num_replicas, (run_index + 1) * self.num_replicas)

    def set_schedule(self, lane: int, schedule: Mapping[int, int]) -> None:
        """Puts a schedule into force. Above its largest bound: no drafts, as TensorRT-LLM has it."""
        index_of = {int(draft_len): index for index, draft_len in enumerate(self.draft_lens_J)}
        row = self.schedule_LR[lane]
        row[:] = 0
        lower = 0
        for bound, draft_len in sorted(schedule.items()):
            row[lower + 1 : bound + 1] = index_of[draft_len]
            lower = bound
        row[0] = row[1]


def _seconds(table: StepTable, slowdown: float, buckets: Sequence[int], draft_lens: Sequence[int]) -> np.ndarray:
    """Seconds of a step without any context; [I, J]."""
    return slowdown * np.array(
        [
            [table.step_s(num_rows=bucket, draft_len=draft_len, context_tokens=0) for draft_len in draft_lens]
            for bucket in buckets
        ]
    )
