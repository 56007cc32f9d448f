"""`SimulatedRunner`: the runner of a device that does not exist. Same plans and results as `engine.runner.runner`.

No weights, no tensors: tokens and accepted drafts come from each request's `RequestStory`, time from the step table.
What a step decides it decides like the real one: a row's own k, the cut at a stop id or at max_len, no drafts past the
drafter's position table. Temperature, filters, penalties and rules on logits have no effect; log-probabilities are
those of a uniform draw.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.config.engine import EngineConfig
from engine.simulated.story import RequestStory
from engine.simulated.timeline import DeviceTimeline
from engine.step import Finish, PrefillChunk, PromptScores, RowResult, SlotInit, StepPlan, StepResult, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class _Slot:
    """The device state of one request. draft_count: drafts made behind the token at committed_len."""

    init: SlotInit
    story: RequestStory
    stop_ids: frozenset[int]
    committed_len: int = 0
    draft_count: int = 0
    finished: bool = False


class SimulatedRunner:
    """Runs plans on a timeline. token_ids: what output is drawn from, at least two.

    timeline: the device's time; default one that sleeps.
    """

    def __init__(
        self, config: EngineConfig, *, token_ids: npt.NDArray[np.int64], timeline: DeviceTimeline | None = None
    ) -> None:
        assert config.simulation is not None and len(token_ids) > 1
        self._config = config
        self._simulation = config.simulation
        self._token_ids = token_ids
        self._logprob = -math.log(len(token_ids))
        self._timeline = timeline or DeviceTimeline(speed=config.simulation.speed)
        self._slots: dict[int, _Slot] = {}
        self._launched: deque[tuple[StepResult, float]] = deque()

    @property
    def simulated_s(self) -> float:
        """Simulated seconds of all steps launched so far."""
        return self._timeline.busy_s

    def launch(self, plan: StepPlan) -> None:
        """Decides what the step does and queues it behind those before it."""
        for init in plan.new_slots:
            self._slots[init.slot] = self._new_slot(init)
        duration_s = self._duration(plan)
        rows = [self._decode(slot, plan) for slot in plan.decode_slots]
        for chunk in plan.prefill:
            self._slots[chunk.slot].committed_len = chunk.start + len(chunk.token_ids)
            if chunk.samples:
                rows.append(self._end_prompt(chunk, plan))
        scores = tuple(self._prompt_scores(chunk) for chunk in plan.prefill if chunk.scored_next)
        result = StepResult(step_id=plan.step_id, rows=tuple(rows), duration_s=duration_s, prompt_scores=scores)
        self._launched.append((result, self._timeline.queue(duration_s)))

    def collect(self) -> StepResult:
        """Waits for the oldest launched step that was not collected."""
        assert self._launched, "collect without a launched step"
        result, deadline_s = self._launched.popleft()
        self._timeline.wait(deadline_s)
        return result

    def discard(self) -> None:
        """Forgets the oldest launched step without waiting for it."""
        assert self._launched, "discard without a launched step"
        self._launched.popleft()

    # ---------------------------------------------------------------------------------------- time

    def _duration(self, plan: StepPlan) -> float:
        """Simulated seconds. A step that verifies another number of drafts than it makes lies between the two."""
        context_tokens = sum(self._slots[slot].committed_len for slot in plan.decode_slots)
        prefill_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        verify_s, draft_s = [
            self._simulation.steps.step_s(
                num_rows=len(plan.decode_slots),
                draft_len=draft_len,
                context_tokens=context_tokens,
                prefill_tokens=prefill_tokens,
            )
            for draft_len in (plan.verify_len, plan.draft_len)
        ]
        return (verify_s + draft_s) / 2

    # ---------------------------------------------------------------------------------------- rows

    def _new_slot(self, init: SlotInit) -> _Slot:
        profile = self._simulation.acceptance
        story = RequestStory(
            seed=init.seed,
            first_position=init.prompt_len,
            kind=profile.classes[profile.class_of(init.seed)],
            token_ids=self._token_ids,
            width=self._config.max_draft_len,
        )
        return _Slot(init=init, story=story, stop_ids=frozenset(init.stop_token_ids))

    def _decode(self, slot: int, plan: StepPlan) -> RowResult:
        state = self._slots[slot]
        if state.finished:
            return RowResult(slot=slot, generation=state.init.generation, token_ids=())
        start = state.committed_len
        k = max(0, min(plan.verify_len, state.draft_count, state.init.max_len - 2 - start))
        num_accepted = min(k, state.story.num_right(start)) if k else 0
        token_ids, finish = self._emit(state, start + 1, num_accepted + 1)
        state.committed_len = start + len(token_ids)
        self._draft(state, plan)
        return self._row(state, plan, token_ids, finish, num_drafted=k, num_accepted=num_accepted)

    def _end_prompt(self, chunk: PrefillChunk, plan: StepPlan) -> RowResult:
        state = self._slots[chunk.slot]
        token_ids, finish = self._emit(state, state.committed_len, 1)
        self._draft(state, plan)
        return self._row(state, plan, token_ids, finish)

    def _emit(self, state: _Slot, position: int, num_tokens: int) -> tuple[list[int], Finish]:
        """Tokens from `position` on, cut at a stop id or at max_len."""
        init = state.init
        token_ids = state.story.tokens(position, position + num_tokens)
        finish = Finish.NONE
        for index, token_id in enumerate(token_ids):
            num_total = position + index + 1
            if token_id in state.stop_ids:
                if num_total > init.min_len:
                    token_ids, finish = token_ids[: index + 1], Finish.STOP
                    break
                token_ids[index] = self._other_than(token_id, state.stop_ids)
            if num_total == init.max_len:
                token_ids, finish = token_ids[: index + 1], Finish.LENGTH
                break
        state.finished = finish is not Finish.NONE
        return token_ids, finish

    def _other_than(self, token_id: int, stop_ids: frozenset[int]) -> int:
        """The token that replaces a masked stop id: the next one that is none."""
        ids = self._token_ids
        at = int(np.searchsorted(ids, token_id))
        for step in range(1, len(ids)):
            other = int(ids[(at + step) % len(ids)])
            if other not in stop_ids:
                return other
        return token_id  # every token that can be drawn is a stop id

    def _draft(self, state: _Slot, plan: StepPlan) -> None:
        drafter = self._config.drafter
        can_draft = (
            drafter is not None
            and not state.finished
            and state.committed_len + self._config.block_width <= drafter.max_position_embeddings
        )
        state.draft_count = plan.draft_len if can_draft else 0

    def _drafts(self, state: _Slot) -> tuple[int, ...]:
        """The tokens of the block that was just made: the right ones, then wrong ones."""
        start, count = state.committed_len, state.draft_count
        num_right = min(count, state.story.num_right(start)) if count else 0
        tokens = state.story.tokens(start + 1, start + 1 + count)
        return (*tokens[:num_right], *[self._other_than(token, frozenset((token,))) for token in tokens[num_right:]])

    def _row(
        self,
        state: _Slot,
        plan: StepPlan,
        token_ids: list[int],
        finish: Finish,
        *,
        num_drafted: int = 0,
        num_accepted: int = 0,
    ) -> RowResult:
        init = state.init
        logprobs = None
        if init.num_logprobs >= 0:
            logprobs = tuple(self._token_logprobs(token_id, init.num_logprobs) for token_id in token_ids)
        return RowResult(
            slot=init.slot,
            generation=init.generation,
            token_ids=tuple(token_ids),
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            finish=finish,
            logprobs=logprobs,
            drafts=self._drafts(state) if plan.report_drafts else (),
        )

    def _prompt_scores(self, chunk: PrefillChunk) -> PromptScores:
        init = self._slots[chunk.slot].init
        logprobs = [self._token_logprobs(token_id, init.num_prompt_logprobs) for token_id in chunk.scored_next]
        return PromptScores(slot=init.slot, generation=init.generation, logprobs=tuple(logprobs))

    def _token_logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """A uniform draw: every token is as likely as the drawn one, which is listed first."""
        ids = self._token_ids
        at = int(np.searchsorted(ids, token_id))
        num_top = min(num_top, len(ids))
        # A prompt's token need not be one that output is drawn from; the drawn ones at its place stand beside it.
        others = [int(ids[(at + step) % len(ids)]) for step in range(num_top + 1)]
        top = (token_id, *[other for other in others if other != token_id])[:num_top]
        return TokenLogprobs(
            token_id=token_id, logprob=self._logprob, rank=1, top_ids=top, top_logprobs=(self._logprob,) * num_top
        )
