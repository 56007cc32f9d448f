"""64 concurrent streams for a minute against a running server; a third of the clients hang up at random moments.

    dflash serve configs/smollm2-135m.yaml        (in another terminal)
    python benchmarks/soak.py OUT.json --url http://127.0.0.1:8000 [--clients 64] [--seconds 60]

Afterwards, with the server idle: no stream that was kept to its end saw an error, /metrics shows nothing running or
waiting and every KV block free or cached, and the resident memory of the server's processes is flat over the second
half of the run. Anything else exits 1.
"""

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from pathlib import Path

import httpx
import psutil
from command_line import command_line


async def one_client(index: int, url: str, model: str, deadline: float, rng: random.Random, tally: dict) -> None:
    async with httpx.AsyncClient(timeout=300) as client:
        while time.monotonic() < deadline:
            hang_up = rng.random() < 1 / 3
            hang_up_after = rng.uniform(0.0, 6.0)
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"Write {rng.randrange(2, 9)} words about number {index}."}],
                "max_tokens": rng.randrange(4, 48),
                "temperature": rng.choice((0.0, 0.8)),
                "stream": True,
            }
            started = time.monotonic()
            finished = False
            try:
                async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    if response.status_code == 429:
                        tally["refused_429"] += 1
                        await asyncio.sleep(1)
                        continue
                    if response.status_code != 200:
                        tally["errors"].append(f"{response.status_code}: {(await response.aread())[:200]!r}")
                        continue
                    async for line in response.aiter_lines():
                        if hang_up and time.monotonic() - started > hang_up_after:
                            tally["hung_up"] += 1
                            break
                        if not line.startswith("data: ") or line == "data: [DONE]":
                            continue
                        event = json.loads(line[6:])
                        if "error" in event:
                            tally["errors"].append(str(event["error"])[:200])
                        elif event["choices"] and event["choices"][0]["finish_reason"]:
                            finished = True
                    else:
                        tally["completed" if finished else "cut_without_finish_reason"] += 1
            except httpx.HTTPError as error:
                tally["errors"].append(repr(error))


def gauges(url: str) -> dict[str, float]:
    wanted = {}
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        name, value = line.rsplit(" ", 1)
        wanted[name.split("{")[0]] = float(value)
    return wanted


def left_over(record: dict) -> list[str]:
    """What the idle server still holds, or has grown by: more than 5 % in the second half."""
    after, growth_mb = record["after"], record["memory_growth_second_half_mb"]
    faults = [name for name in ("vllm:num_requests_running", "vllm:num_requests_waiting") if after[name]]
    if after["dflash:kv_blocks_free"] + after["dflash:kv_blocks_cached"] != after["dflash:kv_blocks"]:
        faults.append("KV blocks are neither free nor cached")
    if growth_mb is None or not record["memory_mb"][-1][1]:
        faults.append("the server's processes were not found on this machine, so their memory is unknown")
    elif growth_mb > 0.05 * record["memory_mb"][-1][1]:
        faults.append(f"memory grew by {growth_mb} MB")
    for fault in faults:
        print(f"left over: {fault}", file=sys.stderr)
    return faults


def server_memory_mb() -> float:
    """Resident memory of every process whose command line names a Ray worker of ours."""
    total = 0
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        line = " ".join(process.info["cmdline"] or ())
        if "ray::" in line and ("GpuWorker" in line or "ModelServer" in line or "ServeReplica" in line):
            total += process.info["memory_info"].rss
    return total / 2**20


async def drive(args, tally: dict, memory: list[tuple[float, float]]) -> None:
    deadline = time.monotonic() + args.seconds
    started = time.monotonic()

    async def watch() -> None:
        while time.monotonic() < deadline:
            memory.append((round(time.monotonic() - started, 1), round(server_memory_mb(), 1)))
            await asyncio.sleep(2)

    rngs = [random.Random(args.seed + i) for i in range(args.clients)]
    await asyncio.gather(
        watch(), *(one_client(i, args.url, args.model, deadline, rngs[i], tally) for i in range(args.clients))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tally: dict = {"completed": 0, "hung_up": 0, "refused_429": 0, "cut_without_finish_reason": 0, "errors": []}
    memory: list[tuple[float, float]] = []
    asyncio.run(drive(args, tally, memory))
    for _ in range(60):
        after = gauges(args.url)
        if after["vllm:num_requests_running"] == 0 and after["vllm:num_requests_waiting"] == 0:
            break
        time.sleep(1)
    health = httpx.get(f"{args.url}/health", timeout=60).status_code
    half = [mb for at, mb in memory if at > args.seconds / 2]
    record = {
        "command": command_line(),
        "machine": platform.machine(),
        "tally": {**tally, "errors": tally["errors"][:10], "num_errors": len(tally["errors"])},
        "after": {k: v for k, v in after.items() if "num_requests" in k or "kv_" in k},
        "health": health,
        "memory_mb": memory,
        "memory_growth_second_half_mb": round(half[-1] - half[0], 1) if half else None,
    }
    args.out.write_text(json.dumps(record, indent=1))
    print(json.dumps({k: record[k] for k in ("tally", "after", "health", "memory_growth_second_half_mb")}, indent=1))
    sys.exit(1 if tally["errors"] or tally["cut_without_finish_reason"] or health != 200 or left_over(record) else 0)


if __name__ == "__main__":
    main()
