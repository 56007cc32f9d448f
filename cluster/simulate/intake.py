"""Requests on their way into the batch: arrival, admission, chunked prefill, and preemption when the KV cache is full.

As in the engine's scheduler: prompts take what the decode rows leave of the token budget, one after the other, first
come first served; a head that does not fit blocks those behind it; the latest admitted is preempted first, goes back to
the head of the queue and is recomputed from its tokens. One prompt at a time is unfinished, and owns all its blocks.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cluster.simulate.acceptance import DRAWS, NUM_PLACES
from cluster.simulate.lanes import Lanes
from cluster.simulate.scenario import Closed

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class _Preempted:
    """What a request takes along to the head of the queue."""

    left: int
    place: int
    cell: int
    context: int
    length: int
    arrived: float
    first_at: float


@dataclass(frozen=True, slots=True)
class Started:
    """Prompts that end in this step: they become rows after it."""

    lanes: np.ndarray
    slots: np.ndarray


class Intake:
    """One waiting line and at most one unfinished prompt per lane."""

    def __init__(self, lanes: Lanes) -> None:
        engine = lanes.world.scenario.engine
        self._lanes = lanes
        arrivals = lanes.world.scenario.arrivals
        self._turnaround_s = arrivals.turnaround_s if isinstance(arrivals, Closed) else 0.0
        self._block_size = engine.block_size
        self.pool = engine.kv_blocks
        self._tail = lanes.world.scenario.draft_lens[-1] + 1 + engine.drafter_block
        longest = max(kind.prompt.at_most + kind.output.at_most for kind in lanes.world.scenario.classes.values())
        self.can_run_out = engine.max_num_seqs * self._blocks(longest + self._tail) > engine.kv_blocks
        count = lanes.count
        self.next_L = np.zeros(count, dtype=np.int64)  # number of the next request in the lane's own traffic
        self.needed_L = np.zeros(count, dtype=np.int64)  # prompt tokens the head still needs; 0: no head
        self._head_slot_L = np.zeros(count, dtype=np.int64)
        self._stacks: dict[int, list[_Preempted]] = {}
        self._stacked_L = np.zeros(count, dtype=bool)
        self.num_preempted_L = np.zeros(count, dtype=np.int64)
        self.prefilled_L = np.zeros(count, dtype=np.int64)

    def _blocks(self, num_tokens: IntOrArray) -> IntOrArray:
        """Blocks of a number of tokens, or of an array of them."""
        return -(-num_tokens // self._block_size)

    # ---------------------------------------------------------------------------------------- arrivals

    def next_arrival(self, sel: np.ndarray) -> np.ndarray:
        """When each lane's next request may be admitted, as far as time goes; infinite if none will come."""
        lanes, traffic = self._lanes, self._lanes.traffic
        clock = lanes.clock_L[sel]
        if traffic.closed:
            second = np.minimum(clock.astype(np.int64), len(traffic.limit_T) - 1)
            taken = lanes.num_rows_L[sel] + lanes.num_ended_L[sel] + (self.needed_L[sel] > 0) + self._away(sel)
            room = traffic.limit_T[second] > taken
            # without room, ask again in the next second: the limit may have changed
            soonest = np.where(room, lanes.planned_L[sel], np.floor(clock) + 1.0)
            if self._turnaround_s:
                soonest = np.minimum(soonest, self._next_return(sel))
            soonest[clock >= lanes.leaves_L[sel]] = np.inf
        else:
            soonest = traffic.arrivals_N[traffic.first_L[sel] + self.next_L[sel]]
        if self._stacks:
            soonest = np.where(self._stacked_L[sel], lanes.planned_L[sel], soonest)
        return soonest

    def ended(self, lane: np.ndarray, slot: np.ndarray) -> None:
        """Requests that have ended, of lanes at their own time."""
        if self._turnaround_s:
            self._lanes.returns_LB[lane, slot] = self._lanes.clock_L[lane] + self._turnaround_s

    def _away(self, sel: np.ndarray) -> np.ndarray | int:
        """Places of a closed loop whose next request had not arrived when this step was put together."""
        if not self._turnaround_s:
            return 0
        return (self._lanes.returns_LB[sel] > self._lanes.planned_L[sel, None]).sum(axis=1)

    def _next_return(self, sel: np.ndarray) -> np.ndarray:
        returns = self._lanes.returns_LB[sel]
        return np.where(returns > self._lanes.clock_L[sel, None], returns, np.inf).min(axis=1)

    # ---------------------------------------------------------------------------------------- prefill

    def prefill(self, sel: np.ndarray, budget: np.ndarray, soonest: np.ndarray) -> tuple[np.ndarray, Started]:
        """Spends the budget left by the decode rows. Returns prompt tokens of each lane, and prompts that end."""
        lanes = self._lanes
        budget = budget.copy()
        tokens = np.zeros(len(sel), dtype=np.int64)
        ended_lanes: list[np.ndarray] = []
        ended_slots: list[np.ndarray] = []
        ended = np.zeros(len(sel), dtype=np.int64)
        at = np.flatnonzero((self.needed_L[sel] > 0) | (soonest <= lanes.planned_L[sel]))
        while len(at):
            at = at[budget[at] > 0]
            idle = at[self.needed_L[sel[at]] == 0]
            if len(idle):
                self._take_heads(sel[idle], ended[idle])
            at = at[self.needed_L[sel[at]] > 0]
            if not len(at):
                break
            lane = sel[at]
            chunk = np.minimum(budget[at], self.needed_L[lane])
            budget[at] -= chunk
            tokens[at] += chunk
            self.needed_L[lane] -= chunk
            at = at[self.needed_L[lane] == 0]
            lane = sel[at]
            ended_lanes.append(lane)
            ended_slots.append(self._head_slot_L[lane])
            ended[at] += 1
            at = at[budget[at] > 0]
        self.prefilled_L[sel] += tokens
        if not ended_lanes:
            return tokens, Started(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        return tokens, Started(np.concatenate(ended_lanes), np.concatenate(ended_slots))

    def _take_heads(self, lane: np.ndarray, ended: np.ndarray) -> None:
        """Makes the first in line the head, where slots and blocks allow. ended: prompts that ended this step."""
        lanes, traffic = self._lanes, self._lanes.traffic
        clock = lanes.clock_L[lane]
        may = lanes.num_free_L[lane] > 0
        if traffic.closed:
            second = np.minimum(clock.astype(np.int64), len(traffic.limit_T) - 1)
            taken = lanes.num_rows_L[lane] + lanes.num_ended_L[lane] + ended + self._away(lane)
            may &= (traffic.limit_T[second] > taken) & (clock < lanes.leaves_L[lane])
            number = traffic.first_L[lane] + self.next_L[lane] % traffic.size_L[lane]
        else:
            number = traffic.first_L[lane] + self.next_L[lane]
            may &= traffic.arrivals_N[number] <= lanes.planned_L[lane]
        if self._stacks:
            stacked = self._stacked_L[lane]
            for one in lane[stacked & (lanes.num_free_L[lane] > 0)].tolist():
                self._resume(one)
            may &= ~stacked
        lane, number, clock = lane[may], number[may], clock[may]
        if not len(lane):
            return
        kind = traffic.kinds_N[number]
        if traffic.closed:
            second = np.minimum(clock.astype(np.int64), traffic.mixes_MTC.shape[1] - 1)
            shares = traffic.mixes_MTC[traffic.mix_L[lane], second]
            kind = (traffic.draws_N[number][:, None] >= shares).sum(axis=1)
        prompt = traffic.prompt_CN[kind, number].astype(np.int64)
        if self.can_run_out:
            fits = self._blocks(prompt + self._tail) <= self.pool - self.used_blocks(lane)
            lane, number, clock, kind, prompt = lane[fits], number[fits], clock[fits], kind[fits], prompt[fits]
        slot = self._take_slot(lane)
        output = traffic.output_CN[kind, number]
        place = traffic.text_start_L[lane] + kind * NUM_PLACES + traffic.places_N[number]
        at = (lane, slot)
        lanes.length_LB[at] = output
        lanes.place_LB[at] = place
        lanes.context_LB[at] = prompt - place
        lanes.cell_LB[at] = lanes.world.acceptance.first_cells(kind, traffic.levels_N[number]) * DRAWS
        lanes.arrived_LB[at] = clock if traffic.closed else traffic.arrivals_N[number]
        lanes.first_at_LB[at] = -1.0
        self._pending(lane, slot, prompt, left=output)
        self.next_L[lane] += 1

    def _pending(self, lane: IntOrArray, slot: IntOrArray, prompt: IntOrArray, *, left: IntOrArray) -> None:
        """The head of a lane: its slot is taken; `left_LB` stays 0 until its prompt has run."""
        self.needed_L[lane] = prompt
        self._head_slot_L[lane] = slot
        self._lanes.num_admitted_L[lane] += 1
        self._lanes.order_LB[lane, slot] = self._lanes.num_admitted_L[lane]
        self._lanes.waiting_left_LB[lane, slot] = left

    def _take_slot(self, lane: np.ndarray) -> np.ndarray:
        self._lanes.num_free_L[lane] -= 1
        return self._lanes.free_LB[lane, self._lanes.num_free_L[lane]]

    def start(self, started: Started, clock_L: np.ndarray) -> None:
        """Prompts that ended become rows; their first token came with the step."""
        lanes = self._lanes
        at = (started.lanes, started.slots)
        left = lanes.waiting_left_LB[at]
        lanes.waiting_left_LB[at] = 0
        lanes.left_LB[at] = left - 1
        lanes.place_LB[at] += 1
        context = lanes.context_LB[at] + lanes.place_LB[at]
        np.add.at(lanes.num_rows_L, started.lanes, 1)
        np.add.at(lanes.context_sum_L, started.lanes, context)
        fresh = lanes.first_at_LB[at] < 0
        lanes.first_at_LB[started.lanes[fresh], started.slots[fresh]] = clock_L[started.lanes[fresh]]

    # ---------------------------------------------------------------------------------------- blocks

    def used_blocks(self, lane: np.ndarray, tail: np.ndarray | None = None) -> np.ndarray:
        """Blocks owned by the rows and prompts of lanes; tail: tokens past the context that a row may write."""
        lanes = self._lanes
        busy = (lanes.left_LB[lane] > 0) | (lanes.waiting_left_LB[lane] > 0)
        context = lanes.place_LB[lane] + lanes.context_LB[lane]
        extra = self._tail if tail is None else tail[:, None]
        return (self._blocks(context + extra) * busy).sum(axis=1)

    def make_room(self, sel: np.ndarray, verify_len: np.ndarray) -> None:
        """Preempts, latest first, until the rows of every lane own what the next step may write."""
        lanes = self._lanes
        tail = verify_len + 1 + lanes.world.scenario.engine.drafter_block
        over = np.flatnonzero(self.used_blocks(sel, tail) > self.pool)
        for index in over.tolist():
            lane = int(sel[index])
            one, its_tail = sel[index : index + 1], tail[index : index + 1]
            while self.used_blocks(one, its_tail)[0] > self.pool:
                self._preempt(lane)

    def _preempt(self, lane: int) -> None:
        lanes = self._lanes
        left, waiting = lanes.left_LB[lane], lanes.waiting_left_LB[lane]
        slot = int(np.where((left > 0) | (waiting > 0), lanes.order_LB[lane], -1).argmax())
        is_row = bool(left[slot] > 0)
        request = _Preempted(
            left=int(left[slot] if is_row else waiting[slot]),
            place=int(lanes.place_LB[lane, slot]),
            cell=int(lanes.cell_LB[lane, slot]),
            context=int(lanes.context_LB[lane, slot]),
            length=int(lanes.length_LB[lane, slot]),
            arrived=float(lanes.arrived_LB[lane, slot]),
            first_at=float(lanes.first_at_LB[lane, slot]),
        )
        self._stacks.setdefault(lane, []).append(request)
        self._stacked_L[lane] = True
        self.num_preempted_L[lane] += 1
        if is_row:
            lanes.num_rows_L[lane] -= 1
            lanes.context_sum_L[lane] -= request.place + request.context
        else:
            self.needed_L[lane] = 0
        left[slot] = waiting[slot] = 0
        lanes.place_LB[lane, slot] = lanes.context_LB[lane, slot] = lanes.cell_LB[lane, slot] = 0
        lanes.free_LB[lane, lanes.num_free_L[lane]] = slot
        lanes.num_free_L[lane] += 1

    def _resume(self, lane: int) -> None:
        """The last preempted becomes the head, if its blocks are there: its prompt is all its tokens."""
        lanes = self._lanes
        request = self._stacks[lane][-1]
        tokens = request.place + request.context
        if self._blocks(tokens + self._tail) > self.pool - int(self.used_blocks(np.array([lane]))[0]):
            return
        self._stacks[lane].pop()
        if not self._stacks[lane]:
            del self._stacks[lane]
            self._stacked_L[lane] = False
        slot = int(self._take_slot(np.array([lane]))[0])
        lanes.length_LB[lane, slot] = request.length
        lanes.place_LB[lane, slot] = request.place
        lanes.cell_LB[lane, slot] = request.cell
        lanes.context_LB[lane, slot] = request.context
        lanes.arrived_LB[lane, slot] = request.arrived
        lanes.first_at_LB[lane, slot] = request.first_at
        self._pending(lane, slot, tokens, left=request.left)

    def stacked_seconds(self, end: float) -> np.ndarray:
        """Seconds that preempted requests not yet resumed have spent in the system by `end`; [L]."""
        seconds = np.zeros(self._lanes.count)
        for lane, stack in self._stacks.items():
            seconds[lane] = sum(end - request.arrived for request in stack)
        return seconds

    def stacked_tokens(self) -> np.ndarray:
        """Tokens that preempted requests not yet resumed have emitted; [L]."""
        tokens = np.zeros(self._lanes.count, dtype=np.int64)
        for lane, stack in self._stacks.items():
            tokens[lane] = sum(request.length - request.left for request in stack)
        return tokens
