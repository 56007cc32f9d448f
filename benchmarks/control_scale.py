"""What a controller of many replicas costs: real actor calls, made-up reports.

    python benchmarks/control_scale.py OUT.json --replicas 1000 --seconds 600
    python benchmarks/control_scale.py OUT.json --replicas 50 --interval-s 0.2 --seconds 60    as many reports a second

A few actors stand for the rank 0s of all replicas. Reports have the size of a busy replica's. Measured: share of a core
the controller's process takes, its memory, and the time from an operator's order until every replica has acknowledged.
Exits 1 if it takes more than 30 % of a core, if acknowledgements take more than 2 s, or if memory grows by over 2 %
after the first minute.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray
from command_line import command_line

from cluster.control.controller import controller_name, find_or_make_controller, remove_controller
from cluster.control.messages import PROTOCOL_VERSION, CellCounts, Order, Registration, Reply, Report
from cluster.control.status import ControllerStatus
from engine.speculative.counters import StepTime
from engine.speculative.schedule import ScheduleAck

DRAFT_LENS = (0, 1, 2, 3, 5, 7, 11, 15)
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
RUNNING = (16, 32, 64)
APP, DEPLOYMENT = "scale", "stub"
NUM_RANK_ACTORS = 4
HAZARD = 0.7
MOST_SHARE, MOST_PUSH_S, MOST_GROWTH, WARM_S = 0.30, 2.0, 0.02, 60.0


@ray.remote(num_cpus=0)
class RankZeros:
    """Rank 0 of many replicas."""

    def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        return ScheduleAck(applied=True, version=version, schedule=schedule)

    def reset_gate(self) -> None:
        pass


class Stub:
    """One replica: reports growing counts when it is told to, or every `interval_s`."""

    def __init__(self, number: int, rank0: Any, interval_s: float | None) -> None:
        self.replica_id = f"replica-{number}"
        self.rank0 = rank0
        self.interval_s = interval_s
        self.sequence = 0
        self.version = (0, 0)

    def cells(self, buckets: Sequence[int], draft_lens: Sequence[int]) -> tuple[CellCounts, ...]:
        """Counts of some programs after as many reports."""
        cells = []
        for bucket, draft_len in itertools.product(buckets, draft_lens):
            steps = 1000 + 50 * self.sequence
            rows = steps * bucket
            alive = [int(rows * HAZARD**j) for j in range(16)]
            cells.append(
                CellCounts(
                    batch_bucket=bucket,
                    draft_len=draft_len,
                    steps=steps,
                    rows=rows,
                    decode_steps=steps,
                    decode_time_s=steps * 0.02,
                    at_risk=tuple(alive[:-1]),
                    accepted=tuple(alive[1:]),
                )
            )
        return tuple(cells)

    def registration(self) -> bytes:
        message = Registration(
            protocol=PROTOCOL_VERSION,
            replica_id=self.replica_id,
            incarnation=1,
            sequence=self.sequence,
            accelerator="stub",
            block_width=DRAFT_LENS[-1] + 1,
            draft_lens=DRAFT_LENS,
            max_num_seqs=BUCKETS[-1],
            static_schedule={BUCKETS[-1]: 7},
            version=self.version,
            schedule={BUCKETS[-1]: 7},
            step_times=tuple(
                StepTime(batch_bucket=b, draft_len=k, seconds=0.01 + 0.0001 * b * k)
                for b in BUCKETS
                for k in DRAFT_LENS
            ),
            cells=self.cells(BUCKETS, DRAFT_LENS),
        )
        return msgspec.msgpack.encode(message)

    def report(self) -> bytes:
        """A busy replica's: every program has run before, and six of them since the last report."""
        self.sequence += 1
        message = Report(
            replica_id=self.replica_id,
            incarnation=1,
            sequence=self.sequence,
            version=self.version,
            gate_disabled=False,
            cells=self.cells(RUNNING, (7, 11)),
        )
        return msgspec.msgpack.encode(message)

    async def run(self, controller: Any, delay_s: float) -> None:
        """Registers, then reports as often as it is asked to."""
        await asyncio.sleep(delay_s)
        reply = await self._send(controller.register, PROTOCOL_VERSION, self.registration(), self.rank0)
        while True:
            await asyncio.sleep(self.interval_s or reply.interval_s)
            reply = await self._send(controller.report, self.report())

    async def _send(self, method: Any, *arguments: object) -> Reply:
        reply = msgspec.msgpack.decode(await method.remote(*arguments), type=Reply)
        assert not reply.must_register
        self.version = max(self.version, reply.version or self.version)
        return reply


async def measure(num_replicas: int, seconds: float, interval_s: float | None) -> dict[str, Any]:
    """One run."""
    controller = find_or_make_controller(APP, DEPLOYMENT)
    ranks = [RankZeros.remote() for _ in range(NUM_RANK_ACTORS)]
    stubs = [Stub(number, ranks[number % NUM_RANK_ACTORS], interval_s) for number in range(num_replicas)]
    spread_s = max(num_replicas / 250, 1.0)
    tasks = [asyncio.create_task(stub.run(controller, spread_s * n / num_replicas)) for n, stub in enumerate(stubs)]

    async def status() -> ControllerStatus:
        return msgspec.msgpack.decode(await controller.status.remote(), type=ControllerStatus)

    while (now := await status()).epoch is None or any(r.version < r.target for r in now.replicas):
        await asyncio.sleep(0.5)
    await asyncio.sleep(2 * spread_s)
    (process,) = [p for p in psutil.process_iter(["cmdline"]) if _is_controller(p.info["cmdline"])]
    samples = []
    cpu_before, began = sum(process.cpu_times()[:2]), time.monotonic()
    num_before = sum(stub.sequence for stub in stubs)
    while time.monotonic() - began < seconds:
        await asyncio.sleep(min(10.0, seconds / 6))
        samples.append(
            {"s": round(time.monotonic() - began, 1), "rss_mib": round(process.memory_info().rss / 2**20, 1)}
        )
    took_s = time.monotonic() - began
    share = (sum(process.cpu_times()[:2]) - cpu_before) / took_s
    reports_per_s = (sum(stub.sequence for stub in stubs) - num_before) / took_s
    pushes = []
    for draft_len in (3, 5, 7):
        began = time.monotonic()
        await controller.give.remote(
            msgspec.msgpack.encode(Order(mode="pin", issued_at=time.time(), schedule={BUCKETS[-1]: draft_len}))
        )
        while any(replica.version < replica.target for replica in (await status()).replicas):
            await asyncio.sleep(0.02)
        pushes.append(round(time.monotonic() - began, 3))
        await asyncio.sleep(1.0)
    shown = await status()
    for task in tasks:
        assert not task.done(), task.exception()
        task.cancel()
    return {
        "replicas": len(shown.replicas),
        "report_interval_s": interval_s or shown.interval_s,
        "reports_per_s": round(reports_per_s, 1),
        "report_bytes": len(stubs[0].report()),
        "controller_share_of_a_core": round(share, 3),
        "controller_ms_per_report": round(1e3 * share / reports_per_s, 3),
        "push_to_all_acknowledged_s": pushes,
        "memory": samples,
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = []
    if result["controller_share_of_a_core"] > MOST_SHARE:
        found.append(f"the controller takes {result['controller_share_of_a_core']:.0%} of a core")
    if max(result["push_to_all_acknowledged_s"]) > MOST_PUSH_S:
        found.append(f"acknowledgements took {max(result['push_to_all_acknowledged_s']):.1f} s")
    warm = [sample["rss_mib"] for sample in result["memory"] if sample["s"] >= WARM_S]
    if warm and warm[-1] > (1 + MOST_GROWTH) * warm[0]:
        found.append(f"memory grew from {warm[0]} to {warm[-1]} MiB")
    return found


def _is_controller(command_line: list[str] | None) -> bool:
    """Ray puts an actor's name or its class into the title of its process, and the method that runs."""
    title = " ".join(command_line or ())
    return title.startswith((f"ray::{controller_name(APP, DEPLOYMENT)}", "ray::SpeculationController"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--interval-s", type=float, help="between two reports of a replica; default: the controller's")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        result = asyncio.run(measure(arguments.replicas, arguments.seconds, arguments.interval_s))
    finally:
        remove_controller(APP, DEPLOYMENT)
        ray.shutdown()
    machine = f"{platform.machine()}, {psutil.cpu_count(logical=False)} cores"
    result = {
        "command": command_line(),
        "machine": machine,
        "seconds": arguments.seconds,
        **result,
        "faults": faults(result),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "memory"}))
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
