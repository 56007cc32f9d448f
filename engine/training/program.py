"""Target, drafter and loss over a batch of packed rows, compiled or not. Training and scoring run the same one.

Shapes: R rows, S tokens of a row, A anchors of a row, W block width, J = W - 1, H hidden, X tap features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.training.attention import Backend, block_mask, document_mask
from engine.training.corpus import PackedRows
from engine.training.drafter import TrainableDrafter
from engine.training.loss import block_loss, compiled_block_loss
from engine.training.target import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Draft blocks of a batch.

    anchor_RA ascends, unused ones (used_RA false) come last at 0. label_RAJ: the tokens after the anchor; valid_RAJ:
    they exist and belong to the anchor's document.
    """

    anchor_RA: Tensor
    used_RA: Tensor
    label_RAJ: Tensor
    valid_RAJ: Tensor


def anchor_places(rows: PackedRows) -> Tensor:
    """[R, S]: response tokens that have a successor in their document."""
    at_S = torch.arange(rows.tokens_NS.shape[1], device=rows.tokens_NS.device)
    return rows.response_NS & (at_S + 1 < rows.doc_end_NS)


def random_anchors(rows: PackedRows, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` different anchors of every row (fewer used if the row has fewer), ascending: (anchor_RA, used_RA)."""
    places = anchor_places(rows)
    order = torch.rand(places.shape, generator=generator, device=places.device).masked_fill_(~places, -1.0)
    value_RA, index_RA = order.topk(count, dim=1)
    return sort_anchors(index_RA, value_RA >= 0)


def sort_anchors(index_RA: Tensor, used_RA: Tensor) -> tuple[Tensor, Tensor]:
    """Used anchors ascending, then unused ones, which become 0."""
    far = torch.iinfo(torch.int64).max
    sorted_RA = torch.where(used_RA, index_RA, far).sort(dim=1).values
    used_RA = sorted_RA < far
    return torch.where(used_RA, sorted_RA, 0), used_RA


def blocks_at(rows: PackedRows, anchor_RA: Tensor, used_RA: Tensor, block_size: int) -> Blocks:
    """Labels of the blocks that begin at the anchors."""
    S = rows.tokens_NS.shape[1]
    steps_J = torch.arange(1, block_size, device=anchor_RA.device)
    place_RAJ = anchor_RA.unsqueeze(-1) + steps_J
    end_RA = rows.doc_end_NS.gather(1, anchor_RA)
    valid_RAJ = used_RA.unsqueeze(-1) & (place_RAJ < end_RA.unsqueeze(-1))
    flat_RX = place_RAJ.clamp(max=S - 1).flatten(1)
    label_RAJ = rows.tokens_NS.gather(1, flat_RX).view(place_RAJ.shape)
    return Blocks(anchor_RA=anchor_RA, used_RA=used_RA, label_RAJ=label_RAJ, valid_RAJ=valid_RAJ)


def teacher_states(state_SH: Tensor, anchor_A: Tensor, width: int) -> Tensor:
    """[A, J, H]: for each slot of the blocks the target's state that predicts its token, which is one token before it.
    Slots past the row's end repeat its last state; they are never valid."""
    place_AJ = anchor_A.unsqueeze(-1) + torch.arange(width - 1, device=anchor_A.device)
    return state_SH[place_AJ.clamp(max=state_SH.shape[0] - 1)]


class BlockProgram:
    """One frozen target and one drafter on one device.

    draft_ids: ascending ids that the drafter's head is cut to when it is scored; None: it drafts with the target's
    whole head, as it is always trained.
    """

    def __init__(
        self,
        target: FrozenTarget,
        drafter: TrainableDrafter,
        *,
        backend: Backend,
        compile_model: bool,
        draft_ids: Tensor | None = None,
    ) -> None:
        self.target, self.drafter, self.backend = target, drafter, backend
        self.draft_ids = None if draft_ids is None else draft_ids.to(target.head.device)
        self._draft_head = target.head if self.draft_ids is None else target.head[self.draft_ids]
        self.block_size = drafter.config.block_size
        self._taps = torch.compile(target.taps, dynamic=False) if compile_model else target.taps
        self._taught = torch.compile(target.states_and_taps, dynamic=False) if compile_model else target.states_and_taps
        self._draft = torch.compile(drafter.forward, dynamic=False) if compile_model else drafter.forward
        self.loss = compiled_block_loss() if compile_model else block_loss

    def taps(self, rows: PackedRows) -> Tensor:
        """[R, S, X] of every token given its document so far; without gradient."""
        mask = document_mask(rows.doc_start_NS, self.backend)
        return self._taps(rows.tokens_NS, self.positions(rows), mask, self.drafter.config.target_layer_ids)

    def taught(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """(the target's final states [R, S, H], whose row t predicts token t + 1; `taps`); without gradient."""
        mask = document_mask(rows.doc_start_NS, self.backend)
        return self._taught(rows.tokens_NS, self.positions(rows), mask, self.drafter.config.target_layer_ids)

    def hidden(self, rows: PackedRows, taps_RSX: Tensor, anchor_RA: Tensor, width: int | None = None) -> Tensor:
        """Final hidden states of the blocks, [R, A, W, H]; width: W, the drafter's block size by default."""
        R, S = rows.tokens_NS.shape
        A, W = anchor_RA.shape[1], width or self.block_size
        ids_RAW = torch.full((R, A, W), self.drafter.config.mask_token_id, device=anchor_RA.device)
        ids_RAW[:, :, 0] = rows.tokens_NS.gather(1, anchor_RA)
        x_RQH = F.embedding(ids_RAW.view(R, A * W), self.target.embedding)
        start_RA = rows.doc_start_NS.gather(1, anchor_RA)
        steps_W = torch.arange(W, device=anchor_RA.device)
        place_RQ = ((anchor_RA - start_RA).unsqueeze(-1) + steps_W).view(R, A * W)
        # Unused anchors sit at 0, whose document also starts at 0: an empty context.
        mask = block_mask(anchor_RA, start_RA, context_len=S, block_size=W, backend=self.backend)
        hidden_RQH = self._draft(taps_RSX, self.positions(rows), x_RQH, place_RQ, mask)
        return hidden_RQH.view(R, A, W, -1)

    def drafts(self, hidden: Tensor) -> Tensor:
        """Greedy drafts of final hidden states [.., H]: target ids [..]; logits in float32."""
        rows = (hidden.float() @ self._draft_head.float().T).argmax(-1)
        return rows if self.draft_ids is None else self.draft_ids[rows]

    @staticmethod
    def positions(rows: PackedRows) -> Tensor:
        """Position of every token in its document."""
        return torch.arange(rows.tokens_NS.shape[1], device=rows.tokens_NS.device) - rows.doc_start_NS
