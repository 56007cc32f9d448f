"""Chat completions through the real openai client: bodies, streams, choices, usage, sampling parameters."""

import pytest
from fake_engine import EOS, MAX_MODEL_LEN, MODEL, ApiServer, fixed_sizes, texts_by_prompt

HELLO = [{"role": "user", "content": "hello"}]


def test_body(server: ApiServer):
    server.engine.step_sizes = fixed_sizes(3)
    reply = server.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.model == MODEL
    [choice] = reply.choices
    assert choice.message.content == "the quick brown fox"
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    [request] = server.engine.requests
    usage = reply.usage
    # 4 words and the end of sequence, in steps of 1, 3 and 1 tokens; 7 drafts a step after the first.
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.prompt_token_ids), 5)
    assert usage.total_tokens == usage.prompt_tokens + 5
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.completion_tokens_details.accepted_prediction_tokens == 2
    assert usage.completion_tokens_details.rejected_prediction_tokens == 12


def test_required_keys_are_present_though_null(server: ApiServer):
    body = {"model": MODEL, "messages": HELLO}
    reply = server.http.post("/v1/chat/completions", json=body).json()
    choice = reply["choices"][0]
    assert choice["logprobs"] is None
    assert choice["message"]["refusal"] is None
    assert "tool_calls" not in choice["message"]


def test_prompt_is_the_rendered_template(server: ApiServer):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    server.client().chat.completions.create(
        model=MODEL, messages=messages, extra_body={"chat_template_kwargs": {"tone": "calm"}}
    )
    text = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nonetwo<|im_end|>\ncalm<|im_start|>assistant\n"
    )


def test_continue_final_message(server: ApiServer):
    messages = [*HELLO, {"role": "assistant", "content": "the quick"}]
    server.client().chat.completions.create(model=MODEL, messages=messages, extra_body={"continue_final_message": True})
    text = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nthe quick")


def test_stream_order(server: ApiServer):
    server.engine.step_sizes = fixed_sizes(2)
    stream = server.client().chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    first, *content, terminal, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    # One event per engine step: 1 + 2 + 2 tokens, of which the last is the end of sequence.
    assert [chunk.choices[0].delta.content for chunk in content] == ["the", " quick brown", " fox"]
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in [first, *content])
    assert terminal.choices[0].finish_reason == "stop"
    assert terminal.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == 5
    assert usage.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 14


def test_stream_wire_format(server: ApiServer):
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    reply = server.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-request-id"] == "abc-1"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    assert '"usage"' not in reply.text


def test_continuous_usage(server: ApiServer):
    server.engine.step_sizes = fixed_sizes(2)
    stream = server.client().chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == [1, 3, 5, 5, 5]


def test_choices_have_their_own_seeds_and_the_prompt_counts_once(server: ApiServer):
    texts = ["the fox", "the dog", "the lazy one"]
    server.engine.text = texts_by_prompt(texts)
    reply = server.client().chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=2**63 - 2)
    assert [choice.message.content for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    seeds = {request.request_id[-1]: request.params.seed for request in server.engine.requests}
    assert seeds == {"0": 2**63 - 2, "1": 2**63 - 1, "2": -(2**63)}
    assert all(request.params.n == 1 for request in server.engine.requests)
    assert reply.usage.prompt_tokens == len(server.engine.requests[0].prompt_token_ids)
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert "metrics" not in reply.model_extra


def test_choices_in_a_stream(server: ApiServer):
    texts = ["the fox", "the dog jumps over", "one"]
    server.engine.text = texts_by_prompt(texts)
    stream = server.client().chat.completions.create(
        model=MODEL, messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
    )
    got = ["", "", ""]
    roles, finishes = [0, 0, 0], [0, 0, 0]
    for chunk in stream:
        for choice in chunk.choices:
            assert not finishes[choice.index]
            roles[choice.index] += choice.delta.role == "assistant"
            got[choice.index] += choice.delta.content or ""
            finishes[choice.index] += choice.finish_reason == "stop"
    assert got == texts
    assert roles == finishes == [1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_inside_a_block(server: ApiServer, stream: bool):
    server.engine.step_sizes = fixed_sizes(3)
    server.engine.text = "the quick brown fox jumps over the lazy dog"
    arguments = {"model": MODEL, "messages": HELLO, "stop": ["own fox", "lazy"]}
    client = server.client()
    if stream:
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        last = client.chat.completions.create(**arguments).choices[0]
        text = last.message.content
    assert text == "the quick br"
    assert last.finish_reason == "stop"
    assert last.stop_reason == "own fox"
    [request] = server.engine.requests
    server.wait_idle()
    assert server.engine.aborted == [request.request_id]


def test_stop_string_counts_the_tokens_up_to_its_end(server: ApiServer):
    server.engine.step_sizes = fixed_sizes(8)
    server.engine.text = "the quick brown fox jumps"
    reply = server.client().chat.completions.create(model=MODEL, messages=HELLO, stop=" brown")
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length(server: ApiServer, field: str):
    reply = server.client().chat.completions.create(model=MODEL, messages=HELLO, **{field: 2})
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content == "the quick"


def test_default_length_is_the_rest_of_the_context(server: ApiServer):
    server.client().chat.completions.create(model=MODEL, messages=HELLO)
    [request] = server.engine.requests
    assert request.params.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)


def test_sampling_parameters_reach_the_engine(server: ApiServer):
    server.client().chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        top_p=0.5,
        seed=7,
        extra_body={
            "top_k": 9,
            "min_p": 0.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [5],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "cache_salt": "tenant",
            "repetition_penalty": 1.2,
            "bad_words": ["fox", " jumps"],
            "allowed_token_ids": [8, 7, 7],
        },
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"9": -100, "10": 2.5},
    )
    [request] = server.engine.requests
    params = request.params
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, -1.0)
    assert (params.logit_bias, params.allowed_token_ids) == ({9: -100.0, 10: 2.5}, (8, 7, 7))
    words = {server.tokenizer.decode(list(ids)) for ids in request.bad_word_ids}
    assert words == {"fox", " fox", "jumps", " jumps"}
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 0.5, 9, 0.1, 7)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (2, True, (5,))
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert params.logprobs is None
    assert request.cache_salt == "tenant"


def test_stop_token_in_the_text_on_request(server: ApiServer):
    reply = server.client().chat.completions.create(
        model=MODEL,
        messages=HELLO,
        logprobs=True,
        extra_body={"skip_special_tokens": False, "include_stop_str_in_output": True},
    )
    assert reply.choices[0].message.content == "the quick brown fox" + EOS
    assert "".join(token.token for token in reply.choices[0].logprobs.content) == "the quick brown fox" + EOS


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(server: ApiServer, stream: bool):
    body = {"model": MODEL, "messages": HELLO, "return_token_ids": True, "stream": stream}
    expected = server.tokenizer.encode("the quick brown fox" + EOS, add_special_tokens=False)
    client = server.client()
    extra = {"return_token_ids": True}
    if stream:
        chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_body=extra))
        ids = [token for chunk in chunks for token in (chunk.choices[0].model_extra.get("token_ids") or [])]
        prompt = chunks[0].model_extra["prompt_token_ids"]
    else:
        reply = server.http.post("/v1/chat/completions", json=body).json()
        ids, prompt = reply["choices"][0]["token_ids"], reply["prompt_token_ids"]
    assert ids == expected
    assert prompt == list(server.engine.requests[0].prompt_token_ids)


def test_null_means_not_given(server: ApiServer):
    nulls = ["temperature", "top_p", "n", "stop", "seed", "max_tokens", "logprobs", "top_logprobs", "stream"]
    nulls += ["stream_options", "tools", "tool_choice", "response_format", "logit_bias", "frequency_penalty", "user"]
    body = {"model": MODEL, "messages": HELLO} | dict.fromkeys(nulls)
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert server.engine.requests[0].params.temperature == 1.0


def test_neutral_and_unknown_fields_pass(server: ApiServer, caplog: pytest.LogCaptureFixture):
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
        "priority": 0,
        "metadata": {"a": "b"},
        "store": True,
        "a_field_of_tomorrow": {"x": 1},
    }
    for _ in range(2):
        body = {"model": MODEL, "messages": HELLO} | neutral
        reply = server.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
    unknown = [record for record in caplog.records if "unknown field" in record.getMessage()]
    assert [("a_field_of_tomorrow" in record.getMessage()) for record in unknown] == [True]


def test_request_id_of_the_body_names_the_response(server: ApiServer):
    reply = server.client().chat.completions.create(model=MODEL, messages=HELLO, extra_body={"request_id": "job-7"})
    assert reply.id == "chatcmpl-job-7"
