"""T and D of decode rows as fixed-shape programs, one pair per (bucket of rows, draft length).

A batch of r rows runs in the smallest bucket R >= r; the rows beyond r are the filler slot's, which is always finished
and writes to the null block. All a step brings is one packed upload (`engine.runner.step_upload`). The program's width
is the plan's draft_len: a verify that is shorter, as after a schedule's rise, runs at that width under the limit.

A mixed step's prompts run as rows as well (`engine.runner.pieces`), for which there are buckets beyond max_num_seqs.
Its D is in two: what is decided, of all rows, then the drafts, of the bucket of those whose token was drawn.
"""

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.context import AttentionContext
from engine.config.engine import EngineConfig
from engine.kernels.row_state import HostResults
from engine.row_buckets import row_buckets
from engine.runner.batch import DecodeBlock, ForwardInputs, InputBuilder, decode_block
from engine.runner.draft_program import DecideAndDraft, Decision, SamplingNeeds
from engine.runner.fused_rows import FusedRows
from engine.runner.pieces import may_mix, most_rows, num_pieces, saves_time
from engine.runner.recorder import Program, Recorder
from engine.runner.results import NUM_COUNTS, ResultEntry, ResultRows, pack
from engine.runner.slots import SlotState, SlotTraits
from engine.runner.step_upload import ProgramShape, StepUpload
from engine.runner.target_program import TargetProgram, TargetStep
from engine.sampling.filters import FilterFlags
from engine.step import BlockTableUpdate, StepPlan

logger = logging.getLogger(__name__)


_FILTERS = int(SlotTraits.FILTERS)  # plain: members of a flag are joined by Python code
_DRAWS = int(SlotTraits.DRAWS | SlotTraits.MASKS_STOPS)


class Variant(enum.Enum):
    """Which sampling a D program contains. A row that asks for less is not changed by more."""

    GREEDY = SamplingNeeds(filters=FilterFlags(all_greedy=True, any_filter=False, sort_width=1), mask_stops=False)
    DRAW = SamplingNeeds(filters=FilterFlags(all_greedy=False, any_filter=False, sort_width=1), mask_stops=True)
    FILTER = SamplingNeeds(filters=FilterFlags(all_greedy=False, any_filter=True, sort_width=0), mask_stops=True)

    @classmethod
    def of(cls, traits: int) -> "Variant":
        """The smallest variant for rows with these SlotTraits."""
        if traits & _FILTERS:
            return cls.FILTER
        return cls.DRAW if traits & _DRAWS else cls.GREEDY


_ROWS_OF_ONE = 4  # up to so many rows a step may be one graph: what lies between two counts there
# Few for mixed steps, to have few programs: of those that draw, the one that suits all.
_MIXED_VARIANTS = (Variant.GREEDY, Variant.FILTER)


def program_shapes(config: EngineConfig) -> tuple[ProgramShape, ...]:
    """Of all T programs of an engine: decode rows at every width, and the larger ones of mixed steps."""
    largest, shapes = config.max_num_seqs, []
    # FlashInfer's kernel ends a row at its first column without a draft: the last piece of a prompt would get no token.
    has_chains = config.draft_sampling == "probabilistic"
    for width in config.draft_len_choices:
        most = 0 if has_chains else most_rows(largest, width)
        larger = [rows for rows in row_buckets(most) if rows > largest] if most else []
        shapes += [
            ProgramShape(num_rows=rows, width=width, takes_pieces=bool(most) and rows > 1)
            for rows in (*row_buckets(largest), *larger)
        ]
    return tuple(shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOutput:
    """What T left for whoever looks at it before D, or after: cut to the rows of the batch."""

    step: TargetStep
    decode: DecodeBlock


class _DecodePair:
    """T and the variants of D for one (rows, width).

    run_step: T and the greedy D in one, of few rows, where programs are recorded.
    run_draft: D of decode steps. run_decide: of mixed ones, all but the drafts. run_drafts_alone: of so many rows.
    """

    def __init__(self, owner: "DecodePrograms", shape: ProgramShape) -> None:
        self._owner, self.shape = owner, shape
        self._num_rows, self._width = shape.num_rows, shape.width
        self._host = host = owner.upload.host(shape)
        if host is not None:
            self._slots_R, self._size_R = host.slots_R, host.size_R
        else:
            self._pieces = owner.upload.pieces(shape)
            self._slots_R = owner.upload.slots_R(shape)
            self._size_R = None if self._pieces is None else self._pieces.size_R
        self._step: TargetStep | None = None
        self._decode: DecodeBlock | None = None
        self.run_step: Program | None = None
        self.run_draft: dict[Variant, Program] = {}
        self.run_decide: dict[Variant, Program] = {}
        self.run_drafts_alone: dict[Variant, Program] = {}

    @property
    def num_programs(self) -> int:
        decode = 1 + (self.run_step is not None) + len(self.run_draft)
        return decode + len(self.run_decide) + len(self.run_drafts_alone)

    def record(self, recorder: Recorder) -> None:
        owner = self._owner
        if recorder.records and self._num_rows <= min(_ROWS_OF_ONE, owner.max_num_seqs):
            self.run_step = recorder.record(self._whole_step)
        self.run_target = recorder.record(self._target)
        if self._num_rows <= owner.max_num_seqs:
            self.run_draft = {variant: recorder.record(self._draft_program(variant)) for variant in Variant}
        if self._size_R is not None:
            for variant in _MIXED_VARIANTS:
                self.run_decide[variant] = recorder.record(self._decide_program(variant, self._size_R))
        if self._num_rows <= owner.max_num_seqs and self._width in owner.mixed_widths:
            for variant in owner.drafts_variants:
                self.run_drafts_alone[variant] = recorder.record(self._drafts_program(variant))
        if self._step is not None and self._decode is not None:
            # The programs know where their inputs lie; from here on the memory may serve other pairs as well.
            self._step, self._decode = _borrowed(self._step, self._decode, recorder)

    def _target(self) -> None:
        owner, state = self._owner, self._owner.state
        if self._host is not None:
            assert owner.fused is not None
            decode, inputs = owner.fused.host_inputs(self._host, self._width)
            self._decode = replace(decode, results=owner.host_results(self._num_rows))
        else:
            state.block_table.view(-1).index_copy_(0, *owner.upload.table_changes(self.shape))
            limit_1 = owner.upload.limit_1
            self._decode = decode_block(state, self._slots_R, self._width, limit_1=limit_1, pieces=self._pieces)
            inputs = owner.builder.target_inputs(self._decode, (), has_pieces=self._pieces is not None)
        self._step = owner.target_program.run_decode(inputs)

    def _whole_step(self) -> None:
        self._target()
        self._draft_program(Variant.GREEDY)()

    def _draft_program(self, variant: Variant) -> Program:
        def run() -> None:
            owner = self._owner
            assert self._step is not None
            decision = owner.draft_program.decide(self._step, self._decode, (), self._width, variant.value)
            assert decision is not None
            owner.draft_program.write_context(self._step, decision, self._num_rows, self._width)
            owner.draft_program.draft_after(decision, self._width, variant.value.filters)
            owner.send_results(decision, self._num_rows, self._width)

        return run

    def _decide_program(self, variant: Variant, size_R: torch.Tensor) -> Program:
        num = min(self._num_rows, self._owner.max_num_seqs)  # the rows whose token is drawn are among the first

        def run() -> None:
            owner = self._owner
            assert self._step is not None and self._decode is not None
            decode = replace(self._decode, size_R=size_R)
            decision = owner.draft_program.decide(self._step, decode, (), self._width, variant.value)
            assert decision is not None
            owner.draft_program.write_context(self._step, decision, self._num_rows, self._width)
            owner.send_results(decision, num, self._width)
            draws_nothing_R = size_R[:num] > 0
            owner.drafted_slots[:num].copy_(self._slots_R[:num].masked_fill(draws_nothing_R, owner.state.filler_slot))

        return run

    def _drafts_program(self, variant: Variant) -> Program:
        owner, slots_S = self._owner, self._owner.drafted_slots[: self._num_rows]
        return lambda: owner.draft_program.draft(slots_S, self._width, variant.value.filters)

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
    memory: of the results on the host, which D of fused rows writes itself; None: nobody does.
    results: int32, rows as `pack` makes them, one behind the other, where the host copies them.
    drafted_slots: of a mixed step, the slots that get drafts, and filler slots behind them.
    mixes: steps that could be mixed are. num_mixed: those that were.
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
        memory: torch.Tensor | None,
        only_pairs: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.state, self.builder = state, builder
        self.target_program, self.draft_program = target_program, draft_program
        reads_host = fused is not None and fused.reads_host
        self.fused, self._memory, self._device = fused, memory if reads_host else None, device
        self.max_num_seqs = largest = config.max_num_seqs
        shapes = [s for s in program_shapes(config) if only_pairs is None or (s.num_rows, s.width) in only_pairs]
        self.upload = StepUpload(shapes, state, device, from_host=reads_host)
        columns = NUM_COUNTS + config.max_draft_len + 1
        self.results = torch.zeros(largest * columns, dtype=torch.int32, device=device)
        self.drafted_slots = torch.full((largest,), state.filler_slot, dtype=torch.int64, device=device)
        # Greedy drafts are the same in every variant.
        self.drafts_variants = _MIXED_VARIANTS[:1] if config.draft_sampling == "greedy" else _MIXED_VARIANTS
        self.mixed_widths = {shape.width for shape in shapes if shape.takes_pieces}
        self.mixes, self.num_mixed = True, 0
        self._recorder = recorder
        buckets = row_buckets(largest)
        self._bucket_of = [min(b for b in buckets if b >= rows) for rows in range(1, largest + 1)]
        self._pairs = {(shape.num_rows, shape.width): _DecodePair(self, shape) for shape in shapes}
        self._mixed_buckets = {
            width: sorted([s.num_rows for s in shapes if s.width == width and s.takes_pieces])
            for width in self.mixed_widths
        }

    def record(self, progress: Callable[[str], None]) -> None:
        """Records every pair, that of the most tokens first, so that the others fit into its memory.

        In another order each that is larger than those before takes memory of its own, and keeps it.
        """
        started = time.perf_counter()
        pairs = sorted(self._pairs.values(), key=lambda pair: pair.shape.num_tokens, reverse=True)
        for number, pair in enumerate(pairs):
            rows, width = pair.shape.num_rows, pair.shape.width
            progress(f"recording decode programs: {number + 1} of {len(pairs)} ({rows} rows, {width} drafts)")
            self._settle()  # what was recorded before may still run, and read its numbers
            self.upload.send_filler(pair.shape)
            pair.record(self._recorder)
        self._settle()
        self.upload.resume()
        logger.info(
            "Decode programs: %d, for steps of up to %s rows and drafts up to %d, recorded in %.1f s",
            sum([pair.num_programs for pair in self._pairs.values()]),
            max(rows for rows, _ in self._pairs),
            max(width for _, width in self._pairs),
            time.perf_counter() - started,
        )

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def expect(self, entry: ResultEntry, num_rows: int, width: int) -> ResultRows | None:
        """Where the next step's first rows will be in its entry, if D writes them there. None: it leaves them in
        `packed`."""
        if self._memory is None:
            return None
        return entry.expect(num_rows, NUM_COUNTS + width + 1, self.upload.number)

    def host_results(self, num_rows: int) -> HostResults | None:
        """Where D of so many rows writes them."""
        if self._memory is None:
            return None
        num_read = min(num_rows, self.max_num_seqs)  # a mixed step's other rows draw nothing
        return HostResults(memory=self._memory, numbers_C=self.upload.numbers_C, num_rows=num_read)

    def send_results(self, decision: Decision, num_rows: int, width: int) -> None:
        """The end of D, for its first rows."""
        if self._memory is None:
            self.packed(num_rows, width).copy_(pack(decision)[:num_rows])

    def run_target(
        self, plan: StepPlan, updates: Sequence[BlockTableUpdate], place: int, variant: Variant | None
    ) -> _DecodePair:
        """Uploads the step and runs T for its decode rows.

        updates: which `fits` allows. place: of the step's results on the host, where `expect` says so. variant: of
        `run_draft`, where that follows at once: it may be done then. None: somebody looks at what T made.
        """
        slots = plan.decode_slots
        assert plan.verify_len <= plan.draft_len, f"a verify longer than what the step drafts: {plan}"
        pair = self._pairs[self._bucket_of[len(slots) - 1], plan.draft_len]
        self.upload.send(pair.shape, limit=plan.verify_len, slots=slots, updates=updates, place=place)
        if pair.run_step is not None and variant is Variant.GREEDY:
            pair.run_step()
        else:
            pair.run_target()
        return pair

    def run_draft(self, pair: _DecodePair, variant: Variant) -> None:
        """Runs D where `run_target` left it. The batch's result rows are on the host then where `expect` says so, else
        in `packed`."""
        if pair.run_step is None or variant is not Variant.GREEDY:
            pair.run_draft[variant]()

    def takes_mixed(self, plan: StepPlan) -> bool:
        """Whether `run_mixed` may run this plan, whose changes of state are applied, and is worth it."""
        if not self.mixes or not may_mix(plan, self._traits_of(plan)):
            return False
        num_rows, num_decode = self._mixed_rows(plan), len(plan.decode_slots)
        return num_rows is not None and saves_time(plan, num_rows, self._bucket_of[num_decode - 1] if num_decode else 0)

    def run_mixed(self, plan: StepPlan, place: int) -> torch.Tensor:
        """T and D of a step with prompts among the rows. Returns `packed`, with a row for each prompt that ended behind
        those of the decode rows. Only where `takes_mixed`. place: as for `run_target`."""
        num_rows, width = self._mixed_rows(plan), plan.draft_len
        assert num_rows is not None and plan.verify_len <= width, plan
        self.num_mixed += 1
        pair = self._pairs[num_rows, width]
        slots, prefill = plan.decode_slots, plan.prefill
        self.upload.send(pair.shape, limit=plan.verify_len, slots=slots, prefill=prefill, place=place)
        pair.run_target()
        variant = Variant.GREEDY if Variant.of(self._traits_of(plan)) is Variant.GREEDY else Variant.FILTER
        pair.run_decide[variant]()
        num_drawn = len(plan.decode_slots) + sum([chunk.samples for chunk in plan.prefill])
        assert num_drawn, f"drafts for nobody: {plan}"
        drafts = self._pairs[self._bucket_of[num_drawn - 1], width].run_drafts_alone
        drafts[variant if variant in drafts else Variant.GREEDY]()
        return self.packed(num_drawn, width)

    def _traits_of(self, plan: StepPlan) -> int:
        """Of the requests that get a token: what others ask for costs their neighbours nothing yet."""
        return self.state.traits_of([*plan.decode_slots, *[chunk.slot for chunk in plan.prefill if chunk.samples]])

    def _mixed_rows(self, plan: StepPlan) -> int | None:
        """Rows of the smallest program that holds a mixed step. None: there is none."""
        needed = len(plan.decode_slots) + num_pieces(plan.prefill, plan.draft_len)
        return next((rows for rows in self._mixed_buckets.get(plan.draft_len, ()) if rows >= needed), None)

    def packed(self, num_rows: int, width: int) -> torch.Tensor:
        """The first rows of a program of this width, [num_rows, NUM_COUNTS + width + 1]: a view that the next step
        overwrites."""
        columns = NUM_COUNTS + width + 1
        return self.results[: num_rows * columns].view(num_rows, columns)


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
            last_R=None,
            fused=None,
            results=None,
        ),
    )
