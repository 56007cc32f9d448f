"""Whether `dflash simulate` foretells what `control_live.py` measured.

    python benchmarks/control_predict.py LIVE.json OUT.json

LIVE.json is the result of a run with phases. The same cluster is simulated: replicas, batch, step table slowed down as
the devices were, traffic in the same phases, the policy with a controller. Compared phase by phase, once settled:
tokens per simulated second of device time and replica. Exits 1 when they differ by more than 3 %.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from command_line import command_line
from control_live import ACCEPTANCE, BATCHED_TOKENS, KINDS, OUTPUT_TOKENS, PROMPT, SETTLE_S, STATIC_K, STEPS

from cluster.simulate.experiment import OURS, make_world, run_policies
from cluster.simulate.scenario import Scenario
from cluster.simulate.tallies import DECODE_S, SLICE_S, TOKENS
from engine.simulated.profile import load_acceptance

WITHIN = 0.03
TURNAROUND_S = 0.005  # a delta to the client and a request back; anything shorter than a step gives the same


def scenario(live: dict[str, Any]) -> Scenario:
    """The live run's cluster and traffic. Requests of the phase before go on until they end; live they are cut off."""
    options = live["options"]
    rows, phase_s = options["rows"], options["phase_s"]
    lengths = {
        "prompt": {"median": len(PROMPT), "at_least": 1, "at_most": len(PROMPT)},
        "output": {"median": OUTPUT_TOKENS, "at_least": 2, "at_most": OUTPUT_TOKENS},
    }
    classes = load_acceptance(ACCEPTANCE).classes
    return Scenario.model_validate(
        {
            "description": "the live run",
            "duration_s": phase_s * len(live["phases"]),
            "configured_schedule": {rows: STATIC_K},
            "replicas": [{"count": options["replicas"], "steps": str(STEPS), "slowdown": 1 / options["speed"]}],
            "engine": {
                "max_num_seqs": rows,
                "max_num_batched_tokens": BATCHED_TOKENS,
                "pipeline_depth": 1,
                "kv_blocks": rows * (OUTPUT_TOKENS // 16 + 4),
            },
            "classes": {
                name: {
                    "hazards": list(kind.hazards),
                    "spread": kind.spread,
                    "wobble": kind.wobble,
                    "memory": kind.memory,
                    **lengths,
                }
                for name, kind in classes.items()
            },
            "mix": {
                "phases": [
                    {"at_s": index * phase_s, "shares": {phase["kind"]: 1}}
                    for index, phase in enumerate(live["phases"])
                ]
            },
            "arrivals": {"kind": "closed", "concurrency": rows, "turnaround_s": TURNAROUND_S},
            "network": {"report_delay_s": 0.005, "report_jitter_s": 0.2, "push_delay_s": 0.005},
        }
    )


def predict(live: dict[str, Any]) -> list[float]:
    """Tokens per simulated second of device time and replica, of each phase once settled; mean over the seeds."""
    world = scenario(live)
    fleet, _ = run_policies(make_world(world), {OURS: dict(world.configured_schedule)})
    slices_T4 = fleet.tallies.slices_LT4.sum(axis=0)
    phase_s, speed = live["options"]["phase_s"], live["options"]["speed"]
    rates = []
    for index in range(len(live["phases"])):
        first, last = round((index * phase_s + SETTLE_S) / SLICE_S), round((index + 1) * phase_s / SLICE_S)
        sums_4 = slices_T4[first:last].sum(axis=0)
        # a request's first token comes from its prompt's step, which the slices do not count
        tokens = sums_4[TOKENS] * OUTPUT_TOKENS / (OUTPUT_TOKENS - 1)
        rates.append(float(tokens / sums_4[DECODE_S] / speed))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("live", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    live = json.loads(arguments.live.read_text(encoding="utf-8"))
    if any(phase["kind"] not in KINDS for phase in live["phases"]) or live["options"]["phase_s"] <= SETTLE_S:
        parser.error(f"LIVE: must be a run of control_live.py whose phases are longer than {SETTLE_S:g} s")
    phases = [
        {
            "kind": phase["kind"],
            "live": round(phase["tokens_per_s"], 1),
            "simulated": round(rate, 1),
            "ratio": round(rate / phase["tokens_per_s"], 4),
        }
        for phase, rate in zip(live["phases"], predict(live), strict=True)
    ]
    worst = float(np.max([abs(phase["ratio"] - 1) for phase in phases]))
    result = {"command": command_line(), "phases": phases, "worst_difference": round(worst, 4), "bar": WITHIN}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    sys.exit(worst > WITHIN)


if __name__ == "__main__":
    main()
