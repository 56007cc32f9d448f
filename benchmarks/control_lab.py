"""What the benchmarks of the control loop share: replicas without HTTP as actors, one controller, start and end.

Whoever uses it is started as a program: actors find its modules in this folder.
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
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from command_line import command_line

from cluster.control.controller import find_controller, find_or_make_controller, remove_controller
from cluster.control.messages import ControlOptions
from cluster.control.reporter import ReplicaFacts, Reporter
from cluster.control.status import ControllerStatus
from engine.config.engine import EngineConfig
from engine.request import EngineRequest
from workers.engine_group import EngineGroup

ROOT = Path(__file__).resolve().parent.parent
APP, DEPLOYMENT = "lab", "replica"
History = list[tuple[float, tuple[int, int], dict[int, int]]]  # when, version, schedule


class Replica:
    """One replica without HTTP: the class of an actor. What it decodes a subclass says."""

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
                block_width=config.block_width,
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
        raise NotImplementedError

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


async def start_replicas(
    actor_class: type[Replica], num_replicas: int, config: EngineConfig, *, accelerator: str, static_k: int
) -> list[Any]:
    """Actors whose engines run and report."""
    replicas = [ray.remote(actor_class).options(num_cpus=0).remote() for _ in range(num_replicas)]
    starts = [
        replica.start.remote(number, config, accelerator=accelerator, static_k=static_k)
        for number, replica in enumerate(replicas)
    ]
    await asyncio.gather(*starts)
    return replicas


async def stop_replicas(replicas: list[Any]) -> ControllerStatus:
    """Ends replicas and controller. Returns what the controller said last."""
    status = msgspec.msgpack.decode(await find_controller(APP, DEPLOYMENT).status.remote(), type=ControllerStatus)
    await asyncio.gather(*[replica.stop.remote() for replica in replicas])
    remove_controller(APP, DEPLOYMENT)
    return status


def changes_in(history: History, began: float, ended: float) -> dict[str, Any]:
    """Of one replica: changes of K by batch size, schedules, and the seconds until the last one was in force."""
    counts: dict[int, int] = {}
    last_s, num_schedules = 0.0, 0
    for (_, _, old), (when, version, new) in itertools.pairwise(history):
        if began <= when <= ended and version[0] > 0:
            last_s = when - began
            num_schedules += 1
            for bound in new:
                fitting = [key for key in old if key >= bound]
                if new[bound] != (old[min(fitting)] if fitting else 0):
                    counts[bound] = counts.get(bound, 0) + 1
    return {"changes": counts, "schedules": num_schedules, "last_s": last_s}


def run_program(
    arguments: argparse.Namespace,
    run: Callable[[argparse.Namespace], Awaitable[dict[str, Any]]],
    *,
    options: tuple[str, ...],
) -> None:
    """Runs on a Ray of its own, writes `arguments.out`, and exits: 1 if the result has faults.

    options: arguments that the record keeps. arguments must have `out` and `replicas`.
    """
    folders = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
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
    kept = {name: getattr(arguments, name) for name in options}
    result = {"command": command_line(), "machine": platform.machine(), "options": kept, **result}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for fault in result["faults"]:
        print(fault, file=sys.stderr)
    sys.exit(bool(result["faults"]))
