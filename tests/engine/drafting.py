"""Test seam: replace what the drafter proposes, so that acceptance of every length can be forced.

The engine promises that a draft never changes what is emitted; these hooks propose the truth, noise, or a mix.
"""

import random
from collections.abc import Callable

import torch

from engine.llm import LLM
from engine.runner.draft_program import Decision
from engine.sampling.filters import FilterFlags
from engine.step import StepPlan

Proposal = Callable[[int, int], int]  # (slot, position) -> token id


def after_drafts(llm: LLM, hook: Callable[[torch.Tensor, int], None]) -> Callable[[], None]:
    """Calls hook(slots, draft length of the plan) whenever D has made a step's drafts. Returns what takes it out."""
    program = llm._rank.runner._draft_program
    real, real_after = program.draft, program.draft_after
    told = False

    def draft(slots_S: torch.Tensor, draft_len: int, filters: FilterFlags) -> None:
        nonlocal told
        real(slots_S, draft_len, filters)
        hook(slots_S, draft_len)
        told = True

    def draft_after(decision: Decision, draft_len: int, filters: FilterFlags) -> None:
        nonlocal told
        told = False
        real_after(decision, draft_len, filters)
        if not told:  # fused with the decision: `draft` was not asked
            hook(decision.slots_S, draft_len)

    def take_out() -> None:
        program.draft, program.draft_after = real, real_after

    program.draft, program.draft_after = draft, draft_after
    return take_out


def propose(llm: LLM, proposal: Proposal) -> None:
    """After every D, overwrite live rows' drafts with `proposal(slot, position)`. Drafter and context run as usual."""
    state = llm._rank.runner.state

    def overwrite(slots_S: torch.Tensor, draft_len: int) -> None:
        for slot in slots_S.tolist():
            count = int(state.draft_count[slot])
            start = int(state.committed_len[slot]) + 1
            for j in range(count):
                state.draft_tokens[slot, j] = proposal(slot, start + j)

    after_drafts(llm, overwrite)


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

    def overwrite(slots_S: torch.Tensor, draft_len: int) -> None:
        for slot in slots_S.tolist():
            count = int(state.draft_count[slot])
            if count == 0:  # the slot of filler rows, too, which holds no request
                continue
            init = state.init_of(slot)
            if init.temperature == 0.0:
                continue
            ids = torch.tensor(likely[init.seed])
            assert state.draft_logits is not None
            state.draft_logits[slot, :count] = -torch.inf
            state.draft_logits[slot, :count, ids] = 0.0
            state.draft_tokens[slot, :count] = ids[torch.randint(len(ids), (count,), generator=generator)]

    after_drafts(llm, overwrite)


class Recount:
    """What the engine's counters must say at the end, from the drafts that lie in the slots before every launch and the
    texts that its requests are known to get. By exact match, a draft is accepted where it is the text's own token and
    all before it in its block are.

    texts: full token sequence (prompt + output) by the request's seed. num_drafts: blocks with drafts.
    num_draft_tokens: their drafts, up to the text's end where accepted ones reach it.
    accepted: drafts accepted, by their position in the block.
    """

    def __init__(self, llm: LLM, texts: dict[int, list[int]]) -> None:
        self._runner, self._texts = llm._rank.runner, texts
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted = [0] * llm.config.max_draft_len
        launch = self._runner.launch

        def launch_and_count(plan: StepPlan) -> None:
            for slot in plan.decode_slots:
                self._count(slot, plan.verify_len)
            launch(plan)

        self._runner.launch = launch_and_count

    def _count(self, slot: int, verify_len: int) -> None:
        state = self._runner.state
        if bool(state.finished[slot]):
            return
        init, committed = state.init_of(slot), int(state.committed_len[slot])
        count = min(verify_len, int(state.draft_count[slot]), init.max_len - 2 - committed)
        drafts = state.draft_tokens[slot, : max(count, 0)].tolist()
        self.num_drafts += bool(drafts)
        text = self._texts[init.seed][committed + 1 :]
        right = 0
        while right < min(len(drafts), len(text)) and drafts[right] == text[right]:
            self.accepted[right] += 1
            right += 1
        self.num_draft_tokens += right if right == len(text) else len(drafts)
