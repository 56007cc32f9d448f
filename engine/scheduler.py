"""`Scheduler`: which sequences take part in the next step, and with what.

GUARD RAIL. This file decides order, budget and preemption for sequences of tokens, and nothing else. It knows no torch,
no sampling, no text, no HTTP, no model family. A feature that needs a branch here gets its own file instead. At most
400 lines.

One step, one token budget (max_num_batched_tokens):

    1. decode rows, verify_len + 1 tokens each       in admission order; if they do not all fit, longest idle first
    2. prefill chunks of admitted sequences          in admission order; beside decode rows, what `prefill_pace` allows
    3. admissions from the waiting queue             first come, first served; a head that does not fit blocks the rest

Admission is first come, first served and preemption takes the latest first, so the running sequences are always the
oldest ones. The oldest can take every block from the others, and by the check at arrival it fits into the pool alone:
it always progresses, so nothing starves. A sequence that finds no blocks without preempting an older one waits and
keeps its own.

Steps may be in flight while the next is planned. What they did is bounded (`_slots_needed`), and blocks are owned for
the bound before the step is launched. Preemption needs exact progress, so it needs an empty pipeline.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.config.engine import EngineConfig
from engine.kv_cache.manager import KvCacheManager
from engine.prefill_pace import PrefillPace, tokens_of_several
from engine.sequence import Sequence, SequenceState
from engine.step import BlockTableUpdate, PrefillChunk, SlotInit, StepPlan


class PipelineNotEmpty(Exception):
    """A preemption is due, but a step is in flight. Nothing was planned; read its result and plan again."""


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk as the host remembers it while its step is in flight."""

    seq: Sequence
    num_tokens: int
    samples: bool


class ScheduledStep(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and the sequences behind its rows, in plan order."""

    plan: StepPlan
    decode: list[Sequence]
    prefill: list[PrefillRow]


@dataclass(kw_only=True, slots=True)
class _Draft:
    """The step under construction."""

    budget: int
    several: int  # what several prompts may have of it together; one alone may have it all
    lookahead_len: int  # slots past a row's base that its next steps may write
    upload_budget: int  # numbers that the admissions' logits rules may add to the plan
    may_preempt: bool
    prompts: list[Sequence]  # that were admitted and are not at their end
    decode: list[Sequence] = field(default_factory=list)
    prefill: list[PrefillRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def drop(self, seq: Sequence) -> None:
        """A sequence chosen earlier in this step was preempted. Its budget is not handed out again."""
        self.decode = [other for other in self.decode if other is not seq]
        self.prefill = [row for row in self.prefill if row.seq is not seq]


class Scheduler:
    """Queues, slots and the token budget.

    draft_len_for: batch size (sampling rows) -> draft length K in force. Read once or twice per step.
    """

    def __init__(self, *, config: EngineConfig, kv: KvCacheManager, draft_len_for: Callable[[int], int]) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        self._draft_len_for = draft_len_for
        target_ms = config.inter_token_target_ms
        self._pace = PrefillPace(target_s=target_ms / 1e3) if target_ms is not None else None
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._num_steps_ahead = config.pipeline_depth + 1
        self._lookahead = config.lookahead
        self._upload_budget = config.max_upload_len
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}  # in admission order, which is arrival order
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._generations = [0] * config.max_num_seqs
        self._draining: set[Sequence] = set()  # finished, a step in flight still names their slot
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of first admissions, like the next two
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.draft_len = 0  # K of the last planned step with sampling rows

    # ---------------------------------------------------------------------------------------- queues

    def add(self, seq: Sequence) -> None:
        """Puts a new sequence at the end of the queue."""
        self.waiting.append(seq)

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is.

        Blocks return at once: the device runs steps in launch order, so one that reuses a block comes after every step
        that still touches it. The slot returns when no step in flight names it.
        """
        assert seq.state is not SequenceState.FINISHED, seq
        if seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
        else:
            del self.running[seq.request_id]
            self._kv.release(seq)
            if seq.num_in_flight == 0:
                self._free_slots.append(seq.slot)
            else:
                self._draining.add(seq)
        seq.state = SequenceState.FINISHED

    def step_was_read(self, step: ScheduledStep) -> None:
        """One step in flight less for its sequences; frees the slot of a finished one after its last."""
        for seq in [*step.decode, *[row.seq for row in step.prefill]]:
            seq.num_in_flight -= 1
            if seq.num_in_flight == 0 and seq.state is SequenceState.FINISHED:
                self._draining.remove(seq)
                self._free_slots.append(seq.slot)

    def step_has_run(self, step: ScheduledStep, duration_s: float) -> None:
        """What a step took, which later ones with prompts are reckoned with."""
        if self._pace is not None:
            self._pace.observe(
                num_decode=len(step.decode),
                verify_len=step.plan.verify_len,
                prompt_tokens=sum([row.num_tokens for row in step.prefill]),
                duration_s=duration_s,
            )

    # ---------------------------------------------------------------------------------------- one step

    def schedule(self, *, step_id: int, may_preempt: bool) -> ScheduledStep | None:
        """Plans a step; None when no sequence can take part in one.

        may_preempt: no step is in flight.

        Raises:
            PipelineNotEmpty: only a preemption would let an older sequence go on, and may_preempt is false.
        """
        draft, verify_cap = self._start(may_preempt)
        if not self._continue_prefills(draft):
            self._admit(draft)
        if not draft.decode and not draft.prefill:
            return None
        return self._finish_plan(draft, verify_cap, step_id)

    def _start(self, may_preempt: bool) -> tuple[_Draft, int]:
        """Chooses the decode rows. Returns the largest verify length their share of the budget allows."""
        rows: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self.running.values():
            if not seq.is_decoding:
                prompts.append(seq)
            elif not seq.is_surely_done:
                rows.append(seq)
        draft_len = self._draft_len_for(len(rows)) if rows else self._draft_len_for(1)
        verify_cap = min(draft_len, max([seq.last_draft_len for seq in rows], default=0))
        num_fitting = self._max_num_batched_tokens // (verify_cap + 1)
        if len(rows) > num_fitting:
            rows.sort(key=lambda seq: seq.last_step_id)  # stable: equally idle rows stay in admission order
        draft = _Draft(
            budget=self._max_num_batched_tokens,
            several=self._max_num_batched_tokens,
            lookahead_len=self._num_steps_ahead * (draft_len + 1) + self._lookahead,
            upload_budget=self._upload_budget,
            may_preempt=may_preempt,
            prompts=prompts,
        )
        for seq in rows:
            if len(draft.decode) == num_fitting:
                break
            if seq.state is SequenceState.RUNNING and self._own(draft, seq, self._slots_needed(seq, verify_cap)):
                draft.decode.append(seq)
        draft.budget -= len(draft.decode) * (verify_cap + 1)
        if self._pace is not None and draft.decode:
            draft.budget = min(draft.budget, self._pace.tokens_beside(len(draft.decode), verify_cap))
        elif draft.decode and self.waiting:
            waiting = (len(seq.token_ids) for seq in self.waiting)
            draft.several = tokens_of_several(len(draft.decode), verify_cap + 1, waiting, draft.budget)
        return draft, verify_cap

    def _slots_needed(self, seq: Sequence, verify_len: int) -> int:
        """Positions a decode row's steps may have written once this one has run.

        Each of the steps unread by then commits at most its verify_len + 1, and the drafter's block follows.
        """
        if seq.num_in_flight and seq.in_flight_verify_len > verify_len:
            verify_len = seq.in_flight_verify_len
        return seq.launched_len + self._num_steps_ahead * (verify_len + 1) + self._lookahead

    def _continue_prefills(self, draft: _Draft) -> bool:
        """Chunks of admitted sequences. True: one of them waits for budget or blocks, so nobody new is admitted."""
        for seq in [seq for seq in draft.prompts if seq.state is SequenceState.RUNNING]:
            if seq.state is not SequenceState.RUNNING:  # preempted by an older one just now
                return True
            if draft.budget == 0 or not self._add_chunk(draft, seq):
                return True
        return False

    def _admit(self, draft: _Draft) -> None:
        """Admissions while slots, budget and blocks for the whole prompt last."""
        while self.waiting and self._free_slots and draft.budget > 0:
            seq = self.waiting[0]
            hit_block_ids = self._kv.match_prefix(seq)
            if not self._kv.can_admit(seq, hit_block_ids, len(seq.token_ids) + draft.lookahead_len):
                return
            if seq.upload_len > draft.upload_budget:  # never for the first: one request alone always fits
                return
            draft.upload_budget -= seq.upload_len
            self.waiting.popleft()
            slot = self._free_slots.pop()
            self._generations[slot] += 1
            self._kv.pool.share(hit_block_ids)
            is_first = seq.num_cached_tokens < 0
            seq.take_slot(
                slot=slot,
                generation=self._generations[slot],
                hit_block_ids=hit_block_ids,
                hit_len=len(hit_block_ids) * self._kv.block_size,
            )
            self.running[seq.request_id] = seq
            draft.admitted.append(seq)
            if is_first:
                self.num_prompt_tokens += seq.prompt_len
                self.num_queried_tokens += seq.prompt_len if self._kv.enable_prefix_caching else 0
                self.num_hit_tokens += seq.hit_len
            fits = self._add_chunk(draft, seq)
            assert fits, f"admitted without blocks: {seq}"
            if not draft.prefill[-1].samples:
                return

    def _add_chunk(self, draft: _Draft, seq: Sequence) -> bool:
        """The next chunk of a prompt, as long as the budget allows. False: no blocks for it yet."""
        num_tokens = min(draft.budget, seq.prefill_len - seq.launched_len)
        end = seq.launched_len + num_tokens
        samples = end == seq.prefill_len
        if not self._own(draft, seq, end + draft.lookahead_len if samples else end):
            return False
        draft.prefill.append(PrefillRow(seq=seq, num_tokens=num_tokens, samples=samples))
        draft.several -= num_tokens
        draft.budget = min(draft.budget - num_tokens, max(draft.several, 0))
        return True

    # ---------------------------------------------------------------------------------------- blocks

    def _own(self, draft: _Draft, seq: Sequence, num_slots: int) -> bool:
        """Makes the sequence own positions 0 .. num_slots-1, preempting later ones. False: it has to wait."""
        if num_slots <= len(seq.block_ids) * self._block_size:
            return True
        num_missing = self._kv.num_missing(seq, num_slots)
        if num_missing <= 0:
            return True
        while num_missing > self._kv.pool.num_available:
            victim = next(reversed(self.running.values()))
            if victim is seq:
                return False
            if not draft.may_preempt:
                raise PipelineNotEmpty
            self._preempt(victim)
            draft.drop(victim)
        self._kv.grow(seq, num_missing)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the head of the queue, to be recomputed from its tokens (the cache often still has most of them)."""
        assert seq.num_in_flight == 0, seq
        del self.running[seq.request_id]
        self._kv.release(seq)
        self._free_slots.append(seq.slot)
        seq.state = SequenceState.WAITING
        seq.reset_progress()
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    # ---------------------------------------------------------------------------------------- the plan

    def _finish_plan(self, draft: _Draft, verify_cap: int, step_id: int) -> ScheduledStep:
        """Turns the chosen rows into a plan and moves their progress to "launched"."""
        sampling = draft.decode + [row.seq for row in draft.prefill if row.samples]
        draft_len = self._draft_len_for(len(sampling)) if sampling else 0
        longest = max([seq.last_draft_len for seq in draft.decode], default=0)
        # verify_cap is what the budget and the blocks were reckoned with; a schedule that rises with the batch size may
        # give more for the final batch, which then waits one step.
        verify_len = min(draft_len, longest, verify_cap)
        if sampling:
            self.draft_len = draft_len
        new_slots: tuple[SlotInit, ...] = tuple(seq.slot_init() for seq in draft.admitted)
        chunks: list[PrefillChunk] = []
        updates: list[BlockTableUpdate] = []
        self._kv.assert_writable([*draft.decode, *[row.seq for row in draft.prefill]])
        for seq in draft.decode:
            seq.in_flight_verify_len = verify_len
            seq.num_in_flight += 1
            seq.last_step_id = step_id
            if seq.num_sent_blocks < len(seq.block_ids):
                updates.append(self._send_blocks(seq))
        for row in draft.prefill:
            seq, start = row.seq, row.seq.launched_len
            token_ids = tuple(seq.token_ids[start : start + row.num_tokens])
            scored_from, scored_next = seq.take_scores(row.num_tokens)
            chunks.append(
                PrefillChunk(
                    slot=seq.slot,
                    start=start,
                    token_ids=token_ids,
                    samples=row.samples,
                    scored_from=scored_from,
                    scored_next=scored_next,
                )
            )
            seq.launched_len += row.num_tokens
            seq.in_flight_verify_len = 0
            seq.num_in_flight += 1
            seq.last_step_id = step_id
            if seq.num_sent_blocks < len(seq.block_ids):
                updates.append(self._send_blocks(seq))
        for seq in sampling:
            seq.last_draft_len = draft_len
        plan = StepPlan(
            step_id=step_id,
            verify_len=verify_len,
            draft_len=draft_len,
            decode_slots=tuple([seq.slot for seq in draft.decode]),
            prefill=tuple(chunks),
            new_slots=new_slots,
            block_updates=tuple(updates),
            zero_blocks=self._kv.pool.take_blocks_to_zero(),
        )
        return ScheduledStep(plan=plan, decode=draft.decode, prefill=draft.prefill)

    def _send_blocks(self, seq: Sequence) -> BlockTableUpdate:
        """The table entries the device has not seen yet."""
        first, seq.num_sent_blocks = seq.num_sent_blocks, len(seq.block_ids)
        return BlockTableUpdate(slot=seq.slot, first_index=first, block_ids=tuple(seq.block_ids[first:]))

    # ---------------------------------------------------------------------------------------- checks

    def check_integrity(self) -> None:
        """Slots and blocks against their owners. The pipeline must be empty.

        Raises:
            RuntimeError: what is inconsistent.
        """
        used = [seq.slot for seq in self.running.values()]
        faults = [f"finished but holding a slot: {seq}" for seq in self._draining]
        if sorted(used + self._free_slots) != list(range(self._max_num_seqs)):
            faults.append(f"slots in use {sorted(used)} and free {sorted(self._free_slots)} are not all slots once")
        faults += [f"not running: {seq}" for seq in self.running.values() if seq.state is not SequenceState.RUNNING]
        faults += [f"a step in flight: {seq}" for seq in self.running.values() if seq.num_in_flight]
        faults += [f"waiting with blocks: {seq}" for seq in self.waiting if seq.block_ids]
        if faults:
            raise RuntimeError("scheduler is inconsistent:\n" + "\n".join(faults))
        owners: dict[int, int] = {}
        for seq in self.running.values():
            for block_id in seq.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        self._kv.pool.check_integrity(owners)
