"""From a step's device decision to host messages: token lists, counts and, where asked for, log-probabilities."""

import torch

from engine.parallel.tp_group import TpGroup
from engine.runner.draft_program import Decision
from engine.runner.slots import SlotState
from engine.sampling.logprobs import to_messages, token_logprobs
from engine.step import Finish, RowResult, StepPlan, TokenLogprobs


def row_results(
    decision: Decision,
    state: SlotState,
    logits_MV: torch.Tensor,
    plan: StepPlan,
    tp: TpGroup,
) -> tuple[RowResult, ...]:
    """One RowResult per sampling row of the plan, in plan order."""
    slots = decision.slots_S.tolist()
    tokens = decision.tokens_SE.tolist()
    emitted = decision.num_emitted_S.tolist()
    accepted = decision.num_accepted_S.tolist()
    drafted = decision.num_drafted_S.tolist()
    finish = decision.finish_S.tolist()
    generations = state.generation[decision.slots_S].tolist()
    logprobs = _logprobs(slots, tokens, emitted, state, logits_MV, plan, tp)
    return tuple(
        RowResult(
            slot=slots[i],
            generation=generations[i],
            token_ids=tuple(tokens[i][: emitted[i]]),
            num_drafted=drafted[i],
            num_accepted=accepted[i],
            finish=Finish(finish[i]),
            logprobs=logprobs.get(i),
        )
        for i in range(len(slots))
    )


def _logprobs(
    slots: list[int],
    tokens: list[list[int]],
    emitted: list[int],
    state: SlotState,
    logits_MV: torch.Tensor,
    plan: StepPlan,
    tp: TpGroup,
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Raw-model log-probabilities of the emitted tokens of the rows that asked, by row."""
    wanted = [(i, state.init_of(slot).num_logprobs) for i, slot in enumerate(slots) if emitted[i]]
    wanted = [(i, top) for i, top in wanted if top >= 0]
    if not wanted:
        return {}
    width = plan.verify_len + 1
    num_decode = len(plan.decode_slots)
    rows: list[int] = []
    ids: list[int] = []
    tops: list[int] = []
    for i, top in wanted:
        first = i * width if i < num_decode else num_decode * width + (i - num_decode)
        rows.extend(range(first, first + emitted[i]))
        ids.extend(tokens[i][: emitted[i]])
        tops.extend([top] * emitted[i])
    device = logits_MV.device
    tensors = token_logprobs(
        logits_MV[torch.tensor(rows, device=device)], torch.tensor(ids, device=device), top_n=max(tops), tp=tp
    )
    messages = to_messages(tensors, tops)
    result: dict[int, tuple[TokenLogprobs, ...]] = {}
    start = 0
    for i, _ in wanted:
        result[i] = messages[start : start + emitted[i]]
        start += emitted[i]
    return result
