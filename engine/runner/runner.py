"""ModelRunner: executes step plans on one rank. Owns tensors; knows no queues, no requests' text, no Ray.

Guard rail: only what every model and every step needs belongs here. A feature that needs a branch gets its own file.
"""

import time
from collections import deque

import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.engine import EngineConfig
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.runner.agreement import RankAgreement
from engine.runner.batch import InputBuilder, decode_block
from engine.runner.draft_program import DecideAndDraft
from engine.runner.results import row_results
from engine.runner.slots import SlotState
from engine.runner.target_program import TargetProgram
from engine.step import RowResult, StepPlan, StepResult


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
        self._results: deque[StepResult] = deque()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Execute one plan. On a CPU the work is done when this returns; its result waits for `collect`."""
        started = time.perf_counter()
        if plan.zero_blocks:
            self.kv.zero_blocks(plan.zero_blocks)
        self.state.apply(plan)
        decode = None
        if plan.decode_slots:
            slots_R = torch.tensor(plan.decode_slots, device=self._device)
            decode = decode_block(self.state, slots_R, plan.verify_len)
        num_decode = len(plan.decode_slots)
        inputs = self._builder.target_inputs(decode, plan.prefill)
        step = self._target_program.run(inputs, num_decode * (plan.verify_len + 1), plan.prefill)
        decision = self._draft_program.decide(step, decode, plan.prefill, plan.verify_len)
        self._draft_program.write_context(step, decision, num_decode, plan.verify_len)
        if decision is not None:
            self._draft_program.draft(decision.slots_S, plan.draft_len)
        rows: tuple[RowResult, ...] = ()
        if decision is not None:
            assert step.logits_MV is not None
            rows = row_results(decision, self.state, step.logits_MV, plan, self.tp)
        duration_s = time.perf_counter() - started
        self._agreement.check(plan.step_id, decision)
        self._results.append(StepResult(step_id=plan.step_id, rows=rows, duration_s=duration_s))

    def collect(self) -> StepResult:
        """The oldest launched step's result."""
        assert self._results, "collect without a launched step"
        return self._results.popleft()
