"""Laws: training's masks equal brute force in both forms, the loss equals a naive loop, optimisers do what they say."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.training.attention import TILE, attend, block_mask, document_mask
from engine.training.loss import acceptance_weights, block_loss, learning_rate, position_weights
from engine.training.optimizer import Optimizer, ParameterArena, orthogonalise

S, A, W = 384, 32, 16


def documents() -> Tensor:
    starts = torch.zeros(2, S, dtype=torch.int64)
    starts[0, 100:], starts[0, 290:], starts[1, 200:] = 100, 290, 200
    return starts


def anchors(starts: Tensor) -> tuple[Tensor, Tensor]:
    """32 anchors a row, none of them a document's first token; the second row uses only 20."""
    rows = []
    for row in starts.tolist():
        places = [p for p in range(S) if p > row[p]]
        chosen = torch.randperm(len(places), generator=torch.Generator().manual_seed(3))[:A].sort().values
        rows.append([places[i] for i in chosen.tolist()])
    anchor = torch.tensor(rows)
    start = starts.gather(1, anchor)
    anchor[1, 20:], start[1, 20:] = 0, 0
    return anchor, start


def brute_block_mask(anchor: Tensor, start: Tensor) -> Tensor:
    mask = torch.zeros(2, A * W, S + A * W, dtype=torch.bool)
    for row in range(2):
        for block in range(A):
            rows = slice(block * W, (block + 1) * W)
            mask[row, rows, int(start[row, block]) : int(anchor[row, block])] = True
            mask[row, rows, S + block * W : S + (block + 1) * W] = True
    return mask


def test_dense_masks_equal_brute_force() -> None:
    starts = documents()
    anchor, start = anchors(starts)
    got = block_mask(anchor, start, context_len=S, block_size=W, backend="dense")
    assert torch.equal(got[:, 0], brute_block_mask(anchor, start))
    document = document_mask(starts, "dense")[:, 0]
    for row, t in ((0, 0), (0, 99), (0, 100), (0, 383), (1, 250)):
        want = torch.zeros(S, dtype=torch.bool)
        want[int(starts[row, t]) : t + 1] = True
        assert torch.equal(document[row, t], want)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()
def test_flex_equals_dense() -> None:
    starts = documents()
    anchor, start = anchors(starts)
    for queries, keys, masks in (
        (S, S, [document_mask(starts, form) for form in ("dense", "flex")]),
        (
            A * W,
            S + A * W,
            [block_mask(anchor, start, context_len=S, block_size=W, backend=form) for form in ("dense", "flex")],
        ),
    ):
        generator = torch.Generator().manual_seed(1)
        q = torch.randn(2, 6, queries, 8, generator=generator)
        k, v = (torch.randn(2, 2, keys, 8, generator=generator) for _ in range(2))
        dense, flex = (attend(q, k, v, mask) for mask in masks)
        assert (dense - flex).abs().max() < 1e-5
        # The hand-made tile list is exact: a tile is listed if and only if it holds an allowed pair.
        tiles = masks[0].view(2, 1, queries // TILE, TILE, keys // TILE, TILE).any(-1).any(3)
        assert torch.equal(masks[1].to_dense().bool(), tiles)


def test_flex_refuses_odd_lengths() -> None:
    with pytest.raises(ValueError, match="row length 100 must be a multiple of 128"):
        document_mask(torch.zeros(1, 100, dtype=torch.int64), "flex")


@pytest.mark.parametrize(("share", "distill"), [(0.0, None), (0.5, None), (0.5, 0.3), (0.0, 1.0)])
def test_loss_equals_naive_loop(share: float, distill: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks, slots, H, V = 5, 7, 12, 37
    hidden = torch.randn(blocks, slots, H, generator=generator, requires_grad=True)
    head = torch.randn(V, H, generator=generator)
    label = torch.randint(0, V, (blocks, slots), generator=generator)
    valid = torch.rand(blocks, slots, generator=generator) < 0.8
    decay = position_weights(slots, 3.0)
    teacher = None if distill is None else torch.randn(blocks, slots, H, generator=generator)
    out = block_loss(hidden.detach(), head, label, valid, decay, share, teacher, distill or 0.0)

    total = torch.zeros(())
    for block in range(blocks):
        p = []
        for j in range(slots):
            nll = -F.log_softmax(head @ hidden[block, j], dim=0)[label[block, j]] * valid[block, j]
            assert abs(float(out.nll_AJ[block, j]) - float(nll.detach())) < 1e-4
            p.append(math.exp(-float(nll.detach())) * float(valid[block, j]))
        for j in range(slots):
            reached = math.prod(p[:j])
            value = 1.0 + sum(math.prod(p[j + 1 : k + 1]) for k in range(j + 1, slots))
            weight = ((1 - share) * math.exp(-j / 3.0) + share * reached * value) * float(valid[block, j])
            assert abs(float(out.weight_AJ[block, j]) - weight) < 1e-4
            wanted = F.one_hot(label[block, j], V).float()
            if teacher is not None and distill is not None:
                wanted = (1 - distill) * wanted + distill * (head @ teacher[block, j]).softmax(0)
            total = total - weight * (wanted * F.log_softmax(head @ hidden[block, j], dim=0)).sum()
    total.backward()
    assert hidden.grad is not None
    assert (out.grad_AJH - hidden.grad).abs().max() < 1e-4
    top = (hidden.detach() @ head.T).argmax(-1)
    assert torch.equal(out.hit_AJ, (top == label) & valid)


def test_acceptance_weights_are_the_derivative_of_the_accepted_length() -> None:
    """weight_j * p_j = d E[accepted] / d log p_j, with E[accepted] = sum over k of p_1 .. p_k."""
    log_p = torch.log(torch.tensor([[0.9, 0.3, 0.7, 0.5]])).requires_grad_(True)
    expected = log_p.exp().cumprod(1).sum()
    (gradient,) = torch.autograd.grad(expected, log_p)
    p = log_p.detach().exp()
    assert torch.allclose(acceptance_weights(p) * p, gradient, atol=1e-6)


def test_learning_rate() -> None:
    def rate(step: int, total: int | None = 110) -> float:
        return learning_rate(step, peak=2.0, warmup_steps=10, total_steps=total)

    assert rate(0) == pytest.approx(0.2)
    assert rate(10) == 2.0
    assert rate(60) == pytest.approx(1.0)
    assert rate(110) == pytest.approx(0.0)
    assert rate(50, None) == 2.0


def test_orthogonalise() -> None:
    matrices = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    for x in (matrices, matrices.mT):
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        got = orthogonalise(x)
        singular = torch.linalg.svdvals(got)
        assert singular.min() > 0.6
        assert singular.max() < 1.3
        assert F.cosine_similarity(got.flatten(1), (u @ v).flatten(1)).min() > 0.97


def test_adamw_equals_torch() -> None:
    """The flat AdamW equals torch's, matrices with decay and vectors without."""
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    theirs.load_state_dict(mine.state_dict())
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    optimizer = Optimizer(ParameterArena(mine), kind="adamw", weight_decay=0.1)
    for step in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for model in (mine, theirs):
            model(x).square().sum().backward()
        optimizer.step(1e-2)
        reference.step()
        reference.zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
