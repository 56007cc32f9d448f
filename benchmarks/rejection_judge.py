"""Judge of rejection sampling through the engine: joint distribution of the first tokens, and the drafts accepted.

The exact side is `tests.reference.joint_tokens`. Shape letters: N texts, T positions, V vocabulary.
"""

import dataclasses
import math
from typing import Any

import torch

from engine import LLM, SamplingParams
from tests.reference.joint_tokens import JointTokens, logits_after

ALPHA = 1e-4
GREEDY_EVERY = 8  # rows of a batch: one in so many is greedy


class FirstDrafts:
    """Notes the first draft of every block that will be verified: (request, committed tokens, draft, its distribution).

    Reads the device after every launch. last_len: tokens of a request that ends; with one to go it verifies no draft.
    """

    def __init__(self, llm: LLM, last_len: int) -> None:
        self.notes: list[tuple[int, int, int, torch.Tensor | None]] = []
        self._state, self._last_len = llm._rank.runner.state, last_len
        self._launch = llm._rank.runner.launch
        llm._rank.runner.launch = self._launch_and_note

    def _launch_and_note(self, plan: Any) -> None:
        self._launch(plan)
        state = self._state
        slots = [*plan.decode_slots, *[chunk.slot for chunk in plan.prefill if chunk.samples]]
        if not slots:
            return
        counts, lengths = state.draft_count[slots].tolist(), state.committed_len[slots].tolist()
        tokens = state.draft_tokens[slots, 0].tolist()
        logits_NV = None if state.draft_logits is None else state.draft_logits[slots, 0].double().cpu()
        for i, slot in enumerate(slots):
            if counts[i] and lengths[i] + 2 < self._last_len:
                q_V = None if logits_NV is None else torch.softmax(logits_NV[i], dim=0)
                self.notes.append((state.init_of(slot).seed, lengths[i], tokens[i], q_V))

    def expected(self, exact: JointTokens, outputs: list[list[int]]) -> tuple[float, float]:
        """(mean, variance) of how many of them are accepted: p(draft), or the sum of min(p, q) for draws."""
        prompt_len = len(exact.prompt)
        logits_NTV = logits_after(exact.model, [[*exact.prompt, *tokens] for tokens in outputs])
        mean = variance = 0.0
        for seed, length, token, q_V in self.notes:
            logits_V = logits_NTV[seed, length]
            if seed % GREEDY_EVERY == 0:
                rate = float(int(logits_V.argmax()) == token)
            else:
                p_V = exact.next_token(logits_V, outputs[seed][: length + 1 - prompt_len])
                rate = float(p_V[token] if q_V is None else torch.minimum(p_V, q_V[: p_V.numel()]).sum())
            mean, variance = mean + rate, variance + rate * (1 - rate)
        return mean, variance


def judged(llm: LLM, exact: JointTokens, num_draws: int, *, length: int) -> dict[str, Any]:
    """One row: num_draws requests with seeds 0, 1, ..; every eighth is greedy, the others draw.

    length: tokens that `exact` knows. Their requests go on for three more, so that blocks are longer than it.
    """
    num_tokens = length + 3
    drawn = exact.params
    params = [
        SamplingParams(
            seed=i,
            temperature=drawn.temperature if i % GREEDY_EVERY else 0.0,
            top_k=drawn.top_k,
            top_p=drawn.top_p,
            min_p=drawn.min_p,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(num_draws)
    ]
    runner, before = llm._rank.runner, _first_position(llm)
    launch = runner.launch
    drafts = FirstDrafts(llm, last_len=len(exact.prompt) + num_tokens)
    try:
        outputs = [list(o.outputs[0].token_ids) for o in llm.generate([exact.prompt] * num_draws, params)]
    finally:
        runner.launch = launch
    at_risk, accepted = (a - b for a, b in zip(_first_position(llm), before, strict=True))
    truth = exact.model.generate(
        torch.tensor([exact.prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(exact.prompt) :].tolist()
    greedy_equal = all(tokens == truth for tokens in outputs[::GREEDY_EVERY])
    found = exact.compare([tuple(tokens[:length]) for i, tokens in enumerate(outputs) if i % GREEDY_EVERY])
    mean, variance = drafts.expected(exact, outputs)
    away = (accepted - mean) / max(math.sqrt(variance), 1e-9)
    follows = found.impossible == 0 and found.freedom > 2 and found.p_value > ALPHA
    return {
        **dataclasses.asdict(found),
        "p_value": found.p_value,
        "first_drafts": at_risk,
        "accepted": accepted,
        "expected_accepted": round(mean, 1),
        "standard_deviations_away": round(away, 2),
        "greedy_rows_equal": greedy_equal,
        "ok": follows and len(drafts.notes) == at_risk > 0 and abs(away) < 4.0 and greedy_equal,
    }


def _first_position(llm: LLM) -> tuple[int, int]:
    """(at risk, accepted) of the first drafts of blocks so far."""
    cells = [cell for cell in llm.core.counters().cells if cell.at_risk]
    return sum(cell.at_risk[0] for cell in cells), sum(cell.accepted[0] for cell in cells)
