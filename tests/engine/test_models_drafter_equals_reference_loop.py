"""Law: the drafter over cached context K/V equals the plain loop that recomputes everything, block by block."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.reference.dflash_loop import ReferenceDrafter, dflash_generate, run_target
from tests.reference.paged import PagedModels, Piece, engine_config
from tests.reference.toy import fit_drafter, make_drafter, make_target

PROMPT = [17, 4, 90, 33, 21, 56, 3]
SHAPES = [
    {},
    {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54, "tie_word_embeddings": True},
]


@pytest.fixture(scope="module", params=SHAPES, ids=["8-heads", "9-heads"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Path]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(directory / "target", "llama", **request.param)
    make_drafter(directory / "drafter", target)
    fit_drafter(directory / "drafter", target, [PROMPT])
    return target, directory / "target", directory / "drafter"


def load(models: tuple[nn.Module, Path, Path], num_seqs: int, **overrides: object) -> PagedModels:
    return PagedModels.load(engine_config(models[1], models[2], **overrides), num_seqs=num_seqs)


def close(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("gather", ["taps", "fused"])
@torch.inference_mode()
def test_blocks_of_a_ragged_batch(models: tuple[nn.Module, Path, Path], gather: str) -> None:
    target, _, drafter_dir = models
    reference = ReferenceDrafter(drafter_dir)
    engine = load(models, 3, hidden_state_gather=gather)
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(0, 131, (n,), generator=generator).tolist() for n in (13, 4, 22)]
    engine.forward([[Piece(seq=s, start=0, ids=text[:4]) for s, text in enumerate(texts)]])
    engine.forward([[Piece(seq=s, start=4, ids=texts[s][4:])] for s in (0, 2)])
    hidden = engine.draft_hidden({s: (len(text), 40 + s) for s, text in enumerate(texts)}, slack=3)
    for s, text in enumerate(texts):
        taps = run_target(target, text, reference.target_layer_ids)[1]
        context = reference.context(taps)
        block = torch.tensor([40 + s, *[reference.mask_token_id] * (reference.block_size - 1)])
        close(hidden[s], reference.block(target.get_input_embeddings()(block), context, len(text)))


@torch.inference_mode()
def test_block_sees_the_whole_block_and_no_stale_rows(models: tuple[nn.Module, Path, Path]) -> None:
    """Drafting twice changes nothing: the first block's K/V lie past the context and are written again."""
    engine = load(models, 2)
    engine.forward([[Piece(seq=0, start=0, ids=[9, 8, 7, 6, 5])]])
    first = engine.draft_hidden({0: (5, 11)})
    engine.draft_hidden({0: (5, 77)})
    assert torch.equal(engine.draft_hidden({0: (5, 11)}), first)


@pytest.mark.parametrize("draft_len", [1, 3, 5])
@torch.inference_mode()
def test_tokens_and_accepted_counts(models: tuple[nn.Module, Path, Path], draft_len: int) -> None:
    target, _, drafter_dir = models
    want = dflash_generate(target, ReferenceDrafter(drafter_dir), PROMPT, max_new_tokens=30, draft_len=draft_len)
    tokens, accepted = load(models, 2).generate(PROMPT, seq=1, max_new_tokens=30, draft_len=draft_len)
    assert tokens == want.tokens
    assert accepted == want.accepted
    assert 0 < sum(accepted) < draft_len * len(accepted)


@torch.inference_mode()
def test_reference_loop_emits_plain_greedy_tokens(models: tuple[nn.Module, Path, Path]) -> None:
    target, _, drafter_dir = models
    prompt = [1, 50, 61, 7]
    plain = target.generate(
        torch.tensor([prompt]), max_new_tokens=25, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    drafter = ReferenceDrafter(drafter_dir)
    assert dflash_generate(target, drafter, prompt, max_new_tokens=25, draft_len=5).tokens == plain
    stop = plain[9]
    stopped = dflash_generate(target, drafter, prompt, max_new_tokens=25, draft_len=5, stop_ids=(stop,)).tokens
    assert stopped == plain[: plain.index(stop) + 1]
