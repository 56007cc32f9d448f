"""`dflash bench`: measure a running server over HTTP."""

import asyncio
import datetime
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.cli.bench_load import LoadPlan, RequestRecord, prompts_from_json, run_load, synthetic_prompts
from cluster.cli.bench_report import as_table, headline, request_figures, summarise
from cluster.cli.console import BAD_USAGE, check_output_file, fail, stderr, stdout, user_errors
from cluster.cli.openai_stream import ApiError, get_json, list_models, normalise_url, open_session

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_DEFAULT_CONCURRENCY = 1  # what one user sees
_OPEN_LOOP_CONNECTIONS = 4096


def bench(
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: this many requests are always in progress. Default without --rate: 1."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: Poisson arrivals, requests per second.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 32,
    url: Annotated[str, typer.Option(help="Root of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first that the server lists.")] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON file of prompts, used in turn. Default: synthetic.")
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Named list within the prompt file.")] = None,
    prompt_words: Annotated[int, typer.Option(min=1, help="Length of synthetic prompts in words.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Always generate max-tokens.")] = False,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first, one by one, and not counted.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and, per request, of sampling.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
) -> None:
    """Measure a running server: first-token time, time per token, tokens/s and acceptance by position."""
    if concurrency is not None and rate is not None:
        fail("give --concurrency N (closed loop) or --rate R (open loop), one of the two", status=BAD_USAGE)
    if concurrency is None and rate is None:
        concurrency = _DEFAULT_CONCURRENCY
    if rate is not None and not rate > 0:
        fail(f"--rate: must be above 0, got {rate}", status=BAD_USAGE)
    if endpoint not in _PATHS:
        fail(f"--endpoint: must be chat or completions, got {endpoint!r}", status=BAD_USAGE)
    check_output_file("--json", json_file)
    with user_errors(ValueError):
        url = normalise_url(url)
        texts = _read_prompts(prompts, subset, num=num_requests + warmup, num_words=prompt_words, seed=seed)
    options = {"max_tokens": max_tokens, "temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    with user_errors(ApiError, status=1):
        records, server = asyncio.run(
            _measure(url, model, endpoint, texts, options, concurrency, rate, num_requests, warmup, seed)
        )
    summary = summarise(records)
    out = stdout()
    out.print(headline(summary), markup=False)
    out.print(as_table(summary))
    for kind, count in summary.errors.items():
        example = next(record.error_message for record in records if record.error == kind)
        stderr().print(f"{count} x {kind}: {example}", style="bold red", markup=False)
    if json_file is not None:
        load = {"concurrency": concurrency, "rate": rate, "warmup": warmup, "seed": seed, "endpoint": endpoint}
        report = {
            "command": shlex.join(["dflash", *sys.argv[1:]]),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "machine": _machine(),
            "server": server,
            "load": load | options,
            "summary": summary.plain(),
            "requests": [_plain_record(record) for record in records],
        }
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        stderr().print(f"written to {json_file}", markup=False)
    if summary.num_succeeded == 0:
        raise typer.Exit(1)


async def _measure(
    url: str,
    model: str | None,
    endpoint: str,
    texts: list[str],
    options: dict[str, Any],
    concurrency: int | None,
    rate: float | None,
    num_requests: int,
    warmup: int,
    seed: int,
) -> tuple[list[RequestRecord], dict[str, Any]]:
    async with open_session(connections=concurrency or _OPEN_LOOP_CONNECTIONS) as session:
        served = await list_models(session, url)
        if model is not None and model not in served:
            raise ApiError("model", f"--model: {model!r} is not served; served: {', '.join(served)}")
        name = model or served[0]
        server = {"url": url, "model": name, "version": await get_json(session, f"{url}/version")}
        bodies = [_body(endpoint, name, texts[i % len(texts)], options, seed + i) for i in range(num_requests + warmup)]
        measured = LoadPlan(
            url=url,
            path=_PATHS[endpoint],
            bodies=bodies[:num_requests],
            concurrency=concurrency,
            rate=rate,
            seed=seed,
        )
        if warmup:
            # Prompts of its own where they are synthetic: a measured prompt must not find itself in the prefix cache.
            first = replace(measured, bodies=bodies[num_requests:], concurrency=1, rate=None)
            failed = [record for record in await run_load(session, first, _ignore) if record.error]
            if failed:
                raise ApiError(str(failed[0].error), f"the warm-up failed: {failed[0].error_message}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=stderr(), transient=True) as progress:
            bar = progress.add_task("requests", total=num_requests)
            records = await run_load(session, measured, lambda record: progress.advance(bar))
        return records, server


def _ignore(record: RequestRecord) -> None:
    """Warm-up requests move no bar."""


def _body(endpoint: str, model: str, text: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if endpoint == "chat" else {"prompt": text}
    return {"model": model, "stream": True, "stream_options": {"include_usage": True}, "seed": seed} | prompt | options


def _read_prompts(path: Path | None, subset: str | None, *, num: int, num_words: int, seed: int) -> list[str]:
    if path is None:
        if subset is not None:
            raise ValueError("--subset: needs --prompts FILE")
        return synthetic_prompts(num, num_words=num_words, seed=seed)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--prompts: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--prompts: {path} is not JSON: {error}") from error
    return prompts_from_json(data, subset=subset)


def _plain_record(record: RequestRecord) -> dict[str, Any]:
    plain = asdict(record)
    begin_s = record.start_s
    plain["event_times_s"] = [round(at_s - begin_s, 6) for at_s in record.event_times_s]
    plain["latency_s"] = record.end_s - begin_s
    del plain["end_s"]
    return plain | (request_figures(record) if record.error is None else {})


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("dflash-serve", "torch", "ray", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
