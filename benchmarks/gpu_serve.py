"""The whole server on a GPU: `dflash serve` with its rank on the device, asked through HTTP, broken once, stopped.

    python benchmarks/gpu_serve.py OUT.json PROMPTS.json [--quick] [--config configs/smollm2-135m-gpu.yaml]
        [--smollm2 MODEL]

First the engine alone, in a process of its own: greedy tokens of a few prompts one after the other, and the speed of
--streams requests at once. Then the server: the same prompts in the same order, whole and streamed, whose tokens must
be the same; the same numbers of streams; a rank killed (SIGKILL) under load, with what the clients see, how long no
request is answered, and whether the GPU's memory came back; at last Ctrl-C, after which no process and no memory may be
left. CONFIG's model is replaced by --smollm2 where the package index cannot be reached.

Every phase is printed as it begins and every ten seconds while it runs (the CPU seconds of the server's processes, the
GPU's memory, the last line of the log), and has a limit; a run that is cut, by a limit or by SIGTERM, prints the logs'
ends, and OUT.json says how far it came. OUT.log has the server's output, OUT.alone.log that of the engine alone.
--quick: 150 s at most. Less is measured, the engine alone runs while the server starts, and the rank is not killed
unless the time for a second start is left.

Needs what the server needs (README), and nvidia-smi for the memory. Exits 1 on a difference, a process or memory that
stayed, a server that did not come back, or a phase that was cut; else 3 if something was left out for want of time.
"""

import argparse
import asyncio
import json
import logging
import os
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
from engine_load import Job, drive, figures
from http_streams import streams_of
from phases import CutError, Phases
from process_cpu import below, cpu_seconds, difference

from cluster.config import load_config
from engine.parallel.process_identity import ProcessIdentity

_SLACK_MIB = 64  # of GPU memory that an idle device may gain
_STOP_S = 30.0  # what is kept for the server's end, whatever else was cut
_QUICK = {"streams": [1, 8], "tokens": 128, "equal_prompts": 4, "repeats": 1, "limit_s": 150.0}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "smollm2-135m-gpu.yaml")
    parser.add_argument("--smollm2", help="model directory or .gguf file in place of the config's")
    parser.add_argument("--proxy", choices=("haproxy", "python"), help="in place of the config's")
    parser.add_argument("--quick", action="store_true", help=f"with these defaults: {_QUICK}")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--equal-prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=18127)
    parser.add_argument("--alone-limit-s", type=float, default=150.0)
    parser.add_argument("--start-limit-s", type=float, default=180.0)
    parser.add_argument("--limit-s", type=float, default=600.0, help="of the whole run")
    parser.add_argument("--engine-alone", type=Path, help=argparse.SUPPRESS)  # this program's own child: its config
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**_QUICK)
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

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
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


# ---------------------------------------------------------------------------------------------------------- the server


def memory_mib() -> int | None:
    """Used memory of the first GPU; None without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


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


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"log: {lines[-1][-160:]}" if lines else "log: empty"


class Run:
    """One run: what was found goes to OUT.json as it comes."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args = args
        self.record: dict[str, Any] = {"command": command_line(), "ok": True}
        self.phases = Phases(limit_s=args.limit_s - _STOP_S)
        self.log, self.alone_log = args.out.with_suffix(".log"), args.out.with_suffix(".alone.log")
        self.server: subprocess.Popen | None = None
        self.url = f"http://127.0.0.1:{args.port}"
        plain = load_config(args.config).to_plain()
        if args.smollm2:
            plain["model"]["source"] = str(Path(args.smollm2).resolve())
        if args.proxy:
            plain["http"]["proxy"] = args.proxy
        self.config_file = scratch / "config.yaml"
        self.config_file.write_text(yaml.safe_dump(plain))
        self.name = load_config(self.config_file).served_name
        self._alone = scratch / "alone.json"

    def add(self, name: str, value: Any, ok: bool = True) -> None:
        self.record[name] = value
        self.record["ok"] &= ok
        print(name, json.dumps(value), "" if ok else "<- NOT AS IT SHOULD BE", flush=True)
        self.save()

    def save(self) -> None:
        self.record["phases"] = self.phases.done
        self.args.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def look(self) -> str:
        """At the server, while a phase waits for it."""
        assert self.server is not None
        spent = ", ".join(f"{role} {s:.0f}" for role, s in sorted(cpu_seconds(self.server.pid).items()))
        return f"CPU s: {spent}; GPU MiB: {memory_mib()}; {last_line(self.log)}"

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        return dict(model=self.name, prompt=prompt, max_tokens=self.args.tokens, temperature=0) | more

    def start_alone(self) -> subprocess.Popen:
        args = self.args
        words = ["--streams", *map(str, args.streams), "--tokens", str(args.tokens), "--repeats", str(args.repeats)]
        words += ["--equal-prompts", str(args.equal_prompts), "--engine-alone", str(self.config_file)]
        command = [sys.executable, __file__, str(self._alone), str(args.prompts), *words]
        return subprocess.Popen(command, stdout=self.alone_log.open("w"), stderr=subprocess.STDOUT)

    def finish_alone(self, child: subprocess.Popen) -> dict[str, Any]:
        """What the engine alone found. Raises RuntimeError if it failed."""
        try:
            with self.phases.phase("engine alone", self.args.alone_limit_s, lambda: last_line(self.alone_log)):
                code = child.wait()
        finally:
            child.kill()
            child.wait()
        if code != 0:
            raise RuntimeError(f"the engine alone ended with {code}: see {self.alone_log.name}")
        found: dict[str, Any] = json.loads(self._alone.read_text())
        return found

    def start_server(self) -> None:
        words = ["serve", str(self.config_file), "--port", str(self.args.port)]
        words += ["--verbose"] if self.args.quick else []  # the ranks' phases in the log, for a little CPU time
        self.server = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.main", *words],
            env=dict(os.environ),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def healthy(self) -> bool:
        """Raises RuntimeError if there is no server any more."""
        if self.server is None or self.server.poll() is not None:
            raise RuntimeError(f"the server ended while starting: see {self.log.name}")
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def measure(self) -> None:
        """Everything up to the server's end. Raises CutError, RuntimeError."""
        args, phases = self.args, self.phases
        self.add("gpu_memory_mib_before", memory_mib())
        alone = self.start_alone()
        if not args.quick:
            known = self.finish_alone(alone)
        began = time.perf_counter()
        self.start_server()
        if args.quick:
            known = self.finish_alone(alone)
            self.add("engine_alone", "ran while the server started")
        with phases.phase("server's start", args.start_limit_s, self.look):
            wait_for(self.healthy, args.start_limit_s)
        start_s = time.perf_counter() - began
        self.add("started_s", round(start_s, 1))
        self.add("gpu_memory_mib_serving", memory_mib())
        with phases.phase("equal tokens", 60.0, self.look):
            self.compare(known)
        with phases.phase("streams", 240.0, self.look):
            self.stream(known)
        needed_s = 0.6 * start_s + 10.0  # Ray and Serve run already
        if args.quick and phases.left_s < needed_s:
            self.add("not_reached", [f"a rank killed: {phases.left_s:.0f} s left, {needed_s:.0f} needed"])
            return
        with phases.phase("a rank killed", args.start_limit_s + 60.0, self.look):
            self.kill_a_rank(known)

    def compare(self, known: dict[str, Any]) -> None:
        different = []
        for place, want in enumerate(known["answers"]):
            body = self.body(known["prompts"][place], return_token_ids=True)
            choice = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
            if list(choice["token_ids"]) != want:
                different.append(place)
        self.add("equal_to_the_engine", {"prompts": len(known["answers"]), "different": different}, not different)

    def stream(self, known: dict[str, Any]) -> None:
        assert self.server is not None
        rows = []
        for streams in self.args.streams:
            more: dict[str, Any] = dict(ignore_eos=True, stream=True, stream_options={"include_usage": True})
            bodies = [self.body(prompt, **more) for prompt in known["prompts"][:streams]]
            found, costs = [], []
            for repeat in range(self.args.repeats + 1):
                before = cpu_seconds(self.server.pid)
                done, seconds = asyncio.run(streams_of(self.args.port, bodies))
                spent = difference(before, cpu_seconds(self.server.pid))
                ends = [stream.ended.result() for stream in done]
                if set(ends) != {"done"}:
                    raise RuntimeError(f"{streams} streams ended with {sorted(set(ends))}")
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
            self.add("streams", rows)

    def kill_a_rank(self, known: dict[str, Any]) -> None:
        assert self.server is not None
        ranks = below(self.server.pid, "GpuWorker")
        self.add("ranks", len(ranks), len(ranks) == 1)
        if len(ranks) != 1:
            return
        rank = ProcessIdentity.of(ranks[0])
        lowest: list[int] = []
        # Hot, so that no stream falls into a repetition, whose drafts would take it to its end before the kill.
        long = dict(ignore_eos=True, stream=True, max_tokens=3000, temperature=1.5)
        bodies = [self.body(prompt, **long) for prompt in known["prompts"][:8]]
        broken, _ = asyncio.run(streams_of(self.args.port, bodies, lambda: os.kill(rank.pid, signal.SIGKILL)))
        died = time.perf_counter()
        ends = [stream.ended.result() for stream in broken]
        self.add("ends_of_streams_at_the_kill", ends, all(end == "error event" for end in ends))

        def back() -> bool:
            lowest.append(memory_mib() or 0)
            # A text that shares no block with the one compared below: a prompt that hits the cache is cut elsewhere.
            return answers(self.url, self.body([17] * 5, max_tokens=4))

        recovered = wait_for(back, self.args.start_limit_s)
        self.add("answers_again_after_s", recovered and round(time.perf_counter() - died, 1), recovered is not None)
        self.add("gpu_memory_mib_lowest_between", min(lowest, default=None))
        self.add("gpu_memory_mib_serving_again", memory_mib())
        if recovered is None:
            return
        body = self.body(known["prompts"][0], return_token_ids=True)
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()
        is_equal = list(reply["choices"][0]["token_ids"]) == known["answers"][0]
        self.add("equal_after_recovery", is_equal, is_equal)
        if self.record["gpu_memory_mib_before"] is not None:
            limit = self.record["gpu_memory_mib_serving"] + _SLACK_MIB
            self.add("memory_of_the_dead_rank_came_back", memory_mib() <= limit, memory_mib() <= limit)

    def stop(self) -> None:
        """Ctrl-C, and what is left."""
        if self.server is None:
            return
        left = [ProcessIdentity.of(pid) for pid in below(self.server.pid)]
        began = time.perf_counter()
        code: int | None = None
        try:
            with self.phases.phase("server's end", _STOP_S - 5.0, self.look, beyond=True):
                self.server.send_signal(signal.SIGINT)
                code = self.server.wait()
        except CutError as cut:
            self.add("cut_at_the_end", str(cut), False)
        finally:
            if self.server.poll() is None:
                self.server.kill()
        self.add("stopped", {"seconds": round(time.perf_counter() - began, 1), "exit": code}, code == 0)
        gone = wait_for(lambda: not any(process.is_alive() for process in left), 5)
        alive = [process for process in left if process.is_alive()]
        self.add("processes_left", len(alive), gone is not None)
        for process in alive:
            os.kill(process.pid, signal.SIGKILL)
        if (before := self.record["gpu_memory_mib_before"]) is not None:
            is_back = wait_for(lambda: memory_mib() <= before + _SLACK_MIB, 5)
            self.add("gpu_memory_mib_after", memory_mib(), is_back is not None)

    def show_logs(self) -> None:
        """The ends of both outputs, and of what Ray's processes wrote."""
        logs = [self.alone_log, self.log]
        for pid in below(self.server.pid, "--logs-dir=") if self.server is not None else ():
            words = (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace").split("\0")
            folder = Path(next(word for word in words if word.startswith("--logs-dir=")).partition("=")[2])
            logs += [*folder.glob("serve/*.log"), *folder.glob("worker-*.err"), folder / "raylet.out"]
            break
        for log in logs:
            if log.is_file() and log.stat().st_size:
                lines = log.read_text(errors="replace").splitlines()[-12:]
                print(f"---- {log.name}", *(line[:300] for line in lines), sep="\n", flush=True)


def main() -> None:
    args = parse()
    if args.engine_alone:
        engine_alone(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(args, Path(scratch))
        try:
            run.measure()
        except (CutError, RuntimeError, httpx.HTTPError) as error:
            run.add("cut", f"{type(error).__name__}: {error}", False)
            run.show_logs()
        finally:
            run.stop()
            run.save()
    sys.exit(1 if not run.record["ok"] else 3 if "not_reached" in run.record else 0)


if __name__ == "__main__":
    main()
