"""Legacy completions, models, tokenize, detokenize, version, health and metrics."""

import json
from typing import Literal

import openai
import pytest
from fake_engine import EOS, MAX_MODEL_LEN, MODEL, ApiServer, fixed_sizes
from openai.types import Completion, CompletionChoice
from prometheus_client.parser import text_string_to_metric_families

from cluster.admission import ReplicaState
from cluster.openai.params import SamplingDefaults


class StreamedChoice(CompletionChoice):
    finish_reason: Literal["stop", "length", "content_filter"] | None


class StreamedCompletion(Completion):
    choices: list[StreamedChoice]


def test_body(server: ApiServer):
    reply = server.client().completions.create(model=MODEL, prompt="the lazy")
    assert reply.id.startswith("cmpl-")
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("the quick brown fox", "stop", None)
    assert server.engine.requests[0].params.max_tokens == 16
    assert reply.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] >= 1


def test_every_form_of_prompt(server: ApiServer):
    ids = server.tokenizer.encode("the dog", add_special_tokens=True)
    more = server.tokenizer.encode("a fox", add_special_tokens=True)
    for prompt, expected in [
        ("the dog", [ids]),
        (["the dog", "a fox"], [ids, more]),
        (ids, [ids]),
        ([ids, more], [ids, more]),
    ]:
        server.engine.requests.clear()
        reply = server.client().completions.create(model=MODEL, prompt=prompt, n=2)
        assert len(reply.choices) == 2 * len(expected)
        assert [choice.index for choice in reply.choices] == list(range(2 * len(expected)))
        sent = sorted(server.engine.requests, key=lambda request: request.request_id)
        assert [list(request.prompt_token_ids) for request in sent] == [p for p in expected for _ in range(2)]
        assert reply.usage.prompt_tokens == sum(len(p) for p in expected)


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: ApiServer, stream: bool):
    ids = server.tokenizer.encode("the dog", add_special_tokens=False)
    for prompt in ("the dog", ids):
        client = server.client(strict=not stream)
        reply = client.completions.create(model=MODEL, prompt=prompt, echo=True, stream=stream)
        chunks = list(reply) if stream else [reply]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "the dogthe quick brown fox"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_needs_no_engine(server: ApiServer, stream: bool):
    reply = server.client(strict=not stream).completions.create(
        model=MODEL, prompt=["the dog", "a"], echo=True, max_tokens=0, stream=stream
    )
    chunks = list(reply) if stream else [reply]
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["the dog", "a"]
    assert {c.finish_reason for chunk in chunks for c in chunk.choices} <= {"length", None}
    assert server.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs(server: ApiServer, stream: bool, max_tokens: int):
    """The prompt's tokens come first, without a prediction for the first one; all tokens together are the text."""
    prompt = "the d\u00f6g " + EOS
    ids = server.tokenizer.encode(prompt, add_special_tokens=False)
    for form in (prompt, ids):
        reply = server.client(strict=False).completions.create(
            model=MODEL, prompt=form, n=2, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream
        )
        chunks = list(reply) if stream else [reply]
        for index in range(2):
            choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
            text = "".join(choice.text for choice in choices)
            tokens = [token for part in parts for token in part.tokens]
            values = [value for part in parts for value in part.token_logprobs]
            offsets = [offset for part in parts for offset in part.text_offset]
            tops = [top for part in parts for top in part.top_logprobs]
            assert text.startswith(prompt)
            assert "".join(tokens) == text
            assert len(tokens) == len(values) == len(tops) == len(offsets) == len(ids) + max_tokens
            assert (values[0], tops[0]) == (None, None)
            assert set(values[1:]) == {-0.25}
            assert all(len(top) in (2, 3) for top in tops[1:])
            assert all(text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))
        if not stream:
            assert reply.usage.completion_tokens == 2 * max_tokens


def test_prompt_logprobs(server: ApiServer):
    """vLLM's form: per choice in completions, once in chat, null when not asked for."""
    ids = server.tokenizer.encode("the dog", add_special_tokens=True)
    extra = {"prompt_logprobs": 2}
    reply = server.client().completions.create(model=MODEL, prompt=["the dog", "a"], n=2, extra_body=extra)
    for choice in reply.choices[:2]:
        entries = choice.model_extra["prompt_logprobs"]
        assert len(entries) == len(ids)
        assert entries[0] is None
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            assert set(entry) == {str(token_id), "5"}
            own = {"logprob": -0.25, "rank": 1, "decoded_token": server.tokenizer.decode([token_id])}
            assert entry[str(token_id)] == own
    messages = [{"role": "user", "content": "hi"}]
    reply = server.client().chat.completions.create(model=MODEL, messages=messages, n=2, extra_body=extra)
    chat_requests = [r for r in server.engine.requests if r.request_id.startswith("chatcmpl")]
    assert len(reply.model_extra["prompt_logprobs"]) == len(chat_requests[0].prompt_token_ids)
    by_choice = sorted(chat_requests, key=lambda request: request.request_id)
    assert [request.params.prompt_logprobs for request in by_choice] == [2, None]
    reply = server.client().chat.completions.create(model=MODEL, messages=messages)
    assert reply.model_extra.get("prompt_logprobs") is None


def test_stream(server: ApiServer):
    server.engine.step_sizes = fixed_sizes(2)
    chunks = list(
        server.client(strict=False).completions.create(
            model=MODEL, prompt="x", stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(StreamedCompletion.model_validate(chunk.to_dict()) for chunk in chunks)
    *content, terminal, usage = chunks
    assert [chunk.choices[0].text for chunk in content] == ["the", " quick brown", " fox"]
    assert (terminal.choices[0].text, terminal.choices[0].finish_reason) == ("", "stop")
    assert usage.choices == []
    assert usage.usage.completion_tokens == 5


def test_default_length_is_cut_to_the_context(server: ApiServer):
    server.client().completions.create(model=MODEL, prompt=[7] * (MAX_MODEL_LEN - 3))
    assert server.engine.requests[0].params.max_tokens == 3


def test_models(server: ApiServer):
    client = server.client()
    [model] = client.models.list().data
    assert (model.id, model.object, model.created) == (MODEL, "model", 1_700_000_000)
    assert model.max_model_len == MAX_MODEL_LEN
    assert client.models.retrieve(MODEL).id == MODEL
    # A slash in the name works in its plain form too.
    assert server.http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    with pytest.raises(openai.NotFoundError) as failure:
        client.models.retrieve("other")
    assert failure.value.code == "model_not_found"


def test_tokenize_and_detokenize_are_inverse(server: ApiServer):
    text = "the fox \u00e9\u4e2d\U0001f600" + EOS
    reply = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == MAX_MODEL_LEN
    assert reply["tokens"] == server.tokenizer.encode(text, add_special_tokens=True)
    back = server.http.post("/detokenize", json={"model": MODEL, "tokens": reply["tokens"]}).json()
    assert back == {"prompt": text}


def test_tokenize_messages(server: ApiServer):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    tokens = server.http.post("/tokenize", json=body).json()["tokens"]
    text = server.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_version(server: ApiServer):
    assert server.http.get("/version").json()["version"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health(server: ApiServer, path: str):
    reply = server.http.get(path)
    assert (reply.status_code, reply.content) == (200, b"")
    server.engine.healthy = False
    reply = server.http.get(path)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert "rank" not in reply.text
    server.engine.healthy = True
    server.admission.state = ReplicaState.DRAINING
    assert server.http.get(path).status_code == 503


def test_metrics(server: ApiServer):
    server.client().completions.create(model=MODEL, prompt="x")
    server.wait_idle()
    reply = server.http.get("/metrics")
    samples = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["engine"], sample.labels["replica"]) == (
                MODEL,
                "0",
                "r1",
            )
            samples[sample.name, sample.labels.get("position")] = sample.value
    assert samples["vllm:spec_decode_num_drafts_total", None] == 10
    assert samples["vllm:spec_decode_num_draft_tokens_total", None] == 70
    assert samples["vllm:spec_decode_num_accepted_tokens_total", None] == 25
    per_position = [samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(7)]
    assert per_position == [10, 8, 7, 0, 0, 0, 0]
    assert samples["vllm:num_requests_running", None] == 2
    assert samples["vllm:num_requests_waiting", None] == 1
    assert samples["vllm:kv_cache_usage_perc", None] == 0.25
    blocks = [samples[f"dflash:kv_blocks{kind}", None] for kind in ("", "_free", "_cached")]
    assert blocks == [8, 4, 2]
    assert samples["vllm:prompt_tokens_total", None] == 100
    assert samples["dflash:prefix_cache_evictions_total", None] == 5
    assert samples["vllm:generation_tokens_total", None] == 35
    assert samples["vllm:time_to_first_token_seconds_count", None] >= 1
    assert samples["vllm:request_success_total", None] >= 1


def test_metrics_of_a_dead_engine_are_unavailable(server: ApiServer):
    server.engine.healthy = False
    reply = server.http.get("/metrics")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "rank" not in reply.text


def test_sampling_defaults_of_a_checkpoint(tmp_path, caplog: pytest.LogCaptureFixture):
    assert SamplingDefaults.from_model_dir(str(tmp_path)) == SamplingDefaults(temperature=1.0)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "top_k": 20, "eos_token_id": 2}))
    assert SamplingDefaults.from_model_dir(str(tmp_path)) == SamplingDefaults(temperature=0.6, top_k=20)
    path.write_text(json.dumps({"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.9}))
    found = SamplingDefaults.from_model_dir(str(tmp_path))
    assert found == SamplingDefaults(repetition_penalty=1.1, top_k=20, top_p=0.9)
    assert found.within(has_penalty=True, has_top_k=True, has_top_p=True) == found
    assert not caplog.records
    assert found.within(has_penalty=False, has_top_k=False, has_top_p=True) == SamplingDefaults(top_p=0.9)
    assert [record.args[:2] for record in caplog.records] == [("repetition_penalty", 1.1), ("top_k", 20)]
    path.write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(ValueError, match="top_p must be a number between 0 and 1"):
        SamplingDefaults.from_model_dir(str(tmp_path))
