"""Law: the target's logits and taps over the paged cache equal transformers', however the rows are batched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reference.dflash_loop import run_target
from tests.reference.paged import PagedModels, Piece, engine_config
from tests.reference.toy import make_target

TAPS = [0, 2, 3]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54}),
    ("llama", {"attention_bias": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 10}),
    ("qwen3", {"attention_bias": True, "head_dim": 4, "num_key_value_heads": 1}),
    ("llama", {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 2}),  # sizes of the compiled CPU layer
    ("qwen3", {"attention_bias": True, "hidden_size": 64, "head_dim": 32}),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join([kind[0], *kind[1]]))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("target")
    kind, overrides = request.param
    return make_target(directory, kind, **overrides), directory


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 131, (n,), generator=generator).tolist() for n in (23, 9, 17)]


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def expected(model: nn.Module, ids: list[int]) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return run_target(model, ids, TAPS)


@pytest.mark.parametrize("shuffle", [True, False])
@torch.inference_mode()
def test_chunked_prefill(pair: tuple[nn.Module, Path], prompts: list[list[int]], shuffle: bool) -> None:
    model, directory = pair
    engine = PagedModels.load(engine_config(directory), num_seqs=2, shuffle=shuffle)
    logits, taps = expected(model, prompts[0])
    got_logits, got_taps = [], []
    for start, end in ((0, 7), (7, 8), (8, 20), (20, 23)):
        out = engine.forward([[Piece(seq=1, start=start, ids=prompts[0][start:end])]])
        got_logits.append(engine.full_logits(out.hidden_NH))
        got_taps.append(out.taps_NTH.flatten(1))
    close(torch.cat(got_logits), logits)
    close(torch.cat(got_taps), taps)


@torch.inference_mode()
def test_decode_group_with_ragged_prefill_group(pair: tuple[nn.Module, Path], prompts: list[list[int]]) -> None:
    model, directory = pair
    engine = PagedModels.load(engine_config(directory), num_seqs=4)
    a, b, c = prompts
    engine.forward(
        [[Piece(seq=0, start=0, ids=a[:20]), Piece(seq=1, start=0, ids=b[:6]), Piece(seq=2, start=0, ids=c[:2])]]
    )
    # Decode rows (3 each) with a padded K/V bound, then a ragged prefill group in the same step.
    out = engine.forward(
        [
            [Piece(seq=0, start=20, ids=a[20:]), Piece(seq=1, start=6, ids=b[6:])],
            [Piece(seq=2, start=2, ids=c[2:]), Piece(seq=3, start=0, ids=b[:4])],
        ],
        slack=9,
    )
    want = [expected(model, ids)[0] for ids in (a, b, c, b)]
    close(engine.full_logits(out.hidden_NH), torch.cat([want[0][20:], want[1][6:], want[2][2:], want[3][:4]]))


@torch.inference_mode()
def test_rejected_rows_are_overwritten(pair: tuple[nn.Module, Path], prompts: list[list[int]]) -> None:
    """K/V of wrong drafts stay behind in the cache; they are masked by length, then replaced."""
    model, directory = pair
    engine = PagedModels.load(engine_config(directory), num_seqs=3)
    a = prompts[0]
    engine.forward([[Piece(seq=0, start=0, ids=a[:10])]])
    engine.forward([[Piece(seq=0, start=10, ids=[a[10], 99, 98, 97, 96])]])
    out = engine.forward([[Piece(seq=0, start=11, ids=a[11:13])]], slack=8)
    close(engine.full_logits(out.hidden_NH), expected(model, a[:13])[0][11:])


def test_tap_is_the_state_after_the_layer(pair: tuple[nn.Module, Path], prompts: list[list[int]]) -> None:
    model, directory = pair
    engine = PagedModels.load(engine_config(directory), num_seqs=1)
    with torch.inference_mode():
        out = engine.forward([[Piece(seq=0, start=0, ids=prompts[1])]])
        states = model(torch.tensor([prompts[1]]), output_hidden_states=True).hidden_states
    for column, layer in enumerate(TAPS):
        close(out.taps_NTH[:, column], states[layer + 1][0])
        assert not torch.allclose(out.taps_NTH[:, column], states[layer][0], rtol=1e-2)
    close(out.hidden_NH, states[-1][0])


@torch.inference_mode()
def test_bfloat16_stays_near_float32(pair: tuple[nn.Module, Path], prompts: list[list[int]]) -> None:
    model, directory = pair
    engine = PagedModels.load(engine_config(directory, dtype="bfloat16"), num_seqs=1)
    logits = engine.full_logits(engine.forward([[Piece(seq=0, start=0, ids=prompts[0])]]).hidden_NH)
    want = expected(model, prompts[0])[0]
    assert logits.dtype == torch.float32
    assert (logits - want).abs().mean() < 0.05 * want.abs().mean() + 0.05 * want.std()
