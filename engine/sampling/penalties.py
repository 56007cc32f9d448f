"""Repetition, presence and frequency penalties on the rows of a verify block.

Column j of a block is drawn after drafts 1..j, so they count as output there; columns whose drafts are rejected are
never used. With n(id) the number of times the output holds an id:

    repetition  logit / r if the logit is positive, else logit * r     for ids of the prompt or with n > 0
    frequency   - f * n
    presence    - p                                                    for ids with n > 0

The order is vLLM's. Every id's new logit depends on its own logit and counts alone, in the same operations whatever
drafts were made, so drafts cannot change a token.

Shape letters: P penalised rows, Q = K + 1 columns, K drafts, V local vocabulary shard, E emitted columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.upload import upload
from engine.sampling.vocab_place import VocabPlace
from engine.step import LogitsRules, SlotInit

_MAX_ELEMENTS = 1 << 24  # of one temporary, 64 MiB of float32: larger batches go a few rows at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyRows:
    """What P rows have said, and how it counts. counts_PV int32, in_prompt_PV bool; the factors are float32 [P].

    any_repetition, any_additive: host flags, whether a row has a repetition penalty, or one of the other two.
    """

    counts_PV: Tensor
    in_prompt_PV: Tensor
    repetition_P: Tensor
    presence_P: Tensor
    frequency_P: Tensor
    any_repetition: bool
    any_additive: bool

    def penalised(self, logits: Tensor, counts: Tensor, in_prompt: Tensor) -> Tensor:
        """New logits from equally shaped (or broadcasting) logits, counts and prompt flags, rows first."""
        row_shape = (-1, *[1] * (logits.dim() - 1))
        said = counts > 0
        if self.any_repetition:
            factor = torch.where(said | in_prompt, self.repetition_P.view(row_shape), 1.0)
            logits = torch.where(logits > 0, logits / factor, logits * factor)
        if self.any_additive:
            logits = logits - (
                self.frequency_P.view(row_shape) * counts + self.presence_P.view(row_shape) * said.to(torch.float32)
            )
        return logits


def penalise_block(logits_PQV: Tensor, rows: PenaltyRows, drafts_PK: Tensor, vocab_start: int) -> None:
    """Applies the rows' penalties in place; drafts_PK: int64 global ids, K = Q - 1.

    The block's own drafts change the counts of at most K ids per row, so all columns are first penalised by what the
    rows had said before the block, and then those ids are set anew.
    """
    vocab = logits_PQV.shape[2]
    num_columns, num_drafts = logits_PQV.shape[1], drafts_PK.shape[1]
    # A draft of another rank's shard is moved to an id of this one, which is set to what it has already.
    local_PK = (drafts_PK - vocab_start).clamp(0, vocab - 1)
    local_PQK = local_PK[:, None, :].expand(-1, num_columns, -1)
    raw_PQK = logits_PQV.gather(2, local_PQK)
    logits_PQV.copy_(rows.penalised(logits_PQV, rows.counts_PV[:, None], rows.in_prompt_PV[:, None]))
    if num_drafts == 0:
        return
    is_before_QK = (
        torch.arange(num_drafts, device=drafts_PK.device) < torch.arange(num_columns, device=drafts_PK.device)[:, None]
    )
    is_same_PKK = drafts_PK[:, :, None] == (local_PK + vocab_start)[:, None, :]  # [p, i, k]: draft i is probed id k
    in_block_PQK = (is_before_QK[None, :, :, None] & is_same_PKK[:, None]).sum(dim=2)
    counts_PQK = rows.counts_PV.gather(1, local_PK)[:, None, :] + in_block_PQK
    in_prompt_PQK = rows.in_prompt_PV.gather(1, local_PK)[:, None, :]
    # Where two drafts are one id both write the same value.
    logits_PQV.scatter_(2, local_PQK, rows.penalised(raw_PQK, counts_PQK, in_prompt_PQK))


class Penalties:
    """The counts of every slot, allocated at construction, and the penalties of the rows that ask for them.

    A rank counts the ids of its own vocabulary shard.
    """

    def __init__(self, place: VocabPlace) -> None:
        self._place = place
        self._counts_SV = place.table(place.vocab_size, fill=0, dtype=torch.int32)
        self._in_prompt_SV = place.table(place.vocab_size, fill=False, dtype=torch.bool)
        self._factors_S3 = place.table(3, fill=1.0, dtype=torch.float32)

    @staticmethod
    def concern(rules: LogitsRules) -> bool:
        """Whether a request with these rules takes part."""
        return rules.has_penalty

    def assign(self, init: SlotInit, rules: LogitsRules) -> None:
        """A slot's new request: its prompt, and what it had emitted before a preemption."""
        factors = [rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty]
        self._factors_S3[init.slot] = upload(factors, self._place.device, dtype=torch.float32)
        self._in_prompt_SV[init.slot] = False
        self._counts_SV[init.slot] = 0
        if rules.prompt_ids:
            local_M, is_mine_M = self._place.local(upload(rules.prompt_ids, self._place.device))
            self._in_prompt_SV[init.slot].view(torch.uint8).scatter_add_(0, local_M, is_mine_M.to(torch.uint8))
        if rules.output_ids:
            local_M, is_mine_M = self._place.local(upload(rules.output_ids, self._place.device))
            self._counts_SV[init.slot].scatter_add_(0, local_M, is_mine_M.to(torch.int32))

    def apply(self, logits_PQV: Tensor, slots_P: Tensor, drafts_PK: Tensor, rules_P: Sequence[LogitsRules]) -> None:
        """Penalises the rows in place."""
        any_repetition = any(rules.repetition_penalty != 1.0 for rules in rules_P)
        any_additive = any(rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0 for rules in rules_P)
        step = max(1, _MAX_ELEMENTS // (logits_PQV.shape[1] * logits_PQV.shape[2]))
        for first in range(0, logits_PQV.shape[0], step):
            part = slice(first, first + step)
            repetition_P, presence_P, frequency_P = self._factors_S3[slots_P[part]].unbind(dim=1)
            rows = PenaltyRows(
                counts_PV=self._counts_SV[slots_P[part]],
                in_prompt_PV=self._in_prompt_SV[slots_P[part]],
                repetition_P=repetition_P,
                presence_P=presence_P,
                frequency_P=frequency_P,
                any_repetition=any_repetition,
                any_additive=any_additive,
            )
            penalise_block(logits_PQV[part], rows, drafts_PK[part], self._place.vocab_start)

    def commit(self, slots_P: Tensor, tokens_PE: Tensor, num_emitted_P: Tensor) -> None:
        """Counts the tokens that the step emitted: the first num_emitted of each row."""
        column_E = torch.arange(tokens_PE.shape[1], device=tokens_PE.device)
        local_PE, is_mine_PE = self._place.local(tokens_PE)
        is_new_PE = is_mine_PE & (column_E < num_emitted_P[:, None])
        flat_M = (slots_P[:, None] * self._place.vocab_size + local_PE).flatten()
        self._counts_SV.view(-1).scatter_add_(0, flat_M, is_new_PE.flatten().to(torch.int32))
