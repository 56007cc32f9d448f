"""A drafter's own head, over its own vocabulary: often a cut one, whose rows stand for chosen ids of the target.

Cut by rows over the ranks as the target's head is. Shapes: M rows, H drafter hidden, Vl the rank's padded rows, D draft
vocabulary, V target vocabulary.
"""

import torch
from torch import Tensor, nn

from engine.config.model import DrafterConfig
from engine.layers.linear import Linear
from engine.parallel.sharding import shard
from engine.parallel.tp_group import TpGroup


class DraftHead(nn.Module):
    """d2t [D] int64 and t2d [V] bool are the checkpoint's: target id = row + d2t[row], and which ids have a row. They
    are None where row r is target id r. target_ids [D] int64 is made of them."""

    d2t: Tensor | None
    t2d: Tensor | None
    target_ids: Tensor

    def __init__(self, config: DrafterConfig, *, tp: TpGroup, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.draft_vocab_size, self.tp = config.draft_vocab_size, tp
        self.vocab = shard(config.draft_vocab_size, rank=tp.rank, ranks=tp.size)
        self.linear = Linear(config.hidden_size, self.vocab.size, dtype=dtype, device=device, out_dtype=torch.float32)
        rows, maps = config.draft_vocab_size, config.maps_vocab
        self.register_buffer("target_ids", torch.arange(rows, device=device), persistent=False)
        self.register_buffer("d2t", torch.zeros(rows, dtype=torch.int64, device=device) if maps else None)
        self.register_buffer("t2d", torch.arange(config.vocab_size, device=device) < rows if maps else None)

    def finish_loading(self) -> None:
        """Makes target_ids of the checkpoint's maps.

        Raises:
            ValueError: maps that do not name an ascending choice of target ids, or that disagree.
        """
        if self.d2t is None or self.t2d is None:
            return
        ids_D = self.target_ids + self.d2t
        # Ascending: the lowest of equally likely ids is then the lowest row as well, with and without the map.
        if not bool((ids_D.diff() > 0).all()) or int(ids_D[0]) < 0 or int(ids_D[-1]) >= self.t2d.shape[0]:
            raise ValueError(
                f"d2t: draft ids plus d2t must ascend within the target's vocabulary (0..{self.t2d.shape[0] - 1})."
            )
        if self.t2d.nonzero()[:, 0].tolist() != ids_D.tolist():
            raise ValueError(f"t2d: marks {int(self.t2d.sum())} target ids, which are not those that d2t gives.")
        self.target_ids = ids_D
        self.d2t = self.t2d = None

    def forward(self, hidden_MH: Tensor) -> Tensor:
        """float32 [M, Vl]: rows vocab.start .. of the draft vocabulary; padding is -inf."""
        logits_MV = self.linear.forward(hidden_MH)
        if self.vocab.real < self.vocab.size:
            logits_MV[:, self.vocab.real :] = float("-inf")
        return logits_MV

    def over_target_vocab(self, logits_MV: Tensor, width: int) -> Tensor:
        """The ranks' draft logits joined, as [M, width] over target ids; an id without a row has -inf."""
        if self.tp.size > 1:
            logits_MV = self.tp.all_gather(logits_MV, dim=1)
        whole_MV = logits_MV.new_full((logits_MV.shape[0], width), float("-inf"))
        return whole_MV.index_copy_(1, self.target_ids, logits_MV[:, : self.draft_vocab_size])
