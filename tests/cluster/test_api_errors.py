"""Bad input, case by case, with the message a user sees, in the envelope of OpenAI."""

import json

import openai
import pytest
from fake_engine import MAX_MODEL_LEN, MODEL, ApiServer

from cluster.openai.errors import from_validation
from cluster.openai.fields import refused_fields

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": MODEL, "messages": HELLO}
TEXT = {"model": MODEL, "prompt": "hello"}
TOOLS = "this server does not support tool calls; leave it out"
CONSTRAINED = "this server does not support constrained output; leave it out"
PROMPT_FORM = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


def message(content: object, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": content}]}


# (overrides of a valid body, param, message after "param: ")
SHARED = [
    ({"temperature": -0.1}, "temperature", "must be greater than or equal to 0"),
    ({"temperature": 2.5}, "temperature", "must be less than or equal to 2"),
    ({"temperature": "1"}, "temperature", "must be a number"),
    ({"top_p": 0}, "top_p", "must be greater than 0"),
    ({"top_p": 1.1}, "top_p", "must be less than or equal to 1"),
    ({"top_k": -2}, "top_k", "must be greater than or equal to -1"),
    ({"top_k": 1.5}, "top_k", "must be an integer"),
    ({"min_p": 1.5}, "min_p", "must be less than or equal to 1"),
    ({"n": 0}, "n", "must be greater than or equal to 1"),
    ({"n": 129}, "n", "must be less than or equal to 128"),
    ({"n": True}, "n", "must be an integer"),
    ({"seed": 2**63}, "seed", "must be less than or equal to 9223372036854775807"),
    ({"seed": "1"}, "seed", "must be an integer"),
    ({"max_tokens": -1}, "max_tokens", "must be greater than or equal to 0"),
    ({"min_tokens": -1}, "min_tokens", "must be greater than or equal to 0"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens", "9 is more than the 4 tokens that may be generated"),
    ({"stop": 5}, "stop", "must be a string or a list of strings"),
    ({"stop": ["a", 5]}, "stop", "must be a string or a list of strings"),
    ({"stop": list("abcde")}, "stop", "at most 4 stop strings are allowed"),
    ({"stop": ["a", ""]}, "stop", "an empty stop string would end every completion at once"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", "must be greater than or equal to 0"),
    ({"stop_token_ids": 3}, "stop_token_ids", "must be a list"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "token id 99999 is not in the vocabulary (0 to {last})"),
    ({"ignore_eos": "yes"}, "ignore_eos", "must be true or false"),
    ({"stream": 1}, "stream", "must be true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed together with stream: true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be true or false"),
    ({"model": 5}, "model", "must be a string"),
    ({"model": None}, "model", "must be a string"),
    ({"cache_salt": ""}, "cache_salt", "String should have at least 1 character"),
    ({"request_id": "a b"}, "request_id", "String should match pattern '^[\\w.:-]+$'"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "must be less than or equal to 2"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "must be a number"),
    ({"presence_penalty": -2.1}, "presence_penalty", "must be greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be greater than or equal to 0.01"),
    ({"repetition_penalty": 101}, "repetition_penalty", "must be less than or equal to 100"),
    ({"logit_bias": [5]}, "logit_bias", "must be an object of token ids and numbers"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "every key must be a token id"),
    ({"logit_bias": {"-5": 1}}, "logit_bias", "every key must be a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "every bias must be a number between -100 and 100"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "every bias must be a number between -100 and 100"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "every token id may appear once"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "token id 99999 is not in the vocabulary (0 to {last})"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 biases are allowed"),
    ({"bad_words": "a"}, "bad_words", "must be a list"),
    ({"bad_words": ["a", " "]}, "bad_words", "a blank word would ban spaces everywhere; remove it"),
    ({"bad_words": ["a"] * 129}, "bad_words", "List should have at most 128 items after validation, not 129"),
    ({"bad_words": ["qzx" * 700]}, "bad_words", "2100 tokens in all; at most 1024 are allowed"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "List should have at least 1 item after validation, not 0"),
    (
        {"allowed_token_ids": [1] * 1025},
        "allowed_token_ids",
        "List should have at most 1024 items after validation, not 1025",
    ),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids", "token id 99999 is not in the vocabulary (0 to {last})"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids.0", "must be an integer"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "must be less than or equal to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "must be greater than or equal to 0"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream: true"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", CONSTRAINED),
    ({"guided_json": {}}, "guided_json", CONSTRAINED),
    ({"regex": "a+"}, "regex", CONSTRAINED),
    ({"best_of": 2}, "best_of", "this server does not sample candidates to choose from; use n"),
    ({"priority": 3}, "priority", "this server schedules in order of arrival; leave it out or send 0"),
    ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "this server never cuts a prompt; shorten it"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format",
        'this server returns text only; use {"type": "text"}',
    ),
]
CHAT_ONLY = [
    ({"messages": []}, "messages", "List should have at least 1 item after validation, not 0"),
    ({"messages": None}, "messages", "must be a list"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "a value is required"),
    (message("x", "robot"), "messages.0.role", "must be one of system, developer, user, assistant"),
    (message("x", "tool"), "messages.0.role", "the role 'tool' needs tool calls, which this server does not support"),
    (message(None), "messages.0.content", "a value is required"),
    (message(5), "messages.0.content", "must be a string or a list of text parts"),
    (
        message([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages.0.content",
        'part 0 is not {"type": "text"}; this server takes text only',
    ),
    (message([{"type": "text"}]), "messages.0.content", "part 0 has no text"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages.0.tool_calls",
        "not supported by this server; leave it out of the message",
    ),
    (message("refuse me"), "messages", "the chat template refused them: no such message"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed together with logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be less than or equal to 20"),
    ({"logprobs": 1}, "logprobs", "must be true or false"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "must be at least 1"),
    (
        {"max_completion_tokens": 3, "max_tokens": 4},
        "max_completion_tokens",
        "differs from max_tokens; send one of them",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "cannot be true together with add_generation_prompt",
    ),
    (
        {"continue_final_message": True},
        "continue_final_message",
        "needs a last message with the role assistant",
    ),
    ({"tools": []}, "tools", TOOLS),
    ({"tools": [{"type": "function"}]}, "tools", TOOLS),
    ({"tool_choice": "auto"}, "tool_choice", TOOLS),
    ({"functions": []}, "functions", TOOLS),
    ({"modalities": ["text", "audio"]}, "modalities", 'this server produces text only; use ["text"]'),
    ({"audio": {"voice": "x"}}, "audio", "this server produces text only; leave it out"),
    ({"web_search_options": {}}, "web_search_options", "this server does not search the web; leave it out"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools' is not the template's; remove it."),
]
TEXT_ONLY = [
    ({"prompt": None}, "prompt", PROMPT_FORM),
    ({"prompt": 5}, "prompt", PROMPT_FORM),
    ({"prompt": ["a", 5]}, "prompt", PROMPT_FORM),
    ({"prompt": [[1], "a"]}, "prompt", PROMPT_FORM),
    ({"prompt": [1.5]}, "prompt", PROMPT_FORM),
    ({"prompt": []}, "prompt", "at least one prompt is required"),
    ({"prompt": ""}, "prompt", "an empty prompt has nothing to continue"),
    ({"prompt": [[]]}, "prompt", "an empty prompt has nothing to continue"),
    ({"prompt": [99999]}, "prompt", "token id 99999 is not in the vocabulary (0 to {last})"),
    ({"prompt": [-1]}, "prompt", "token id -1 is not in the vocabulary (0 to {last})"),
    ({"logprobs": 21}, "logprobs", "must be less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "must be an integer"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1 (0 is for echo: true)"),
    ({"suffix": "x"}, "suffix", "this server does not fill in the middle; leave it out"),
]
CASES = [
    *(("chat/completions", CHAT, *case) for case in SHARED + CHAT_ONLY),
    *(("completions", TEXT, *case) for case in SHARED + TEXT_ONLY),
]


@pytest.mark.parametrize(("path", "valid", "change", "param", "text"), CASES, ids=lambda value: str(value)[:40])
def test_rule(server: ApiServer, path: str, valid: dict, change: dict, param: str, text: str):
    reply = server.http.post(f"/v1/{path}", json=valid | change)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].split("; messages")[0] == f"{param}: " + text.replace(
        "{last}", str(server.tokenizer.vocab_size - 1)
    )
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["code"] is None or isinstance(error["code"], str)
    assert server.engine.requests == []


def test_every_refused_field_is_refused_by_name_and_passes_as_null(server: ApiServer):
    for name in refused_fields():
        reply = server.http.post("/v1/chat/completions", json=CHAT | {name: {"something": 1}})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert server.http.post("/v1/chat/completions", json=CHAT | dict.fromkeys(refused_fields())).status_code == 200


def test_refusals_leave_the_replica_healthy(server: ApiServer):
    for body in (CHAT | {"logprobs": 1}, CHAT | {"temperature": -1}, {}):
        assert server.http.post("/v1/chat/completions", json=body).status_code == 400
    assert [server.http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


@pytest.mark.parametrize(
    ("content", "param", "text"),
    [
        (b"{", None, "the request body is not valid JSON"),
        (b"", None, "the request body is not valid JSON"),
        (b"\xff\xfe", None, "the request body is not valid JSON"),
        (b"[1]", None, "the request body must be a JSON object"),
        (b'"x"', None, "the request body must be a JSON object"),
        (b"{}", "model", "model: a value is required; messages: a value is required"),
        (b'{"model": "m", "messages": [], "stream_options": 5}', "stream_options", None),
        (b'{"model": "m", "messages": [5]}', "messages.0", "messages.0: must be an object"),
        (b'{"model": "m", "messages": [], "temperature": NaN}', "temperature", None),
    ],
)
def test_malformed_body(server: ApiServer, content: bytes, param: str | None, text: str | None):
    reply = server.http.post("/v1/chat/completions", content=content)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    if text is not None:
        assert error["message"] == text


def test_errors_do_not_repeat_the_input(server: ApiServer):
    secret = "s3cret" * 300
    for change in (
        {"temperature": secret},
        {"messages": [{"role": secret, "content": "x"}] * 5},
        {"stop": [5, secret]},
    ):
        reply = server.http.post("/v1/chat/completions", json=CHAT | change)
        assert reply.status_code == 400
        assert "s3cret" not in reply.text
        assert len(reply.content) < 3000
    many = from_validation([{"type": "int_type", "loc": ("a", i), "msg": "x"} for i in range(12)])
    assert many.message.count("must be an integer") == 10
    assert many.message.endswith("and 2 more errors")


def test_context_length(server: ApiServer):
    client = server.client()
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=MAX_MODEL_LEN)
    used = len(
        server.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    )
    rest = MAX_MODEL_LEN - used
    assert failure.value.code == "context_length_exceeded"
    assert failure.value.param == "max_tokens"
    assert failure.value.body["message"] == (
        f"This model's context holds {MAX_MODEL_LEN} tokens, but the request needs {MAX_MODEL_LEN + used}: "
        f"{used} in messages and {MAX_MODEL_LEN} by max_tokens; shorten messages or lower max_tokens to {rest}."
    )
    with pytest.raises(openai.BadRequestError) as failure:
        client.completions.create(model=MODEL, prompt=[7] * MAX_MODEL_LEN)
    assert (failure.value.code, failure.value.param) == ("context_length_exceeded", "prompt")
    assert client.completions.create(model=MODEL, prompt=[7] * (MAX_MODEL_LEN - 1), max_tokens=1).choices


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_unknown_model(server: ApiServer, path: str):
    body = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": TEXT,
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": []},
    }
    reply = server.http.post(path, json=body[path] | {"model": "other"})
    assert reply.status_code == 404
    assert reply.json()["error"] == {
        "message": "The model 'other' does not exist on this server; GET /v1/models lists what it serves.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/tokenize", {}, "prompt", "exactly one of prompt and messages is required"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt", "exactly one of prompt and messages is required"),
        ("/tokenize", {"prompt": 5}, "prompt", "must be a string"),
        ("/detokenize", {}, "tokens", "a value is required"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0", "must be an integer"),
        ("/detokenize", {"tokens": [99999]}, "tokens", "token id 99999 is not in the vocabulary (0 to {last})"),
    ],
)
def test_tokenize_rules(server: ApiServer, path: str, body: dict, param: str, text: str):
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400
    text = text.replace("{last}", str(server.tokenizer.vocab_size - 1))
    assert reply.json()["error"]["message"] == f"{param}: {text}"


def test_paths_and_methods(server: ApiServer):
    reply = server.http.get("/v1/nothing")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"].startswith("Unknown path /v1/nothing; ")
    reply = server.http.get("/v1/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == "The method GET is not allowed for /v1/completions."
    assert reply.headers["x-request-id"]


def test_body_too_large(server: ApiServer):
    body = json.dumps(CHAT | message("x" * 30_000)).encode()

    def parts():
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    for content in (body, parts()):  # with and without a Content-Length
        reply = server.http.post("/v1/chat/completions", content=content)
        assert reply.status_code == 413
        assert reply.json()["error"]["message"] == (
            "The request body is larger than this server's limit of 20000 bytes (http.max_body_bytes)."
        )
