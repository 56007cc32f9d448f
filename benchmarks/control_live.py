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
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_lab import ROOT, Replica, changes_in, run_program, start_replicas, stop_replicas

from cluster.control.messages import SHADOW_TIME_SHARE
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

KINDS = ("easy", "hard")  # even seeds, odd seeds
SETTLE_S = 15.0
STATIC_K = 15
PROMPT, OUTPUT_TOKENS = (1, 2, 3, 4), 300
BATCHED_TOKENS = 2048
STEPS = ROOT / "configs" / "sim" / "steps" / "a100-8b.yaml"
ACCEPTANCE = ROOT / "configs" / "sim" / "acceptance" / "easy-and-hard.yaml"
BASELINE_STEPS = 1500


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


class LiveReplica(Replica):
    """A replica with a simulated device."""

    def request(self, number: int, kind: str) -> EngineRequest:
        return request(number, kind)


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


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = make_config(arguments.rows, arguments.speed)
    steps = BASELINE_STEPS if not arguments.quick else 300
    table = {kind: {k: fixed_rate(config, kind, k, steps) for k in config.draft_len_choices} for kind in KINDS}
    best = {kind: max(table[kind], key=lambda k: table[kind][k]) for kind in KINDS}
    print(f"best fixed K: {best}", file=sys.stderr)
    replicas = await start_replicas(
        LiveReplica, arguments.replicas, config, accelerator="simulated a100", static_k=STATIC_K
    )
    if arguments.control_s:
        phases = [("easy", SETTLE_S), ("easy", arguments.control_s)]
    else:
        phases = [(kind, arguments.phase_s) for kind in KINDS * 2]
    measured = await rates(replicas, phases, min(SETTLE_S, arguments.phase_s / 2))
    histories = await asyncio.gather(*[replica.history.remote() for replica in replicas])
    status = await stop_replicas(replicas)
    for phase in measured:
        seen = [changes_in(history, phase["began"], phase["ended"]) for history in histories]
        phase["of_best_fixed"] = phase["tokens_per_s"] / table[phase["kind"]][best[phase["kind"]]]
        phase["last_acknowledged_s"] = max(replica["last_s"] for replica in seen)
        phase["most_changes"] = max((n for replica in seen for n in replica["changes"].values()), default=0)
        phase["most_schedules"] = max(replica["schedules"] for replica in seen)
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
        if phases[1]["most_schedules"] > 1:
            found.append(f"{phases[1]['most_schedules']} changes without a change of traffic")
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
    run_program(arguments, run, options=("replicas", "rows", "phase_s", "control_s", "speed"))


if __name__ == "__main__":
    main()
