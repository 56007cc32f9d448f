"""Logit bias, allowed token ids and bad words on the rows of a verify block.

Each keeps a table of what the slots' requests asked, padded with -1 and widened when a request asks for more: the stage
they belong to runs eagerly, so the tables' addresses may change.

Shape letters: S slots, P rows that asked, Q = K + 1 columns, K drafts, V local vocabulary shard, E emitted columns; B
entries per slot, L ids in front of a bad word's last one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.layers.upload import upload
from engine.sampling.processed_rows import ProcessedRows, VocabPlace
from engine.step import LogitsRules, SlotInit


class LogitBias:
    """Adds a request's biases to its logits."""

    def __init__(self, place: VocabPlace) -> None:
        self._place = place
        self._ids_SB = place.table(1, fill=-1, dtype=torch.int64)
        self._values_SB = place.table(1, fill=0.0, dtype=torch.float32)

    @staticmethod
    def concern(rules: LogitsRules) -> bool:
        """Whether a request with these rules takes part."""
        return bool(rules.logit_bias)

    def assign(self, init: SlotInit, rules: LogitsRules) -> None:
        """A slot's new request."""
        self._ids_SB = _widened(self._ids_SB, len(rules.logit_bias), -1)
        self._values_SB = _widened(self._values_SB, len(rules.logit_bias), 0)
        width = self._ids_SB.shape[1]
        ids = _padded([token_id for token_id, _ in rules.logit_bias], width, -1)
        values = _padded([value for _, value in rules.logit_bias], width, 0.0)
        self._ids_SB[init.slot] = upload(ids, self._place.device)
        self._values_SB[init.slot] = upload(values, self._place.device, dtype=torch.float32)

    def apply(self, logits_PQV: Tensor, rows: ProcessedRows) -> None:
        """Adds in place. Ids are distinct, so one value goes to each and the padding adds 0."""
        local_PB, is_mine_PB = self._place.local(self._ids_SB[rows.slots_P])
        values_PB = torch.where(is_mine_PB, self._values_SB[rows.slots_P], 0.0)
        columns = logits_PQV.shape[1]
        index_PQB = local_PB[:, None, :].expand(-1, columns, -1)
        logits_PQV.scatter_add_(2, index_PQB, values_PB[:, None, :].expand(-1, columns, -1))

    def commit(self, rows: ProcessedRows, tokens_PE: Tensor, num_emitted_P: Tensor) -> None:
        """Biases do not depend on the output."""


class AllowedTokens:
    """Rules out every id that a request did not allow."""

    def __init__(self, place: VocabPlace) -> None:
        self._place = place
        self._ids_SB = place.table(1, fill=-1, dtype=torch.int64)

    @staticmethod
    def concern(rules: LogitsRules) -> bool:
        """Whether a request with these rules takes part."""
        return bool(rules.allowed_ids)

    def assign(self, init: SlotInit, rules: LogitsRules) -> None:
        """A slot's new request."""
        self._ids_SB = _widened(self._ids_SB, len(rules.allowed_ids), -1)
        ids = _padded(list(rules.allowed_ids), self._ids_SB.shape[1], -1)
        self._ids_SB[init.slot] = upload(ids, self._place.device)

    def apply(self, logits_PQV: Tensor, rows: ProcessedRows) -> None:
        """Masks in place."""
        local_PB, is_mine_PB = self._place.local(self._ids_SB[rows.slots_P])
        local_PQB = local_PB[:, None, :].expand(-1, logits_PQV.shape[1], -1)
        kept_PQB = logits_PQV.gather(2, local_PQB).masked_fill_(~is_mine_PB[:, None, :], float("-inf"))
        logits_PQV.fill_(float("-inf")).scatter_reduce_(2, local_PQB, kept_PQB, "amax")

    def commit(self, rows: ProcessedRows, tokens_PE: Tensor, num_emitted_P: Tensor) -> None:
        """What is allowed does not depend on the output."""


class BadWords:
    """Rules out the last id of every bad word whose other ids are the end of the output (vLLM's rule).

    In column j of a block the output ends with drafts 1..j. The ends of the slots' outputs are kept, padded with -1 in
    front, which equals no id.
    """

    def __init__(self, place: VocabPlace) -> None:
        self._place = place
        self._last_SB = place.table(1, fill=-1, dtype=torch.int64)
        self._before_SBL = place.table(1, 1, fill=-1, dtype=torch.int64)  # -1: any id
        self._tail_SL = place.table(1, fill=-1, dtype=torch.int64)

    @staticmethod
    def concern(rules: LogitsRules) -> bool:
        """Whether a request with these rules takes part."""
        return bool(rules.bad_words)

    def assign(self, init: SlotInit, rules: LogitsRules) -> None:
        """A slot's new request, and the end of what it had emitted before a preemption."""
        self._make_room(len(rules.bad_words), max(len(word) for word in rules.bad_words) - 1)
        width, reach = self._before_SBL.shape[1:]
        before = [_right_aligned(word[:-1], reach) for word in rules.bad_words]
        before += [[-1] * reach] * (width - len(before))
        self._before_SBL[init.slot] = upload(before, self._place.device)
        self._last_SB[init.slot] = upload(
            _padded([word[-1] for word in rules.bad_words], width, -1), self._place.device
        )
        self._tail_SL[init.slot] = upload(_right_aligned(rules.output_ids, reach), self._place.device)

    def apply(self, logits_PQV: Tensor, rows: ProcessedRows) -> None:
        """Masks in place. -inf is added, as a scatter of values could set it and the padding's old value in any
        order."""
        tail_PL = self._tail_SL[rows.slots_P]
        windows_PQL = torch.cat([tail_PL, rows.drafts_PK], dim=1).unfold(1, tail_PL.shape[1], 1)
        before_PBL = self._before_SBL[rows.slots_P]
        fits_PQBL = (windows_PQL[:, :, None, :] == before_PBL[:, None]) | (before_PBL < 0)[:, None]
        local_PB, is_mine_PB = self._place.local(self._last_SB[rows.slots_P])
        banned_PQB = fits_PQBL.all(dim=3) & is_mine_PB[:, None]
        index_PQB = local_PB[:, None, :].expand_as(banned_PQB)
        penalty_PQB = torch.zeros_like(banned_PQB, dtype=torch.float32).masked_fill_(banned_PQB, float("-inf"))
        logits_PQV.scatter_add_(2, index_PQB, penalty_PQB)

    def commit(self, rows: ProcessedRows, tokens_PE: Tensor, num_emitted_P: Tensor) -> None:
        """Moves the ends of the outputs on by what the step emitted."""
        tail_PL = self._tail_SL[rows.slots_P]
        index_PL = num_emitted_P[:, None] + torch.arange(tail_PL.shape[1], device=self._place.device)
        self._tail_SL[rows.slots_P] = torch.cat([tail_PL, tokens_PE], dim=1).gather(1, index_PL)

    def _make_room(self, num_words: int, reach: int) -> None:
        """Widens the tables; a longer reach is padded in front, where old words take any id and old tails end."""
        have = self._tail_SL.shape[1]
        if reach > have:
            self._tail_SL = _lengthened(self._tail_SL, reach)
            self._before_SBL = _lengthened(self._before_SBL, reach)
        have = self._last_SB.shape[1]
        if num_words > have:
            self._last_SB = _widened(self._last_SB, num_words, -1)
            room = self._before_SBL.new_full(
                (self._before_SBL.shape[0], self._last_SB.shape[1] - have, self._before_SBL.shape[2]), -1
            )
            self._before_SBL = torch.cat([self._before_SBL, room], dim=1)


def _widened(table_SB: Tensor, needed: int, padding: int) -> Tensor:
    """The table with at least `needed` columns."""
    have = table_SB.shape[1]
    if needed <= have:
        return table_SB
    return torch.cat([table_SB, table_SB.new_full((table_SB.shape[0], 2 * needed - have), padding)], dim=1)


def _lengthened(table: Tensor, needed: int) -> Tensor:
    """The table with `needed` entries in the last dimension, -1 in front of the old ones."""
    return torch.cat([table.new_full((*table.shape[:-1], needed - table.shape[-1]), -1), table], dim=-1)


def _padded(values: list[Any], width: int, padding: float) -> list[Any]:
    return values + [padding] * (width - len(values))


def _right_aligned(ids: Sequence[int], width: int) -> list[int]:
    """The last `width` ids, -1 in front where there are fewer."""
    kept = list(ids[-width:]) if width else []
    return [-1] * (width - len(kept)) + kept
