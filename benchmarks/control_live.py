"""The control loop live: simulated devices, the real controller, real actors and pushes, and traffic that changes.

    python benchmarks/control_live.py OUT.json                        four phases of 60 s, easy and hard in turn
    python benchmarks/control_live.py OUT.json --control-s 600        no change of traffic

Each replica is an actor with its engine group, its reporter and a closed loop of as many requests as fit into a batch.
A request's seed decides whether it is easy or hard. Rates are tokens per simulated second of device time, so a busy
host falsifies none; what the best fixed K of a phase would give is computed by an engine on the same device without
waiting.
Exits 1 if an assertion fails; all figures are in OUT.json.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from command_line import command_line

from cluster.control.controller import find_controller, find_or_make_controller, remove_controller
from cluster.control.messages import SHADOW_TIME_SHARE, ControlOptions
from cluster.control.reporter import ReplicaFacts, Reporter
from cluster.control.status import ControllerStatus
from engine.config.decoding import DFlashDecodingConfig
from engine.config.engine import EngineConfig
from engine.config.resolve import resolve_engine_config
from engine.core import EngineCore
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.simulated.profile import SimulationOptions
from engine.simulated.rank import output_token_ids
from engine.simulated.runner import SimulatedRunner
from engine.simulated.timeline import DeviceTimeline
from workers.engine_group import EngineGroup

ROOT = Path(__file__).resolve().parent.parent
APP, DEPLOYMENT = "live", "replica"
KINDS = ("easy", "hard")  # even seeds, odd seeds
SETTLE_S = 15.0
STATIC_K = 15
PROMPT, OUTPUT_TOKENS = (1, 2, 3, 4), 300
BATCHED_TOKENS = 2048
STEPS = ROOT / "configs" / "sim" / "steps" / "a100-8b.yaml"
ACCEPTANCE = ROOT / "configs" / "sim" / "acceptance" / "easy-and-hard.yaml"
BASELINE_STEPS = 1500
History = list[tuple[float, tuple[int, int], dict[int, int]]]  # when, version, schedule


def make_config(rows: int, speed: float) -> EngineConfig:
    """The engine of a replica; the batch is always full."""
    return resolve_engine_config(
        model=str(ROOT / "models" / "simulated"),
        speculative_config=DFlashDecodingConfig(
            speculative_model=str(ROOT / "models" / "simulated-dflash"),
            max_draft_len=15,
        ),
        device="simulated",
        max_num_seqs=rows,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=1024,
        enable_prefix_caching=False,
        shadow_time_share=SHADOW_TIME_SHARE,
        simulation=SimulationOptions(
            steps=str(STEPS),
            acceptance=str(ACCEPTANCE),
            speed=speed,
        ),
    )


def request(number: int, kind: str) -> EngineRequest:
    return EngineRequest(
        request_id=f"{kind}-{number}",
        prompt_token_ids=PROMPT,
        params=SamplingParams(
            seed=2 * number + KINDS.index(kind), max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        ),
    )


def fixed_rate(config: EngineConfig, kind: str, draft_len: int, steps: int) -> float:
    """Tokens per simulated second of a full batch of one kind at a fixed K."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    config = replace(config, shadow_time_share=0.0)
    timeline = DeviceTimeline(speed=1.0, now=lambda: clock[0], sleep=sleep)
    runner = SimulatedRunner(config, token_ids=output_token_ids(config), timeline=timeline)
    core = EngineCore(config=config, runner=runner)
    core.apply_schedule((1, 1), {config.max_num_seqs: draft_len})
    numbers = itertools.count(10**6)
    for _ in range(steps):
        while core.stats().num_running + core.stats().num_waiting < config.max_num_seqs:
            core.add_request(request(next(numbers), kind))
        core.step()
    counters = core.counters()
    return counters.generation_tokens / counters.device_time_s


class Replica:
    """One replica without HTTP: the class of an actor. What it decodes is `request`."""

    async def start(self, number: int, config: EngineConfig, *, accelerator: str, static_k: int) -> None:
        """Starts the engine and its reports."""
        self._config = config
        self._group = await EngineGroup.start(config, step_times_budget_s=60.0)
        self._client = self._group.client
        self._numbers = itertools.count(number * 10**6)
        self._streams: list[asyncio.Task[None]] = []
        self._history: History = []
        await self._client.apply_schedule((0, 1), {config.max_num_seqs: static_k})
        await self.prepare()
        reporter = Reporter(
            facts=ReplicaFacts(
                replica_id=f"replica-{number}",
                accelerator=accelerator,
                draft_lens=config.draft_len_choices,
                max_num_seqs=config.max_num_seqs,
                step_times=self._client.step_times,
                options=ControlOptions(),
            ),
            engine=self._client,
            rank0=self._group.rank0,
            connect=lambda: asyncio.to_thread(find_or_make_controller, APP, DEPLOYMENT),
            static_schedule=lambda: {config.max_num_seqs: static_k},
            fallback_s=60.0,
        )
        self._tasks = [asyncio.create_task(reporter.run()), asyncio.create_task(self._watch())]

    async def prepare(self) -> None:
        """What is to be done under the configured schedule, before the first report."""

    def request(self, number: int, kind: str) -> EngineRequest:
        """The next request of a stream."""
        return request(number, kind)

    def received(self, request: EngineRequest, token_ids: list[int]) -> None:
        """A request has ended by itself."""

    async def load(self, kind: str) -> float:
        """Ends all requests and starts as many of one kind. Returns when that was."""
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        self._streams = [asyncio.create_task(self._stream(kind)) for _ in range(self._config.max_num_seqs)]
        return time.monotonic()

    async def counts(self) -> tuple[int, float]:
        """Tokens and simulated seconds so far."""
        counters = await self._client.counters()
        return counters.generation_tokens, counters.device_time_s

    async def history(self) -> History:
        """(when, version, schedule) of every schedule that was in force."""
        for task in self._tasks:
            assert not task.done(), task.exception()
        return self._history

    async def stop(self) -> None:
        for task in (*self._tasks, *self._streams):
            task.cancel()
        await self._group.close()

    async def _stream(self, kind: str) -> None:
        while True:
            asked = self.request(next(self._numbers), kind)
            self.received(asked, await self.complete(asked))

    async def complete(self, request: EngineRequest) -> list[int]:
        """The tokens of a request."""
        token_ids: list[int] = []
        async with contextlib.aclosing(self._client.submit(request)) as deltas:
            async for delta in deltas:
                token_ids += delta.token_ids
        return token_ids

    async def _watch(self) -> None:
        while True:
            stats = await self._client.stats()
            if not self._history or stats.schedule_version != self._history[-1][1]:
                self._history.append((time.monotonic(), stats.schedule_version, stats.schedule))
            await asyncio.sleep(0.1)


async def rates(replicas: list[Any], phases: list[tuple[str, float]], settle_s: float) -> list[dict[str, Any]]:
    """Runs the phases; for each, when it began and the tokens per simulated second once settled."""
    measured = []
    for kind, seconds in phases:
        began = max(await asyncio.gather(*[replica.load.remote(kind) for replica in replicas]))
        await asyncio.sleep(began + settle_s - time.monotonic())
        before = await asyncio.gather(*[replica.counts.remote() for replica in replicas])
        await asyncio.sleep(began + seconds - time.monotonic())
        after = await asyncio.gather(*[replica.counts.remote() for replica in replicas])
        tokens = sum(new[0] - old[0] for old, new in zip(before, after, strict=True))
        simulated_s = sum(new[1] - old[1] for old, new in zip(before, after, strict=True))
        ended = time.monotonic()
        measured.append({"kind": kind, "began": began, "ended": ended, "tokens_per_s": tokens / simulated_s})
        print(f"{kind}: {tokens / simulated_s:.1f} tokens per simulated second and replica", file=sys.stderr)
    return measured


def changes_in(history: History, began: float, ended: float) -> dict[str, Any]:
    """Of one replica: changes of K by batch size, and the seconds until the last schedule was in force."""
    counts: dict[int, int] = {}
    last_s = 0.0
    for (_, _, old), (when, version, new) in itertools.pairwise(history):
        if began <= when <= ended and version[0] > 0:
            last_s = when - began
            for bound in new:
                fitting = [key for key in old if key >= bound]
                if new[bound] != (old[min(fitting)] if fitting else 0):
                    counts[bound] = counts.get(bound, 0) + 1
    return {"changes": counts, "last_s": last_s}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = make_config(arguments.rows, arguments.speed)
    steps = BASELINE_STEPS if not arguments.quick else 300
    table = {kind: {k: fixed_rate(config, kind, k, steps) for k in config.draft_len_choices} for kind in KINDS}
    best = {kind: max(table[kind], key=lambda k: table[kind][k]) for kind in KINDS}
    print(f"best fixed K: {best}", file=sys.stderr)
    replicas = [ray.remote(Replica).options(num_cpus=0).remote() for _ in range(arguments.replicas)]
    await asyncio.gather(
        *[
            replica.start.remote(number, config, accelerator="simulated a100", static_k=STATIC_K)
            for number, replica in enumerate(replicas)
        ]
    )
    if arguments.control_s:
        phases = [("easy", SETTLE_S), ("easy", arguments.control_s)]
    else:
        phases = [(kind, arguments.phase_s) for kind in KINDS * 2]
    measured = await rates(replicas, phases, min(SETTLE_S, arguments.phase_s / 2))
    histories = await asyncio.gather(*[replica.history.remote() for replica in replicas])
    status = msgspec.msgpack.decode(await find_controller(APP, DEPLOYMENT).status.remote(), type=ControllerStatus)
    await asyncio.gather(*[replica.stop.remote() for replica in replicas])
    remove_controller(APP, DEPLOYMENT)
    for phase in measured:
        seen = [changes_in(history, phase["began"], phase["ended"]) for history in histories]
        phase["of_best_fixed"] = phase["tokens_per_s"] / table[phase["kind"]][best[phase["kind"]]]
        phase["last_acknowledged_s"] = max(replica["last_s"] for replica in seen)
        phase["most_changes"] = max((n for replica in seen for n in replica["changes"].values()), default=0)
        phase["schedules"] = sorted(
            {json.dumps([s for when, _, s in history if when <= phase["ended"]][-1]) for history in histories}
        )
    origin = measured[0]["began"]
    for phase in measured:
        phase["began"], phase["ended"] = phase["began"] - origin, phase["ended"] - origin
    return {
        "fixed": table,
        "best_fixed": best,
        "phases": measured,
        "changes_of_replica_0": [(when - origin, version, schedule) for when, version, schedule in histories[0]],
        "controller_changes": status.num_changes,
        "faults": faults(table, best, measured, is_control=bool(arguments.control_s)),
    }


def faults(
    table: dict[str, dict[int, float]], best: dict[str, int], phases: list[dict[str, Any]], *, is_control: bool
) -> list[str]:
    """What is not as it should be."""
    found = []
    if is_control:
        if phases[1]["most_changes"] > 1:
            found.append(f"{phases[1]['most_changes']} changes of a batch size without a change of traffic")
        return found
    for kind, other in (KINDS, KINDS[::-1]):
        loss = 1 - table[kind][best[other]] / table[kind][best[kind]]
        if loss < 0.10:
            found.append(f"the traffic does not matter: the best K of {other} loses only {loss:.1%} in {kind}")
    for index, phase in enumerate(phases):
        name = f"phase {index + 1} ({phase['kind']})"
        if phase["of_best_fixed"] < 0.97:
            found.append(f"{name}: {phase['of_best_fixed']:.3f} of the best fixed K")
        if phase["last_acknowledged_s"] > SETTLE_S:
            found.append(f"{name}: the last schedule was acknowledged after {phase['last_acknowledged_s']:.1f} s")
        if phase["most_changes"] > 2:
            found.append(f"{name}: {phase['most_changes']} changes of a batch size")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="requests of a replica")
    parser.add_argument("--phase-s", type=float, default=60.0)
    parser.add_argument("--control-s", type=float, default=0.0)
    parser.add_argument("--speed", type=float, default=0.25, help="simulated seconds in a second")
    parser.add_argument("--quick", action="store_true", help="a shorter look at the fixed lengths")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ray.init(
        address="local",
        num_cpus=2 * arguments.replicas,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        result = asyncio.run(run(arguments))
    finally:
        ray.shutdown()
    names = ("replicas", "rows", "phase_s", "control_s", "speed")
    options = {name: getattr(arguments, name) for name in names}
    result = {"command": command_line(), "machine": platform.machine(), "options": options, **result}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for fault in result["faults"]:
        print(fault, file=sys.stderr)
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
