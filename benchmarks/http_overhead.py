"""Tokens/s through HTTP against the engine alone, 8 streams, server and client on the same machine.

    python benchmarks/http_overhead.py PROMPTS.json OUT.json CONFIG.yaml [--rounds 3] [--streams 8]

Alternates: the engine in this process (offline API, same resolved config), then the same prompts as 8 concurrent
streams to a server started with `dflash serve CONFIG`. Greedy, end-of-sequence ignored. Medians and their ratio.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
from command_line import command_line

from cluster.config import load_config
from engine import LLM, SamplingParams
from engine.config.resolve import resolve_engine_config


async def stream(client: httpx.AsyncClient, url: str, body: dict) -> int:
    tokens = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    return tokens


async def http_round(url: str, model: str, prompts: list[list[int]], num_tokens: int) -> float:
    async with httpx.AsyncClient(timeout=600) as client:
        started = time.perf_counter()
        counts = await asyncio.gather(
            *(
                stream(
                    client,
                    url,
                    {
                        "model": model,
                        "prompt": p,
                        "max_tokens": num_tokens,
                        "temperature": 0,
                        "ignore_eos": True,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                    },
                )
                for p in prompts
            )
        )
        return sum(counts) / (time.perf_counter() - started)


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
        engine_speeds, http_speeds = [], []
        with LLM.from_config(engine_config) as llm:
            prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": m}]) for m in messages]
            for round_index in range(args.rounds + 1):
                started = time.perf_counter()
                outputs = llm.generate(prompts, params)
                engine_speed = sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - started)
                http_speed = asyncio.run(http_round(url, config.model.served_name, prompts, args.tokens))
                print(f"round {round_index}: engine {engine_speed:.1f}, http {http_speed:.1f} tokens/s", flush=True)
                if round_index:
                    engine_speeds.append(engine_speed)
                    http_speeds.append(http_speed)
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
        "ratio": round(http_median / engine_median, 3),
    }
    args.out.write_text(json.dumps(record, indent=1))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
