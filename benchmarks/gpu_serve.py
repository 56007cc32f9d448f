"""The whole server on a GPU: `dflash serve` with its rank on the device, asked through HTTP, broken once, stopped.

    python benchmarks/gpu_serve.py OUT.json PROMPTS.json [--config configs/smollm2-135m-gpu.yaml] [--smollm2 MODEL]

First the engine alone, in a process of its own: greedy tokens of a few prompts one after the other, and the speed of
--streams requests at once. Then the server: the same prompts in the same order, whole and streamed, whose tokens must
be the same; the same numbers of streams; a rank killed (SIGKILL) under load, with what the clients see, how long no
request is answered, and whether the GPU's memory came back; at last Ctrl-C, after which no process and no memory may be
left. CONFIG's model is replaced by --smollm2 where the package index cannot be reached.

Needs what the server needs (README), and nvidia-smi for the memory. Exits 1 on a difference, a process or memory that
stayed, or a server that did not come back.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import yaml
from command_line import command_line
from engine_load import Job, Trace, drive, figures
from process_cpu import cpu_seconds, difference

from cluster.config import load_config
from engine.parallel.process_identity import ProcessIdentity

_SLACK_MIB = 64  # of GPU memory that an idle device may gain


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "smollm2-135m-gpu.yaml")
    parser.add_argument("--smollm2", help="model directory or .gguf file in place of the config's")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--equal-prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=18127)
    parser.add_argument("--start-limit-s", type=float, default=180.0)
    parser.add_argument("--engine-alone", type=Path, help=argparse.SUPPRESS)  # this program's own child: its config
    return parser.parse_args()


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Chat prompts of all sets in turn, enough for the largest number of streams."""
    sets = json.loads(args.prompts.read_text())
    texts = [text for turn in zip(*sets.get("eval", sets).values(), strict=False) for text in turn]
    ids = [list(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in texts]
    return (ids * -(-max(args.streams) // len(ids)))[: max(max(args.streams), args.equal_prompts)]


# ---------------------------------------------------------------------------------------------------- the engine alone


class _Core:
    """`engine_load.Engine` over the engine of the offline API."""

    def __init__(self, llm: Any) -> None:
        self._core = llm.core

    def add(self, name: str, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        from engine.request import EngineRequest
        from engine.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False)
        self._core.add_request(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params))

    def step(self) -> Iterable[tuple[str, int, bool]]:
        return [(d.request_id, len(d.token_ids), d.finish_reason is not None) for d in self._core.step()]


def engine_alone(args: argparse.Namespace) -> None:
    from engine import LLM, SamplingParams
    from engine.config.resolve import resolve_engine_config

    config = load_config(args.engine_alone)
    with LLM.from_config(resolve_engine_config(**config.engine_arguments())) as llm:
        prompts = prompts_of(args, llm.tokenizer)
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
        answers = []
        for prompt in prompts[: args.equal_prompts]:
            answers.append(list(llm.generate([prompt], params)[0].outputs[0].token_ids))
        speeds: dict[int, list[dict[str, Any]]] = {n: [] for n in args.streams}
        for repeat in range(args.repeats + 1):
            for streams in args.streams:
                jobs = [Job(prompt=p, max_tokens=args.tokens, ignore_eos=True) for p in prompts[:streams]]
                row = figures(*drive(_Core(llm), jobs))
                if repeat:
                    speeds[streams].append(row)
    args.out.write_text(json.dumps({"prompts": prompts, "answers": answers, "speeds": speeds}))


# ------------------------------------------------------------------------------------------------------------ the wire


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own: when pieces came, and how it ended."""

    def __init__(self, request: bytes) -> None:
        self._request, self._tail, self._began = request, b"", time.perf_counter()
        self.pieces: list[float] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._began = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._began
        self.pieces += [now] * data.count(b'"text":')  # the last one, with the usage, has none
        self._tail = (self._tail + data)[-4096:]
        if b"data: [DONE]" in self._tail and not self.ended.done():
            self.ended.set_result("error event" if b'"error"' in self._tail else "done")
        elif b"HTTP/1.1 5" in self._tail[:64] and not self.ended.done():
            self.ended.set_result(self._tail[:32].decode(errors="replace").splitlines()[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result("cut off")

    @property
    def num_tokens(self) -> int:
        match = re.search(rb'"completion_tokens":(\d+)', self._tail)
        return int(match[1]) if match else 0

    def trace(self) -> Trace:
        """Tokens are known for the whole alone: the last piece gets them, and times of single tokens mean nothing."""
        counts = [0] * (len(self.pieces) - 1) + [self.num_tokens]
        return Trace(start_s=0.0, outputs=list(zip(self.pieces, counts, strict=True)))


def request_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    return head + data


async def streams_of(port: int, bodies: list[dict[str, Any]], after: Any = None) -> tuple[list[Stream], float]:
    """All requests as streams side by side; after: called once half a second into them."""
    loop, started = asyncio.get_running_loop(), time.perf_counter()
    made = []
    for data in map(request_of, bodies):
        made.append(await loop.create_connection(lambda data=data: Stream(data), "127.0.0.1", port))
    if after is not None:
        await asyncio.sleep(0.5)
        after()
    for _, stream in made:
        await stream.ended
    seconds = time.perf_counter() - started
    for transport, _ in made:
        transport.close()
    return [stream for _, stream in made], seconds


# ---------------------------------------------------------------------------------------------------------- the server


def memory_mib() -> int | None:
    """Used memory of the first GPU; None without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def below(root: int, mark: str = "") -> list[int]:
    """Processes below `root` whose command line holds `mark`."""
    parents, commands = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            commands[int(stat.parent.name)] = (stat.parent / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it ended while we looked
    found = []
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root and mark in commands[pid]:
            found.append(pid)
    return found


def wait_for(condition: Any, limit_s: float) -> float | None:
    """Seconds until the condition holds; None if it does not within the limit."""
    began = time.perf_counter()
    while time.perf_counter() - began < limit_s:
        if condition():
            return round(time.perf_counter() - began, 2)
        time.sleep(0.1)
    return None


def answers(url: str, body: dict[str, Any]) -> bool:
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    args = parse()
    if args.engine_alone:
        engine_alone(args)
        return
    record: dict[str, Any] = {"command": command_line(), "ok": True}

    def add(name: str, value: Any, ok: bool = True) -> None:
        record[name] = value
        record["ok"] &= ok
        print(name, json.dumps(value), "" if ok else "<- NOT AS IT SHOULD BE", flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        plain = load_config(args.config).to_plain()
        if args.smollm2:
            plain["model"]["source"] = str(Path(args.smollm2).resolve())
        config_file = Path(scratch) / "config.yaml"
        config_file.write_text(yaml.safe_dump(plain))
        name = load_config(config_file).served_name
        add("gpu_memory_mib_before", memory_mib())
        alone = Path(scratch) / "alone.json"
        words = ["--streams", *map(str, args.streams), "--tokens", str(args.tokens), "--repeats", str(args.repeats)]
        words += ["--equal-prompts", str(args.equal_prompts), "--engine-alone", str(config_file)]
        subprocess.run([sys.executable, __file__, str(alone), str(args.prompts), *words], check=True)
        known = json.loads(alone.read_text())
        with (args.out.with_suffix(".log")).open("w") as log:
            began = time.perf_counter()
            server = subprocess.Popen(
                [sys.executable, "-m", "cluster.cli.main", "serve", str(config_file), "--port", str(args.port)],
                env=dict(os.environ),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                measure(args, record, add, name, known, server, began)
            finally:
                stop(server, record["gpu_memory_mib_before"], add)
    sys.exit(0 if record["ok"] else 1)


def measure(
    args: argparse.Namespace, record: dict, add: Any, name: str, known: dict, server: subprocess.Popen, began: float
) -> None:
    url = f"http://127.0.0.1:{args.port}"
    prompts = known["prompts"]

    def body(prompt: list[int], **more: Any) -> dict[str, Any]:
        return dict(model=name, prompt=prompt, max_tokens=args.tokens, temperature=0) | more

    def healthy() -> bool:
        assert server.poll() is None, "the server ended while starting"
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    started = wait_for(healthy, args.start_limit_s)
    add("started_s", started and round(time.perf_counter() - began, 1), started is not None)
    if started is None:
        return
    add("gpu_memory_mib_serving", memory_mib())

    different = []
    for place, want in enumerate(known["answers"]):
        reply = httpx.post(f"{url}/v1/completions", json=body(prompts[place], return_token_ids=True), timeout=60)
        choice = reply.json()["choices"][0]
        if list(choice["token_ids"]) != want:
            different.append(place)
    add("equal_to_the_engine", {"prompts": len(known["answers"]), "different": different}, not different)

    rows = []
    for streams in args.streams:
        bodies = [
            body(p, ignore_eos=True, stream=True, stream_options={"include_usage": True}) for p in prompts[:streams]
        ]
        found, costs = [], []
        for repeat in range(args.repeats + 1):
            before = cpu_seconds(server.pid)
            done, seconds = asyncio.run(streams_of(args.port, bodies))
            spent = difference(before, cpu_seconds(server.pid))
            assert all(stream.ended.result() == "done" for stream in done), [s.ended.result() for s in done]
            if repeat:
                found.append(figures([stream.trace() for stream in done], seconds))
                costs.append({role: round(1e3 * s / found[-1]["tokens"], 4) for role, s in spent.items()})
        middle = sorted(range(len(found)), key=lambda i: found[i]["tokens_per_s"])[len(found) // 2]
        ours = sorted(known["speeds"][str(streams)], key=lambda row: row["tokens_per_s"])[len(found) // 2]
        fields = ("tokens_per_s", "first_token_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms")
        rows.append(
            {
                "streams": streams,
                "http": {field: found[middle].get(field) for field in fields},
                "engine": {field: ours.get(field) for field in fields},
                "ratio": round(found[middle]["tokens_per_s"] / ours["tokens_per_s"], 3),
                "all_http_tokens_per_s": [row["tokens_per_s"] for row in found],
                "cpu_ms_per_token": costs[middle],
            }
        )
        add("streams", rows)

    ranks = below(server.pid, "GpuWorker")
    add("ranks", len(ranks), len(ranks) == 1)
    if len(ranks) != 1:
        return
    rank = ProcessIdentity.of(ranks[0])
    lowest: list[int] = []
    bodies = [body(p, ignore_eos=True, stream=True, max_tokens=3000) for p in prompts[:8]]
    broken, _ = asyncio.run(streams_of(args.port, bodies, lambda: os.kill(rank.pid, signal.SIGKILL)))
    died = time.perf_counter()
    ends = [stream.ended.result() for stream in broken]
    add("ends_of_streams_at_the_kill", ends, all(end == "error event" for end in ends))

    def back() -> bool:
        lowest.append(memory_mib() or 0)
        return answers(url, body(prompts[0], max_tokens=4))

    recovered = wait_for(back, args.start_limit_s)
    add("answers_again_after_s", recovered and round(time.perf_counter() - died, 1), recovered is not None)
    add("gpu_memory_mib_lowest_between", min(lowest, default=None))
    add("gpu_memory_mib_serving_again", memory_mib())
    if recovered is not None:
        reply = httpx.post(f"{url}/v1/completions", json=body(prompts[0], return_token_ids=True), timeout=60).json()
        add("equal_after_recovery", list(reply["choices"][0]["token_ids"]) == known["answers"][0])
    if record["gpu_memory_mib_before"] is not None:
        limit = record["gpu_memory_mib_serving"] + _SLACK_MIB
        add("memory_of_the_dead_rank_came_back", memory_mib() <= limit, memory_mib() <= limit)


def stop(server: subprocess.Popen, memory_before_mib: int | None, add: Any) -> None:
    """Ctrl-C, and what is left."""
    left = [ProcessIdentity.of(pid) for pid in below(server.pid)]
    began = time.perf_counter()
    server.send_signal(signal.SIGINT)
    try:
        code: int | None = server.wait(timeout=60)
    except subprocess.TimeoutExpired:
        code = None
        server.kill()
    add("stopped", {"seconds": round(time.perf_counter() - began, 1), "exit": code}, code == 0)
    gone = wait_for(lambda: not any(process.is_alive() for process in left), 10)
    alive = [process.pid for process in left if process.is_alive()]
    add("processes_left", len(alive), gone is not None)
    if memory_before_mib is not None:
        limit = memory_before_mib + _SLACK_MIB
        add("gpu_memory_mib_after", memory_mib(), wait_for(lambda: memory_mib() <= limit, 15) is not None)


if __name__ == "__main__":
    main()
