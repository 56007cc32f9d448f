"""Law: prompts become responses, responses a drafter that loads, without any held-out prompt on the way."""

import json
from pathlib import Path

import pytest
import torch

from engine.config.drafter import parse_drafter_config
from engine.config.model import parse_target_config
from engine.training.corpus import Corpus
from engine.training.pipeline import PROMPTS_FILE, RUN_DIR, TrainJob, evaluate, fit, write_corpus
from engine.training.prompts import TurnWriter, chat_prompts, save_prompts
from engine.training.ranks import Ranks
from engine.training.recipe import TrainRecipe
from engine.training.responses import ResponsePlan
from engine.training.sampler import Sample, SampleRequest
from tests.engine.toy_tokenizers import byte_level
from tests.reference.toy import make_target

HELD_OUT = "the quick brown fox jumps over the lazy dog and then stops there"
SOLO = Ranks(rank=0, size=1, device="cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    make_target(directory, "llama", vocab_size=tokenizer.vocab_size, eos_token_id=0)
    tokenizer.hf_tokenizer.save_pretrained(directory)
    return directory


def test_stages(model_dir: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.json"
    held_out.write_text(json.dumps({"set": [HELD_OUT, "another short one"]}))
    job = TrainJob(
        model_dir=model_dir,
        work_dir=tmp_path,
        init="random",
        held_out_file=held_out,
        num_layers=2,
        block_size=4,
        mask_token_id=1,
        target_layer_ids=(0, 2),
        score_new_tokens=8,
    )
    prompts = [f"stop the dog number {i}" for i in range(30)]
    save_prompts([HELD_OUT, *prompts], tmp_path / PROMPTS_FILE)
    plan = ResponsePlan(turns=10, greedy_share=1.0, max_new=24, max_prompt=100, slots=8)
    figures = write_corpus(job, plan, SOLO)
    assert figures["file_prompts"] == 30
    corpus = Corpus.load([tmp_path / "corpus-0.npz"])
    texts = [byte_level().decode(corpus.document(i).tolist()) for i in range(len(corpus))]
    assert len(texts) >= 25
    assert not any("lazy dog" in text for text in texts)

    recipe = TrainRecipe(
        steps=3, row_len=256, rows_per_step=2, anchors_per_row=16, backend="dense", compile_model=False, log_every=1
    )
    scores = fit(job, recipe, SOLO)
    assert set(scores) == {"set", "dev"}
    drafter = tmp_path / RUN_DIR / "drafter"
    parse_drafter_config(drafter, parse_target_config(model_dir))
    reports = evaluate(job, drafter, device="cpu", temperature=0.0, recipe=recipe)
    assert reports["set"].documents == 2
    assert reports["set"].acceptance_length == pytest.approx(scores["set"], abs=0.05)  # weights were rounded


def test_job_is_checked(model_dir: Path, tmp_path: Path) -> None:
    job = TrainJob(model_dir=model_dir, work_dir=tmp_path, init="random")
    with pytest.raises(ValueError, match="mask_token_id is needed"):
        job.raw_config()
    bad = tmp_path / "bad.json"
    bad.write_text("[1]")
    with pytest.raises(ValueError, match="JSON object of set name"):
        TrainJob(model_dir=model_dir, work_dir=tmp_path, init="random", held_out_file=bad).overlap_index()


def test_prompts_have_the_served_form() -> None:
    tokenizer = byte_level()
    texts = ["hello", "stop the dog"]
    for text, ids in zip(texts, chat_prompts(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids) == tokenizer.render_chat([{"role": "user", "content": text}])


def test_turns_are_the_words_before_the_end() -> None:
    tokenizer = byte_level()
    writer = TurnWriter(tokenizer, seed=0)
    request = next(iter(writer.requests(1)))
    assert tokenizer.decode(request.prompt).startswith("<|im_start|>user\n")
    eos = tokenizer.eos_token_id
    assert eos is not None

    def sample(text: str, ended: bool = True) -> Sample:
        plain = SampleRequest(prompt=request.prompt, max_new=9, temperature=1.0, tag=0)
        return Sample(request=plain, tokens=[*request.prompt, *tokenizer.encode(text), eos], ended=ended)

    turn = writer.turn(sample(" what is this?"))
    assert turn is not None
    assert "what is this?" in turn
    assert writer.turn(sample(" what", ended=False)) is None
    assert writer.turn(sample(" a <|im_start|> b")) is None
