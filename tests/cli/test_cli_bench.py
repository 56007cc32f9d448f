"""`dflash bench`: figures against hand computation, load against a scripted server, the report and the errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from cluster.cli.bench_load import LoadPlan, RequestRecord, prompts_from_json, synthetic_prompts
from cluster.cli.bench_report import Distribution, request_figures, summarise
from cluster.cli.main import app
from cluster.cli.openai_stream import SpecCounts
from tests.cli.fake_api import MODEL, Script, running


def bench(script: Script, *arguments: str) -> Result:
    with running(script) as url:
        return CliRunner().invoke(app, ["bench", "--url", url, *arguments])


def record(index: int = 0, **changes: Any) -> RequestRecord:
    """Starts at 10 s, texts at 10.5, 11.0 and 12.5 s, ends with 9 tokens; 4 verify steps, 5 of 12 drafts accepted."""
    values: dict[str, Any] = {
        "index": index,
        "start_s": 10.0,
        "end_s": 12.5,
        "event_times_s": (10.5, 11.0, 12.5),
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "finish_reason": "stop",
        "spec": SpecCounts(num_steps=4, num_drafted=12, num_accepted=5, histogram=(1, 2, 0, 1)),
    }
    return RequestRecord(**values | changes)


def test_figures_of_one_request_by_hand() -> None:
    assert request_figures(record()) == {
        "latency_s": 2.5,
        "ttft_s": 0.5,
        "tpot_s": 0.25,  # (2.5 - 0.5) / (9 - 1)
        "tokens_per_s_user": 4.0,
        "acceptance_length": 2.25,  # 1 + 5 / 4
    }


def test_one_token_has_no_time_per_token() -> None:
    figures = request_figures(record(event_times_s=(10.5,), completion_tokens=1, spec=None))
    assert figures == {"latency_s": 2.5, "ttft_s": 0.5}


def test_summary_by_hand() -> None:
    records = [
        record(0),
        record(
            1,
            start_s=11.0,
            end_s=14.0,
            event_times_s=(12.0, 14.0),
            completion_tokens=3,
            spec=SpecCounts(num_steps=2, num_drafted=6, num_accepted=0, histogram=(2,)),
        ),
        record(2, start_s=9.0, end_s=9.1, error="HTTP 429", error_message="full", completion_tokens=0),
    ]
    summary = summarise(records)
    assert (summary.num_requests, summary.num_succeeded, summary.errors) == (3, 2, {"HTTP 429": 1})
    assert summary.duration_s == 5.0  # 9.0 to 14.0: failures count
    assert summary.tokens_per_s == 12 / 5
    assert summary.requests_per_s == 2 / 5
    assert (summary.prompt_tokens, summary.completion_tokens) == (40, 12)
    assert summary.acceptance_length == 1 + 5 / 6  # over all steps, not the mean of the requests' lengths
    assert (summary.drafted_tokens, summary.accepted_tokens) == (18, 5)
    assert summary.acceptance_by_position == (3 / 6, 1 / 6, 1 / 6)  # 3 steps of 6 accepted one draft or more
    assert summary.distributions["ttft_s"].mean == 0.75
    assert summary.distributions["tpot_s"].mean == (0.25 + 1.0) / 2
    assert summary.distributions["inter_token_s"].count == 3  # 0.5 and 1.5 of the first, 2.0 of the second
    assert summary.distributions["inter_token_s"].mean == pytest.approx(4 / 3)
    assert summary.distributions["acceptance_length_per_request"].mean == (2.25 + 1.0) / 2


def test_percentiles_interpolate() -> None:
    found = Distribution.of([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert found.percentiles[50] == 2.5
    assert found.percentiles[90] == pytest.approx(3.7)  # rank 0.9 * 3 = 2.7
    assert (found.min, found.max, found.count) == (1.0, 4.0, 4)
    assert Distribution.of([]) is None


def test_open_loop_arrivals_are_poisson_and_seeded() -> None:
    def plan(seed: int) -> LoadPlan:
        return LoadPlan(url="u", path="p", bodies=[{}] * 4001, concurrency=None, rate=8.0, seed=seed)

    times = plan(1).arrivals_s()
    assert times == plan(1).arrivals_s()
    assert times != plan(2).arrivals_s()
    assert times[0] == 0.0
    gaps = np.diff(times)
    # Mean 1/8 s and, as for an exponential, a deviation equal to the mean; 4,000 draws are within 5 % of both.
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)


def test_closed_loop_keeps_concurrency_and_writes_everything(tmp_path: Path) -> None:
    script = Script(gap_s=0.02)
    file = tmp_path / "r.json"
    result = bench(
        script, "--concurrency", "3", "--num-requests", "9", "--warmup", "2", "--max-tokens", "7", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert "9 of 9 requests" in result.stdout
    assert "acceptance length 1.750 (27 of 108 drafted tokens accepted)" in result.stdout
    assert "accepted up to position 1, 2, ..: 50.0% 25.0% 0.0%" in result.stdout
    assert len(script.bodies) == 11
    assert script.most_in_progress == 3
    body = script.bodies[-1]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"]) == (MODEL, 7, 0.0)
    measured = script.bodies[2:]
    assert sorted(body["seed"] for body in measured) == list(range(9))
    assert len({body["messages"][0]["content"] for body in measured}) == 9

    report = json.loads(file.read_text())
    assert set(report) == {"command", "time", "versions", "machine", "server", "load", "summary", "requests"}
    assert report["server"]["version"] == {"version": "9.9"}
    assert report["machine"]["num_cpus"] >= 1
    assert report["versions"]["torch"]
    assert report["load"]["concurrency"] == 3
    summary = report["summary"]
    assert (summary["num_succeeded"], summary["completion_tokens"], summary["errors"]) == (9, 63, {})
    assert summary["acceptance_length"] == 1.75
    assert summary["acceptance_by_position"] == [0.5, 0.25, 0.0]
    assert {"mean", "p50", "p99", "max", "min", "count", "p90", "p95"} == set(summary["ttft_s"])
    assert [request["index"] for request in report["requests"]] == list(range(9))
    for request in report["requests"]:
        assert len(request["event_times_s"]) == 3
        # Two gaps of 20 ms between three texts; reading one late may shorten what is seen of them.
        assert request["event_times_s"][-1] - request["event_times_s"][0] > 0.02
        assert request["latency_s"] >= request["event_times_s"][-1]
        assert request["tpot_s"] == pytest.approx((request["latency_s"] - request["ttft_s"]) / 6)


def test_open_loop_does_not_wait_for_answers() -> None:
    script = Script(gap_s=0.1)
    result = bench(script, "--rate", "200", "--num-requests", "6", "--warmup", "0")
    assert result.exit_code == 0, result.output
    assert script.most_in_progress > 2


def test_completions_endpoint_and_prompt_file(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"a": ["one", {"prompt": "two"}], "b": ["three"]}))
    script = Script()
    result = bench(
        script,
        *("--concurrency", "1", "--num-requests", "3", "--warmup", "0", "--endpoint", "completions"),
        *("--prompts", str(file), "--subset", "a", "--ignore-eos"),
    )
    assert result.exit_code == 0, result.output
    assert [body["prompt"] for body in script.bodies] == ["one", "two", "one"]
    assert set(script.paths) == {"/v1/completions"}
    assert all(body["ignore_eos"] for body in script.bodies)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(status=429), "HTTP 429: HTTP 429: the queue is full"),
        (Script(error_event="engine died"), "error event: engine died"),
        (Script(finish_reason=None), "protocol: the stream ended without a finish_reason"),
        (Script(send_done=False), "protocol: the connection closed before [DONE]"),
    ],
)
def test_failures_are_counted_by_kind(script: Script, kind: str) -> None:
    result = bench(script, "--concurrency", "2", "--num-requests", "4", "--warmup", "0")
    assert result.exit_code == 1
    assert "0 of 4 requests" in result.stdout
    assert f"4 x {kind}" in result.stderr


def test_failing_warm_up_stops_at_once() -> None:
    script = Script(status=429)
    result = bench(script, "--concurrency", "2", "--num-requests", "50")
    assert result.exit_code == 1
    assert "error: the warm-up failed: HTTP 429: the queue is full" in result.stderr
    assert len(script.bodies) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--concurrency", "1", "--rate", "1"],
            "give --concurrency N (closed loop) or --rate R (open loop), one of the two",
        ),
        (["--rate", "0"], "--rate: must be above 0, got 0.0"),
        (["--rate", "1", "--endpoint", "embed"], "--endpoint: must be chat or completions, got 'embed'"),
        (["--rate", "1", "--json", "/no/such/r.json"], "--json: no such directory: /no/such"),
        (["--rate", "1", "--subset", "a"], "--subset: needs --prompts FILE"),
        (["--rate", "1", "--prompts", "/no/p.json"], "--prompts: cannot read /no/p.json: No such file or directory"),
        (["--rate", "1", "--url", "ftp://x"], "--url: must start with http:// or https://, got 'ftp://x'"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert f"error: {message}" in result.stderr


@pytest.mark.parametrize(
    ("data", "subset", "message"),
    [
        ([], None, "non-empty list"),
        ("x", None, "non-empty list"),
        (["a", 5], None, "prompt 1 of the prompt file"),
        ([{"text": "a"}], None, "prompt 0 of the prompt file"),
        ({"a": ["x"]}, "b", "the prompt file has no 'b'; it has a"),
        (["x"], "a", "plain list"),
    ],
)
def test_wrong_prompt_files(data: object, subset: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts_from_json(data, subset=subset)


def test_synthetic_prompts_are_seeded_and_sized() -> None:
    prompts = synthetic_prompts(5, num_words=12, seed=4)
    assert prompts == synthetic_prompts(5, num_words=12, seed=4)
    assert prompts != synthetic_prompts(5, num_words=12, seed=5)
    assert len(set(prompts)) == 5
    assert {len(prompt.split()) for prompt in prompts} == {12}
