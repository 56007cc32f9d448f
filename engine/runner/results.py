"""From a step's device decision to host messages: token lists, counts and, where asked for, log-probabilities."""

import torch

from engine.parallel.tp_group import TpGroup
from engine.runner.draft_program import Decision
from engine.runner.slots import SlotState
from engine.sampling.logprobs import token_logprobs
from engine.step import Finish, RowResult, StepPlan, TokenLogprobs


def row_results(
    decision: Decision,
    state: SlotState,
    logits_MV: torch.Tensor,
    plan: StepPlan,
    tp: TpGroup,
    vocab_start: int,
) -> tuple[RowResult, ...]:
    """One RowResult per sampling row of the plan, in plan order."""
    slots = decision.slots_S.tolist()
    tokens = decision.tokens_SE.tolist()
    emitted = decision.num_emitted_S.tolist()
    accepted = decision.num_accepted_S.tolist()
    drafted = decision.num_drafted_S.tolist()
    finish = decision.finish_S.tolist()
    generations = state.generation[decision.slots_S].tolist()
    logprobs = _logprobs(slots, tokens, emitted, state, logits_MV, plan, tp, vocab_start)
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
    vocab_start: int,
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Raw-model log-probabilities of the emitted tokens of the rows that asked, by row."""
    wanted = [(i, state.inits[s].num_logprobs) for i, s in enumerate(slots) if state.inits[s].num_logprobs >= 0]
    wanted = [(i, top) for i, top in wanted if emitted[i]]
    if not wanted:
        return {}
    width = plan.verify_len + 1
    num_decode = len(plan.decode_slots)
    rows: list[int] = []
    ids: list[int] = []
    for i, _ in wanted:
        first = i * width if i < num_decode else num_decode * width + (i - num_decode)
        rows.extend(range(first, first + emitted[i]))
        ids.extend(tokens[i][: emitted[i]])
    device = logits_MV.device
    found = token_logprobs(
        logits_MV[torch.tensor(rows, device=device)],
        torch.tensor(ids, device=device),
        max(top for _, top in wanted),
        tp,
        vocab_start,
    )
    result: dict[int, tuple[TokenLogprobs, ...]] = {}
    start = 0
    for i, top in wanted:
        entries = found[start : start + emitted[i]]
        start += emitted[i]
        result[i] = tuple(
            TokenLogprobs(
                token_id=e.token_id,
                logprob=e.logprob,
                rank=e.rank,
                top_ids=e.top_ids[:top],
                top_logprobs=e.top_logprobs[:top],
            )
            for e in entries
        )
    return result
