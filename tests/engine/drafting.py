"""Test seam: replace what the drafter proposes, so that acceptance of every length can be forced.

The engine promises that a draft never changes what is emitted; these hooks propose the truth, noise, or a mix.
"""

import random
from collections.abc import Callable

import torch

from engine.llm import LLM
from engine.sampling.filters import FilterFlags

Proposal = Callable[[int, int], int]  # (slot, position) -> token id


def propose(llm: LLM, proposal: Proposal) -> None:
    """After every D, overwrite live rows' drafts with `proposal(slot, position)`. Drafter and context run as usual."""
    runner = llm._rank.runner
    program = runner._draft_program
    real = program.draft

    def draft(slots_S: torch.Tensor, plan_draft_len: int, flags: FilterFlags) -> None:
        real(slots_S, plan_draft_len, flags)
        state = runner.state
        for slot in slots_S.tolist():
            count = int(state.draft_count[slot])
            start = int(state.committed_len[slot]) + 1
            for j in range(count):
                state.draft_tokens[slot, j] = proposal(slot, start + j)

    program.draft = draft


def mixed_truth(llm: LLM, truth: dict[int, list[int]], p_right: float, seed: int) -> None:
    """Propose the known continuation with probability p_right per token, otherwise a random id.

    truth: full token sequence (prompt + output) by the request's seed, which names the request on the device.
    """
    rng = random.Random(seed)
    vocab = llm.config.target.vocab_size

    def proposal(slot: int, position: int) -> int:
        tokens = truth[llm._rank.runner.state.init_of(slot).seed]
        if position < len(tokens) and rng.random() < p_right:
            return tokens[position]
        return rng.randrange(vocab)

    propose(llm, proposal)


def spoil(llm: LLM) -> None:
    """Every draft is the mask token, which no target emits: each step accepts nothing."""
    mask = llm.config.drafter.mask_token_id
    propose(llm, lambda slot, position: mask)


def propose_draws(llm: LLM, likely: dict[int, list[int]], seed: int) -> None:
    """Probabilistic drafts of our own: every draft of a drawing row is uniform among the ids that are likely for its
    request (by the request's seed), and the slot state holds that distribution, as it does for the drafter's draws."""
    generator, state = torch.Generator().manual_seed(seed), llm._rank.runner.state
    program = llm._rank.runner._draft_program
    real = program.draft

    def draft(slots_S: torch.Tensor, plan_draft_len: int, flags: FilterFlags) -> None:
        real(slots_S, plan_draft_len, flags)
        for slot in slots_S.tolist():
            init, count = state.init_of(slot), int(state.draft_count[slot])
            if init.temperature == 0.0 or count == 0:
                continue
            ids = torch.tensor(likely[init.seed])
            assert state.draft_logits is not None
            state.draft_logits[slot, :count] = -torch.inf
            state.draft_logits[slot, :count, ids] = 0.0
            state.draft_tokens[slot, :count] = ids[torch.randint(len(ids), (count,), generator=generator)]

    program.draft = draft
