"""A drafter's block narrower than it was trained: limits of the option, and that the block is so wide everywhere."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.models.decoder import EnteredRows
from tests.engine.drafting import after_drafts, mixed_truth
from tests.engine.resolving import DRAFTER, TARGET, resolve, spec, write_checkpoint
from tests.reference.dflash_loop import LoopResult, ReferenceDrafter, dflash_generate
from tests.reference.toy import fit_drafter
from tests.toy import make_drafter, make_target

PROMPT = [17, 4, 90, 33, 21, 56, 3]
NUM_TOKENS = 30
POSITIONS = 96  # of the drafter
FORMS: list[dict[str, Any]] = [{"debug_checks": True}, {}, {"decode_programs": "repeated", "pipeline_depth": 1}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("width")
    target = make_target(root / "target")
    drafter = make_drafter(root / "drafter", target, max_position_embeddings=POSITIONS)
    fit_drafter(drafter, AutoModelForCausalLM.from_pretrained(target), [PROMPT], text_len=30, steps=150)
    return target, drafter


def engine(models: tuple[Path, Path], draft_len: int, **options: Any) -> LLM:
    target, drafter = models
    settings = dict(max_model_len=160, max_num_seqs=4, max_num_batched_tokens=64, block_size=8, num_blocks=120)
    return LLM(
        str(target),
        speculative_config=DFlashDecodingConfig(max_draft_len=draft_len, speculative_model=str(drafter)),
        dtype="float32",
        threads=1,
        **settings | options,
    )


def greedy(num_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=seed, ignore_eos=True)


def expected(models: tuple[Path, Path], draft_len: int, width: int) -> LoopResult:
    """The plain loop over a block of this width."""
    target, drafter = models
    reference, model = ReferenceDrafter(drafter), AutoModelForCausalLM.from_pretrained(target)
    return dflash_generate(model, reference, PROMPT, max_new_tokens=NUM_TOKENS, draft_len=draft_len, width=width)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("draft_len", "width"), [(1, 2), (3, 4), (3, 6)])
def test_drafts_are_those_of_a_forward_of_that_width(
    models: tuple[Path, Path], draft_len: int, width: int, form: dict[str, Any]
) -> None:
    want = expected(models, draft_len, width)
    drafts, rows = [], []
    with engine(models, draft_len, draft_block_width=width, **form) as llm:
        state, drafter = llm._rank.runner.state, llm._rank.runner._draft_program._drafter
        real = drafter.draft_hidden

        def draft_hidden(block: EnteredRows, *args: Any, **kwargs: Any) -> torch.Tensor:
            rows.append((block.x_NH.shape[0], kwargs["block_width"]))
            return real(block, *args, **kwargs)

        drafter.draft_hidden = draft_hidden
        after_drafts(llm, lambda slots, _: drafts.append(state.draft_tokens[slots[0], :draft_len].tolist()))
        (output,) = llm.generate([PROMPT], [greedy(NUM_TOKENS)])
    assert list(output.outputs[0].token_ids) == want.tokens
    assert rows and set(rows) == {(width, width)}
    verified = [made[: len(checked)] for made, checked in zip(drafts, want.drafts, strict=False)]
    assert verified == want.drafts
    assert sum(want.accepted) > 0


def test_the_loops_of_two_widths_differ(models: tuple[Path, Path]) -> None:
    """Without this the test above could not tell which width was run."""
    assert expected(models, 3, 4).drafts != expected(models, 3, 6).drafts != expected(models, 3, 8).drafts


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_output_is_plain_decoding_s(models: tuple[Path, Path], form: dict[str, Any]) -> None:
    texts = [PROMPT, [5], list(range(40, 85)), PROMPT[::-1]]
    params = [greedy(40, seed) for seed in range(4)]
    with LLM(str(models[0]), dtype="float32", threads=1, max_model_len=160, num_blocks=120, block_size=8) as plain:
        truth = [list(output.outputs[0].token_ids) for output in plain.generate(texts, params)]
    with engine(models, 3, draft_block_width=4, num_blocks=24, **form) as llm:
        mixed_truth(llm, {i: texts[i] + truth[i] for i in range(4)}, p_right=0.7, seed=1)
        assert [list(output.outputs[0].token_ids) for output in llm.generate(texts, params)] == truth
        assert llm.core.counters().num_accepted_tokens > 20
        llm.core.check_integrity()


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
@pytest.mark.parametrize("width", [4, None])
def test_rows_draft_as_long_as_their_block_has_positions(
    models: tuple[Path, Path], width: int | None, form: dict[str, Any]
) -> None:
    live: list[int] = []
    with engine(models, 3, draft_block_width=width, **form) as llm:
        state = llm._rank.runner.state

        def note(slots: torch.Tensor, _: int) -> None:
            live.extend(state.committed_len[slots][state.draft_count[slots] > 0].tolist())
            state.draft_tokens[slots] = llm.config.drafter.mask_token_id  # nothing is accepted: every length is met

        after_drafts(llm, note)
        llm.generate([PROMPT], [greedy(POSITIONS)])
    assert max(live) == POSITIONS - (width or 8)


def test_lookahead_is_the_width(tmp_path: Path) -> None:
    target, drafter = write_checkpoint(tmp_path / "t", TARGET), write_checkpoint(tmp_path / "d", DRAFTER)
    trained, narrow, plain = (
        resolve(target, given, max_model_len=256, **options)
        for given, options in ((spec(drafter), {}), (spec(drafter), {"draft_block_width": 8}), (None, {}))
    )
    assert [config.block_width for config in (trained, narrow, plain)] == [16, 8, 0]
    assert [config.lookahead for config in (trained, narrow, plain)] == [16, 8, 0]
    assert [config.max_blocks_per_seq for config in (trained, narrow, plain)] == [17, 17, 16]
    assert narrow.identity == trained.identity, "what lies in cached blocks is made of the target's states alone"
    assert resolve(target, spec(drafter), draft_block_width=16).block_width == 16


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (17, "lie between max_draft_len + 1 = 8 and 16, the width the drafter has learnt, got 17; lower it, or leave"),
        (7, "got 7; raise it, or lower speculative_config.max_draft_len to at most 6"),
        (1, "and 16, the width the drafter has learnt, got 1; raise it"),
        (0, "and 16, the width the drafter has learnt, got 0; raise it"),
    ],
)
def test_widths_that_cannot_be(tmp_path: Path, width: int, message: str) -> None:
    target, drafter = write_checkpoint(tmp_path / "t", TARGET), write_checkpoint(tmp_path / "d", DRAFTER)
    with pytest.raises(ValueError, match="^draft_block_width: must .*" + re.escape(message)):
        resolve(target, spec(drafter), draft_block_width=width)
