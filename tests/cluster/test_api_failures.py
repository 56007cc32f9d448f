"""Failures of the engine before and after the first token, replicas that are not ready, admission under a burst."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
from fake_engine import MODEL, ApiServer

from cluster.admission import Admission, ReplicaState
from cluster.openai.errors import ApiError
from engine.logits_rules import check_request
from engine.request import EngineRequest, TokenDelta
from workers.engine_client import EngineDeadError

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": MODEL, "messages": HELLO}
NOT_FINITE = TokenDelta(request_id="", finish_reason="error", error="the model's output is not finite")
TEXT = {"model": MODEL, "prompt": "hello"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineDeadError("rank 1 exited with code -9"), 503, "overloaded"),
        (RuntimeError("a secret of the inside"), 500, "internal_error"),
        (TokenDelta(request_id="", finish_reason="error", error="inside"), 500, "internal_error"),
        (TokenDelta(request_id="", finish_reason="abort"), 500, "internal_error"),
        (None, 500, "internal_error"),
    ],
)
def test_failure_before_the_first_token_is_an_http_error(server: ApiServer, failure, status, code, stream: bool):
    server.engine.fail_after = 0
    server.engine.failure = failure
    reply = server.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == code
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    assert "rank" not in reply.text
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("failure", [EngineDeadError("rank 1 died"), RuntimeError("inside"), NOT_FINITE, None])
def test_failure_in_mid_stream_is_an_error_event(server: ApiServer, failure, num_choices: int):
    server.engine.fail_after = 2
    server.engine.failure = failure
    server.engine.text = "the quick brown fox jumps over the lazy dog and then the other one and the fox"
    body = CHAT | {"stream": True, "n": num_choices}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    *events, error, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert set(json.loads(error.removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
    assert events
    assert all('"finish_reason":null' in event for event in events)
    server.wait_idle()
    with pytest.raises(openai.APIError):
        list(server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True, n=num_choices))


@pytest.mark.parametrize("fail_after", [0, 2])
def test_an_error_of_one_request_says_why(server: ApiServer, fail_after: int):
    server.engine.fail_after = fail_after
    server.engine.failure = NOT_FINITE
    server.engine.text = "the quick brown fox jumps over the lazy dog"
    reply = server.http.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 500
    assert reply.json()["error"] == {
        "message": "The engine could not finish the request: the model's output is not finite.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_cancellation_inside_the_server_is_answered(server: ApiServer, num_choices: int):
    def cancelled(_: EngineRequest) -> str:
        raise asyncio.CancelledError  # what awaiting a cancelled future raises, though nobody cancelled the request

    server.engine.text = cancelled
    reply = server.http.post("/v1/chat/completions", json=CHAT | {"n": num_choices}, timeout=5)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "overloaded"


def test_a_refusal_of_the_engine_is_the_clients_error(server: ApiServer):
    server.engine.fail_after = 0
    server.engine.failure = ValueError("min_p: this engine says no")
    reply = server.http.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 400
    assert (reply.json()["error"]["param"], reply.json()["error"]["message"]) == ("min_p", "min_p: this engine says no")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 5}, "logprobs"),
        ({"echo": True, "logprobs": 5, "prompt_logprobs": 1}, "logprobs"),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 5}, "prompt_logprobs"),
        ({"logprobs": 5, "prompt_logprobs": 5}, "prompt_logprobs"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
    ],
)
def test_too_many_log_probabilities_of_a_prompt_name_the_field_that_was_sent(
    server: ApiServer, fields: dict[str, object], param: str
):
    engine_config = SimpleNamespace(
        max_num_batched_tokens=200_000,
        target=SimpleNamespace(vocab_size=1 << 20),
        enable_penalty=True,
        enable_top_k=True,
        enable_top_p=True,
    )

    def text(request: EngineRequest) -> str:
        check_request(request, engine_config, ())
        return "the fox"

    server.engine.text = text
    reply = server.http.post("/v1/completions", json=TEXT | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert error["message"].endswith("with max_num_batched_tokens = 200000 at most 1 alternatives are reported, got 5")
    assert server.http.post("/v1/completions", json=TEXT | {"echo": True, "logprobs": 1}).status_code == 200


def test_failure_in_mid_response_is_an_http_error(server: ApiServer):
    server.engine.fail_after = 2
    server.engine.failure = EngineDeadError("rank 1 died")
    server.engine.text = "the quick brown fox jumps over the lazy dog and then the other one and the fox"
    with pytest.raises(openai.InternalServerError) as failure:
        server.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert failure.value.status_code == 503


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.DEAD])
def test_a_replica_that_is_not_ready_answers_503(server: ApiServer, state: ReplicaState):
    server.admission.state = state
    reply = server.http.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == "server_error"
    assert reply.json()["error"]["code"] == "overloaded"


def test_burst_above_the_limit_is_429_for_the_excess_only(server: ApiServer):
    server.engine.gate = threading.Event()
    capacity = server.admission.capacity

    def ask(_: int) -> httpx.Response:
        return server.http.post("/v1/completions", json=TEXT | {"n": 2}, timeout=20)

    with ThreadPoolExecutor(capacity) as pool:
        waiting = [pool.submit(ask, index) for index in range(capacity // 2 + 5)]
        while server.admission.num_rejected < 5 or server.admission.num_admitted < capacity:
            assert not all(reply.done() for reply in waiting)
        server.engine.gate.set()
        replies = [reply.result() for reply in waiting]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert len(refused) == 5
    assert all(reply.headers["retry-after"] == "1" for reply in refused)
    assert refused[0].json()["error"] == {
        "message": f"The server is at its limit of {capacity} running and waiting completions; try again.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert sum(reply.status_code == 200 for reply in replies) == capacity // 2


def test_a_request_that_never_fits_is_400(server: ApiServer):
    reply = server.http.post("/v1/completions", json=TEXT | {"n": 128})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "n: the request asks for 128 completions, this server holds at most 64 at once; split the request"
    )


def test_a_request_that_never_fits_is_refused_before_work_is_done_for_it(server: ApiServer, monkeypatch):
    monkeypatch.setattr(server.service, "_tokenizer", None)  # nothing is tokenised
    reply = server.http.post("/v1/completions", json=TEXT | {"prompt": ["a"] * 33, "n": 2})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "prompt: the request asks for 66 completions, this server holds at most 64 at once; split the request"
    )


def test_metrics_of_an_engine_that_does_not_answer_are_503(server: ApiServer, monkeypatch):
    async def dead():
        raise EngineDeadError("rank 0 exited with code -9")

    async def hung():
        await asyncio.Event().wait()

    for stats in (dead, hung):
        monkeypatch.setattr(server.engine, "stats", stats)
        reply = server.http.get("/metrics")
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["message"] == "The engine does not answer; try again."


def test_admission_gives_places_back_once():
    admission = Admission(max_num_seqs=2, queue_limit=1)
    with pytest.raises(ApiError, match="starting"):
        admission.admit(1)
    admission.state = ReplicaState.READY
    first = admission.admit(2)
    with pytest.raises(ApiError) as failure:
        admission.admit(2)
    assert (failure.value.status, failure.value.retry_after_s) == (429, 1)
    first.release()
    first.release()
    assert admission.num_admitted == 0
    admission.set_queue_limit(0)
    with pytest.raises(ApiError, match="at most 2 at once"):
        admission.admit(3)
