"""ModelRunner: executes step plans on one rank. Owns tensors; knows no queues, no requests' text, no Ray.

Guard rail: only what every model and every step needs belongs here. A feature that needs a branch gets its own file.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.engine import EngineConfig
from engine.layers.upload import upload
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.runner.agreement import RankAgreement
from engine.runner.batch import DecodeBlock, InputBuilder, decode_block
from engine.runner.decode_programs import DecodePrograms, Variant
from engine.runner.draft_program import DecideAndDraft, Decision, SamplingNeeds
from engine.runner.fused_rows import FusedRows
from engine.runner.prompt_programs import PromptPrograms
from engine.runner.prompt_scores import ChunkScores, score_prompts
from engine.runner.recorder import GraphRecorder, Repeater
from engine.runner.reported_drafts import drafts_of, pack_drafts
from engine.runner.results import LogprobRows, ResultEntry, ResultRing, ResultRows, pack, row_results, unpack
from engine.runner.slots import LOOKS_BETWEEN, SlotState
from engine.runner.step_upload import fits
from engine.runner.target_program import TargetProgram, TargetStep
from engine.sampling.processors import LogitsStage
from engine.step import PrefillChunk, RowResult, SlotInit, StepPlan, StepResult


class _Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a step that were decided together. place: where the step's entry will hold their results.

    inits: their requests in plan order. logprobs: None where nobody asked for any. drafts: where their drafts will be,
    if the plan wants them.
    """

    inits: tuple[SlotInit, ...]
    place: ResultRows
    logprobs: LogprobRows | None
    drafts: ResultRows | None = None


class _Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A step on the device. Everything a later step changes (slot state, block tables) is not in here.

    prompt_scores: of the prompt chunks that asked for them.
    """

    plan: StepPlan
    entry: ResultEntry
    rows: list[_Rows]
    prompt_scores: tuple[ChunkScores, ...]


class ModelRunner:
    """Runs T then D for each plan, in launch order; `collect` hands the results back in the same order.

    With decode programs (`config.decode_programs`) decode rows run in programs of fixed shapes. Prompt chunks that suit
    it are rows of these as well (`engine.runner.pieces`), all others run behind the decode rows, in programs of their
    own or in a ragged forward. Without, they share one forward.

    progress: called with a short phase name while programs are recorded. only_pairs: see DecodePrograms; of the prompt
    programs then only the ends are recorded.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        target: TargetModel,
        drafter: DFlashDrafter | None,
        kv: KvCache,
        tp: TpGroup,
        device: torch.device,
        progress: Callable[[str], None] | None = None,
        only_pairs: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.config = config
        fixed_shapes = config.decode_programs != "eager"
        self.state = SlotState(config, device, fixed_shapes=fixed_shapes)
        self.kv = kv
        self.tp = tp
        self._device = device
        self._target = target
        self._builder = InputBuilder(config, self.state, device)
        self._fixed_builder = InputBuilder(config, self.state, device, fixed_shapes=True)
        builder = self._fixed_builder if fixed_shapes else self._builder
        # The kernels on CUDA belong to programs of fixed shapes, those on the CPU take steps as they come.
        is_fused = fixed_shapes == (device.type == "cuda")
        self._fused = FusedRows.create(config, self.state, builder, device) if is_fused else None
        taps = config.drafter.target_layer_ids if config.drafter is not None else ()
        self._target_program = TargetProgram(target, kv, taps)
        self._draft_program = DecideAndDraft(
            config=config,
            target=target,
            drafter=drafter,
            kv=kv,
            state=self.state,
            builder=builder,
            tp=tp,
            fused=self._fused,
        )
        self._logits_stage = LogitsStage(
            num_slots=config.max_num_seqs + 1,
            vocab_size=target.vocab.size,
            vocab_start=target.vocab_start,
            max_len=config.max_model_len,
            enable_penalty=config.enable_penalty,
            device=device,
        )
        self._agreement = RankAgreement(tp, every_step=config.debug_checks)
        self._results = ResultRing(num_rows=config.max_num_seqs, num_columns=config.max_draft_len + 1, device=device)
        # Steps that nobody waits for may still use the host's memory when the runner goes.
        weakref.finalize(self, self._results.wait).atexit = False
        self._launched: deque[_Launched] = deque()
        self._decode_programs: DecodePrograms | None = None
        self._prompt_programs: PromptPrograms | None = None
        if fixed_shapes:
            self._record(progress or (lambda phase: None), only_pairs)

    @torch.inference_mode()
    def _record(self, progress: Callable[[str], None], only_pairs: Sequence[tuple[int, int]] | None) -> None:
        recorder = GraphRecorder(self._device) if self.config.decode_programs == "graphs" else Repeater()
        self._decode_programs = DecodePrograms(
            config=self.config,
            state=self.state,
            builder=self._fixed_builder,
            target_program=self._target_program,
            draft_program=self._draft_program,
            fused=self._fused,
            recorder=recorder,
            device=self._device,
            # Ranks that compare what they decided do so on the device.
            memory=self._results.memory if self.tp.size == 1 else None,
            only_pairs=only_pairs,
        )
        self._prompt_programs = PromptPrograms(
            config=self.config,
            state=self.state,
            builder=self._fixed_builder,
            target_program=self._target_program,
            draft_program=self._draft_program,
            recorder=recorder,
            device=self._device,
            num_parameters=sum([p.numel() for p in self._target.parameters()]),
            only_ends=only_pairs is not None,
        )
        self._prompt_programs.record(progress)
        self._decode_programs.record(progress)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what the programs took when they ran eagerly is of no use to their graphs

    def launch(self, plan: StepPlan) -> None:
        """Execute one plan. On a CPU the work is done when this returns; on a device it is queued, and nothing is read
        back but where the ranks are compared."""
        # Made anew each time: one that is kept leaves the mode on in this thread where an interrupt meets its entrance.
        # As a decorator it costs twice as much.
        with torch.inference_mode():
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        entry = self._results.take()
        self._draft_program.prepare_context(plan)
        if plan.zero_blocks:
            self.kv.zero_blocks(plan.zero_blocks)
        if plan.new_slots:
            self._logits_stage.assign(plan.new_slots)
        if self._decode_programs is None:
            self.state.apply(plan)
            rows, scores = self._run_eagerly(plan, plan.decode_slots, plan.prefill, entry)
        elif self._takes_mixed(self._decode_programs, plan):
            rows, scores = self._run_mixed(self._decode_programs, plan, entry), ()
        else:
            rows, scores = self._run_decode(plan, entry), ()
            if plan.prefill and self._prompt_programs is not None and self._prompt_programs.take(plan.prefill):
                rows += self._run_prompts(self._prompt_programs, plan, entry)
            elif plan.prefill:
                prompt_rows, scores = self._run_eagerly(plan, (), plan.prefill, entry)
                rows += prompt_rows
        entry.clock.stop()
        self._launched.append(_Launched(plan=plan, entry=entry, rows=rows, prompt_scores=scores))

    def _takes_mixed(self, programs: DecodePrograms, plan: StepPlan) -> bool:
        """Whether prompts run among the decode rows. Applies the changes of state of a plan with prompts."""
        if plan.new_slots or plan.prefill:
            self.state.apply(plan)
        return bool(plan.prefill) and programs.takes_mixed(plan)

    def _run_mixed(self, programs: DecodePrograms, plan: StepPlan, entry: ResultEntry) -> list[_Rows]:
        """Decode rows and prompt chunks, in recorded programs."""
        slots = (*plan.decode_slots, *[chunk.slot for chunk in plan.prefill if chunk.samples])
        place = programs.expect(entry, len(slots), plan.draft_len)
        packed = programs.run_mixed(plan, entry.place)
        if self.tp.size > 1:
            self._agreement.check(plan.step_id, unpack(packed, slots))
        return [_Rows(inits=self.state.inits_of(slots), place=place or entry.put(packed), logprobs=None)]

    def _run_decode(self, plan: StepPlan, entry: ResultEntry) -> list[_Rows]:
        """The decode rows, in recorded programs. Applies the changes of state of a plan without prompts."""
        programs, slots, updates = self._decode_programs, plan.decode_slots, plan.block_updates
        assert programs is not None
        if plan.new_slots or plan.prefill:
            updates = ()  # they are applied
        elif fits(updates, slots):
            self.state.note_table(updates)
        else:
            self.state.write_table(updates)
            updates = ()
        if not slots:
            return []
        inits, traits = self.state.inits_of(slots), self.state.traits_of(slots)
        is_eager = traits & LOOKS_BETWEEN
        variant = None if is_eager else Variant.of(traits)
        place = None if is_eager else programs.expect(entry, len(slots), plan.draft_len)
        pair = programs.run_target(plan, updates, entry.place, variant)
        if variant is None:
            output = pair.output(len(inits))
            return self._decide_and_draft(plan, output.step, output.decode, (), plan.draft_len, inits, entry)
        programs.run_draft(pair, variant)
        packed = None
        if place is None:
            packed = programs.packed(len(slots), plan.draft_len)
            place = entry.put(packed)
        drafts = None
        if plan.report_drafts:
            drafts = self._report_drafts(plan, upload(slots, self._device), entry)
        if self.tp.size > 1:
            assert packed is not None, "ranks compare on the device what they decided"
            self._agreement.check(plan.step_id, unpack(packed, slots))
        return [_Rows(inits=inits, place=place, logprobs=None, drafts=drafts)]

    def _run_prompts(self, programs: PromptPrograms, plan: StepPlan, entry: ResultEntry) -> list[_Rows]:
        """The prompt chunks, one behind the other in recorded programs.

        Where the last of them ends a prompt, the step's results leave with its token: a first token does not wait for
        its prompt's context and drafts.
        """
        rows: list[_Rows] = []

        def add(chunk: PrefillChunk, packed: torch.Tensor) -> None:
            if self.tp.size > 1:
                self._agreement.check(plan.step_id, unpack(packed, (chunk.slot,)))
            rows.append(_Rows(inits=self.state.inits_of((chunk.slot,)), place=entry.put(packed), logprobs=None))
            if chunk is plan.prefill[-1]:
                entry.clock.results_sent()

        programs.run(plan.prefill, plan.draft_len, add)
        return rows

    def _run_eagerly(
        self, plan: StepPlan, decode_slots: tuple[int, ...], prefill: tuple[PrefillChunk, ...], entry: ResultEntry
    ) -> tuple[list[_Rows], tuple[ChunkScores, ...]]:
        """These decode rows and prompt chunks in one forward of exactly their shape."""
        decode, verify_len = None, plan.verify_len if decode_slots else 0
        inits = self.state.inits_of((*decode_slots, *[chunk.slot for chunk in prefill if chunk.samples]))
        if decode_slots and not prefill and self._fused is not None:
            decode, inputs = self._fused.target_inputs(upload(decode_slots, self._device), verify_len)
        else:
            if decode_slots:
                decode = decode_block(self.state, upload(decode_slots, self._device), verify_len)
            inputs = self._builder.target_inputs(decode, prefill)
        num_decode_tokens = len(decode_slots) * (verify_len + 1)
        step = self._target_program.run(inputs, num_decode_tokens, prefill)
        rows = self._decide_and_draft(plan, step, decode, prefill, verify_len, inits, entry)
        return rows, score_prompts(
            step.hidden_NH,
            prefill=prefill,
            num_decode_tokens=num_decode_tokens,
            init_of=self.state.init_of,
            target=self._target,
            tp=self.tp,
        )

    def _decide_and_draft(
        self,
        plan: StepPlan,
        step: TargetStep,
        decode: DecodeBlock | None,
        prefill: tuple[PrefillChunk, ...],
        verify_len: int,
        inits: tuple[SlotInit, ...],
        entry: ResultEntry,
    ) -> list[_Rows]:
        """D, not recorded. verify_len: the width of T's decode rows."""
        num_decode = 0 if decode is None else decode.slots_R.shape[0]
        needs = SamplingNeeds.of(inits)
        drawn_from = self._with_rules(step, decode, prefill, inits)
        decision: Decision | None = self._draft_program.decide(drawn_from, decode, prefill, verify_len, needs)
        self._draft_program.write_context(step, decision, num_decode, verify_len, may_wait=plan.draft_len == 0)
        if decision is None:
            return []
        assert step.logits_MV is not None
        self._logits_stage.commit(decision.slots_S, decision.tokens_SE, decision.num_emitted_S, inits)
        self._draft_program.draft_after(decision, plan.draft_len, needs.filters)
        drafts = self._report_drafts(plan, decision.slots_S, entry) if plan.report_drafts else None
        # Here and not in `collect`: it may gather over the ranks, and collectives follow the launch order.
        logprobs = LogprobRows.of(decision, inits, step.logits_MV, num_decode, self.tp)
        self._agreement.check(plan.step_id, decision)
        return [_Rows(inits=inits, place=entry.put(pack(decision)), logprobs=logprobs, drafts=drafts)]

    def _report_drafts(self, plan: StepPlan, slots_S: torch.Tensor, entry: ResultEntry) -> ResultRows:
        return entry.put(pack_drafts(self.state, slots_S, plan.draft_len))

    def _with_rules(
        self,
        step: TargetStep,
        decode: DecodeBlock | None,
        prefill: tuple[PrefillChunk, ...],
        inits: tuple[SlotInit, ...],
    ) -> TargetStep:
        """The step with the logits that tokens are drawn from; the step itself where no request changes them."""
        if not LogitsStage.is_needed(inits):
            return step
        assert step.logits_MV is not None
        logits_MV = self._logits_stage.apply(
            step.logits_MV,
            block_slots_R=None if decode is None else decode.slots_R,
            drafts_RK=None if decode is None else decode.drafts_RK,
            end_slots=[chunk.slot for chunk in prefill if chunk.samples],
            inits=inits,
        )
        return replace(step, logits_MV=logits_MV)

    def collect(self) -> StepResult:
        """Waits for the oldest launched step that was not collected, and reads it."""
        assert self._launched, "collect without a launched step"
        done = self._launched.popleft()
        done.entry.clock.wait()
        results: list[RowResult] = []
        for rows in done.rows:
            drafts = None if rows.drafts is None else drafts_of(done.entry.read(rows.drafts))
            results += row_results(done.entry.read(rows.place), rows.inits, rows.logprobs, drafts)
        return StepResult(
            step_id=done.plan.step_id,
            rows=tuple(results),
            duration_s=done.entry.clock.seconds(),
            prompt_scores=tuple([scores.message() for scores in done.prompt_scores]),
        )

    def discard(self) -> None:
        """Forgets the oldest launched step without waiting for it: on ranks whose results nobody reads."""
        assert self._launched, "discard without a launched step"
        self._launched.popleft()
