"""Streams under any grouping of tokens into steps, log-probabilities, and clients that hang up."""

import json
import socket
import threading
import time

import httpx
import pytest
from fake_engine import MODEL, ApiServer, fixed_sizes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": MODEL, "messages": HELLO}
# Characters of 1 to 4 bytes, combining ones included, next to words of the vocabulary.
PIECES = st.sampled_from(
    [
        "the ",
        " fox",
        "a",
        "\n",
        "\u00e9",
        "e\u0301",
        "\u4e2d\u6587",
        "\U0001f600",
        "\U0001f468\u200d\U0001f469",
        "<",
        "|",
    ]
)
TEXTS = st.lists(PIECES, max_size=25).map("".join)
SIZES = st.lists(st.integers(1, 16), min_size=1, max_size=10)


def stream_events(server: ApiServer, path: str, body: dict) -> list[dict]:
    reply = server.http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, sizes=SIZES, stop=st.lists(PIECES.filter(bool), max_size=2), limit=st.integers(1, 60))
def test_streamed_text_is_the_whole_text(server: ApiServer, text: str, sizes: list[int], stop: list[str], limit: int):
    server.engine.text = text
    server.engine.step_sizes = fixed_sizes(*sizes)
    body = CHAT | {"stop": stop, "max_tokens": limit, "logprobs": True, "top_logprobs": 1}
    whole = server.http.post("/v1/chat/completions", json=body).json()
    [choice] = whole["choices"]
    events = stream_events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    choices = [event["choices"][0] for event in events if event["choices"]]
    content = choice["message"]["content"]
    assert "".join(c["delta"].get("content", "") for c in choices) == content
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert choices[-1]["stop_reason"] == choice["stop_reason"]
    assert events[-1]["usage"] == whole["usage"]
    # An independent oracle: the text, cut at the first stop string, if the limit was not reached.
    if choice["finish_reason"] == "stop":
        cuts = [text.index(s) for s in stop if s in text]
        assert content == text[: min(cuts, default=len(text))]
    # The law of log-probabilities, for the whole and for every event.
    tokens = (choice["logprobs"] or {"content": []})["content"]
    assert "".join(token["token"] for token in tokens) == content
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace") == content
    streamed = [token for c in choices if c["logprobs"] for token in c["logprobs"]["content"]]
    assert streamed == tokens


def test_chat_logprobs(server: ApiServer):
    reply = server.client().chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert [token.token for token in content] == ["the", " quick", " brown", " fox"]
    assert all(token.logprob == -0.25 for token in content)
    assert [[top.logprob for top in token.top_logprobs] for token in content] == [[-0.25, -1.0]] * 4
    assert content[1].top_logprobs[0].token == " quick"
    assert content[1].bytes == list(b" quick")
    assert server.engine.requests[0].params.logprobs == 2


def test_chat_logprobs_without_alternatives(server: ApiServer):
    reply = server.client().chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert [token.top_logprobs for token in reply.choices[0].logprobs.content] == [[]] * 4


def test_completion_logprobs(server: ApiServer):
    reply = server.client().completions.create(model=MODEL, prompt="x", logprobs=2)
    logprobs = reply.choices[0].logprobs
    # Completions keep the end-of-sequence token, which has no text.
    assert logprobs.tokens == ["the", " quick", " brown", " fox", ""]
    assert logprobs.text_offset == [0, 3, 9, 15, 19]
    assert logprobs.token_logprobs == [-0.25] * 5
    assert logprobs.top_logprobs[1][" quick"] == -0.25
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_streamed_completion_logprobs_are_the_whole_ones(server: ApiServer):
    server.engine.step_sizes = fixed_sizes(2)
    body = {"model": MODEL, "prompt": "x", "logprobs": 1}
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    parts = [event["choices"][0]["logprobs"] for event in stream_events(server, "/v1/completions", body)]
    for key, values in whole.items():
        assert [value for part in parts if part for value in part[key]] == values


def test_multibyte_character_over_two_steps_is_not_split(server: ApiServer):
    server.engine.text = "a\U0001f600b"  # the emoji is four tokens
    server.engine.step_sizes = fixed_sizes(1)
    body = CHAT | {"logprobs": True}
    events = stream_events(server, "/v1/chat/completions", body)
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert contents == ["", "a", "\U0001f600", "b", None]
    [emoji] = [event for event in events if event["choices"][0]["delta"].get("content") == "\U0001f600"]
    tokens = emoji["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in tokens] == ["", "", "", "\U0001f600"]
    assert [token["bytes"] for token in tokens] == [[byte] for byte in "\U0001f600".encode()]


def test_possible_stop_prefix_is_held_back(server: ApiServer):
    server.engine.text = "the fox the dog"
    server.engine.step_sizes = fixed_sizes(1)
    events = stream_events(server, "/v1/chat/completions", CHAT | {"stop": " the lazy"})
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert " the" not in contents  # it left together with what showed that it was no stop string
    assert "".join(content or "" for content in contents) == "the fox the dog"


def test_first_token_is_sent_at_once(server: ApiServer):
    server.engine.delay_s = 0.2
    started = time.monotonic()
    with server.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
        lines = reply.iter_lines()
        contents = []
        while not contents:
            line = next(lines)
            if '"content":"the"' in line:
                contents.append(time.monotonic() - started)
        assert contents[0] < 0.39  # before the second step
        for _ in lines:
            pass


def test_head_waits_for_the_first_token(server: ApiServer):
    server.engine.gate = threading.Event()
    request = json.dumps(CHAT | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(_http_post(request))
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        server.engine.gate.set()
        connection.settimeout(5)
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_first_token", [False, True])
def test_hanging_up_aborts_in_the_engine(server: ApiServer, stream: bool, after_first_token: bool, num_choices: int):
    server.engine.delay_s = 0.02
    server.engine.text = "the fox " * 150
    server.engine.step_sizes = fixed_sizes(1)
    if not after_first_token:
        server.engine.gate = threading.Event()
    body = json.dumps(CHAT | {"stream": stream, "n": num_choices}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(_http_post(body))
        if stream and after_first_token:
            connection.settimeout(5)
            connection.recv(100)
        deadline = time.monotonic() + 5
        while server.engine.num_open < num_choices:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert server.admission.num_admitted == num_choices
    server.wait_idle()
    assert sorted(server.engine.aborted) == sorted(request.request_id for request in server.engine.requests)


def test_a_finished_request_is_not_aborted(server: ApiServer):
    server.client().chat.completions.create(model=MODEL, messages=HELLO, n=2)
    list(server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    server.wait_idle()
    assert server.engine.aborted == []


def test_many_streams_with_hang_ups(server: ApiServer):
    server.engine.delay_s = 0.005
    server.engine.text = "the quick brown fox jumps over the lazy dog " * 3
    failures: list[str] = []

    def ask(index: int) -> None:
        body = CHAT | {"stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=30, verify=False) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as reply,
        ):
            text = ""
            for line in reply.iter_lines():
                text += line
                if index % 3 == 0 and "quick" in line:
                    return
            if not text.endswith("data: [DONE]") or '"finish_reason":"stop"' not in text:
                failures.append(text)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    server.wait_idle()


def _http_post(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
