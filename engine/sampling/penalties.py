"""Repetition, presence and frequency penalties on the rows of a verify block.

Column j of a block is drawn after drafts 1..j, so they count as output there; columns whose drafts are rejected are
never used. With n(id) the number of times the output holds an id:

    repetition  logit / r if the logit is positive, else logit * r     for ids of the prompt or with n > 0
    frequency   - f * n
    presence    - p                                                    for ids with n > 0

The order is vLLM's. Every id's new logit depends on its own logit and counts alone, in the same operations whatever
drafts were made, so drafts cannot change a token. Only ids that were said change, so only they are looked at: those a
request has said (once per distinct id of the prompt, once per token of the output) and the block's drafts. The value
written at an id follows from the counts, so an id may be looked at twice, or needlessly.

Shape letters: P penalised rows, Q = K + 1 columns, K drafts, V local vocabulary shard, E emitted columns, L ids said
before, N = L + K ids looked at.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.upload import upload
from engine.sampling.processed_rows import ProcessedRows, VocabPlace
from engine.step import LogitsRules, SlotInit

_MAX_ELEMENTS = 1 << 24  # of one temporary, 64 MiB of float32: larger batches go a few rows at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyFactors:
    """float32 [P] each. any_repetition, any_additive: known to the host, whether a row has that kind of penalty."""

    repetition_P: Tensor
    presence_P: Tensor
    frequency_P: Tensor
    any_repetition: bool
    any_additive: bool

    def penalised(self, logits_PQN: Tensor, counts_PQN: Tensor, in_prompt_PQN: Tensor) -> Tensor:
        """New logits of ids with these counts in the output and flags of the prompt; shapes broadcast."""
        said_PQN = counts_PQN > 0
        if self.any_repetition:
            factor_PQN = torch.where(said_PQN | in_prompt_PQN, self.repetition_P[:, None, None], 1.0)
            logits_PQN = torch.where(logits_PQN > 0, logits_PQN / factor_PQN, logits_PQN * factor_PQN)
        if self.any_additive:
            logits_PQN = logits_PQN - (
                self.frequency_P[:, None, None] * counts_PQN + self.presence_P[:, None, None] * said_PQN
            )
        return logits_PQN


def counts_in_block(drafts_PK: Tensor, ids_PN: Tensor) -> Tensor:
    """How often drafts 1..j hold each id, int64 [P, K + 1, N]; column j = 0 is zero."""
    is_id_PKN = drafts_PK[:, :, None] == ids_PN[:, None, :]
    none_P1N = is_id_PKN.new_zeros(ids_PN.shape[0], 1, ids_PN.shape[1])
    return torch.cat([none_P1N, is_id_PKN], dim=1).cumsum(dim=1)


class Penalties:
    """The counts of every slot, allocated at construction, and the penalties of the rows that ask for them.

    A rank counts the ids of its own vocabulary shard; what was said it keeps whole.
    """

    def __init__(self, place: VocabPlace, *, max_len: int) -> None:
        """max_len: tokens of a request, prompt and output."""
        self._place = place
        self._counts_SV = place.table(place.vocab_size, fill=0, dtype=torch.int32)
        self._in_prompt_SV = place.table(place.vocab_size, fill=False, dtype=torch.bool)
        self._factors_S3 = place.table(3, fill=1.0, dtype=torch.float32)
        self._said_SH = place.table(max_len + 1, fill=0, dtype=torch.int32)  # the last column takes what is dropped
        self._said_len_S = place.table(fill=0, dtype=torch.int64)
        # What the host knows of the lengths: an upper bound now, and one for all of the request's life.
        self._said_bound = [0] * place.num_slots
        self._said_most = [0] * place.num_slots

    @staticmethod
    def concern(rules: LogitsRules) -> bool:
        """Whether a request with these rules takes part."""
        return rules.has_penalty

    def assign(self, init: SlotInit, rules: LogitsRules) -> None:
        """A slot's new request: its prompt, and what it had emitted before a preemption."""
        slot, device = init.slot, self._place.device
        factors = [rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty]
        self._factors_S3[slot] = upload(factors, device, dtype=torch.float32)
        self._in_prompt_SV[slot] = False
        self._counts_SV[slot] = 0
        said = (*rules.prompt_ids, *rules.output_ids)
        self._said_len_S[slot : slot + 1].fill_(len(said))  # assigning a number to an element waits for the device
        self._said_bound[slot] = len(said)
        self._said_most[slot] = len(rules.prompt_ids) + init.max_len - init.prompt_len
        if not said:
            return
        said_M = upload(said, device)
        self._said_SH[slot, : len(said)] = said_M.to(torch.int32)
        local_M, is_mine_M = self._place.local(said_M)
        prompt = slice(0, len(rules.prompt_ids))
        flags_V = self._in_prompt_SV[slot].view(torch.uint8)
        flags_V.scatter_add_(0, local_M[prompt], is_mine_M[prompt].to(torch.uint8))  # ids are distinct: 0 or 1
        output = slice(len(rules.prompt_ids), len(said))
        self._counts_SV[slot].scatter_add_(0, local_M[output], is_mine_M[output].to(torch.int32))

    def apply(self, logits_PQV: Tensor, rows: ProcessedRows) -> None:
        """Penalises the rows in place."""
        any_repetition = any(rules.repetition_penalty != 1.0 for rules in rows.rules)
        any_additive = any(rules.presence_penalty != 0.0 or rules.frequency_penalty != 0.0 for rules in rows.rules)
        num_said = max(self._said_bound[slot] for slot in rows.slots)
        num_columns = logits_PQV.shape[1]
        step = max(1, _MAX_ELEMENTS // (num_columns * (num_said + num_columns)))
        for first in range(0, logits_PQV.shape[0], step):
            part = slice(first, first + step)
            slots_P, drafts_PK = rows.slots_P[part], rows.drafts_PK[part]
            repetition_P, presence_P, frequency_P = self._factors_S3[slots_P].unbind(dim=1)
            factors = PenaltyFactors(
                repetition_P=repetition_P,
                presence_P=presence_P,
                frequency_P=frequency_P,
                any_repetition=any_repetition,
                any_additive=any_additive,
            )
            ids_PN = torch.cat([self._said_SH[slots_P, :num_said].to(torch.int64), drafts_PK], dim=1)
            # An id of another rank's shard becomes some id of this one, which is set to what it has to be anyway.
            local_PN, _ = self._place.local(ids_PN)
            local_PQN = local_PN[:, None, :].expand(-1, num_columns, -1)
            in_block_PQN = counts_in_block(drafts_PK, local_PN + self._place.vocab_start)
            new_PQN = factors.penalised(
                logits_PQV[part].gather(2, local_PQN),
                self._counts_SV[slots_P[:, None], local_PN][:, None, :] + in_block_PQN,
                self._in_prompt_SV[slots_P[:, None], local_PN][:, None, :],
            )
            logits_PQV[part].scatter_(2, local_PQN, new_PQN)

    def commit(self, rows: ProcessedRows, tokens_PE: Tensor, num_emitted_P: Tensor) -> None:
        """Counts the tokens that the step emitted: the first num_emitted of each row."""
        slots_P1 = rows.slots_P[:, None]
        column_E = torch.arange(tokens_PE.shape[1], device=tokens_PE.device)
        is_new_PE = column_E < num_emitted_P[:, None]
        local_PE, is_mine_PE = self._place.local(tokens_PE)
        flat_M = (slots_P1 * self._place.vocab_size + local_PE).flatten()
        self._counts_SV.view(-1).scatter_add_(0, flat_M, (is_new_PE & is_mine_PE).flatten().to(torch.int32))
        dropped = self._said_SH.shape[1] - 1
        place_PE = torch.where(is_new_PE, self._said_len_S[slots_P1] + column_E, dropped)
        self._said_SH[slots_P1, place_PE] = tokens_PE.to(torch.int32)
        self._said_len_S[rows.slots_P] += num_emitted_P
        for slot in rows.slots:
            self._said_bound[slot] = min(self._said_bound[slot] + tokens_PE.shape[1], self._said_most[slot])
