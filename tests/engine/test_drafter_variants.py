"""Every kind of drafter drafts what a plain loop over its file's weights drafts, block by block, through the engine."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from tests.engine.drafting import after_drafts
from tests.reference import toy as reference_toy
from tests.reference.dflash_loop import ReferenceDrafter, dflash_generate
from tests.toy import VOCAB_SIZE, make_drafter, make_target

NUM_TOKENS = 40
PROMPT = [17, 4, 90, 33, 21, 56, 3, 200, 11, 62]
SLIDING = ["sliding_attention", "full_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "sliding, causal": {"layer_types": SLIDING, "sliding_window": 6},
    "sliding, symmetric": {
        "layer_types": SLIDING[::-1],
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 1], "use_swa": True, "swa_window_size": 9},
    },
    "causal everywhere": {"is_causal": True},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        "max_position_embeddings": 64,
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "one tap": {"target_layer_ids": [1]},
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "speculators": {"layer_types": SLIDING, "sliding_window": 6},
    "speculators, not causal": {"layer_types": SLIDING, "sliding_window": 6},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    directory = make_target(tmp_path_factory.mktemp("target") / "target")
    return directory, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, target: tuple[Path, nn.Module]) -> Path:
    """A plain drafter that agrees with the target now and then; the variants keep its weights."""
    directory = make_drafter(tmp_path_factory.mktemp("drafter") / "fitted", target[0], head_dim=8)
    reference_toy.fit_drafter(directory, target[1], [PROMPT], text_len=50, steps=40)
    return directory


def variant(directory: Path, fitted: Path, target: tuple[Path, nn.Module], name: str) -> Path:
    make_drafter(directory, target[0], head_dim=8, **(VARIANTS | SPECULATORS)[name])
    if name != "one tap":
        shutil.copy(fitted / "model.safetensors", directory / "model.safetensors")
    if name in SPECULATORS:
        draft_ids = [i for i in range(VOCAB_SIZE) if i % 5 != 3]  # the head lacks every fifth id
        reference_toy.as_speculators(
            directory, target[1], draft_ids, sliding_window_non_causal=name == "speculators, not causal"
        )
    return directory


def drafted(target_dir: Path, drafter_dir: Path, **options: Any) -> tuple[list[int], list[int], list[list[int]]]:
    """(tokens, accepted of every step, the drafts of every step) of greedy decoding."""
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter_dir))
    options = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 2, "num_blocks": 60, "block_size": 4} | options
    with LLM(str(target_dir), speculative_config=spec, threads=1, debug_checks=True, **options) as llm:
        state, drafts = llm._rank.runner.state, []

        def record(slots_S, draft_len):  # type: ignore[no-untyped-def]
            slot = int(slots_S[0])
            drafts.append(state.draft_tokens[slot, : int(state.draft_count[slot])].tolist())

        after_drafts(llm, record)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        result = llm.generate(PROMPT, params)[0].outputs[0]
        cells = llm.core.counters()
        return list(result.token_ids), [cells.num_accepted_tokens], drafts


@pytest.mark.parametrize("name", [*VARIANTS, *SPECULATORS])
def test_drafts_equal_the_loop(tmp_path: Path, fitted: Path, target: tuple[Path, nn.Module], name: str) -> None:
    drafter_dir = variant(tmp_path / "drafter", fitted, target, name)
    reference = ReferenceDrafter(drafter_dir)
    want = dflash_generate(target[1], reference, PROMPT, max_new_tokens=NUM_TOKENS, draft_len=7)
    tokens, accepted, drafts = drafted(target[0], drafter_dir)
    assert tokens == want.tokens
    assert accepted == [sum(want.accepted)] and (accepted[0] > 0 or name == "one tap")
    for got, expected in zip(drafts, want.drafts, strict=False):
        assert got[: len(expected)] == expected
    if name in SPECULATORS:
        assert not any(token % 5 == 3 for block in drafts for token in block)
    else:  # the variant matters: the plain drafter of the same weights would have drafted otherwise
        reference.sees = [(False, None)] * 2
        plain = dflash_generate(target[1], reference, PROMPT, max_new_tokens=NUM_TOKENS, draft_len=7)
        assert (plain.drafts != want.drafts) == (name in list(VARIANTS)[:3])


def test_two_ranks_share_the_cut_vocabulary(tmp_path: Path, fitted: Path, target: tuple[Path, nn.Module]) -> None:
    drafter_dir = variant(tmp_path / "drafter", fitted, target, "speculators")
    one = drafted(target[0], drafter_dir)
    assert drafted(target[0], drafter_dir, tensor_parallel_size=2) == one


@pytest.mark.parametrize("rejection", [False, True])
def test_sampled_drafts_of_a_cut_vocabulary_stay_in_it(
    tmp_path: Path, fitted: Path, target: tuple[Path, nn.Module], rejection: bool
) -> None:
    """Coupled and probabilistic drafts come from the head's own ids; what is emitted does not."""
    drafter_dir = variant(tmp_path / "drafter", fitted, target, "speculators")
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter_dir), use_rejection_sampling=rejection)
    options: dict[str, Any] = {"draft_sampling": "probabilistic" if rejection else "coupled", "num_blocks": 120}
    with LLM(
        str(target[0]),
        speculative_config=spec,
        dtype="float32",
        max_model_len=96,
        threads=1,
        debug_checks=True,
        **options,
    ) as llm:
        state, drafts = llm._rank.runner.state, []

        def record(slots_S, draft_len):  # type: ignore[no-untyped-def]
            drafts.extend(state.draft_tokens[slots_S, :draft_len].flatten().tolist())

        after_drafts(llm, record)
        params = [SamplingParams(temperature=1.0, max_tokens=30, seed=i, ignore_eos=True) for i in range(4)]
        outputs = llm.generate([PROMPT] * 4, params)
    assert drafts and not any(token % 5 == 3 for token in drafts)
    emitted = [token for output in outputs for token in output.outputs[0].token_ids]
    assert any(token % 5 == 3 for token in emitted)
    if not rejection:
        with LLM(str(target[0]), dtype="float32", max_model_len=96, threads=1) as plain:
            exact = plain.generate([PROMPT] * 4, params)
        assert emitted == [token for output in exact for token in output.outputs[0].token_ids]
