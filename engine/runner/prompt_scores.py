"""Log-probabilities of prompt tokens, from the hidden states of their prefill chunks.

The head runs here on rows that decoding never needs, a few at a time: a whole chunk's logits would be gigabytes.

Shape letters: N rows of the step, M scored rows, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.layers.upload import upload
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.sampling.logprobs import LogprobTensors, to_messages, token_logprobs
from engine.step import PrefillChunk, PromptScores, SlotInit

_MAX_LOGITS = 1 << 24  # numbers in the logits of one head call, over all ranks: 64 MiB of float32


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkScores:
    """Scores of one chunk, on their way to the host; parts of at most a head call each."""

    init: SlotInit
    parts: tuple[LogprobTensors, ...]

    def message(self) -> PromptScores:
        """Once the step is done."""
        entries = [
            entry
            for part in self.parts
            for entry in to_messages(part, [self.init.num_prompt_logprobs] * part.token_M.shape[0])
        ]
        return PromptScores(slot=self.init.slot, generation=self.init.generation, logprobs=tuple(entries))


def score_prompts(
    hidden_NH: Tensor | None,
    *,
    prefill: Sequence[PrefillChunk],
    num_decode_tokens: int,
    init_of: Callable[[int], SlotInit],
    target: TargetModel,
    tp: TpGroup,
) -> tuple[ChunkScores, ...]:
    """Scores of the chunks that name `scored_next`, in plan order.

    hidden_NH: the step's rows after the final norm, decode rows first; None if no chunk is to be scored.
    init_of: what the request in a slot asked for.
    """
    if hidden_NH is None:
        return ()
    rows_per_call = max(1, _MAX_LOGITS // (target.vocab.size * tp.size))
    scores: list[ChunkScores] = []
    first_row = num_decode_tokens
    for chunk in prefill:
        if chunk.scored_next:
            init = init_of(chunk.slot)
            start = first_row + chunk.scored_from - chunk.start
            hidden_MH = hidden_NH[start : start + len(chunk.scored_next)]
            next_M = upload(chunk.scored_next, hidden_NH.device)
            parts = [
                token_logprobs(target.logits(part_MH), part_M, top_n=init.num_prompt_logprobs, tp=tp).sent_to_host()
                for part_MH, part_M in zip(hidden_MH.split(rows_per_call), next_M.split(rows_per_call), strict=True)
            ]
            scores.append(ChunkScores(init=init, parts=tuple(parts)))
        first_row += len(chunk.token_ids)
    return tuple(scores)
