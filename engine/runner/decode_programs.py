"""T and D of decode-only work as fixed-shape programs, one pair per (bucket of rows, draft length).

A batch of r rows runs in the smallest bucket R >= r; the rows beyond r are the filler slot's, which is always finished
and writes to the null block. All a step brings is one packed upload:

    [0]                    limit of the rows' own drafts (the plan's verify_len, at most the program's width K)
    [1 .. R]               slots
    [R+1 .. R+U]           places in the flattened block table ..
    [R+U+1 .. R+2U]        .. and the block ids they take; unused ones write 0 to the filler slot's table

The program's width is the plan's draft_len: a verify that is shorter, as after a schedule's rise, runs at that width
under the limit.
"""

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.context import AttentionContext
from engine.config.engine import EngineConfig
from engine.runner.batch import DecodeBlock, ForwardInputs, InputBuilder, decode_block
from engine.runner.draft_program import DecideAndDraft, SamplingNeeds
from engine.runner.fused_rows import FusedRows
from engine.runner.recorder import Program, Recorder
from engine.runner.results import NUM_COUNTS, pack
from engine.runner.slots import SlotState, SlotTraits
from engine.runner.target_program import TargetProgram, TargetStep
from engine.runner.upload_ring import UploadRing
from engine.sampling.filters import FilterFlags
from engine.step import StepPlan

logger = logging.getLogger(__name__)


class Variant(enum.Enum):
    """Which sampling a D program contains. A row that asks for less is not changed by more."""

    GREEDY = SamplingNeeds(filters=FilterFlags(all_greedy=True, any_filter=False, sort_width=1), mask_stops=False)
    DRAW = SamplingNeeds(filters=FilterFlags(all_greedy=False, any_filter=False, sort_width=1), mask_stops=True)
    FILTER = SamplingNeeds(filters=FilterFlags(all_greedy=False, any_filter=True, sort_width=0), mask_stops=True)

    @classmethod
    def of(cls, traits: int) -> "Variant":
        """The smallest variant for rows with these SlotTraits."""
        if traits & SlotTraits.FILTERS:
            return cls.FILTER
        return cls.DRAW if traits & (SlotTraits.DRAWS | SlotTraits.MASKS_STOPS) else cls.GREEDY


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Ascending: powers of two, from 8 on with three values between, and max_num_seqs itself.

    A batch pays for its bucket's rows. Beyond 8 requests of 8 tokens or more a GPU computes longer than it reads, so
    rows cost time there; recording another bucket costs a tenth of a second.
    """
    powers = [1 << n for n in range(max_num_seqs.bit_length())]
    between = [power * quarter // 4 for power in powers if power >= 8 for quarter in (5, 6, 7)]
    return tuple(sorted({*[n for n in (*powers, *between) if n < max_num_seqs], max_num_seqs}))


def num_table_entries(num_rows: int) -> int:
    """U, block-table changes that an upload has room for: two a row, as a verify of 16 tokens can fill, and some."""
    return 2 * num_rows + 6


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOutput:
    """What T left for whoever looks at it before D, or after: cut to the rows of the batch."""

    step: TargetStep
    decode: DecodeBlock


class _DecodePair:
    """T and the variants of D for one (rows, width)."""

    def __init__(self, owner: "DecodePrograms", num_rows: int, width: int) -> None:
        self._owner = owner
        self._num_rows, self._width = num_rows, width
        upload, end = owner.upload.device, 1 + num_rows
        self._limit_1, self._slots_R = upload[:1], upload[1:end]
        num_entries = num_table_entries(num_rows)
        self._entries_U, self._block_ids_U = upload[end : end + 2 * num_entries].view(2, num_entries).unbind()
        self._step: TargetStep | None = None
        self._decode: DecodeBlock | None = None

    def record(self, recorder: Recorder) -> None:
        self.run_target = recorder.record(self._target)
        self.run_draft = {variant: recorder.record(self._draft_program(variant)) for variant in Variant}
        if self._step is not None and self._decode is not None:
            # The programs know where their inputs lie; from here on the memory may serve other pairs as well.
            self._step, self._decode = _borrowed(self._step, self._decode, recorder)

    def _target(self) -> None:
        owner, state = self._owner, self._owner.state
        state.block_table.view(-1).index_copy_(0, self._entries_U, self._block_ids_U)
        if owner.fused is not None:
            self._decode, inputs = owner.fused.target_inputs(self._slots_R, self._width, self._limit_1)
        else:
            self._decode = decode_block(state, self._slots_R, self._width, limit_1=self._limit_1)
            inputs = owner.builder.target_inputs(self._decode, ())
        self._step = owner.target_program.run_decode(inputs)

    def _draft_program(self, variant: Variant) -> Program:
        def run() -> None:
            owner = self._owner
            assert self._step is not None
            decision = owner.draft_program.decide(self._step, self._decode, (), self._width, variant.value)
            assert decision is not None
            owner.draft_program.write_context(self._step, decision, self._num_rows, self._width)
            owner.draft_program.draft_after(decision, self._width, variant.value.filters)
            owner.packed(self._num_rows, self._width).copy_(pack(decision))

        return run

    def output(self, num_rows: int) -> DecodeOutput:
        """T's results for the first rows, valid until another pair runs."""
        assert self._step is not None and self._decode is not None
        decode, step, tokens = self._decode, self._step, num_rows * (self._width + 1)
        logits_MV = self._owner.target_program.logits_of(step)
        inputs = ForwardInputs(
            ids_N=step.inputs.ids_N[:tokens],
            positions_N=step.inputs.positions_N[:tokens],
            context=AttentionContext(slot_mapping_N=step.inputs.context.slot_mapping_N[:tokens], groups=()),
        )
        return DecodeOutput(
            step=TargetStep(
                inputs=inputs,
                logits_MV=logits_MV[:tokens],
                taps_NTH=None if step.taps_NTH is None else step.taps_NTH[:tokens],
            ),
            decode=DecodeBlock(
                slots_R=decode.slots_R[:num_rows],
                drafts_RK=decode.drafts_RK[:num_rows],
                k_R=decode.k_R[:num_rows],
                committed_R=decode.committed_R[:num_rows],
                finished_R=decode.finished_R[:num_rows],
            ),
        )


class DecodePrograms:
    """All pairs of one engine, and the buffers they share.

    only_pairs: the (rows, width) to record, all by default.
    upload: where each step's numbers arrive. results: int32, rows as `pack` makes them, one behind the other.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        state: SlotState,
        builder: InputBuilder,
        target_program: TargetProgram,
        draft_program: DecideAndDraft,
        fused: FusedRows | None,
        recorder: Recorder,
        device: torch.device,
        only_pairs: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.state, self.builder = state, builder
        self.target_program, self.draft_program = target_program, draft_program
        self.fused = fused
        largest = config.max_num_seqs
        self.upload = UploadRing(1 + largest + 2 * num_table_entries(largest), device)
        columns = NUM_COUNTS + config.max_draft_len + 1
        self.results = torch.zeros(largest * columns, dtype=torch.int32, device=device)
        self._recorder = recorder
        self._buckets = row_buckets(largest)
        self._bucket_of = [min(b for b in self._buckets if b >= rows) for rows in range(1, largest + 1)]
        self._null_entry = state.filler_slot * state.block_table.shape[1]
        self._pairs = {
            (rows, width): _DecodePair(self, rows, width)
            for rows in self._buckets
            for width in config.draft_len_choices
            if only_pairs is None or (rows, width) in only_pairs
        }

    def record(self, progress: Callable[[str], None]) -> None:
        """Records every pair, the largest first, so that the smaller ones fit into its memory."""
        started = time.perf_counter()
        for number, key in enumerate(sorted(self._pairs, reverse=True)):
            rows, width = key
            progress(f"recording decode programs: {number + 1} of {len(self._pairs)} ({rows} rows, {width} drafts)")
            self._send(rows, limit=0, slots=(), entries=(), block_ids=())
            self._pairs[key].record(self._recorder)
        logger.info(
            "Decode programs: %d, for batches up to %s rows and drafts up to %d, recorded in %.1f s",
            len(self._pairs) * (1 + len(Variant)),
            max(rows for rows, _ in self._pairs),
            max(width for _, width in self._pairs),
            time.perf_counter() - started,
        )

    def run_target(self, plan: StepPlan, entries: Sequence[int], block_ids: Sequence[int]) -> _DecodePair:
        """Uploads the step and runs T for its decode rows. entries, block_ids: at most what `has_room` allows."""
        slots = plan.decode_slots
        assert plan.verify_len <= plan.draft_len, f"a verify longer than what the step drafts: {plan}"
        rows = self._bucket_of[len(slots) - 1]
        self._send(rows, limit=plan.verify_len, slots=slots, entries=entries, block_ids=block_ids)
        pair = self._pairs[rows, plan.draft_len]
        pair.run_target()
        return pair

    def run_draft(self, pair: _DecodePair, plan: StepPlan, traits: int) -> torch.Tensor:
        """Runs D and returns the batch's packed result rows, a view that the next step overwrites."""
        pair.run_draft[Variant.of(traits)]()
        return self.packed(len(plan.decode_slots), plan.draft_len)

    def packed(self, num_rows: int, width: int) -> torch.Tensor:
        """The first rows of a program of this width, [num_rows, NUM_COUNTS + width + 1]."""
        columns = NUM_COUNTS + width + 1
        return self.results[: num_rows * columns].view(num_rows, columns)

    def has_room(self, plan: StepPlan, num_entries: int) -> bool:
        """Whether a step's block-table changes fit into its upload."""
        return num_entries <= num_table_entries(self._bucket_of[len(plan.decode_slots) - 1])

    def _send(
        self, rows: int, *, limit: int, slots: Sequence[int], entries: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        room = num_table_entries(rows)
        assert len(entries) <= room, f"{len(entries)} block-table changes, room for {room}"
        array = self.upload.next()
        array[0] = limit
        array[1 : 1 + len(slots)] = slots
        array[1 + len(slots) : 1 + rows] = self.state.filler_slot
        first, end = 1 + rows, 1 + rows + 2 * room
        array[first : first + room] = self._null_entry
        array[first + room : end] = 0
        if entries:
            array[first : first + len(entries)] = entries
            array[first + room : first + room + len(entries)] = block_ids
        self.upload.send(end)


def _borrowed(step: TargetStep, decode: DecodeBlock, recorder: Recorder) -> tuple[TargetStep, DecodeBlock]:
    inputs, borrow = step.inputs, recorder.borrow
    return (
        TargetStep(
            inputs=ForwardInputs(
                ids_N=borrow(inputs.ids_N),
                positions_N=borrow(inputs.positions_N),
                context=AttentionContext(slot_mapping_N=borrow(inputs.context.slot_mapping_N), groups=()),
            ),
            logits_MV=None if step.logits_MV is None else borrow(step.logits_MV),
            taps_NTH=None if step.taps_NTH is None else borrow(step.taps_NTH),
            headless_MH=None if step.headless_MH is None else borrow(step.headless_MH),
        ),
        replace(
            decode,
            drafts_RK=borrow(decode.drafts_RK),
            k_R=borrow(decode.k_R),
            committed_R=borrow(decode.committed_R),
            finished_R=borrow(decode.finished_R),
            fused=None,
        ),
    )
