"""The event loop: every lane whose clock is behind its target makes one engine step, all in one go.

A step is what the engine's scheduler and runner make of it: K from the schedule at the number of decode rows, verify no
wider than the drafts at hand, the program of the row count's bucket, prompts in the rest of the token budget.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cluster.control.messages import SHADOW_TIME_SHARE
from cluster.simulate.acceptance import DRAWS
from cluster.simulate.intake import Intake, Started
from cluster.simulate.lanes import NOISE_STEPS, Lanes, Run, World
from cluster.simulate.tallies import ALL_RIGHT, CODES, Tallies
from engine.speculative.shadow import MIN_GAP, share_of_budget

_LOOK_EVERY = 4  # sweeps of which one is kept for hindsight


class Control(Protocol):
    """Whoever changes schedules of a run while it goes on."""

    def tick(self, now: float) -> float:
        """All lanes have reached `now`. Returns the next time to be asked."""


class Fleet:
    """All lanes of some runs, from time 0 to the scenario's end."""

    def __init__(self, world: World, runs: Sequence[Run]) -> None:
        scenario = world.scenario
        self.lanes = Lanes(world, runs)
        self.intake = Intake(self.lanes)
        self.tallies = Tallies(self.lanes)
        self._tokens_of_cell = world.acceptance.tokens(scenario.draft_lens)
        noise = scenario.step_noise
        rng = np.random.default_rng(20)
        factors = np.exp(noise.deviation * rng.standard_normal(NOISE_STEPS) - noise.deviation**2 / 2)
        self._noise = np.where(rng.random(NOISE_STEPS) < noise.stragglers, noise.straggler_factor, 1.0) * factors
        self._counted_L = ~self.lanes.clairvoyant_L & self.lanes.shadows_L
        self.num_sweeps = 0

    def run(self, controls: dict[int, Control]) -> None:
        """Runs to the end. controls: by run index, for those that are controlled."""
        lanes = self.lanes
        end = lanes.world.scenario.duration_s
        target_L = np.full(lanes.count, end)
        for index in controls:
            target_L[list(lanes.lanes_of(index))] = 0.0
        controlled = sorted(controls)
        first = np.array([index * lanes.num_replicas for index in controlled], dtype=np.int64)
        open_runs = set(controlled)
        while True:
            behind = lanes.clock_L < target_L
            for index, start in zip(controlled, first.tolist(), strict=True):
                stop = start + lanes.num_replicas
                while index in open_runs and not behind[start:stop].any():
                    now = float(target_L[start])
                    if now >= end:
                        open_runs.discard(index)
                        break
                    target_L[start:stop] = min(controls[index].tick(now), end)
                    behind[start:stop] = lanes.clock_L[start:stop] < target_L[start:stop]
            sel = np.flatnonzero(behind)
            if not len(sel):
                break
            self.sweep(sel, target_L)
        self._count_unfinished(end)

    # ---------------------------------------------------------------------------------------- one step

    def sweep(self, sel: np.ndarray, target_L: np.ndarray) -> None:
        """One step of each of these lanes; one that has nothing to do waits, until its target at most."""
        lanes, intake, tallies = self.lanes, self.intake, self.tallies
        self.num_sweeps += 1
        lanes.num_ended_L[sel] *= lanes.num_rows_L[sel] > 0  # without a row there is no step for them to take part in
        is_empty = (lanes.num_rows_L[sel] == 0) & (intake.needed_L[sel] == 0)
        lanes.planned_L[sel] = np.where(is_empty, lanes.clock_L[sel], lanes.planned_L[sel])
        soonest = intake.next_arrival(sel)
        waits = is_empty & (soonest > lanes.clock_L[sel])
        if waits.any():
            idle = sel[waits]
            lanes.clock_L[idle] = np.minimum(soonest[waits], target_L[idle])
            sel, soonest = sel[~waits], soonest[~waits]
            if not len(sel):
                return
        rows, in_program = self._rows(sel)
        bucket = lanes.bucket_index_R[in_program]
        seen = self._look(sel)
        draft = lanes.schedule_LR[sel, in_program]
        verify = np.minimum(draft, lanes.last_index_L[sel])
        seeing = np.flatnonzero(lanes.clairvoyant_L[sel])
        if len(seeing):
            draft[seeing] = verify[seeing] = self._best(sel[seeing], bucket[seeing], seen[0][seeing], seen[1][seeing])
        lanes.last_index_L[sel] = draft
        verify_len = lanes.draft_lens_J[verify]
        if intake.can_run_out:
            intake.make_room(sel, verify_len)
            rows, in_program = self._rows(sel)
            bucket = lanes.bucket_index_R[in_program]
        budget = lanes.world.scenario.engine.max_num_batched_tokens - rows * (verify_len + 1)
        prompt_tokens, started = intake.prefill(sel, budget, soonest)
        lanes.num_ended_L[sel] = 0
        steady = (rows > 0) & (prompt_tokens == 0) & (draft == verify)
        shadow_s = self._shadows(sel, rows, bucket, draft, steady)
        seconds = self._seconds(sel, rows, bucket, draft, verify, prompt_tokens, shadow_s)
        steady_s = seconds * (steady & (shadow_s == 0))
        self._save(sel, rows, seconds, draft)
        before = lanes.clock_L[sel]
        lanes.clock_L[sel] = before + seconds
        lanes.planned_L[sel] = before if lanes.world.scenario.engine.pipeline_depth else lanes.clock_L[sel]
        lanes.num_steps_L[sel] += 1

        left = lanes.left_LB[sel]
        right = self.lanes.world.acceptance.num_right[seen[1]]
        depth = np.minimum(left, verify_len[:, None])
        accepted = np.minimum(depth, right)
        emitted = np.minimum(accepted + 1, left)
        left -= emitted
        lanes.left_LB[sel] = left
        lanes.place_LB[sel] += emitted
        tokens = emitted.sum(axis=1)
        lanes.context_sum_L[sel] += tokens
        self._count(sel, rows, bucket, draft, verify, seconds, steady_s, tokens)
        if self.num_sweeps % _LOOK_EVERY == 0:
            self._count_right(sel, bucket, emitted, right)
        self._count_codes(sel, bucket, verify, emitted, left, depth, right, shadow_s > 0)
        ended = (left == 0) & (emitted > 0)
        if ended.any():
            at, slot = np.nonzero(ended)
            self._finish(sel[at], slot)
        if len(started.lanes):
            self._start(started)
        tallies.tokens_L[sel] += tokens

    def _rows(self, sel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows that decode, and those of the program: with what has ended and is not known to."""
        rows = self.lanes.num_rows_L[sel]
        return rows, np.minimum(rows + self.lanes.num_ended_L[sel], self.lanes.world.scenario.engine.max_num_seqs)

    def _look(self, sel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in the tables the rows of lanes are: their cell, and cell * draws + draw; [n, B] each."""
        lanes = self.lanes
        draw = lanes.cell_LB[sel] + lanes.traffic.texts_P[lanes.place_LB[sel]]
        return draw // DRAWS, draw

    def _best(self, lane: np.ndarray, bucket: np.ndarray, cell: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """Index of the K with the most expected tokens a second, from the truth about the rows of this very step."""
        lanes = self.lanes
        live = lanes.left_LB[lane] > 0
        tokens = (self._tokens_of_cell[cell] * live[:, :, None]).sum(axis=1)
        seconds = lanes.step_s_AIJ[lanes.machine_L[lane], bucket]
        seconds = seconds + (lanes.context_s_L[lane] * lanes.context_sum_L[lane])[:, None]
        return (tokens / seconds).argmax(axis=1)

    def _shadows(
        self, sel: np.ndarray, rows: np.ndarray, bucket: np.ndarray, draft: np.ndarray, steady: np.ndarray
    ) -> np.ndarray:
        """What scoring all drafts adds to the step, 0 where that is not due: the engine's `ShadowBudget`.

        It costs a drafter's pass and a verified column: more than it does where something is drafted anyway.
        """
        lanes = self.lanes
        extra_s = np.zeros(len(sel))
        may = np.flatnonzero(steady & lanes.shadows_L[sel] & (draft < len(lanes.draft_lens_J) - 1))
        if not len(may):
            return extra_s
        lane, rows = sel[may], rows[may]
        lanes.shadow_gap_L[lane] += 1
        steps = lanes.step_s_AIJ[lanes.machine_L[lane], bucket[may]]
        cost = steps[:, 1] - steps[:, 0]
        saved = np.minimum(lanes.shadow_saved_s_L[lane], lanes.shadow_saved_row_s_L[lane] / rows)
        due = (lanes.shadow_gap_L[lane] >= MIN_GAP) & (saved >= cost)
        if due.any():
            may, lane, rows, cost = may[due], lane[due], rows[due], cost[due]
            lanes.shadow_gap_L[lane] = 0
            lanes.shadow_saved_s_L[lane] -= cost
            lanes.shadow_saved_row_s_L[lane] -= cost * rows
            extra_s[may] = cost
        return extra_s

    def _save(self, sel: np.ndarray, rows: np.ndarray, seconds: np.ndarray, draft: np.ndarray) -> None:
        """Any step saves up for shadow steps. The first half minute is one of the step table's seconds."""
        table_s = self.tallies.busy_s_L[sel] / self.lanes.slowdown_L[sel]
        share = share_of_budget(table_s, num_rows=rows, draft_len=draft)  # K = 0 is the first length
        saved = SHADOW_TIME_SHARE * share * seconds
        self.lanes.shadow_saved_s_L[sel] += saved
        self.lanes.shadow_saved_row_s_L[sel] += saved * rows

    def _seconds(
        self,
        sel: np.ndarray,
        rows: np.ndarray,
        bucket: np.ndarray,
        draft: np.ndarray,
        verify: np.ndarray,
        prompt_tokens: np.ndarray,
        shadow_s: np.ndarray,
    ) -> np.ndarray:
        """Seconds of the step."""
        lanes = self.lanes
        machine = lanes.machine_L[sel]
        of_verify = lanes.step_s_AIJ[machine, bucket, verify]
        decode = (of_verify + lanes.step_s_AIJ[machine, bucket, draft]) / 2
        decode = decode + lanes.context_s_L[sel] * lanes.context_sum_L[sel] + shadow_s
        decode = np.where(rows > 0, decode, lanes.prefill_base_s_L[sel])
        noise = self._noise[(lanes.num_steps_L[sel] + lanes.noise_L[sel]) % NOISE_STEPS]
        return (decode + prompt_tokens * lanes.prefill_token_s_L[sel]) * noise

    def _finish(self, lane: np.ndarray, slot: np.ndarray) -> None:
        """Takes rows that have emitted all their tokens out. Ascending by lane."""
        lanes, tallies = self.lanes, self.tallies
        # finished rows of a lane stand one behind the other: each gives its slot back at its own place
        first = np.searchsorted(lane, lane)
        lanes.free_LB[lane, lanes.num_free_L[lane] + np.arange(len(lane)) - first] = slot
        np.add.at(lanes.num_free_L, lane, 1)
        np.subtract.at(lanes.num_rows_L, lane, 1)
        np.add.at(lanes.num_ended_L, lane, lanes.world.scenario.engine.pipeline_depth)
        self.intake.ended(lane, slot)
        context = lanes.place_LB[lane, slot] + lanes.context_LB[lane, slot]
        np.subtract.at(lanes.context_sum_L, lane, context)
        now = lanes.clock_L[lane]
        arrived, first_at, length = (
            array[lane, slot] for array in (lanes.arrived_LB, lanes.first_at_LB, lanes.length_LB)
        )
        np.add.at(tallies.request_s_L, lane, now - arrived)
        np.add.at(tallies.finished_tokens_L, lane, length)
        np.add.at(tallies.finished_L, lane, 1)
        tallies.latencies.append((lane, (now - first_at) / (length - 1), first_at - arrived))

    def _start(self, started: Started) -> None:
        """Rows whose prompt ran in this step. One that was preempted before its last token is done with it."""
        self.intake.start(started, self.lanes.clock_L)
        np.add.at(self.tallies.tokens_L, started.lanes, 1)
        done = np.flatnonzero(self.lanes.left_LB[started.lanes, started.slots] == 0)
        if len(done):
            done = done[np.argsort(started.lanes[done], kind="stable")]
            self._finish(started.lanes[done], started.slots[done])

    # ---------------------------------------------------------------------------------------- counting

    def _count(
        self,
        sel: np.ndarray,
        rows: np.ndarray,
        bucket: np.ndarray,
        draft: np.ndarray,
        verify: np.ndarray,
        seconds: np.ndarray,
        steady_s: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        lanes, tallies = self.lanes, self.tallies
        live = rows > 0
        steady = steady_s > 0
        sums = np.empty((len(sel), 5))
        sums[:, 0], sums[:, 1], sums[:, 2], sums[:, 3], sums[:, 4] = live, rows, steady, steady_s, tokens * steady
        tallies.cells_LIJ5[sel, bucket, verify] += sums
        tallies.busy_s_L[sel] += seconds
        busy = seconds * live
        sums = np.empty((len(sel), 4))
        sums[:, 0], sums[:, 1], sums[:, 2], sums[:, 3] = tokens, rows * seconds, lanes.draft_lens_J[draft] * busy, busy
        tallies.slices_LT4[sel, tallies.slices(lanes.clock_L[sel])] += sums

    def _count_right(self, sel: np.ndarray, bucket: np.ndarray, emitted: np.ndarray, right: np.ndarray) -> None:
        """How many drafts would have been right, whatever K was: what hindsight learns from."""
        values = self.tallies.right_LIW.shape[2]
        codes = np.where(emitted > 0, right, values - 1) + np.arange(len(sel))[:, None] * values
        histogram = np.bincount(codes.ravel(), minlength=len(sel) * values).reshape(len(sel), values)
        self.tallies.right_LIW[sel, bucket] += histogram

    def _count_codes(
        self,
        sel: np.ndarray,
        bucket: np.ndarray,
        verify: np.ndarray,
        emitted: np.ndarray,
        left: np.ndarray,
        depth: np.ndarray,
        right: np.ndarray,
        is_shadow: np.ndarray,
    ) -> None:
        """Outcomes of the rows of lanes whose counters somebody reads. A shadow step tells of every position."""
        lanes = self.lanes
        counted = np.flatnonzero(self._counted_L[sel])
        if not len(counted):
            return
        lane = sel[counted]
        emitted, left, depth, right = emitted[counted], left[counted], depth[counted], right[counted]
        shadow = is_shadow[counted]
        if shadow.any():
            widest = lanes.draft_lens_J[-1]
            depth = np.where(shadow[:, None], np.minimum(left + emitted, widest), depth)
        codes = np.where(right < depth, right, depth + ALL_RIGHT)
        codes[emitted == 0] = CODES - 1
        codes += np.arange(len(lane))[:, None] * CODES
        histogram = np.bincount(codes.ravel(), minlength=len(lane) * CODES).reshape(len(lane), CODES)
        self.tallies.codes_LIJC[lane, bucket[counted], verify[counted]] += histogram

    def _count_unfinished(self, end: float) -> None:
        """Requests still in the system at the end count with the time they have spent."""
        lanes, tallies, traffic = self.lanes, self.tallies, self.lanes.traffic
        inside = (lanes.left_LB > 0) | (lanes.waiting_left_LB > 0)
        tallies.request_s_L += (np.maximum(end - lanes.arrived_LB, 0.0) * inside).sum(axis=1)
        tallies.request_s_L += self.intake.stacked_seconds(end)
        if traffic.closed:
            return
        for lane in range(lanes.count):
            start = traffic.first_L[lane]
            waiting = traffic.arrivals_N[start + self.intake.next_L[lane] : start + traffic.size_L[lane]]
            tallies.request_s_L[lane] += (end - waiting).sum()
