"""The controller where it sees hardly anything: two replicas with one request each, whose text turns over.

Counts of so few requests never prove a change of traffic at once, so what was believed of the old text must fade in
another way. A controller that keeps it goes back to the length that was right before, or never leaves it.
"""

from pathlib import Path

import pytest

from cluster.simulate.experiment import OURS, make_world, run_policies
from cluster.simulate.tallies import SLICE_S
from tests.simulate.toy import scenario

DRAFT_LENS = (0, 1, 2, 3, 5, 7, 11, 15)
STEPS = {  # measured: SmolLM2-135M in float32, one thread on a core of an x86 server
    "measured": [1],
    "prefill_token_s": 0.004,
    "draft_lens": list(DRAFT_LENS),
    "seconds": {1: [0.056, 0.088, 0.097, 0.100, 0.108, 0.112, 0.117, 0.119]},
}
LENGTHS = {
    "prompt": {"median": 40, "spread": 0.2, "at_least": 16, "at_most": 100},
    "output": {"median": 120, "at_least": 120, "at_most": 120},
}
VARIED = {"spread": 0.2, "wobble": 0.3, "memory": 0.9}
PHASE_S = 60.0


@pytest.mark.parametrize("seed", [2, 5, 6, 10])
def test_the_length_falls_on_hard_text_each_time_and_does_not_come_back_before_the_easy_one(
    tmp_path: Path, seed: int
) -> None:
    asked = scenario(
        tmp_path,
        table=STEPS,
        duration_s=4 * PHASE_S,
        seeds=[seed],
        draft_lens=list(DRAFT_LENS),
        configured_schedule={1: 3},
        replicas=[{"count": 2, "steps": "toy.yaml"}],
        engine={"max_num_seqs": 1, "max_num_batched_tokens": 256, "kv_blocks": 256},
        classes={
            "easy": {"hazards": [0.995]} | VARIED | LENGTHS,
            "hard": {"hazards": [0.53, 0.50, 0.54, 0.48, 0.50, 0.40]} | VARIED | LENGTHS,
        },
        mix={
            "repeat_s": 2 * PHASE_S,
            "phases": [{"at_s": 0, "shares": {"easy": 1}}, {"at_s": PHASE_S, "shares": {"hard": 1}}],
        },
        arrivals={"kind": "closed", "concurrency": 1},
        step_noise={"deviation": 0.15, "stragglers": 0.005, "straggler_factor": 3},
        network={"report_delay_s": 0.005, "report_jitter_s": 0.2, "push_delay_s": 0.005},
    )
    _, (outcome,) = run_policies(make_world(asked), {OURS: {1: 3}})
    lengths = outcome.curve_draft_len  # of both replicas
    for phase in range(4):
        end = int((phase + 1) * PHASE_S / SLICE_S)
        last_seconds = lengths[end - 3 : end]
        assert min(last_seconds) > 10 if phase % 2 == 0 else max(last_seconds) < 8, (phase, lengths)
