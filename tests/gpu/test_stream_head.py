"""The head of few rows fed by the tensor copy engine: its logits are the product, its peaks are those of its logits."""

import pytest
import torch
from torch import Tensor

from engine.config.model import TargetConfig
from engine.config.rope import RopeConfig
from engine.kernels.gemm_choice import PeakCut
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.available import copy_engine, dependent_launch
from engine.kernels.row_ops import rms_norm
from engine.kernels.shard_argmax import shard_argmax

START = 1000
CUTS = {
    "chosen": PeakCut(),
    "8_rows": PeakCut(rows=8, num_stages=6),
    "32_rows": PeakCut(rows=32, outputs=128, inputs=128),
}
each_cut = pytest.mark.parametrize("cut", list(CUTS.values()), ids=list(CUTS))
# (vocabulary, inputs): the 8B one; fewer tiles than programs; a last tile of 37 rows; a single tile, in part.
SHAPES = [(151936, 4096), (5000, 4096), (64 * 269 + 37, 2048), (50, 2048)]


def _random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (x * scale).bfloat16()


class Head:
    """A head whose weight lies between others' rows, which would win in every row if they were read."""

    def __init__(self, vocab: int, K: int, cut: PeakCut) -> None:
        self.cut, self.x = cut, _random(cut.rows, K)
        around = torch.full((vocab + 128, K), float("inf"), dtype=torch.bfloat16, device="cuda")
        self.weight = around[64 : 64 + vocab]
        self.weight.copy_(_random(vocab, K, seed=1, scale=K**-0.5))

    def logits(self, x: Tensor) -> Tensor:
        from engine.kernels.stream_head import stream_logits

        return stream_logits(x, self.weight, cut=self.cut, pdl=dependent_launch())

    def peaks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from engine.kernels.stream_head import stream_argmax

        return stream_argmax(x, self.weight, START, cut=self.cut, pdl=dependent_launch())

    def check(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The peaks of x, which are those of its logits."""
        value, index = self.peaks(x)
        want_value, want_index = shard_argmax(self.logits(x), START)
        assert torch.equal(value, want_value) and torch.equal(index, want_index)
        return value, index


@pytest.fixture(autouse=True)
def _on_sm90(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None and not copy_engine():
        pytest.skip("needs SM90")


@pytest.mark.gpu
@each_cut
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_peaks_are_those_of_the_product(shape: tuple[int, int], cut: PeakCut) -> None:
    vocab, K = shape
    head = Head(vocab, K, cut)
    logits = head.logits(head.x)
    torch.testing.assert_close(logits, head.x.float() @ head.weight.float().t(), rtol=1e-3, atol=1e-3)
    value, index = head.check(head.x)
    assert torch.equal(value, logits.amax(1))
    assert torch.equal(index, logits.argmax(1) + START)
    for _ in range(10):  # other timing gives the same bits
        again = head.peaks(head.x)
        assert torch.equal(again[0], value) and torch.equal(again[1], index)
        assert torch.equal(head.logits(head.x), logits)
    for rows in range(1, cut.rows):
        few = head.check(head.x[:rows])
        assert torch.equal(few[0], value[:rows]) and torch.equal(few[1], index[:rows])
    others = head.x.clone()
    others[[0, 3, -1]] = 100 * _random(3, K, seed=9)
    kept = [m for m in range(1, cut.rows - 1) if m != 3]
    assert torch.equal(head.check(others)[1][kept], index[kept])
    assert torch.equal(head.logits(others)[kept], logits[kept])


@pytest.mark.gpu
@each_cut
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ties_and_what_is_no_number(shape: tuple[int, int], cut: PeakCut) -> None:
    vocab, K = shape
    head = Head(vocab, K, cut)
    head.weight.copy_(-head.weight.abs())  # all logits below the zeros that stand for rows past the end
    x = head.x.abs() + 1
    one_hot = torch.zeros(K, dtype=torch.bfloat16, device="cuda")
    one_hot[3] = 1.0
    value, _ = head.check(x)
    assert (value < 0).all()
    for low in (0, 7, vocab // 3):  # equal logits of one tile, of one program, of several
        for high in {vocab - 1, min(vocab - 1, low + 1), min(vocab - 1, low + 64 * 132)} - {low}:
            before = head.weight[[low, high]].clone()
            head.weight[[low, high]] = one_hot
            value, index = head.check(x)
            assert index.tolist() == [START + low] * cut.rows
            assert torch.equal(value, x[:, 3].float())
            head.weight[[low, high]] = before
    value, index = head.check(x)
    for broken in (float("nan"), float("inf")):
        spoiled = x.clone()
        spoiled[2, 5] = broken
        spoiled_value, spoiled_index = head.peaks(spoiled)
        kept = [m for m in range(cut.rows) if m != 2]
        assert torch.equal(spoiled_value[kept], value[kept]) and torch.equal(spoiled_index[kept], index[kept])
        assert torch.equal(spoiled_value[2].isnan(), head.logits(spoiled)[2].isnan().any())
        assert START <= int(spoiled_index[2]) < START + vocab
    head.weight[vocab // 2, 3] = float("nan")
    value, index = head.peaks(x)
    assert value.isnan().all()
    assert ((index >= START) & (index < START + vocab)).all()


@pytest.mark.gpu
@each_cut
def test_a_captured_head_follows_its_norm(cut: PeakCut) -> None:
    """In a graph the weights are asked for before the norm in front has ended, a head right behind another."""
    head = Head(151936, 4096, cut)
    norm = _random(4096, seed=3)
    x = head.x.clone()

    def chain() -> list[Tensor]:
        found = []
        for _ in range(3):
            found += head.peaks(rms_norm(x, norm, 1e-6, pdl=dependent_launch()))
        found.append(head.logits(rms_norm(x, norm, 1e-6, pdl=dependent_launch())))
        return found

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain()
    for seed in range(3):
        x.copy_(_random(cut.rows, 4096, seed=seed))
        graph.replay()
        for got, want in zip(results, chain(), strict=True):
            assert torch.equal(got, want)
        assert torch.equal(results[1], shard_argmax(results[-1], START)[1])


# Vocabularies of two ranks: the padded row within the last tile, or alone in a tile that decides who multiplies.
@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [2 * 64 * 132 - 1, 2 * (64 * 118 + 1) - 1])
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_models_peaks_are_those_of_its_logits(tied: bool, vocab: int) -> None:
    """The second of two ranks, whose part of the vocabulary ends in a padded row."""
    config, tp = _config(vocab_size=vocab, tied=tied), TpGroup(rank=1, size=2, backend="nccl")
    model = TargetModel(config, tp=tp, dtype=torch.bfloat16, device="cuda", num_positions=8)
    real = model.vocab.real
    assert model.vocab.size == real + 1
    weight = _random(real, 2048, scale=0.02)
    model.head.weight[:real] = weight
    hidden = _random(18, 2048, seed=1)
    assert model.finds_peaks(16) and not model.finds_peaks(17)
    for rows in (hidden[1:17], hidden[3:4]):
        logits = model.logits(rows)
        torch.testing.assert_close(logits[:, :real], rows.float() @ weight.float().t(), rtol=1e-3, atol=1e-3)
        assert (logits[:, real:] == float("-inf")).all()
        value, index = model.peaks(rows)
        assert torch.equal(value, logits.amax(1))
        assert torch.equal(index, logits.argmax(1) + model.vocab_start)


def _config(*, vocab_size: int, tied: bool) -> TargetConfig:
    return TargetConfig(
        architecture="LlamaForCausalLM",
        num_layers=1,
        hidden_size=2048,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=8,
        tie_word_embeddings=tied,
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
    )
