"""Shadow scoring: drafts beyond K, made now and then, never verified, compared with what the request emits later.

So acceptance is counted at every position whatever K is, also at K = 0, without trying other lengths on the traffic.
What is emitted does not change. For one block

    draft     1 .. k                      k+1 ..................... Kmax
              verified by the next step   compared with later tokens; at risk behind k accepted ones

each position is counted once: up to the row's own k by the verify, beyond it here.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from engine.sequence import Sequence, SequenceState
from engine.speculative.counters import SpeculationCounters
from engine.step import StepPlan, StepResult

MIN_GAP = 8  # steps from one that drafts for scoring to the next, however little it costs
_SMOOTHING = 0.1  # weight of a new duration in the running means

_FIRST_S, _LATER = 30.0, 0.1
_FEW_ROWS = 2

Key = tuple[int, int]  # (rows of the program, K in force)


def share_of_budget(device_time_s: Any, *, num_rows: Any, draft_len: Any) -> Any:
    """What part of its time share scoring may take in a step, so long after the engine's start; also of arrays.

    A step of few rows tells little, and at K = 0 nobody else tells anything: there it may go on as in the beginning.
    """
    is_blind = (num_rows <= _FEW_ROWS) & (draft_len == 0)
    return _LATER + (1.0 - _LATER) * ((device_time_s < _FIRST_S) | is_blind)


class ShadowBudget:
    """Which steps can be afforded: what they cost beyond an ordinary one is at most `time_share` of device time, and of
    the time that requests spend in steps; a tenth of it once the first half minute has told what there is to learn, but
    where few rows, or none, draft nothing.

    The second account counts a second once for each row. It lets small batches pay, whose delay few requests share.
    Ordinary steps save up; one that drafts for scoring is due when its cost is there, which is known from the last ones
    of the same rows and K. Until there was one it counts as much as an ordinary step.
    """

    def __init__(self, time_share: float) -> None:
        self._time_share = time_share
        self._seen_s = 0.0
        self._saved_s = 0.0
        self._saved_row_s = 0.0
        self._gap = 0
        self._ordinary_s: dict[Key, float] = {}
        self._extra_s: dict[Key, float] = {}
        self.spent_s = 0.0

    def is_due(self, key: Key) -> bool:
        """Whether the next step, an ordinary one so far, is to draft for scoring. If so, its cost is set aside."""
        self._gap += 1
        cost_s = self._cost(key)
        if cost_s is None or self._gap < MIN_GAP or self._saved_s < cost_s or self._saved_row_s < cost_s * key[0]:
            return False
        self._gap = 0
        self._add(-cost_s, key[0])
        return True

    def save(self, num_rows: int, duration_s: float, *, draft_len: int) -> None:
        """Any step took so long; num_rows: those that decoded. draft_len: the plan's, 0 of prompts alone."""
        share = share_of_budget(self._seen_s, num_rows=num_rows, draft_len=draft_len)
        self._add(self._time_share * share * duration_s, num_rows)
        self._seen_s += duration_s

    def read_ordinary(self, key: Key, duration_s: float) -> None:
        """A step that could have drafted for scoring and did not."""
        known = self._ordinary_s.get(key, duration_s)
        self._ordinary_s[key] = known + _SMOOTHING * (duration_s - known)

    def read_shadow(self, key: Key, duration_s: float) -> None:
        """A step that was due. What was set aside for it is replaced by what it did cost."""
        ordinary_s, reserved_s = self._ordinary_s[key], self._cost(key)
        assert reserved_s is not None
        extra_s = max(duration_s - ordinary_s, 0.0)
        self._add(reserved_s - extra_s, key[0])
        self.spent_s += extra_s
        known = self._extra_s.get(key, extra_s)
        self._extra_s[key] = known + 2 * _SMOOTHING * (extra_s - known)

    def _add(self, seconds: float, num_rows: int) -> None:
        self._saved_s += seconds
        self._saved_row_s += seconds * num_rows

    def _cost(self, key: Key) -> float | None:
        return self._extra_s.get(key, self._ordinary_s.get(key))


@dataclass(kw_only=True, slots=True)
class _Block:
    """Drafts behind a request's token number `start` - 1 (0-based).

    num_verified: k of the row's next step, None before it was read. num_right: leading drafts found right so far.
    """

    key: Key
    start: int
    drafts: tuple[int, ...]
    num_verified: int | None = None
    num_right: int = 0


class ShadowScoring:
    """Chooses the steps, keeps their blocks until the tokens are there, and counts."""

    def __init__(self, *, max_draft_len: int, time_share: float, counters: SpeculationCounters) -> None:
        self._max_draft_len = max_draft_len
        self._budget = ShadowBudget(time_share)
        self._counters = counters
        self._blocks: dict[str, list[_Block]] = {}

    def is_due(self, plan: StepPlan) -> bool:
        """Whether this step is to draft max_draft_len tokens and to report them. Asked once for every planned step."""
        return self._may_score(plan) and self._budget.is_due(_key(plan))

    def read(self, plan: StepPlan, result: StepResult, sequences: Rows[Sequence]) -> None:
        """A step was read and its tokens were appended. sequences: those of the result's rows."""
        self._budget.save(len(plan.decode_slots), result.duration_s, draft_len=plan.draft_len)
        if plan.report_drafts:
            self._budget.read_shadow(_key(plan), result.duration_s)
        elif self._may_score(plan):
            self._budget.read_ordinary(_key(plan), result.duration_s)
        if self._blocks or plan.report_drafts:
            for seq, row in zip(sequences, result.rows, strict=True):
                self._score(seq, row.num_drafted)
                if row.drafts and seq.state is SequenceState.RUNNING:
                    block = _Block(key=_key(plan), start=len(seq.token_ids), drafts=row.drafts)
                    self._blocks.setdefault(seq.request_id, []).append(block)
        self._counters.shadow_time_s = self._budget.spent_s

    def end(self, seq: Sequence) -> None:
        """The request was aborted: its blocks are at risk up to its last token."""
        for block in self._blocks.pop(seq.request_id, ()):
            if block.num_verified is not None:
                self._settle(block, seq, has_ended=True)

    def _may_score(self, plan: StepPlan) -> bool:
        """Decode rows alone, at a steady K that leaves something to score."""
        return bool(plan.decode_slots) and not plan.prefill and plan.verify_len == plan.draft_len < self._max_draft_len

    def _score(self, seq: Sequence, num_verified: int) -> None:
        """The request's newest tokens are known; its row of this step verified so many drafts."""
        blocks = self._blocks.get(seq.request_id)
        if blocks is None:
            return
        has_ended = seq.state is SequenceState.FINISHED
        for block in blocks:
            if block.num_verified is None:
                block.num_verified = num_verified
        waiting = [block for block in blocks if not self._settle(block, seq, has_ended=has_ended)]
        if waiting:
            self._blocks[seq.request_id] = waiting
        else:
            del self._blocks[seq.request_id]

    def _settle(self, block: _Block, seq: Sequence, *, has_ended: bool) -> bool:
        """Compares what is there. True: the block is done and counted."""
        assert block.num_verified is not None
        num_known = len(seq.token_ids) - block.start
        num_drafts = len(block.drafts)
        while (
            block.num_right < min(num_known, num_drafts)
            and seq.token_ids[block.start + block.num_right] == block.drafts[block.num_right]
        ):
            block.num_right += 1
        is_decided = block.num_right == num_drafts or block.num_right < num_known
        if not is_decided and not has_ended:
            return False
        self._counters.record_shadow(
            num_program_rows=block.key[0],
            verify_len=block.key[1],
            num_verified=block.num_verified,
            num_drafted=num_drafts if is_decided else block.num_right,
            num_accepted=block.num_right,
        )
        return True


def _key(plan: StepPlan) -> Key:
    return len(plan.decode_slots), plan.verify_len
