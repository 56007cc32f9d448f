"""A controller's state learns from messages, pushes versions that only grow, and heals whatever was lost."""

import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.estimate import ControlState, Push
from cluster.control.messages import ControlOptions, Order, Reply
from cluster.control.status import status_of
from engine.speculative.schedule import ScheduleAck
from tests.control.messages import DRAFT_LENS, CountingReplica, step_seconds

EASY, HARD = [0.95] * 7, [0.1] * 7


class Cluster:
    """Replicas under one ControlState; a message arrives if `arrives()`."""

    def __init__(self, num: int, *, arrives=lambda: True, options: ControlOptions | None = None) -> None:
        self.now = 0.0
        self.arrives = arrives
        self.options = options or ControlOptions()
        self.replicas = {f"r{n}": CountingReplica(f"r{n}", seed=n, static={2: 7, 8: 3}) for n in range(num)}
        self.applied: dict[str, list[tuple[int, int]]] = {name: [] for name in self.replicas}
        self.restart_controller()

    def restart_controller(self) -> None:
        self.state = ControlState(started_at=self.now)

    def take(self, replica: CountingReplica, version, schedule) -> ScheduleAck:
        """What an engine does with a schedule."""
        applied = version > replica.version
        if applied:
            replica.version, replica.schedule = version, dict(schedule)
            self.applied[replica.replica_id].append(version)
        return ScheduleAck(applied=applied, version=replica.version, schedule=replica.schedule)

    def push(self, pushes: list[Push]) -> None:
        for push in pushes:
            if self.arrives():
                ack = self.take(self.replicas[push.replica_id], push.version, push.schedule)
                if self.arrives():
                    self.state.acknowledged(push.replica_id, ack)

    def answer(self, replica: CountingReplica, reply: Reply) -> None:
        if not self.arrives():
            return
        if reply.must_register:
            self.answer(replica, self.state.register(replica.registration(options=self.options), now=self.now))
        elif reply.version is not None:
            self.take(replica, reply.version, reply.schedule)

    def run(self, seconds: int, hazards=lambda name: EASY, *, rows: int = 8, silent: tuple[str, ...] = ()) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for name, replica in self.replicas.items():
                draft_len = replica.schedule[min(bound for bound in replica.schedule if bound >= rows)]
                replica.decode(rows=rows, draft_len=draft_len, hazards=hazards(name), steps=20, scored=7)
                if name not in silent and self.arrives():
                    self.answer(replica, self.state.report(replica.report(), now=self.now))
            self.push(self.state.decide(now=self.now))

    def draft_lens(self, rows: int = 8) -> set[int]:
        return {replica.schedule[rows] for replica in self.replicas.values()}


def plain_schedule(cluster: Cluster) -> dict[int, int]:
    """Of the only line, at the configured bounds."""
    (line,) = cluster.state.lines.values()
    return {bound: line.schedule[bound].draft_len for bound in next(iter(cluster.replicas.values())).static}


def best(hazards: list[float], rows: int) -> int:
    tokens = [1.0]
    for k in range(1, 8):
        tokens.append(tokens[-1] + hazards[0] ** k)
    return max(DRAFT_LENS, key=lambda k: tokens[k] / step_seconds(rows, k))


def test_draft_lengths_follow_the_traffic_and_every_replica_has_them() -> None:
    cluster = Cluster(4)
    for hazards in (EASY, HARD, EASY):
        cluster.run(12, lambda name, h=hazards: h)
        assert cluster.draft_lens() == {best(hazards, 8)}
        assert cluster.draft_lens(1) == {best(hazards, 1)}  # batch sizes without traffic as well
    assert best(EASY, 8) != best(HARD, 8)
    line = next(iter(cluster.state.lines.values()))
    assert "gains" in line.schedule[8].reason


def test_what_nobody_ran_for_a_while_is_new_again() -> None:
    cluster = Cluster(1)
    cluster.run(8, rows=8)
    (line,) = cluster.state.lines.values()
    assert line.fresh([1, 2, 8], cluster.now - 2.5) == [] and line.idle([1, 2, 8], cluster.now) == [1, 2]
    cluster.run(2, rows=2)
    assert line.fresh([1, 2, 8], cluster.now - 2.5) == [2] and line.idle([1, 2, 8], cluster.now) == [1]
    cluster.run(3, rows=2)
    assert line.fresh([1, 2, 8], cluster.now - 2.5) == []
    cluster.run(12, rows=8)
    cluster.run(1, rows=2)
    assert line.fresh([1, 2, 8], cluster.now - 2.5) == [2]


def test_a_few_drafts_are_no_reason_for_anything() -> None:
    cluster = Cluster(1)
    replica = cluster.replicas["r0"]
    for _ in range(20):
        cluster.now += 1.0
        replica.decode(rows=8, draft_len=0, hazards=HARD, steps=20, scored=0)
        if len(replica.cells) < 2 and cluster.now > 10.0:
            replica.decode(rows=1, draft_len=3, hazards=HARD, steps=20)
        cluster.answer(replica, cluster.state.report(replica.report(), now=cluster.now))
        cluster.push(cluster.state.decide(now=cluster.now))
    assert cluster.state.beliefs == {} and cluster.state.num_changes == 0
    assert plain_schedule(cluster) == replica.static


def test_requests_that_end_without_a_step_are_counted_with_the_next_rows() -> None:
    state, replica = ControlState(started_at=0.0), CountingReplica("r", seed=1, static={8: 3})
    state.register(replica.registration(), now=0.0)
    ended = []
    for now, (steps, num_ended) in enumerate([(20, 5), (0, 9), (0, 11), (20, 12), (20, 12), (20, 15)], 1):
        if steps:
            replica.decode(rows=8, draft_len=3, hazards=EASY, steps=steps)
        state.report(msgspec.structs.replace(replica.report(), num_ended=num_ended), now=float(now))
        ended.append(state.learnt[16].log.ended_P.sum())
    assert ended == [0, 0, 0, 7, 7, 10]


def test_steady_traffic_leads_to_no_more_changes() -> None:
    cluster = Cluster(4)
    cluster.run(15)
    changes = cluster.state.num_changes
    cluster.run(120)
    assert cluster.state.num_changes == changes


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_any_loss_heals_and_versions_only_grow(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(3, arrives=lambda: rng.random() < 0.6)
    cluster.run(10)
    if rng.random() < 0.5:
        cluster.restart_controller()
    cluster.run(12, lambda name: HARD)
    cluster.arrives = lambda: True
    cluster.run(6, lambda name: HARD)
    assert cluster.draft_lens() == {best(HARD, 8)}
    for name, versions in cluster.applied.items():
        assert versions == sorted(set(versions))
        assert cluster.replicas[name].version == cluster.state.replicas[name].target


def test_a_new_controller_listens_first_and_goes_on_with_a_greater_epoch_from_where_the_last_one_was() -> None:
    cluster = Cluster(3)
    cluster.run(10, lambda name: HARD)
    (before,) = {tuple(replica.schedule.items()) for replica in cluster.replicas.values()}
    assert {replica.version[0] for replica in cluster.replicas.values()} == {1}
    cluster.restart_controller()
    for replica in cluster.replicas.values():
        cluster.state.register(replica.registration(), now=cluster.now)
    assert cluster.state.decide(now=cluster.now + 1.9) == []
    pushes = cluster.state.decide(now=cluster.now + 2.0)
    assert [push.version for push in pushes] == [(2, 1)] * 3
    assert {tuple(push.schedule.items()) for push in pushes} == {before}


def test_a_new_controller_takes_over_what_most_replicas_have_though_one_has_a_newer_schedule_of_its_own() -> None:
    cluster = Cluster(3)
    shared, own = {2: 7, 8: 5}, {8: 1}
    for name, version, schedule in (("r0", (3, 4), shared), ("r1", (3, 5), shared), ("r2", (3, 9), own)):
        cluster.take(cluster.replicas[name], version, schedule)
        cluster.state.register(cluster.replicas[name].registration(), now=cluster.now)
    pushes = cluster.state.decide(now=cluster.now + 2.0)
    assert {push.replica_id for push in pushes} == {"r0", "r1", "r2"}
    assert {(push.schedule[1], push.schedule[8]) for push in pushes} == {(7, 5)}


def test_a_controller_that_sees_a_greater_epoch_is_superseded_and_pushes_nothing() -> None:
    cluster = Cluster(2)
    cluster.run(5)
    cluster.replicas["r0"].version = (7, 1)
    cluster.run(1, lambda name: HARD)
    assert cluster.state.is_superseded
    cluster.run(8, lambda name: HARD)
    assert cluster.replicas["r1"].version[0] == 1


def test_a_replica_that_fell_back_to_its_own_schedule_gets_the_cluster_s_again() -> None:
    cluster = Cluster(2)
    cluster.run(12, lambda name: HARD)
    replica = cluster.replicas["r0"]
    cluster.take(replica, (replica.version[0], replica.version[1] + 1), replica.static)
    cluster.answer(replica, cluster.state.register(replica.registration(), now=cluster.now))
    assert cluster.draft_lens() == {best(HARD, 8)}
    assert cluster.replicas["r0"].version > cluster.replicas["r1"].version


def test_a_replica_with_other_traffic_gets_its_own_schedule_and_returns() -> None:
    cluster = Cluster(4)
    cluster.run(15, lambda name: HARD if name == "r0" else EASY)
    assert cluster.replicas["r0"].schedule[8] == best(HARD, 8)
    assert {cluster.replicas[name].schedule[8] for name in ("r1", "r2", "r3")} == {best(EASY, 8)}
    cluster.run(40)
    assert cluster.draft_lens() == {best(EASY, 8)}
    shared = Cluster(4, options=ControlOptions(corrects_replicas=False))
    shared.run(15, lambda name: HARD if name == "r0" else EASY)
    assert len(shared.draft_lens()) == 1


def test_a_cold_replica_gets_what_the_cluster_knows_at_once() -> None:
    cluster = Cluster(2)
    cluster.run(12, lambda name: HARD)
    late = CountingReplica("late", seed=9, static={8: 7})
    reply = cluster.state.register(late.registration(), now=cluster.now)
    assert reply.schedule is not None and reply.schedule[8] == best(HARD, 8)
    assert reply.version == cluster.replicas["r0"].version


def test_counts_of_drafters_with_blocks_of_different_widths_are_kept_apart() -> None:
    """Of a rollout to a narrower block, whose drafts are worse: neither side may learn from the other's."""
    cluster, alone = Cluster(4), Cluster(2)
    narrow = ("r2", "r3")
    for name in narrow:
        registration = cluster.replicas[name].registration(block_width=8)
        cluster.answer(cluster.replicas[name], cluster.state.register(registration, now=0.0))
    for several in (cluster, alone):
        several.run(15, lambda name: HARD if name in narrow else EASY)
    assert {cluster.replicas[name].schedule[8] for name in narrow} == {best(HARD, 8)}
    assert {cluster.replicas[name].schedule[8] for name in ("r0", "r1")} == {best(EASY, 8)}
    assert not any(replica.traffic.is_own for replica in cluster.state.replicas.values())
    beliefs = cluster.state.beliefs
    assert list(beliefs[16].hazards) == list(alone.state.beliefs[16].hazards), "as if there were no others"
    assert beliefs[8].hazards[0] == pytest.approx(HARD[0], abs=0.02)
    for name in ("r0", "r1"):
        cluster.state.leave(name, incarnation=1, now=cluster.now)
    assert set(cluster.state.beliefs) == {8}
    cluster.now += 700.0
    cluster.run(2, lambda name: HARD, silent=("r0", "r1"))
    assert set(cluster.state.learnt) == {8}, "nothing is kept of widths that nobody has had for long"


def test_a_rollout_that_changes_the_declared_lengths_keeps_what_was_learnt() -> None:
    cluster = Cluster(2)
    cluster.run(12, lambda name: HARD)
    new = CountingReplica("new", seed=9, static={8: 7})
    registration = new.registration(draft_lens=(0, 1, 4, 7), max_num_seqs=16)
    cluster.state.register(registration, now=cluster.now)
    (push,) = [p for p in cluster.state.decide(now=cluster.now + 0.1) if p.replica_id == "new"]
    assert set(push.schedule) == {1, 2, 4, 8, 16} and push.schedule[8] in (0, 1)


@pytest.mark.parametrize("steps", [20, 1])
def test_a_replica_with_longer_drafts_joins_while_others_serve_much_or_little(steps: int) -> None:
    """What is believed and predicted before it came says nothing of the positions that only it has."""
    cluster = Cluster(1)
    cluster.run(60)

    def serve(seconds: int) -> None:
        for _ in range(seconds):
            cluster.now += 1.0
            for replica in cluster.replicas.values():
                replica.decode(rows=1, draft_len=0, hazards=HARD, steps=steps, scored=7)
                cluster.answer(replica, cluster.state.report(replica.report(), now=cluster.now))
            cluster.push(cluster.state.decide(now=cluster.now))

    serve(8)
    new = cluster.replicas["new"] = CountingReplica("new", seed=9, static={8: 15})
    cluster.applied["new"] = []
    registration = new.registration(draft_lens=(0, 1, 3, 7, 15))
    cluster.answer(new, cluster.state.register(registration, now=cluster.now))
    assert cluster.state.beliefs == {}  # a decision from too few rows for a new one would ask it for 15 positions
    cluster.push(cluster.state.decide(now=cluster.now))
    serve(12)
    assert len(cluster.state.beliefs[16].hazards) == 15


def test_a_schedule_without_replicas_is_neither_asked_nor_shown_and_forgotten_in_the_end() -> None:
    cluster = Cluster(1)
    cluster.run(5)
    new, pin = CountingReplica("new", seed=9, static={8: 9}), Order(mode="pin", issued_at=1.0, schedule={8: 9})
    cluster.state.register(new.registration(draft_lens=(0, 3, 9)), now=cluster.now)
    with pytest.raises(ValueError, match="max_draft_len=7"):
        cluster.state.give(pin, now=cluster.now)
    cluster.state.leave("r0", incarnation=1, now=cluster.now)
    (push,) = cluster.state.give(pin, now=cluster.now)
    assert (push.replica_id, push.schedule) == ("new", {8: 9})
    shown = status_of(cluster.state, app="a", deployment="d", now=cluster.now)
    assert [line.num_replicas for line in shown.lines] == [1]
    assert len(cluster.state.lines) == 2  # for a replica that returns soon
    later = cluster.now + 700.0
    cluster.state.report(new.report(), now=later)
    cluster.state.decide(now=later)
    assert list(cluster.state.lines) == [("toy", 16, (0, 3, 9), 8)]


def test_silent_replicas_are_forgotten_and_idleness_is_noticed() -> None:
    cluster = Cluster(2)
    assert cluster.state.idle_since == 0.0
    cluster.run(5)
    assert cluster.state.idle_since is None
    cluster.run(12, silent=("r0",))
    assert set(cluster.state.replicas) == {"r1"}
    cluster.run(11, silent=("r0", "r1"))
    assert cluster.state.replicas == {} and cluster.state.idle_since == cluster.now - 0.0
    cluster.run(1)
    assert set(cluster.state.replicas) == {"r0", "r1"}
    cluster.state.leave("r0", incarnation=1, now=cluster.now)
    cluster.state.leave("r1", incarnation=0, now=cluster.now)  # an older one: not the one that is there
    assert set(cluster.state.replicas) == {"r1"}


def test_the_options_of_the_replica_that_started_last_count() -> None:
    cluster = Cluster(1)
    new, old = (CountingReplica(name, seed=0, static={8: 3}, incarnation=n) for name, n in (("new", 9), ("old", 5)))
    cluster.state.register(new.registration(options=ControlOptions(corrects_replicas=False)), now=0.0)
    cluster.state.register(old.registration(), now=1.0)
    assert cluster.state.options.corrects_replicas is False


def test_a_pin_and_a_freeze_hold_also_for_the_next_controller_until_released() -> None:
    cluster = Cluster(2)
    cluster.run(12)
    cluster.push(cluster.state.give(Order(mode="pin", issued_at=1.0, schedule={8: 2}), now=cluster.now))
    assert cluster.draft_lens() == {2}
    order = cluster.state.report(cluster.replicas["r0"].report(), now=cluster.now).order
    cluster.restart_controller()
    for replica in cluster.replicas.values():
        cluster.state.register(replica.registration(order=order), now=cluster.now)
    cluster.run(8, lambda name: HARD)
    assert cluster.draft_lens() == {2}
    cluster.push(cluster.state.give(Order(mode="release", issued_at=2.0), now=cluster.now))
    cluster.run(2, lambda name: HARD)
    assert cluster.draft_lens() == {best(HARD, 8)}
    cluster.push(cluster.state.give(Order(mode="freeze", issued_at=3.0), now=cluster.now))
    cluster.run(12)
    assert cluster.draft_lens() == {best(HARD, 8)}
    with pytest.raises(ValueError, match="max_draft_len=7"):
        cluster.state.give(Order(mode="pin", issued_at=4.0, schedule={8: 9}), now=cluster.now)


def test_a_pin_without_end_is_refused_and_changes_nothing() -> None:
    cluster = Cluster(1)
    cluster.run(5)
    with pytest.raises(ValueError, match="schedule: a pin has at most 1024 entries, got 200000; name only"):
        cluster.state.give(
            Order(mode="pin", issued_at=1.0, schedule=dict.fromkeys(range(1, 200_001), 2)), now=cluster.now
        )
    assert cluster.state.held is None
    cluster.state.give(Order(mode="pin", issued_at=1.0, schedule=dict.fromkeys(range(1, 1025), 2)), now=cluster.now)
    assert cluster.state.held is not None


@pytest.mark.parametrize("entries", [{}, {0: 2}, {-4: 2}, {8: -1}])
def test_a_pin_that_no_replica_could_take_is_refused_also_while_there_is_none(entries: dict[int, int]) -> None:
    state = ControlState(started_at=0.0)
    with pytest.raises(ValueError, match="draft_len_schedule"):
        state.give(Order(mode="pin", issued_at=1.0, schedule=entries), now=1.0)
    assert state.held is None
    state.give(Order(mode="pin", issued_at=2.0, schedule={8: 2}), now=2.0)
    assert state.held is not None


def test_a_pin_is_spelled_out_once_for_all_replicas_of_one_limit() -> None:
    cluster = Cluster(3)
    cluster.run(5)
    short = CountingReplica("short", seed=9, static={8: 3})
    cluster.state.register(short.registration(draft_lens=(0, 1, 3)), now=cluster.now)
    cluster.state.see_order(Order(mode="pin", issued_at=1.0, schedule={8: 2, 2: 5}))  # given before the short one came
    schedules = {push.replica_id: push.schedule for push in cluster.state.decide(now=cluster.now)}
    assert list(schedules["r0"].items()) == [(2, 5), (8, 2)] and schedules["short"] == {2: 3, 8: 2}
    assert schedules["r0"] is schedules["r1"] is schedules["r2"]


def test_an_order_counts_though_the_operator_s_clock_is_behind_that_of_the_one_before() -> None:
    cluster = Cluster(2)
    cluster.run(5)
    first = Order(mode="pin", issued_at=1.8e9, schedule={8: 2})
    cluster.push(cluster.state.give(first, now=cluster.now))
    cluster.push(cluster.state.give(Order(mode="pin", issued_at=1.7e9, schedule={8: 5}), now=cluster.now))
    assert cluster.draft_lens() == {5}
    cluster.state.register(cluster.replicas["r0"].registration(order=first), now=cluster.now)  # it kept the first one
    assert cluster.state.held is not None and cluster.state.held.schedule == {8: 5}
    cluster.state.give(Order(mode="release", issued_at=1.7e9), now=cluster.now)
    assert cluster.state.held is None


@pytest.mark.parametrize("changes", [{"protocol": 1}, {"draft_lens": (1, 2)}, {"block_width": 7}, {"max_num_seqs": 0}])
def test_registrations_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Cluster(1).state.register(CountingReplica("x", seed=0, static={8: 3}).registration(**changes), now=0.0)


def test_what_decides_knows_no_ray() -> None:
    code = "import sys, cluster.control.estimate; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
