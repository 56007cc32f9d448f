"""Cumulative counts of what speculation did, in a form from which any window's statistics follow by subtraction.

Every count only grows while the engine lives, so a reader that missed, repeated or reordered reports loses nothing.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec


class StepCell(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of the programs of one batch-size bucket (inclusive upper bound) and verify length K.

    rows, tokens:     live rows over all steps, and the tokens they emitted.
    decode_steps, decode_time_s: steps without prefill rows whose verify and draft lengths were equal (the steady
        programs), and their device seconds.
    at_risk[j-1]:     rows whose own k >= j and whose first j-1 drafts were accepted.
    accepted[j-1]:    those of them whose draft j was accepted. A block cut by a stop is at risk up to the cut.
    shadow_at_risk, shadow_accepted: the same for drafts that were compared instead of verified, of blocks made in steps
        of these programs (`engine.speculative.shadow`): positions behind the row's own k. No draft counts in both.
    """

    batch_bucket: int
    draft_len: int
    steps: int
    rows: int
    tokens: int
    decode_steps: int
    decode_time_s: float
    at_risk: tuple[int, ...]
    accepted: tuple[int, ...]
    shadow_at_risk: tuple[int, ...] = ()
    shadow_accepted: tuple[int, ...] = ()


class StepTime(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Seconds of one decode-only step of a program, as measured before it serves."""

    batch_bucket: int
    draft_len: int
    seconds: float


class CounterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All counts since the engine started. Tokens, rows and steps; times in seconds.

    device_time_s: device time of all steps read, prefill included; on a simulated device simulated seconds.
    shadow_time_s: the part of it that shadow scoring took.
    num_drafts, num_draft_tokens, num_accepted_tokens, num_accepted_tokens_per_pos are vLLM's spec_decode counters:
    rows that had drafts at risk, those drafts, those accepted, and the latter by position.
    prefix_cache_queries / prefix_cache_hits: prompt tokens looked up and found, first admissions only.
    prefill_tokens: tokens handed to the device as prefill, recomputation included. prompt_tokens: admitted prompts'.
    prefix_cache_evictions: cached blocks that were given to another owner.
    finished: by finish reason.
    """

    cells: tuple[StepCell, ...]
    num_steps: int
    device_time_s: float
    shadow_time_s: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    prompt_tokens: int
    prefill_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prefix_cache_evictions: int
    finished: dict[str, int]


def batch_bucket(num_rows: int, max_num_seqs: int) -> int:
    """The bucket of a batch size: the next power of two, at most max_num_seqs. Coarser than the programs' own."""
    return min(1 << (num_rows - 1).bit_length(), max_num_seqs) if num_rows else 0


def drafts_at_risk(*, num_tokens: int, num_drafted: int, num_accepted: int) -> tuple[int, int]:
    """(drafted, accepted) of a row as counted: a cut block's drafts past the cut were never at risk.

    A block is cut when it emits fewer tokens than the accepted drafts and the one token of the target's own.
    """
    if num_tokens <= num_accepted:
        return min(num_drafted, num_tokens), num_tokens
    return num_drafted, num_accepted


class _Cell:
    __slots__ = ("decode_steps", "decode_time_s", "outcomes", "rows", "shadows", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.tokens = 0
        self.decode_steps = 0
        self.decode_time_s = 0.0
        self.outcomes: Counter[tuple[int, int]] = Counter()  # (drafted, accepted) -> rows
        self.shadows: Counter[tuple[int, int, int]] = Counter()  # (verified, drafted, accepted) -> blocks


class SpeculationCounters:
    """The live counts. One call per step; positions are expanded from (drafted, accepted) only when read."""

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._cells: dict[tuple[int, int], _Cell] = {}
        self.num_steps = 0
        self.device_time_s = 0.0
        self.shadow_time_s = 0.0
        self.prefill_tokens = 0
        self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    def record_decode(
        self,
        *,
        num_program_rows: int,
        verify_len: int,
        outcomes: list[tuple[int, int]],
        num_tokens: int,
        steady_time_s: float | None,
    ) -> None:
        """One step with decode rows.

        num_program_rows: rows of the program, finished ones included (they cost time). outcomes: (drafted, accepted) of
        each live row. steady_time_s: device time of a decode-only step with equal verify and draft length, else None.
        """
        cell = self._cell(num_program_rows, verify_len)
        cell.steps += 1
        cell.rows += len(outcomes)
        cell.tokens += num_tokens
        counts = cell.outcomes
        for outcome in outcomes:  # not Counter's own `update`, which asks first for the type of what it was given
            counts[outcome] = counts.get(outcome, 0) + 1
        if steady_time_s is not None:
            cell.decode_steps += 1
            cell.decode_time_s += steady_time_s

    def record_shadow(
        self, *, num_program_rows: int, verify_len: int, num_verified: int, num_drafted: int, num_accepted: int
    ) -> None:
        """One block that was compared. num_drafted, num_accepted: of all its drafts, as for a verified block; the first
        num_verified of them are counted there."""
        if num_drafted > num_verified and num_accepted >= num_verified:
            self._cell(num_program_rows, verify_len).shadows[num_verified, num_drafted, num_accepted] += 1

    def _cell(self, num_program_rows: int, verify_len: int) -> _Cell:
        key = (batch_bucket(num_program_rows, self._max_num_seqs), verify_len)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell()
        return cell

    def snapshot(
        self,
        *,
        preemptions: int,
        prompt_tokens: int,
        prefix_cache_queries: int,
        prefix_cache_hits: int,
        prefix_cache_evictions: int,
    ) -> CounterSnapshot:
        """The counts now, joined with those the scheduler and the block pool keep."""
        cells = tuple(_expand(key, self._cells[key]) for key in sorted(self._cells))
        outcomes: Counter[tuple[int, int]] = Counter()
        for cell in self._cells.values():
            outcomes.update(cell.outcomes)
        return CounterSnapshot(
            cells=cells,
            num_steps=self.num_steps,
            device_time_s=self.device_time_s,
            shadow_time_s=self.shadow_time_s,
            num_drafts=sum(num for (drafted, _), num in outcomes.items() if drafted),
            num_draft_tokens=sum(drafted * num for (drafted, _), num in outcomes.items()),
            num_accepted_tokens=sum(accepted * num for (_, accepted), num in outcomes.items()),
            num_accepted_tokens_per_pos=_positions(_unskipped(outcomes))[1],
            prompt_tokens=prompt_tokens,
            prefill_tokens=self.prefill_tokens,
            generation_tokens=self.generation_tokens,
            preemptions=preemptions,
            prefix_cache_queries=prefix_cache_queries,
            prefix_cache_hits=prefix_cache_hits,
            prefix_cache_evictions=prefix_cache_evictions,
            finished=dict(self.finished),
        )


def _unskipped(outcomes: Counter[tuple[int, int]]) -> dict[tuple[int, int, int], int]:
    """Verified blocks: every position of them counts."""
    return {(0, drafted, accepted): num for (drafted, accepted), num in outcomes.items()}


def _positions(outcomes: Mapping[tuple[int, int, int], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(at_risk, accepted) by position from (positions not counted, drafted, accepted) -> rows."""
    width = max((drafted for _, drafted, _ in outcomes), default=0)
    at_risk, accepted = [0] * width, [0] * width
    for (num_skipped, num_drafted, num_accepted), num in outcomes.items():
        for index in range(num_skipped, min(num_drafted, num_accepted + 1)):
            at_risk[index] += num
        for index in range(num_skipped, num_accepted):
            accepted[index] += num
    return tuple(at_risk), tuple(accepted)


def _expand(key: tuple[int, int], cell: _Cell) -> StepCell:
    at_risk, accepted = _positions(_unskipped(cell.outcomes))
    shadow_at_risk, shadow_accepted = _positions(cell.shadows)
    return StepCell(
        batch_bucket=key[0],
        draft_len=key[1],
        steps=cell.steps,
        rows=cell.rows,
        tokens=cell.tokens,
        decode_steps=cell.decode_steps,
        decode_time_s=cell.decode_time_s,
        at_risk=at_risk,
        accepted=accepted,
        shadow_at_risk=shadow_at_risk,
        shadow_accepted=shadow_accepted,
    )
