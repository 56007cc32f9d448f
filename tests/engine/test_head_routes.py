"""Which kernel multiplies a model's head on a GPU with the copy engine: launches are noted, none is made."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config.model import TargetConfig
from engine.config.rope import RopeConfig
from engine.kernels.gemm_choice import PeakCut, StreamCut
from engine.kernels.wide_choice import WideCut
from engine.layers import cuda_cuts, cuda_rows, linear
from engine.layers.cuda_rows import CudaRows
from engine.layers.int8_weight import Int8Weight
from engine.layers.linear import Linear
from engine.models import target
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.runner.draft_program import DecideAndDraft

H = 4096
Calls = list[tuple[str, Tensor, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """(kernel, the weight that it was given, cut) of each launch."""
    found: Calls = []

    def noting(name: str, result: Callable[[Tensor, Tensor], Any]) -> Any:
        def call(x: Tensor, weight: Tensor, *_: Any, cut: Any, **__: Any) -> Any:
            found.append((name, weight, cut))
            return result(x, weight)

        return call

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)

    def peaks(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.int64)

    kernels: dict[str, dict[str, Callable[[Tensor, Tensor], Any]]] = {
        "stream_head": {"stream_logits": logits, "stream_argmax": peaks},
        "wide_gemm": {"wide_logits": logits, "wide_argmax": peaks},
        "stream_gemm": {"stream_gemm": lambda x, weight: None},
    }
    for file, results in kernels.items():
        module = SimpleNamespace(**{name: noting(name, result) for name, result in results.items()})
        monkeypatch.setitem(sys.modules, f"engine.kernels.{file}", module)
    for of in (cuda_cuts, cuda_rows):
        monkeypatch.setattr(of, "copy_engine", lambda: True)
    rows = CudaRows(pdl=False)
    for user in (linear, target):
        monkeypatch.setattr(user, "cuda_rows", lambda x: rows)
    return found


def model_of(vocab: int, tp: TpGroup, *, tied: bool = False) -> TargetModel:
    config = TargetConfig(
        architecture="LlamaForCausalLM",
        num_layers=1,
        hidden_size=H,
        intermediate_size=64,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=8,
        tie_word_embeddings=tied,
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
    )
    return TargetModel(config, tp=tp, dtype=torch.bfloat16, device="meta", num_positions=8)


def rows_of(number: int) -> Tensor:
    return torch.empty(number, H, dtype=torch.bfloat16, device="meta")


# A part of the vocabulary whose last rows alone, which are padding on the last rank, make a head worth the kernel.
@pytest.mark.parametrize(
    ("vocab", "ranks", "rows", "cut"),
    [
        (15105, 2, 16, PeakCut),
        (30211, 4, 16, PeakCut),
        (243241, 8, 16, PeakCut),
        (2 * (56 * 256 + 1) - 1, 2, 256, WideCut),
    ],
)
def test_all_ranks_find_peaks_the_same_way(vocab: int, ranks: int, rows: int, cut: type, calls: Calls) -> None:
    for rank in range(ranks):
        model = model_of(vocab, TpGroup(rank=rank, size=ranks, backend="gloo"))
        assert model.finds_peaks(rows)
        value, index = model.peaks(rows_of(rows))
        assert value.shape == index.shape == (rows,)
        assert calls[-1][1].shape == (model.vocab.real, H)
        assert model.logits(rows_of(rows)).shape == (rows, model.vocab.size)
        assert calls[-1][1].shape == (model.vocab.size, H)
    assert sum(weight.shape[0] for name, weight, _ in calls if name.endswith("argmax")) == vocab
    assert all(type(taken) is cut and taken == calls[0][2] for _, _, taken in calls)


def rounded(head: Linear) -> Linear:
    draft = Linear(H, 0, dtype=torch.bfloat16, device="meta", out_dtype=torch.float32)
    draft.weight = nn.Parameter(head.weight.data, False)
    N = head.weight.shape[0]
    draft.int8_weight = Int8Weight(
        rounded=torch.empty(N, H, dtype=torch.int8, device="meta"), scale=torch.empty(N, device="meta"), streams=True
    )
    return draft


def draft(model: TargetModel, num_drafts: int) -> None:
    """What a greedy request's drafts are made by: the program's own choice, of a drafter that gives rows."""
    masks = rows_of(num_drafts)
    program = SimpleNamespace(
        _drafter=SimpleNamespace(enter=lambda *_: None, draft_hidden=lambda *_, **__: masks, head=None),
        _target=model,
        _config=SimpleNamespace(block_width=num_drafts + 1),
        _kv=None,
        _tp=TpGroup.solo(),
        _draft_tokens=SimpleNamespace(are_greedy=lambda _: True, choose=lambda *_: None),
    )
    inputs = SimpleNamespace(ids_N=None, positions_N=None, context=None)
    DecideAndDraft._drafts(program, inputs, None, num_drafts, None)  # type: ignore[arg-type]


def test_a_rounded_head_drafts_few_rows(calls: Calls) -> None:
    model = model_of(151936, TpGroup.solo())
    assert model.finds_peaks(15) and model.finds_draft_peaks(15)
    draft(model, 15)
    model.draft_logits(rows_of(15))
    model.draft_head = rounded(model.head)
    assert model.finds_peaks(15) and not model.finds_draft_peaks(15)
    draft(model, 15)
    model.draft_logits(rows_of(15))
    model.logits(rows_of(15))
    assert [(name, weight.dtype, type(cut)) for name, weight, cut in calls] == [
        ("stream_argmax", torch.bfloat16, PeakCut),
        ("stream_logits", torch.bfloat16, PeakCut),
        ("stream_gemm", torch.int8, StreamCut),
        ("stream_gemm", torch.int8, StreamCut),
        ("stream_logits", torch.bfloat16, PeakCut),
    ]


def test_more_rows_are_drafted_by_the_weights_as_they_are(calls: Calls) -> None:
    model = model_of(151936, TpGroup.solo())
    model.draft_head = rounded(model.head)
    assert model.finds_peaks(256) and model.finds_draft_peaks(256)
    draft(model, 256)
    model.draft_logits(rows_of(256))
    assert [(name, weight.dtype) for name, weight, _ in calls] == [
        ("wide_argmax", torch.bfloat16),
        ("wide_logits", torch.bfloat16),
    ]
