"""From a step's device decision to host messages: token lists, counts and, where asked for, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from engine.layers.upload import upload
from engine.parallel.tp_group import TpGroup
from engine.runner.draft_program import Decision
from engine.sampling.logprobs import LogprobTensors, to_messages, token_logprobs
from engine.step import Finish, RowResult, SlotInit, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of every column of the rows that asked for them; which columns count is not known yet.

    rows: indices of those rows in plan order. tensors: num_columns entries of each decode row (the first num_decode
        rows of the step) and one of each prompt that ended, in the order of `rows`.
    """

    rows: tuple[int, ...]
    num_decode: int
    num_columns: int
    tensors: LogprobTensors

    @classmethod
    def of(
        cls, decision: Decision, inits: Sequence[SlotInit], logits_MV: torch.Tensor, num_decode: int, tp: TpGroup
    ) -> Self | None:
        """Raw-model log-probabilities, on the device. None: no row asked.

        logits_MV: K + 1 rows of each decode row, then one of each prompt that ended.
        """
        rows = tuple([i for i, init in enumerate(inits) if init.num_logprobs >= 0])
        if not rows:
            return None
        columns = decision.tokens_SE.shape[1]
        logit_rows: list[int] = []
        for i in rows:
            if i < num_decode:
                logit_rows.extend(range(i * columns, (i + 1) * columns))
            else:
                logit_rows.append(num_decode * columns + i - num_decode)
        index_M = upload(logit_rows, logits_MV.device)
        tokens_M = torch.cat([decision.tokens_SE[:num_decode].reshape(-1), decision.tokens_SE[num_decode:, 0]])
        tensors = token_logprobs(
            logits_MV[index_M], tokens_M[index_M], top_n=max([inits[i].num_logprobs for i in rows]), tp=tp
        )
        return cls(rows=rows, num_decode=num_decode, num_columns=columns, tensors=tensors)

    def messages(self, inits: Sequence[SlotInit], emitted: list[int]) -> dict[int, tuple[TokenLogprobs, ...]]:
        """The emitted tokens' log-probabilities by row. Copies to the host."""
        widths = [self.num_columns if i < self.num_decode else 1 for i in self.rows]
        tops = [inits[i].num_logprobs for i, width in zip(self.rows, widths, strict=True) for _ in range(width)]
        messages = to_messages(self.tensors, tops)
        result: dict[int, tuple[TokenLogprobs, ...]] = {}
        start = 0
        for i, width in zip(self.rows, widths, strict=True):
            if emitted[i]:
                result[i] = messages[start : start + emitted[i]]
            start += width
        return result


def row_results(decision: Decision, inits: Sequence[SlotInit], logprobs: LogprobRows | None) -> tuple[RowResult, ...]:
    """One RowResult per sampling row of the plan, in plan order. Waits for the step."""
    tokens = decision.tokens_SE.tolist()
    emitted = decision.num_emitted_S.tolist()
    accepted = decision.num_accepted_S.tolist()
    drafted = decision.num_drafted_S.tolist()
    finish = decision.finish_S.tolist()
    entries = {} if logprobs is None else logprobs.messages(inits, emitted)
    return tuple(
        [
            RowResult(
                slot=init.slot,
                generation=init.generation,
                token_ids=tuple(tokens[i][: emitted[i]]),
                num_drafted=drafted[i],
                num_accepted=accepted[i],
                finish=Finish(finish[i]),
                logprobs=entries.get(i),
            )
            for i, init in enumerate(inits)
        ]
    )
