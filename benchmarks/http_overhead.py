"""Tokens/s through HTTP against the engine alone, 8 streams, server and client on the same machine.

    python benchmarks/http_overhead.py PROMPTS.json OUT.json CONFIG.yaml [--rounds 3] [--streams 8]

Alternates: the engine in this process (offline API, same resolved config), then the same prompts as 8 concurrent
streams to a server started with `dflash serve CONFIG`. Greedy, end-of-sequence ignored. Medians, their ratio, and the
CPU time a token costs in every process, which other load on the machine changes little. The client reads bytes and
parses next to nothing. A rank waits for its other threads by spinning, so its figure does depend on load.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
from command_line import command_line
from process_cpu import cpu_seconds, difference

from cluster.config import load_config
from engine import LLM, SamplingParams
from engine.config.resolve import resolve_engine_config


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own. Looks into nothing but the end of what it is sent."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.completion_tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-4096:]
        if b"data: [DONE]" in self._tail and not self.completion_tokens.done():
            if match := re.search(rb'"completion_tokens":(\d+)', self._tail):
                self.completion_tokens.set_result(int(match[1]))
            else:
                self.completion_tokens.set_exception(RuntimeError(self._tail.decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.completion_tokens.done():
            self.completion_tokens.set_exception(RuntimeError(f"cut off: {self._tail.decode(errors='replace')}"))


async def http_round(port: int, model: str, prompts: list[list[int]], num_tokens: int) -> tuple[float, int]:
    """(seconds, tokens) of all prompts as streams side by side."""
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    streams = []
    for prompt in prompts:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        streams.append(await loop.create_connection(lambda r=head + data: Stream(r), "127.0.0.1", port))
    counts = [await stream.completion_tokens for _, stream in streams]
    seconds = time.perf_counter() - started
    for transport, _ in streams:
        transport.close()
    return seconds, sum(counts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--port", type=int, default=18123)
    args = parser.parse_args()
    config = load_config(args.config)
    engine_config = resolve_engine_config(**config.engine_arguments())
    bank = json.loads(args.prompts.read_text())
    messages = (bank["gsm8k"] + bank["humaneval"])[: args.streams * 2 : 2]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli.main", "serve", str(args.config), "--port", str(args.port)],
        env=dict(os.environ),
    )
    url = f"http://127.0.0.1:{args.port}"
    try:
        for _ in range(300):
            assert server.poll() is None, "the server ended while starting"
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        engine_speeds, http_speeds, costs = [], [], []
        with LLM.from_config(engine_config) as llm:
            prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": m}]) for m in messages]
            for round_index in range(args.rounds + 1):
                own_cpu_s, started = time.process_time(), time.perf_counter()
                outputs = llm.generate(prompts, params)
                num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
                engine_speed = num_tokens / (time.perf_counter() - started)
                cost = {"engine alone": (time.process_time() - own_cpu_s) / num_tokens}
                before, own_cpu_s = cpu_seconds(server.pid), time.process_time()
                seconds, num_tokens = asyncio.run(http_round(args.port, config.served_name, prompts, args.tokens))
                spent = difference(before, cpu_seconds(server.pid)) | {"client": time.process_time() - own_cpu_s}
                cost |= {role: value / num_tokens for role, value in spent.items()}
                print(f"round {round_index}: engine {engine_speed:.1f}, http {num_tokens / seconds:.1f} tokens/s")
                print("  CPU ms a token:", {role: round(1e3 * value, 3) for role, value in cost.items()}, flush=True)
                if round_index:
                    engine_speeds.append(engine_speed)
                    http_speeds.append(num_tokens / seconds)
                    costs.append(cost)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)
    engine_median, http_median = statistics.median(engine_speeds), statistics.median(http_speeds)
    record = {
        "command": command_line(),
        "machine": platform.machine(),
        "streams": args.streams,
        "engine_tokens_per_s": [round(v, 2) for v in engine_speeds],
        "http_tokens_per_s": [round(v, 2) for v in http_speeds],
        "cpu_ms_per_token": {role: round(1e3 * statistics.median(c[role] for c in costs), 3) for role in costs[0]},
        "ratio": round(http_median / engine_median, 3),
    }
    args.out.write_text(json.dumps(record, indent=1))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
