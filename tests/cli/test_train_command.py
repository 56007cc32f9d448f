"""Law: the same commands make a drafter for a target of another kind and shape, cut its head and measure it; what the
engine emits with either equals plain decoding."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cluster.cli.main import app
from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.training.corpus import Corpus
from engine.training.cut_head import kept_ids
from engine.training.pipeline import PROMPTS_FILE
from engine.training.prompts import load_prompts, save_prompts
from engine.training.vocabulary import most_frequent, token_counts
from tests.engine.toy_tokenizers import byte_level
from tests.reference.toy import make_target

MESSAGES = [f"stop the {word} dog" for word in ("quick", "brown", "lazy", "other", "naive", "hello")]
RECIPE = {"row_len": 256, "rows_per_step": 1, "anchors_per_row": 48, "learning_rate": 1e-2, "warmup_steps": 4}


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 whose heads are wider than its hidden state, untied, six layers, a vocabulary of a few hundred."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("target")
    tokenizer = byte_level()
    make_target(
        directory,
        "qwen3",
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=6,
        eos_token_id=0,
    )
    tokenizer.hf_tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Responses written and a drafter fitted to them."""
    directory = tmp_path_factory.mktemp("work")
    save_prompts(MESSAGES, directory / PROMPTS_FILE)
    (directory / "recipe.json").write_text(json.dumps(RECIPE))
    train = ["train", "--model", model, "--work-dir", directory, "--device", "cpu", "--init", "random"]
    train += ["--mask-token-id", 1, "--num-layers", 2, "--block-size", 4]
    run(*train, "--stage", "responses", "--turns", 0, "--slots", 6, "--max-new", 24, "--greedy-share", 1.0)
    run(*train, "--stage", "fit", "--steps", 60, "--recipe", directory / "recipe.json")
    return directory


def decode(model: Path, drafter: Path | None) -> tuple[list[Sequence[int]], int, int]:
    """(token ids of every answer, verify steps, accepted drafts)."""
    spec = None if drafter is None else DFlashDecodingConfig(max_draft_len=3, speculative_model=str(drafter))
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(str(model), speculative_config=spec, dtype="float32", threads=1, max_model_len=128) as llm:
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in MESSAGES]
        texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        counters = llm.core.counters()
        return texts, counters.num_drafts, counters.num_accepted_tokens


def test_a_drafter_for_another_target(model: Path, work: Path) -> None:
    plain, _, _ = decode(model, None)
    drafted, steps, accepted = decode(model, work / "run" / "drafter")
    assert drafted == plain
    assert accepted > steps / 2  # fitted to these very texts


def test_a_cut_head_drafts_the_kept_ids_alone(model: Path, work: Path, tmp_path: Path) -> None:
    drafter = work / "run" / "drafter"
    counts = token_counts(Corpus.load([work / "corpus-0.npz"]), byte_level().vocab_size)
    written = int((counts > 0).sum())
    ids = most_frequent(counts, written, always=(0,))
    plain, steps, accepted = decode(model, drafter)
    cut = ["cut-head", "--model", model, "--drafter", drafter, "--work-dir", work]
    run(*cut, "--rows", written, "--out", tmp_path / "cut")
    found = kept_ids(model, tmp_path / "cut")
    assert found is not None
    assert found.tolist() == ids.tolist()
    texts, cut_steps, cut_accepted = decode(model, tmp_path / "cut")
    assert texts == plain
    # Every id of these texts is kept, so nothing that was right is lost, and what was wrong outside cannot be drafted.
    assert (cut_steps <= steps, cut_accepted >= accepted) == (True, True)

    np.save(tmp_path / "counts.npy", counts)
    counted = ["cut-head", "--model", model, "--drafter", drafter, "--token-counts", tmp_path / "counts.npy"]
    run(*counted, "--rows", 1, "--out", tmp_path / "one")
    texts, _, few = decode(model, tmp_path / "one")  # the end of sequence alone
    assert texts == plain
    assert few < accepted


def test_cut_drafters_are_measured_with_their_head(model: Path, work: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"set": MESSAGES}))
    cut = ["cut-head", "--model", model, "--drafter", work / "run" / "drafter", "--work-dir", work]
    lengths = {}
    counts = token_counts(Corpus.load([work / "corpus-0.npz"]), byte_level().vocab_size)
    written = int((counts > 0).sum())
    sizes = (1, written, byte_level().vocab_size)
    for rows in sizes:
        run(*cut, "--rows", rows, "--out", tmp_path / str(rows))
    for name in (work / "run" / "drafter", *[tmp_path / str(rows) for rows in sizes]):
        out = tmp_path / "report.json"
        run("eval-drafter", "--model", model, "--drafter", name, "--prompts", prompts, "--max-new", 24, "--json", out)
        lengths[name.name] = json.loads(out.read_text())["set"]["acceptance_length"]
    assert lengths["drafter"] == lengths[str(byte_level().vocab_size)] > lengths["1"]
    assert lengths[str(written)] >= lengths["drafter"]  # every id of these texts is kept

    weights = load_file(tmp_path / "1" / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, tmp_path / "1" / "model.safetensors")
    with pytest.raises(ValueError, match="not made of the target's rows"):
        kept_ids(model, tmp_path / "1")


def test_refusals(model: Path, work: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.zeros(3, np.int64))
    cut = ["cut-head", "--model", model, "--drafter", work / "run" / "drafter", "--out", tmp_path / "out"]
    for words, message in (
        (["--rows", 5], "give --work-dir or --token-counts"),
        (["--rows", 10**6, "--work-dir", work], "a head of 1000000 rows: must lie in 1.."),
        (["--rows", 5, "--token-counts", tmp_path / "short.npy"], "wanted one count >= 0 for each"),
        (["--rows", 5, "--work-dir", work, "--out", work], "exists; name a new directory"),
    ):
        result = CliRunner().invoke(app, [str(word) for word in [*cut, *words]])
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


def test_word_problems_are_made_where_the_package_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that repeat an evaluation prompt, or a run of its words, stay out."""
    held_out = "Melanie sold 12 of her vacuum cleaners at the green house and 2 more at the red house."
    again = held_out.replace("12", "31")
    package = ModuleType("reasoning_gym")
    package.__spec__ = SimpleNamespace(name="reasoning_gym")  # type: ignore[assignment]
    package.factory = SimpleNamespace(DATASETS={"gsm_symbolic": None})  # type: ignore[attr-defined]
    package.create_dataset = lambda name, size, seed: [  # type: ignore[attr-defined]
        {"question": text} for text in (held_out, again, "How many apples has Ben, who had 3 and bought 4?")
    ]
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(empty), "purelib": str(empty)})
    file = tmp_path / "held_out.json"
    file.write_text(json.dumps({"set": [held_out]}))
    train = ["train", "--model", model, "--work-dir", tmp_path, "--init", "random", "--mask-token-id", 1]
    train += ["--num-layers", 2, "--device", "cpu", "--stage", "prompts", "--held-out", file]

    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    run(*train)
    assert [text.startswith("How many apples") for text in load_prompts(tmp_path / PROMPTS_FILE)] == [True]
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    result = CliRunner().invoke(app, [str(word) for word in train])
    assert (result.exit_code, "reasoning-gym is not installed" in result.stderr) == (0, True)
    assert load_prompts(tmp_path / PROMPTS_FILE) == []
