"""The control loop on real models: replicas of SmolLM2 with its drafter, and text that changes.

    python benchmarks/control_real.py OUT.json --model DIR --drafter models/smollm2-135m-dflash

Two replicas with --rows requests each, on the CPU. One by default: with two, on a processor without matrix units, one
length is hardly faster than another. Phases in turn: prompts that make the model count and repeat, decoded
greedily, and stories at temperature 1.5. `accepted` in the result is how often the first drafts of a phase were right,
which tells the two kinds of text apart. Exits 1 unless K is higher in every easy phase than in every hard one, all
replicas have acknowledged the controller's newest version, and every greedy output is the one that the same replica
gave at a fixed K; float32, since in bfloat16 products of other shapes may round to other tokens.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from control_lab import ROOT, Replica, changes_in, run_program, start_replicas, stop_replicas

from cluster.control.messages import SHADOW_TIME_SHARE, cell_counts
from engine.config.decoding import DFlashDecodingConfig
from engine.config.engine import EngineConfig
from engine.config.resolve import resolve_engine_config
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

EASY, HARD = "easy", "hard"
PROMPTS = {
    EASY: (
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30",
        "red green blue red green blue red green blue red green blue red green blue red green blue",
        "0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1",
        "31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50",
    ),
    HARD: (
        "Once upon a time in a town by the sea",
        "The strangest thing about the old house was",
        "My opinion on the future of music is",
        "A letter to a friend that I have never met:",
    ),
}
STATIC_K = 3
OUTPUT_TOKENS = 120
POSITIONS = 4


def make_config(arguments: argparse.Namespace) -> EngineConfig:
    return resolve_engine_config(
        model=arguments.model,
        speculative_config=DFlashDecodingConfig(speculative_model=arguments.drafter, max_draft_len=15),
        device="cpu",
        dtype=arguments.dtype,
        threads=1,
        max_num_seqs=arguments.rows,
        max_model_len=512,
        max_num_batched_tokens=256,
        num_blocks=256,
        enable_prefix_caching=False,
        shadow_time_share=SHADOW_TIME_SHARE,
    )


class RealReplica(Replica):
    """A replica that decodes `PROMPTS` and keeps what its greedy requests gave."""

    async def prepare(self) -> None:
        """The outputs at a fixed K."""
        tokenizer = Tokenizer.load(self._config.model_dir)
        self._prompts = {kind: [tuple(tokenizer.encode(text)) for text in PROMPTS[kind]] for kind in PROMPTS}
        self._outputs: list[tuple[tuple[int, ...], list[int]]] = []
        self._expected = {
            prompt: await self.complete(self.request(-1 - index, EASY))
            for index, prompt in enumerate(reversed(self._prompts[EASY]))
        }

    def request(self, number: int, kind: str) -> EngineRequest:
        """Prompts in turn."""
        prompts = self._prompts[kind]
        return EngineRequest(
            request_id=f"{kind}-{number}",
            prompt_token_ids=prompts[number % len(prompts)],
            params=SamplingParams(
                temperature=0.0 if kind == EASY else 1.5,
                seed=number % 2**31,
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                detokenize=False,
            ),
        )

    def received(self, request: EngineRequest, token_ids: list[int]) -> None:
        if request.params.temperature == 0.0:
            self._outputs.append((request.prompt_token_ids, token_ids))

    async def drafts(self) -> list[tuple[int, int]]:
        """(rows at risk, accepted) by position so far, of the first `POSITIONS`."""
        sums = [[0] * POSITIONS, [0] * POSITIONS]
        for cell in cell_counts(await self._client.counters()):
            for into, counts in zip(sums, (cell.at_risk, cell.accepted), strict=True):
                for position, count in enumerate(counts[:POSITIONS]):
                    into[position] += count
        return list(zip(*sums, strict=True))

    async def compared(self) -> tuple[int, int]:
        """(greedy outputs, those that differ from the one at a fixed K)."""
        return len(self._outputs), sum(self._expected[prompt] != token_ids for prompt, token_ids in self._outputs)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = make_config(arguments)
    replicas = await start_replicas(RealReplica, arguments.replicas, config, accelerator="cpu", static_k=STATIC_K)
    phases: list[dict[str, Any]] = []
    for kind in (EASY, HARD) * arguments.rounds:
        began = max(await asyncio.gather(*[replica.load.remote(kind) for replica in replicas]))
        before = np.array(await asyncio.gather(*[replica.drafts.remote() for replica in replicas]))
        await asyncio.sleep(arguments.phase_s)
        histories = await asyncio.gather(*[replica.history.remote() for replica in replicas])
        after = np.array(await asyncio.gather(*[replica.drafts.remote() for replica in replicas]))
        at_risk_P, accepted_P = (after - before).sum(axis=0).T
        seen = [changes_in(history, began, began + arguments.phase_s) for history in histories]
        schedules = [history[-1][2] for history in histories]
        phases.append(
            {
                "kind": kind,
                "accepted": (accepted_P / np.maximum(at_risk_P, 1)).round(2).tolist(),
                "draft_lens": [schedule[min(b for b in schedule if b >= arguments.rows)] for schedule in schedules],
                "schedules": schedules,
                "versions": [history[-1][1] for history in histories],
                "last_change_s": [round(one["last_s"], 1) for one in seen],
            }
        )
        print(json.dumps(phases[-1]), file=sys.stderr, flush=True)
    compared = await asyncio.gather(*[replica.compared.remote() for replica in replicas])
    status = await stop_replicas(replicas)
    result = {
        "phases": phases,
        "acknowledged": [[replica.version, replica.target] for replica in status.replicas],
        "greedy_outputs": sum(count for count, _ in compared),
        "greedy_outputs_that_differ": sum(wrong for _, wrong in compared),
    }
    return result | {"faults": faults(result, arguments.replicas)}


def faults(result: dict[str, Any], num_replicas: int) -> list[str]:
    """What is not as it should be."""
    found = []
    lengths = {kind: [k for p in result["phases"] if p["kind"] == kind for k in p["draft_lens"]] for kind in PROMPTS}
    if min(lengths[EASY]) <= max(lengths[HARD]):
        found.append(f"K in easy phases {lengths[EASY]} is not above that in hard ones {lengths[HARD]}")
    acknowledged = result["acknowledged"]
    if len(acknowledged) != num_replicas or any(version != target for version, target in acknowledged):
        found.append(f"not all replicas have acknowledged the newest version: {acknowledged}")
    if not result["greedy_outputs"] or result["greedy_outputs_that_differ"]:
        differ, count = result["greedy_outputs_that_differ"], result["greedy_outputs"]
        found.append(f"{differ} of {count} greedy outputs differ from those at a fixed K")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", default=str(ROOT / "models" / "smollm2-135m-dflash"))
    parser.add_argument("--dtype", default="float32", help="bfloat16 is not exact across K on every CPU")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1, help="requests of a replica")
    parser.add_argument("--phase-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=2, help="of an easy and a hard phase")
    arguments = parser.parse_args()
    run_program(arguments, run, options=("replicas", "rows", "phase_s", "rounds", "dtype"))


if __name__ == "__main__":
    main()
