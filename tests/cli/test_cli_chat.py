"""`dflash chat` against a scripted server: what it sends, shows and remembers, and how it fails."""

import re

import pytest
from typer.testing import CliRunner, Result

from cluster.cli.chat import AnswerStats
from cluster.cli.main import app
from cluster.cli.openai_stream import SpecCounts
from tests.cli.fake_api import MODEL, Script, running


def chat(script: Script, *arguments: str, typed: str = "") -> Result:
    with running(script) as url:
        return CliRunner().invoke(app, ["chat", "--url", url, *arguments], input=typed)


def test_once_prints_the_answer_alone_on_stdout() -> None:
    script = Script(gap_s=0.01)
    result = chat(script, "--once", "Hi", "--system", "Be brief.", "--temperature", "0.5", "--seed", "3")
    assert result.exit_code == 0
    assert result.stdout == "Hello there\n"
    assert re.fullmatch(r"7 tokens, \d+\.\d tokens/s, first token \d+ ms, acceptance length 1\.75\n", result.stderr), (
        result.stderr
    )
    assert script.bodies == [
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 512,
            "temperature": 0.5,
            "seed": 3,
        }
    ]


def test_conversation_is_remembered_and_reset() -> None:
    script = Script()
    result = chat(script, typed="one\n\ntwo\n/reset\nthree\n/what\n/quit\nnever sent\n")
    assert result.exit_code == 0
    said = [[(m["role"], m["content"]) for m in body["messages"]] for body in script.bodies]
    assert said == [
        [("user", "one")],
        [("user", "one"), ("assistant", "Hello there"), ("user", "two")],
        [("user", "three")],
    ]
    assert "conversation forgotten" in result.stderr
    assert "unknown command /what" in result.stderr


def test_end_of_input_ends_the_chat() -> None:
    script = Script()
    result = chat(script, typed="one\n")
    assert (result.exit_code, len(script.bodies)) == (0, 1)


def test_a_failed_turn_is_said_and_not_kept() -> None:
    script = Script(error_event="the engine died")
    result = chat(script, typed="one\ntwo\n/quit\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: the engine died") == 2
    assert [len(body["messages"]) for body in script.bodies] == [1, 1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(status=429), "HTTP 429: the queue is full"),
        (Script(error_event="the engine died"), "the engine died"),
        (Script(finish_reason=None), "the stream ended without a finish_reason"),
        (Script(send_done=False), "the connection closed before [DONE]"),
    ],
)
def test_once_fails_with_the_reason(script: Script, message: str) -> None:
    result = chat(script, "--once", "Hi")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"error: {message}"


def test_no_server_says_how_to_start_one(free_port: int) -> None:
    result = CliRunner().invoke(app, ["chat", "--url", f"http://127.0.0.1:{free_port}", "--once", "Hi"])
    assert result.exit_code == 1
    assert f"error: cannot reach http://127.0.0.1:{free_port}/v1/models" in result.stderr
    assert "dflash serve configs/smollm2-135m.yaml" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "other"], "error: --model: 'other' is not served; served: fake-1"),
        (["--once", "  "], "error: --once: the text is empty"),
        (["--url", "127.0.0.1:1"], "error: --url: must start with http:// or https://, got '127.0.0.1:1'"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    result = chat(Script(), *arguments)
    assert (result.exit_code, result.stderr.strip()) == (2, message)


def test_rate_counts_the_tokens_after_the_first() -> None:
    stats = AnswerStats(ttft_s=0.05, decode_s=2.0, completion_tokens=101, spec=None)
    assert stats.line() == "101 tokens, 50.0 tokens/s, first token 50 ms"
    one = AnswerStats(
        ttft_s=0.05, decode_s=0.0, completion_tokens=1, spec=SpecCounts(num_steps=0, num_drafted=0, num_accepted=0)
    )
    assert one.line() == "1 tokens, first token 50 ms"
