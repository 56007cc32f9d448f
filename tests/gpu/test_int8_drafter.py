"""A drafter by weights of 8 bits: what those weights say, and its engine's tokens are the target's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.attention.cuda_paged import cuda_paged_attention
from engine.kernels.gemm_choice import GemmCut
from engine.kernels.int8_choice import MAX_ROWS
from engine.layers import cuda_cuts, linear, rms_norm, rotary
from engine.layers import cuda_rows as cuda_rows_module
from engine.layers.cuda_rows import CudaRows
from engine.layers.int8_weight import Int8Weight, round_weight
from engine.layers.linear import Linear
from engine.models import decoder, dflash, target
from engine.models.decoder import DecoderLayer
from tests import toy
from tests.gpu.places import places
from tests.reference.paged import PagedModels, Piece, engine_config
from tests.reference.toy import make_drafter, make_target

pytest.importorskip("triton", reason="the package triton is not installed")


def _small_cut(*, rows: int, K: int, N: int, swiglu: bool = False, shared_bytes: int = 0) -> GemmCut | None:
    splits = 1 if -(-K // 64) % 2 else 2
    return GemmCut(outputs=64, inputs=64, num_splits=splits, staggered=True) if rows <= MAX_ROWS else None


def _streams(N: int, K: int) -> bool:
    return N % 64 == 0 and K % 128 == 0


@pytest.fixture
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are held and multiplied in 8 bits as large ones are."""
    monkeypatch.setattr(linear, "keeps_int8", lambda N, K: K % 16 == 0)
    monkeypatch.setattr(linear, "streams_int8", _streams)
    monkeypatch.setattr(cuda_cuts, "int8_cut", _small_cut)


def _drafting(models: PagedModels) -> dict[str, Linear]:
    assert models.drafter is not None
    found = {name: module for name, module in models.drafter.named_modules() if isinstance(module, Linear)}
    return found | {"head": models.target.draft_head or models.target.head}


def _spread(weight: Int8Weight) -> None:
    """So far from the matrix that no rounding hides it: every row times a factor of its own."""
    generator = torch.Generator().manual_seed(weight.scale.numel())
    weight.scale.mul_((0.5 + torch.rand(weight.scale.shape, generator=generator)).to(weight.scale.device))


def _outputs(models: PagedModels) -> list[Tensor]:
    """What drafting leaves in two steps: the block's states, the logits of its drafts, the drafter's cache."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(4, 131, (n,), generator=generator).tolist() for n in (9, 5)]
    models.forward([[Piece(seq=s, start=0, ids=text) for s, text in enumerate(texts)]])
    block = models.draft_hidden({0: (9, 7), 1: (5, 9)})
    logits = models.target.draft_logits(block.flatten(0, 1))
    return [
        x.float().cpu().clone() for x in (block, logits, *(cache[1:] for kv in models.kv.drafter_kv for cache in kv))
    ]


@pytest.mark.parametrize(("case", "device"), places(["qwen3", "qwen2", "llama"], ["qwen3"]))
@torch.inference_mode()
def test_what_drafts_are_made_of(
    case: str, device: str, tmp_path: Path, small_matrices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 128 if device == "cuda" else 64
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": size, "num_hidden_layers": 4}
    model = make_target(tmp_path / "target", case, **shape)
    make_drafter(tmp_path / "drafter", model, head_dim=32, intermediate_size=2 * size)
    directories = tmp_path / "target", tmp_path / "drafter"
    settings: dict[str, Any] = {"block_size": 16, "num_blocks": 31}
    monkeypatch.setattr(linear, "unavailable_reason", lambda: "weights stay as they are")
    reference = PagedModels.load(engine_config(*directories, **settings), num_seqs=2)
    # Products of whole heads have no such form.
    monkeypatch.setattr(cuda_rows_module, "head_cut", lambda **shape: None)
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = engine_config(*directories, **settings, device=device, dtype=dtype, drafter_weights="int8")
    models = PagedModels.load(config, num_seqs=2)
    if device == "cpu":  # the interpreter's dot does not know bfloat16
        for module in _drafting(models).values():
            module.int8_weight = round_weight(module.weight)
        kernels = CudaRows(pdl=False)
        for module_of in (decoder, dflash, linear, rms_norm, rotary, target):
            monkeypatch.setattr(module_of, "cuda_rows", lambda x: kernels if x.device == models.tables.device else None)
        assert models.drafter is not None
        for layer in (*models.target.layers, *models.drafter.layers):
            assert isinstance(layer, DecoderLayer)
            layer.attention = cuda_paged_attention
    held = _drafting(models)
    plain = _outputs(reference)
    for name, module in _drafting(reference).items():
        rounded = held[name].int8_weight
        assert rounded is not None, name
        _spread(rounded)
        plain_order = round_weight(held[name].weight).rounded
        assert torch.equal(plain_order, rounded.rounded) != rounded.streams
        module.weight.data = (plain_order * rounded.scale[:, None]).cpu()
    if device == "cpu":
        # The reference runs torch's expressions, on the same device.
        found = _outputs(models)
        for module_of in (decoder, dflash, linear, rms_norm, rotary, target):
            monkeypatch.setattr(module_of, "cuda_rows", lambda x: None)
        monkeypatch.setattr(dflash, "row_kernels", lambda dtype: None)
    else:
        found = _outputs(models)
    for got, want, other in zip(found, _outputs(reference), plain, strict=True):
        assert (got - want).norm() <= (1e-4 if device == "cpu" else 0.1) * want.norm()
        assert (other - want).norm() >= 0.2 * want.norm(), "the weights were meant to be others"


PROMPTS = [[5, 6, 7], list(range(40, 75)), [9] * 20]


def _run(models: tuple[Path, Path], weights: str, prompts: list[list[int]], **options: Any) -> tuple[list, float, LLM]:
    """(tokens of greedy and seeded requests, one at a time; accepted drafts of a step; the engine, closed)."""
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(models[1]))
    settings = dict(max_model_len=256, max_num_seqs=1, max_num_batched_tokens=256, num_blocks=40, threads=1)
    llm = LLM(
        str(models[0]),
        speculative_config=spec,
        dtype="bfloat16",
        device="cuda",
        drafter_weights=weights,
        draft_len_choices=[0, 7],
        **(settings | options),
    )
    with llm:
        tokens = []
        for index, prompt in enumerate(prompts):
            for temperature in (0.0, 0.7):
                params = SamplingParams(temperature=temperature, seed=index, max_tokens=64, ignore_eos=True)
                tokens.append(list(llm.generate([prompt], params)[0].outputs[0].token_ids))
        counters = llm.core.counters()
        return tokens, counters.num_accepted_tokens / counters.num_drafts, llm


@pytest.mark.gpu
def test_tokens_do_not_depend_on_the_drafter_s_weights(tmp_path: Path, small_matrices: None) -> None:
    shape = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    target_dir = toy.make_target(tmp_path / "target", kind="qwen3", **shape)
    models = target_dir, toy.make_drafter(tmp_path / "drafter", target_dir, head_dim=32, intermediate_size=256)
    want, _, _ = _run(models, "model", PROMPTS)
    tokens, _, llm = _run(models, "int8", PROMPTS)
    assert tokens == want
    assert len({token for text in want for token in text}) > 20
    assert llm.config.drafter_weights == "int8"


@pytest.fixture
def smollm2(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    try:
        directory = request.getfixturevalue("smollm2_dir")
    except (OSError, ValueError) as error:
        pytest.skip(f"no SmolLM2: {error}")
    return directory, request.getfixturevalue("smollm2_drafter_dir")


@pytest.mark.gpu
def test_smollm2_accepts_as_many_drafts(smollm2: tuple[Path, Path], small_matrices: None) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2[0])
    texts = ("Write a Python function that adds two numbers.", "What is the capital of France? Tell me of it.")
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
        for text in texts
    ]
    want, accepted, _ = _run(smollm2, "model", prompts, num_blocks=200)
    tokens, of_rounded, _ = _run(smollm2, "int8", prompts, num_blocks=200)
    assert tokens == want
    assert accepted > 0.5
    assert of_rounded == pytest.approx(accepted, rel=0.1)
