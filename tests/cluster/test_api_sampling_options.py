"""Sampling options through the whole API and a real engine with drafts: the clients' answers are the engine's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from core_engine import CoreEngine
from fake_engine import MAX_MODEL_LEN, MODEL, ApiServer, running
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from tests.toy import make_drafter, make_target

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]
OPTIONS: dict[str, Any] = {"repetition_penalty": 1.3, "bad_words": ["e", "th"], "min_tokens": 4, "ignore_eos": True}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.25}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("api")
    target = make_target(root / "target")
    return target, make_drafter(root / "drafter", target)


def serve(models: tuple[Path, Path], **options: Any) -> Iterator[ApiServer]:
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(models[1]), **options)
    with LLM(str(models[0]), speculative_config=spec, dtype="float32", threads=1, **sizes()) as llm:
        engine = CoreEngine(llm)
        try:
            with running(ApiServer(llm.tokenizer, engine=engine)) as server:
                yield server
        finally:
            engine.close()


def sizes() -> dict[str, Any]:
    return dict(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=64, block_size=8, num_blocks=200)


@pytest.fixture(scope="module")
def server(models) -> Iterator[ApiServer]:
    yield from serve(models, enable_penalty=True)


@pytest.fixture(scope="module")
def stripped(models) -> Iterator[ApiServer]:
    yield from serve(models, advanced_sampling_mode="no_topk_no_topp")


@pytest.fixture(scope="module")
def plain(models) -> Iterator[LLM]:
    with LLM(str(models[0]), dtype="float32", threads=1, **sizes()) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_options_give_what_the_engine_without_drafts_gives(server: ApiServer, plain: LLM, temperature: float):
    ids = {letter: server.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghtuvwz"}
    base = {"temperature": temperature, "seed": 3, "max_tokens": 24}
    options = OPTIONS | {"allowed_token_ids": list(ids.values())}
    bias = {ids["e"]: 20.0, ids["t"]: 2.5, ids["h"]: 2.5, ids["z"]: -3.0}
    reply = server.client().chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        logit_bias={str(token_id): value for token_id, value in bias.items()},
        extra_body=options,
        **base,
        **PENALTIES,
    )
    expected = plain.chat(MESSAGES, SamplingParams(logit_bias=bias, **base, **options, **PENALTIES))[0].outputs[0]
    text = reply.choices[0].message.content
    assert text == expected.text
    assert len(text) == 24
    assert set(text) <= set(ids) - {"e"}
    assert "t" in text
    assert "h" in text
    assert "th" not in text


@pytest.mark.parametrize(
    ("body", "param", "option"),
    [
        ({"presence_penalty": 0.1}, "presence_penalty", "speculative_config.enable_penalty"),
        ({"frequency_penalty": -0.1}, "frequency_penalty", "speculative_config.enable_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty", "speculative_config.enable_penalty"),
        ({"top_k": 5}, "top_k", "speculative_config.advanced_sampling_mode"),
        ({"top_p": 0.9}, "top_p", "speculative_config.advanced_sampling_mode"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_deployment_lacks_is_a_400(stripped: ApiServer, body: dict, param: str, option: str, stream: bool):
    reply = stripped.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, "stream": stream, "max_tokens": 2} | body
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert option in error["message"]
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "top_k": -1, "top_p": 1}
    reply = stripped.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, "max_tokens": 2} | neutral
    )
    assert reply.status_code == 200


def test_a_request_no_token_could_serve_is_a_400(server: ApiServer):
    [only] = server.tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(openai.BadRequestError) as failure:
        server.client().completions.create(
            model=MODEL, prompt=PROMPT, extra_body={"allowed_token_ids": [only], "bad_words": ["a"]}
        )
    assert failure.value.param == "allowed_token_ids"


def test_a_harness_scores_its_continuations(server: ApiServer, models):
    """The request of lm-evaluation-harness: prompts of ids, echoed with log-probabilities, one token generated."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (70, 5, 33)]
    reply = server.client(strict=False).completions.create(
        model=MODEL, prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [rows[i - 1, prompt[i]].item() for i in range(1, len(prompt))] + [rows[-1].max().item()]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        for row, top in zip(rows, choice.logprobs.top_logprobs[1:], strict=True):
            assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-4)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(prompt) + 1


def test_prompt_logprobs_of_a_chat(server: ApiServer, models):
    reply = server.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, extra_body={"prompt_logprobs": 2}
    )
    ids = list(server.engine.requests[-1].prompt_token_ids)
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries = reply.model_extra["prompt_logprobs"]
    assert entries[0] is None
    for row, token_id, entry in zip(rows, ids[1:], entries[1:], strict=False):
        assert entry[str(token_id)]["logprob"] == pytest.approx(row[token_id].item(), abs=1e-4)
        assert entry[str(token_id)]["rank"] == 1 + int((row > row[token_id]).sum())
        assert {int(key) for key in entry} == {token_id, *row.topk(2).indices.tolist()}
    assert len(entries) == len(ids)
