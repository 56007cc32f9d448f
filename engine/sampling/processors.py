"""The stage between the target's logits and the draw, for batches in which a request asks for it.

A batch that asks for nothing skips it. It runs eagerly and reads nothing back: which rows take part is known to the
host (`SlotInit.rules`), what they said is on the device. Every rank changes its own vocabulary shard.

Shape letters: M logit rows (R decode rows of Q = K + 1 columns each, then F prompts that ended, one row each), S
sampling rows (R + F), P rows of one kind that take part, V local vocabulary shard, E emitted columns.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.upload import upload
from engine.sampling.penalties import Penalties
from engine.sampling.processed_rows import ProcessedRows, VocabPlace
from engine.sampling.token_rules import AllowedTokens, BadWords, LogitBias
from engine.step import LogitsRules, SlotInit


class Processor(Protocol):
    """One kind of rule: state per slot, and what it does to the rows of the slots that it concerns."""

    @staticmethod
    def concern(rules: LogitsRules) -> bool:
        """Whether a request with these rules takes part."""
        ...

    def assign(self, init: SlotInit, rules: LogitsRules) -> None:
        """A concerned request takes a slot."""
        ...

    def apply(self, logits_PQV: Tensor, rows: ProcessedRows) -> None:
        """Changes the logits of concerned rows in place."""
        ...

    def commit(self, rows: ProcessedRows, tokens_PE: Tensor, num_emitted_P: Tensor) -> None:
        """The first num_emitted tokens of each concerned row became output."""
        ...


class LogitsStage:
    """All processors of one rank, in the order in which they apply: bias, penalties, then what is ruled out.

    vocab_size, vocab_start: of this rank's shard, padding included. max_len: tokens of a request at most.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        vocab_start: int,
        max_len: int,
        enable_penalty: bool,
        device: torch.device,
    ) -> None:
        place = VocabPlace(num_slots=num_slots, vocab_size=vocab_size, vocab_start=vocab_start, device=device)
        penalties = (Penalties(place, max_len=max_len),) if enable_penalty else ()
        self._device = device
        self._processors: tuple[Processor, ...] = (
            LogitBias(place),
            *penalties,
            AllowedTokens(place),
            BadWords(place),
        )

    @staticmethod
    def is_needed(inits: Sequence[SlotInit]) -> bool:
        """Whether a row of the batch asks for anything."""
        return any(init.rules is not None for init in inits)

    def assign(self, inits: Sequence[SlotInit]) -> None:
        """New requests take their slots."""
        for init in inits:
            if init.rules is not None:
                for processor in self._processors:
                    if processor.concern(init.rules):
                        processor.assign(init, init.rules)

    def apply(
        self,
        logits_MV: Tensor,
        *,
        block_slots_R: Tensor | None,
        drafts_RK: Tensor | None,
        end_slots: Sequence[int],
        inits: Sequence[SlotInit],
    ) -> Tensor:
        """New logits that the tokens are drawn from; `logits_MV`, from which log-probabilities are read, stays.

        block_slots_R, drafts_RK: the decode rows and their drafts, global ids, any filler past a row's own; both None
            without decode rows. end_slots: of the F prompts that ended. inits: of the S sampling rows.
        """
        out_MV = logits_MV.clone()
        split = 0
        if block_slots_R is not None:
            assert drafts_RK is not None
            num_rows, width = drafts_RK.shape[0], drafts_RK.shape[1] + 1
            split = num_rows * width
            blocks_RQV = out_MV[:split].view(num_rows, width, -1)
            self._apply_to(blocks_RQV, block_slots_R, drafts_RK, inits[:num_rows])
        if end_slots:
            slots_F = upload(end_slots, self._device)
            self._apply_to(out_MV[split:, None], slots_F, slots_F[:, None][:, :0], inits[len(inits) - len(end_slots) :])
        return out_MV

    def commit(self, slots_S: Tensor, tokens_SE: Tensor, num_emitted_S: Tensor, inits: Sequence[SlotInit]) -> None:
        """After the verify: the first num_emitted tokens of each row are output from now on."""
        for processor in self._processors:
            indices = _concerned(processor, inits)
            if indices:
                index_P = upload(indices, self._device)
                rows = _rows([inits[i] for i in indices], slots_S[index_P], tokens_SE[index_P, :0])
                processor.commit(rows, tokens_SE[index_P], num_emitted_S[index_P])

    def _apply_to(self, logits_RQV: Tensor, slots_R: Tensor, drafts_RK: Tensor, inits: Sequence[SlotInit]) -> None:
        for processor in self._processors:
            indices = _concerned(processor, inits)
            if not indices:
                continue
            if len(indices) == len(inits):
                processor.apply(logits_RQV, _rows(inits, slots_R, drafts_RK))
                continue
            index_P = upload(indices, self._device)
            part_PQV = logits_RQV[index_P]
            processor.apply(part_PQV, _rows([inits[i] for i in indices], slots_R[index_P], drafts_RK[index_P]))
            logits_RQV.index_copy_(0, index_P, part_PQV)


def _concerned(processor: Processor, inits: Sequence[SlotInit]) -> list[int]:
    """Rows of the requests that the processor concerns."""
    return [i for i, init in enumerate(inits) if init.rules is not None and processor.concern(init.rules)]


def _rows(inits: Sequence[SlotInit], slots_P: Tensor, drafts_PK: Tensor) -> ProcessedRows:
    return ProcessedRows(
        slots=[init.slot for init in inits],
        rules=[init.rules for init in inits if init.rules is not None],
        slots_P=slots_P,
        drafts_PK=drafts_PK,
    )
