"""What `LLM.generate` takes as a prompt, and that everything else is a ValueError which leaves the engine working."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine import LLM, SamplingParams
from tests.toy import VOCAB_SIZE, make_target

FORMS = "prompts: must be a text, a list of token ids"
BAD = [
    (None, FORMS),
    (5, FORMS),
    (b"abc", FORMS),
    ([True], FORMS),
    ([1.0], FORMS),
    ([None], FORMS),
    ([[1], [None]], FORMS),
    ({"prompt_token_ids": "abc"}, FORMS),
    ({"prompt_token_ids": None}, FORMS),
    ({"prompt": "x"}, "prompts: a dict prompt needs the key 'prompt_token_ids'"),
    ([-1], "prompts: token id -1 is not in the vocabulary, 0 .. 319"),
    ([VOCAB_SIZE], "prompts: token id 320 is not in the vocabulary"),
    ([10**30], "prompts: token id 1000000000000000000000000000000 is not in the vocabulary"),
    ("\ud800", "prompts: a text cannot be encoded"),
    ("", "prompt_token_ids: the prompt is empty"),
    ([[]], "prompt_token_ids: the prompt is empty"),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    target = make_target(tmp_path_factory.mktemp("target"))
    with LLM(str(target), dtype="float32", threads=1, max_num_seqs=2, max_model_len=64, num_blocks=20) as engine:
        yield engine


@pytest.mark.parametrize(("prompts", "message"), BAD, ids=[ascii(prompts) for prompts, _ in BAD])
def test_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        llm.generate(prompts, SamplingParams(max_tokens=1))
    assert str(error.value).startswith(message)
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=1))) == 1


def test_seeds_of_choices_wrap(llm: LLM) -> None:
    def tokens(seed: int, n: int) -> list[tuple[int, ...]]:
        params = SamplingParams(n=n, seed=seed, max_tokens=8, ignore_eos=True)
        return [output.token_ids for output in llm.generate([1, 2], params)[0].outputs]

    assert tokens(2**63 - 1, 2) == tokens(2**63 - 1, 1) + tokens(-(2**63), 1)
