"""Log-probabilities of emitted tokens under the raw model: before temperature, filters and stop masking.

Shape letters: M emitted tokens, V local vocabulary shard, n alternatives.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.sampling.sampler import VocabGroup
from engine.step import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobTensors:
    """Log-probabilities of M tokens, on the device or on their way to the host.

    token_M int64, logprob_M float32, rank_M int64 (1 + number of strictly more likely tokens), top_ids_Mn int64 and
    top_logprobs_Mn float32, best first, equal values by ascending id.
    """

    token_M: Tensor
    logprob_M: Tensor
    rank_M: Tensor
    top_ids_Mn: Tensor
    top_logprobs_Mn: Tensor

    def sent_to_host(self) -> "LogprobTensors":
        """Copies queued behind what is computed here, into pinned memory: right once the step is done, and then read
        without waiting for a later one."""
        return LogprobTensors(
            **{field.name: getattr(self, field.name).to("cpu", non_blocking=True) for field in fields(self)}
        )


def token_logprobs(logits_MV: Tensor, token_M: Tensor, *, top_n: int, tp: VocabGroup) -> LogprobTensors:
    """Log-probability, rank and the `top_n` most likely alternatives of each token, equal on every rank.

    Args:
        logits_MV: float32 [M, V] raw target logits of this rank's shard, padded ids -inf.
        token_M: int64 [M] global ids.
        top_n: the largest number of alternatives any row asks for; 0 for none.
        tp: the group that shares the vocabulary; whole rows are gathered.
    """
    if tp.size > 1:
        logits_MV = tp.all_gather(logits_MV, dim=1)
    normaliser_M1 = torch.logsumexp(logits_MV, dim=1, keepdim=True)
    chosen_M1 = logits_MV.gather(1, token_M[:, None])
    rank_M = (logits_MV > chosen_M1).sum(dim=1) + 1
    top_ids_Mn = top_ids(logits_MV, top_n)
    return LogprobTensors(
        token_M=token_M,
        logprob_M=(chosen_M1 - normaliser_M1)[:, 0],
        rank_M=rank_M,
        top_ids_Mn=top_ids_Mn,
        top_logprobs_Mn=logits_MV.gather(1, top_ids_Mn) - normaliser_M1,
    )


def top_ids(logits_MV: Tensor, n: int) -> Tensor:
    """Ids of the n largest logits, int64 [M, n], best first; equal values by ascending id (torch.topk: any)."""
    vocab = logits_MV.shape[1]
    # A float32's bits, with the magnitude bits of negatives inverted, order as integers; the id fills the low half.
    bits_MV = (logits_MV.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    order_MV = torch.where(bits_MV < 0, bits_MV ^ 0x7FFFFFFF, bits_MV)
    id_V = torch.arange(vocab, device=logits_MV.device)
    key_Mn = ((order_MV << 32) + (0xFFFFFFFF - id_V)).topk(min(n, vocab), dim=1).values
    return 0xFFFFFFFF - (key_Mn & 0xFFFFFFFF)


def to_messages(tensors: LogprobTensors, num_logprobs: list[int]) -> tuple[TokenLogprobs, ...]:
    """The tensors as messages; `num_logprobs[i]` alternatives are kept for token i."""
    token_ids = tensors.token_M.tolist()
    assert len(token_ids) == len(num_logprobs), (len(token_ids), len(num_logprobs))
    logprobs, ranks = tensors.logprob_M.tolist(), tensors.rank_M.tolist()
    top_ids_lists, top_logprobs_lists = tensors.top_ids_Mn.tolist(), tensors.top_logprobs_Mn.tolist()
    return tuple(
        TokenLogprobs(
            token_id=token_ids[i],
            logprob=logprobs[i],
            rank=ranks[i],
            top_ids=tuple(top_ids_lists[i][:count]),
            top_logprobs=tuple(top_logprobs_lists[i][:count]),
        )
        for i, count in enumerate(num_logprobs)
    )
