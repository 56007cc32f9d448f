"""ModelRunner: executes step plans on one rank. Owns tensors; knows no queues, no requests' text, no Ray.

Guard rail: only what every model and every step needs belongs here. A feature that needs a branch gets its own file.
"""

from collections import deque
from dataclasses import dataclass

import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.engine import EngineConfig
from engine.layers.upload import upload
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.runner.agreement import RankAgreement
from engine.runner.batch import InputBuilder, decode_block
from engine.runner.clock import StepClock
from engine.runner.draft_program import DecideAndDraft, Decision, SamplingNeeds
from engine.runner.results import LogprobRows, row_results
from engine.runner.slots import SlotState
from engine.runner.target_program import TargetProgram
from engine.step import SlotInit, StepPlan, StepResult


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """A step on the device. Everything a later step changes (slot state, block tables) is not in here.

    inits: the sampling rows' requests in plan order. decision, logprobs: None where no row samples, or asked for any.
    """

    plan: StepPlan
    inits: tuple[SlotInit, ...]
    decision: Decision | None
    logprobs: LogprobRows | None
    clock: StepClock


class ModelRunner:
    """Runs T then D for each plan, in launch order; `collect` hands the results back in the same order."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        target: TargetModel,
        drafter: DFlashDrafter | None,
        kv: KvCache,
        tp: TpGroup,
        device: torch.device,
    ) -> None:
        self.config = config
        self.state = SlotState(config, device)
        self.kv = kv
        self.tp = tp
        self._device = device
        self._builder = InputBuilder(config, self.state, device)
        taps = config.drafter.target_layer_ids if config.drafter is not None else ()
        self._target_program = TargetProgram(target, kv, taps)
        self._draft_program = DecideAndDraft(
            config=config, target=target, drafter=drafter, kv=kv, state=self.state, builder=self._builder, tp=tp
        )
        self._agreement = RankAgreement(tp, every_step=config.debug_checks)
        self._launched: deque[_Launched] = deque()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Execute one plan. On a CPU the work is done when this returns; on a device it is queued, and nothing is read
        back but where the ranks are compared."""
        clock = StepClock(self._device)
        if plan.zero_blocks:
            self.kv.zero_blocks(plan.zero_blocks)
        self.state.apply(plan)
        decode = None
        if plan.decode_slots:
            decode = decode_block(self.state, upload(plan.decode_slots, self._device), plan.verify_len)
        num_decode = len(plan.decode_slots)
        slots = (*plan.decode_slots, *[chunk.slot for chunk in plan.prefill if chunk.samples])
        inits = tuple([self.state.init_of(slot) for slot in slots])
        inputs = self._builder.target_inputs(decode, plan.prefill)
        step = self._target_program.run(inputs, num_decode * (plan.verify_len + 1), plan.prefill)
        decision = self._draft_program.decide(step, decode, plan.prefill, plan.verify_len, SamplingNeeds.of(inits))
        self._draft_program.write_context(step, decision, num_decode, plan.verify_len)
        logprobs = None
        if decision is not None:
            assert step.logits_MV is not None
            self._draft_program.draft(decision.slots_S, plan.draft_len)
            # Here and not in `collect`: it may gather over the ranks, and collectives follow the launch order.
            logprobs = LogprobRows.of(decision, inits, step.logits_MV, num_decode, self.tp)
        clock.stop()
        self._agreement.check(plan.step_id, decision)
        self._launched.append(_Launched(plan=plan, inits=inits, decision=decision, logprobs=logprobs, clock=clock))

    def collect(self) -> StepResult:
        """Waits for the oldest launched step that was not collected, and reads it."""
        assert self._launched, "collect without a launched step"
        done = self._launched.popleft()
        rows = () if done.decision is None else row_results(done.decision, done.inits, done.logprobs)
        return StepResult(step_id=done.plan.step_id, rows=rows, duration_s=done.clock.seconds())

    def discard(self) -> None:
        """Forgets the oldest launched step without waiting for it: on ranks whose results nobody reads."""
        assert self._launched, "discard without a launched step"
        self._launched.popleft()
