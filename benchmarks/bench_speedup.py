"""DFlash against plain decoding at one request at a time, through HTTP: `dflash serve`, measured by `dflash bench`.

    python benchmarks/bench_speedup.py CONFIG.yaml PROMPTS.json OUT.json [--draft-lens 3 5 7 15] [--least 1.8]

Three servers one after another: plain (the config without its speculative_config), DFlash with every K in turn (by
`dflash schedule pin`), plain again. A ratio is DFlash's tokens/s over the mean of both plain runs, so that a machine
that slowly changes its speed does not count for one side. Greedy, end-of-sequence ignored; every server has seen the
prompts before, so that all runs find them in the prefix cache. Exits 1 if the best K of a set is below --least x plain.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from command_line import command_line

_READY_S = 240.0
_PIN_S = 3.0  # a push takes milliseconds; a report's reply heals a lost one after an interval


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "humaneval"])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[3, 5, 7, 15])
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1, help="of all K in turn")
    parser.add_argument("--port", type=int, default=18124)
    parser.add_argument("--least", type=float, default=1.8)
    return parser.parse_args()


def dflash(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cluster.cli.main", *arguments]


def server_config(args: argparse.Namespace, *, drafts: bool) -> dict[str, Any]:
    """The config file's, with nothing changed but what the comparison needs."""
    raw: dict[str, Any] = yaml.safe_load(args.config.read_text())
    section = raw.pop("speculative_config", None)
    if not drafts:
        return raw
    if section is None:
        raise SystemExit(f"{args.config} has no speculative_config; there is nothing to compare")
    beside = args.config.parent / str(section["speculative_model"])
    longest = max(args.draft_lens)
    raw["speculative_config"] = section | {
        "speculative_model": str(beside.resolve()) if beside.is_dir() else section["speculative_model"],
        "max_draft_len": longest,
        "draft_len_schedule": {1: longest},
    }
    raw.setdefault("engine", {})["draft_len_choices"] = sorted({0, *args.draft_lens})
    raw["controller"] = {"enabled": True}
    return raw


@contextmanager
def server(args: argparse.Namespace, raw: dict[str, Any], scratch: Path) -> Iterator[str]:
    """A running server's URL; stopped at the end."""
    file = scratch / "config.yaml"
    file.write_text(yaml.safe_dump(raw))
    process = subprocess.Popen(dflash("serve", str(file), "--port", str(args.port)), env=dict(os.environ))
    url = f"http://127.0.0.1:{args.port}"
    stop_at = time.monotonic() + _READY_S
    try:
        while not is_healthy(url):
            if process.poll() is not None or time.monotonic() > stop_at:
                raise SystemExit("the server did not start")
            time.sleep(0.5)
        for name in args.sets:
            bench(args, url, name, scratch, tokens=2)
        yield url
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def bench(args: argparse.Namespace, url: str, name: str, scratch: Path, *, tokens: int) -> dict[str, Any]:
    """What `dflash bench` says of one set of prompts."""
    file = scratch / "bench.json"
    command = dflash("bench", "--url", url, "--prompts", str(args.prompts), "--subset", name, "--json", str(file))
    command += ["--num-requests", str(args.num_prompts), "--max-tokens", str(tokens), "--ignore-eos"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report = json.loads(file.read_text())
    summary = report["summary"]
    if summary["errors"]:
        raise SystemExit(f"{name}: requests failed: {summary['errors']}")
    steps = sum(request["spec"]["num_steps"] for request in report["requests"] if request["spec"])
    return {
        "tokens_per_s": round(summary["tokens_per_s"], 2),
        "first_token_ms": round(1e3 * summary["ttft_s"]["p50"], 1),
        "acceptance_length": summary["acceptance_length"] and round(summary["acceptance_length"], 3),
        "drafts_per_step": round(summary["drafted_tokens"] / steps, 2) if steps else 0.0,
        "machine": report["machine"],
    }


def main() -> None:
    args = parse()
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    machine: dict[str, Any] = {}

    def measure(url: str, row: str, scratch: Path) -> dict[str, Any]:
        found = {}
        for name in args.sets:
            found[name] = bench(args, url, name, scratch, tokens=args.tokens)
            machine.update(found[name].pop("machine"))
            runs.setdefault((name, row), []).append(found[name])
            print(f"{name}, {row}: {json.dumps(found[name])}", flush=True)
        return found

    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with server(args, server_config(args, drafts=False), scratch) as url:
            measure(url, "plain", scratch)
        with server(args, server_config(args, drafts=True), scratch) as url:
            for _ in range(args.rounds):
                for draft_len in args.draft_lens:
                    subprocess.run(dflash("schedule", "pin", str(draft_len)), check=True)
                    time.sleep(_PIN_S)
                    for name, found in measure(url, f"K={draft_len}", scratch).items():
                        # Fewer only in a request's last steps, which have not so many tokens left.
                        if not draft_len - 1.5 <= found["drafts_per_step"] <= draft_len:
                            raise SystemExit(f"{name}: K={draft_len} was pinned but not in force")
        with server(args, server_config(args, drafts=False), scratch) as url:
            measure(url, "plain", scratch)

    speed = {key: mean(run["tokens_per_s"] for run in found) for key, found in runs.items()}
    ratios = {
        name: {f"K={k}": round(speed[name, f"K={k}"] / speed[name, "plain"], 3) for k in args.draft_lens}
        for name in args.sets
    }
    best = {name: max(found.values()) for name, found in ratios.items()}
    record = {
        "command": command_line(),
        "machine": machine,
        "runs": [{"set": name, "row": row, "runs": found} for (name, row), found in runs.items()],
        "ratio_to_plain": ratios,
        "best": best,
        "ok": min(best.values()) >= args.least,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"ratio_to_plain": ratios, "ok": record["ok"]}, indent=1))
    sys.exit(0 if record["ok"] else 1)


if __name__ == "__main__":
    main()
