"""Laws: evaluation prompts stay out, packing keeps every document, the sampler writes what the target would."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from engine.training.corpus import Corpus, assign_rows, pack
from engine.training.overlap import OverlapIndex
from engine.training.prompts import Cleaner, docstring_prompts, load_prompts, save_prompts
from engine.training.sampler import BatchSampler, SampleRequest
from engine.training.target import FrozenTarget
from tests.reference.toy import make_target

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HELD_OUT = [
    "Melanie sold a third of her vacuum cleaners at the green house and two more at the red house." + STEP_BY_STEP,
    "Tom's ship can travel at ten miles per hour and he is sailing from one to four." + STEP_BY_STEP,
    "The sisters are driving home with seven kittens adopted from the local animal shelter today." + STEP_BY_STEP,
    "Explain photosynthesis to a ten year old.",
]


def test_evaluation_prompts_are_refused_and_their_instruction_is_not() -> None:
    index = OverlapIndex(HELD_OUT)
    assert all(index.overlaps(text) for text in HELD_OUT)
    assert index.overlaps("ok: MELANIE sold a third of her vacuum, cleaners at noon")
    assert index.overlaps("Please explain photosynthesis to a ten year old in French.")
    assert not index.overlaps("Melanie sold a third of her vacuum")
    assert not index.overlaps("Ben has 3 apples and buys 4. How many has he?" + STEP_BY_STEP)
    texts = ["Ben has three apples." + STEP_BY_STEP, HELD_OUT[1], "ben has  three apples." + STEP_BY_STEP]
    assert Cleaner(index).kept(texts) == ["Ben has three apples." + STEP_BY_STEP]


def test_docstring_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'def double(x: int) -> int:\n    """Return twice the number that is given.\n\n    More words.\n    """\n'
        'def _hidden(x):\n    """Not shown because its name is private."""\n'
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    prompts = list(docstring_prompts([tmp_path], seed=1))
    assert len(prompts) == 1
    assert "twice the number" in prompts[0]
    save_prompts(prompts, tmp_path / "p.xz")
    assert load_prompts(tmp_path / "p.xz") == prompts
    (tmp_path / "bad.xz").write_text("no")
    with pytest.raises(ValueError, match="not a prompt file"):
        load_prompts(tmp_path / "bad.xz")


def test_packing_keeps_every_document(tmp_path: Path) -> None:
    rng = random.Random(0)
    documents = []
    for index in range(60):
        length = rng.randint(2, 40)
        documents.append(([1000 * index + i for i in range(length)], rng.randint(1, length - 1), 0.0))
    corpus = Corpus.of(documents)
    corpus.save(tmp_path / "c.npz")
    corpus = Corpus.load([tmp_path / "c.npz"])
    assert corpus.response_tokens == sum(len(tokens) - prompt for tokens, prompt, _ in documents)
    rows = pack(corpus, row_len=64, seed=0, whole_multiple=4)
    assert len(rows) % 4 == 0
    assert rows.fill > 0.8
    found = {}
    for row in range(len(rows)):
        at = 0
        while at < 64:
            start, end = int(rows.doc_start_NS[row, at]), int(rows.doc_end_NS[row, at])
            assert start == at
            assert (rows.doc_start_NS[row, start:end] == start).all()
            tokens = rows.tokens_NS[row, start:end].tolist()
            if end - start > 1:
                found[tokens[0] // 1000] = (tokens, int((~rows.response_NS[row, start:end]).sum()))
            at = end
    assert found == {i: (tokens, prompt) for i, (tokens, prompt, _) in enumerate(documents)}
    with pytest.raises(ValueError, match="does not fit row_len=8"):
        assign_rows([9], 8, 0)
    assert np.array_equal(corpus.subset([3]).tokens, corpus.document(3))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, FrozenTarget]:
    directory = tmp_path_factory.mktemp("target")
    model = make_target(directory, "llama")
    return model, FrozenTarget.load(directory, num_positions=64, dtype=torch.float32, device="cpu")


def test_sampler_equals_generate(target: tuple[nn.Module, FrozenTarget]) -> None:
    """More requests than slots, mixed lengths; greedy rows equal transformers, whatever runs beside them."""
    model, frozen = target
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 131) for _ in range(rng.randint(1, 9))] for _ in range(7)]
    requests = [
        SampleRequest(prompt=prompt, max_new=5 + i, temperature=0.0 if i % 3 else 1.0, tag=i)
        for i, prompt in enumerate(prompts)
    ]
    sampler = BatchSampler(frozen, slots=3, max_len=24, stop_ids=(2,), seed=0, steps_per_look=4)
    samples = {sample.request.tag: sample for sample in sampler.run(requests)}
    assert len(samples) == 7
    for i, prompt in enumerate(prompts):
        sample = samples[i]
        assert sample.tokens[: len(prompt)] == prompt
        assert len(sample.tokens) <= len(prompt) + 5 + i
        assert sample.ended == (sample.tokens[-1] == 2)
        if i % 3:
            want = model.generate(
                torch.tensor([prompt]), max_new_tokens=5 + i, do_sample=False, eos_token_id=2, pad_token_id=0
            )
            assert sample.tokens == want[0].tolist()
    with pytest.raises(ValueError, match="1 <= prompt"):
        list(sampler.run([SampleRequest(prompt=[], max_new=1, temperature=0.0)]))


def test_sampler_follows_the_distribution(target: tuple[nn.Module, FrozenTarget]) -> None:
    """First tokens at temperature 0.8, min_p 0.05, against the softmax computed from the full pass."""
    from engine.training.attention import document_mask

    _, frozen = target
    prompt = [17, 4, 90]
    mask = document_mask(torch.zeros(1, 3, dtype=torch.int64), "dense")
    logits = frozen.logits(torch.tensor([prompt]), torch.arange(3)[None], mask)[0, -1]
    p = (logits / 0.8).softmax(0)
    p = torch.where(p >= 0.05 * p.max(), p, 0.0)
    p /= p.sum()
    sampler = BatchSampler(frozen, slots=64, max_len=4, stop_ids=(), seed=3, min_p=0.05, steps_per_look=4)
    count = 2000
    samples = sampler.run([SampleRequest(prompt=prompt, max_new=1, temperature=0.8)] * count)
    seen = torch.bincount(torch.tensor([sample.tokens[-1] for sample in samples]), minlength=131) / count
    assert not seen[p == 0].any()
    assert (seen - p).abs().max() < 0.05
