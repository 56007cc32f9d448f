"""Requests that arrive while others decode, and which of an engine's steps had prompts among their decode rows."""

import random
from dataclasses import dataclass, field

import torch

from engine import LLM, SamplingParams
from engine.request import EngineRequest
from engine.step import StepPlan


@dataclass(kw_only=True)
class Arrival:
    """A request that comes at a step. abort_after: tokens after which its client hangs up."""

    step: int
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None = None


@dataclass(kw_only=True)
class Run:
    """tokens and reasons by request, in order of arrival; the plans of all steps, and of the mixed ones."""

    tokens: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    mixed: list[StepPlan] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)


def arrivals(seed: int, kinds: list[SamplingParams], *, every: int = 2, longest: int = 45) -> list[Arrival]:
    """One request of each kind, every so many steps, some of them two at once."""
    rng = random.Random(seed)
    made, step = [], 0
    for params in kinds:
        prompt = [rng.randrange(200) for _ in range(rng.randrange(1, longest))]
        made.append(Arrival(step=step, prompt=prompt, params=params))
        step += rng.choice((0, every, every + 1))
    return made


def run(llm: LLM, requests: list[Arrival], *, schedules: dict[int, dict[int, int]], last_step: int = 2000) -> Run:
    """Drives the engine until all is done. schedules: step -> draft lengths in force from it on."""
    core, runner, result, step = llm.core, llm._rank.runner, Run(), 0
    launch, programs = runner.launch, runner._decode_programs

    def launch_and_note(plan: StepPlan) -> None:
        result.plans.append(plan)
        launch(plan)

    runner.launch = launch_and_note
    if programs is not None:
        run_mixed = programs.run_mixed

        def note_and_run(plan: StepPlan, place: int) -> torch.Tensor:
            result.mixed.append(plan)
            return run_mixed(plan, place)

        programs.run_mixed = note_and_run
    waiting = list(requests)
    try:
        while (waiting or core.has_work()) and step < last_step:
            if step in schedules:
                version = core.stats().schedule_version
                core.apply_schedule((1, version[1] + 1), schedules[step])
            while waiting and waiting[0].step <= step:
                request = waiting.pop(0)
                name = str(len(result.tokens))
                core.add_request(
                    EngineRequest(request_id=name, prompt_token_ids=tuple(request.prompt), params=request.params)
                )
                result.tokens.append([])
                result.reasons.append(None)
                result.num_cached.append(0)
            for delta in core.step():
                index = int(delta.request_id)
                result.tokens[index] += delta.token_ids
                result.reasons[index] = delta.finish_reason or result.reasons[index]
                if delta.num_cached_tokens is not None:
                    result.num_cached[index] = delta.num_cached_tokens
            for index, request in enumerate(requests[: len(result.tokens)]):
                limit = request.abort_after
                if limit is not None and result.reasons[index] is None and len(result.tokens[index]) >= limit:
                    core.abort(str(index))
            step += 1
    finally:
        runner.launch = launch
        if programs is not None:
            programs.run_mixed = run_mixed
    return result


def context_rows(llm: LLM, slots: list[int]) -> list[torch.Tensor]:
    """K and V, of every layer of both models, of the slots' committed positions (the drafter's, then the target's)."""
    runner = llm._rank.runner
    state, size = runner.state, llm.config.block_size
    rows = []
    for slot in slots:
        position = torch.arange(int(state.committed_len[slot]), device=state.block_table.device)
        at = state.block_table[slot, position // size] * size + position % size
        for k, v in (*runner.kv.drafter_kv, *runner.kv.target_kv):
            rows += [x.flatten(0, 1)[at].cpu() for x in (k, v)]
    return rows
