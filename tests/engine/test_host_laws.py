"""Laws of the host side under random load: whatever happens around a request, its tokens are a function of its seed."""

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import make_config
from tests.engine.host_harness import Harness

MAX_EXAMPLES = int(os.environ.get("HOST_LAWS_EXAMPLES", "120"))


@st.composite
def loads(draw):
    """A configuration, requests, and what happens between the steps."""
    width = draw(st.sampled_from([0, 2, 4, 8]))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_model_len = draw(st.integers(12, 48))
    config = make_config(
        width=width,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(max(width, 1), 40)),
        enable_prefix_caching=draw(st.booleans()),
        gate_window=draw(st.sampled_from([0, 0, 3])),
        gate_threshold=draw(st.sampled_from([0.3, 0.9])),
    )
    least = config.max_blocks_per_seq + 1
    config = replace(config, num_blocks=draw(st.integers(least, 2 * least + 4)))
    request = st.fixed_dictionaries(
        {
            "family": st.integers(0, 1),
            "prompt_len": st.integers(1, max_model_len - 1),
            "num_fresh": st.integers(0, 3),
            "max_tokens": st.one_of(st.none(), st.integers(1, max_model_len)),
            "min_tokens": st.integers(0, 6),
            "stop": st.booleans(),
            "ignore_eos": st.booleans(),
            "salt": st.sampled_from([None, None, "s"]),
        }
    )
    requests = draw(st.lists(request, min_size=1, max_size=9))
    schedule = st.dictionaries(st.integers(1, 6), st.integers(0, config.max_draft_len), min_size=1, max_size=3)
    event = st.one_of(
        st.just(("add",)),
        st.just(("step",)),
        st.just(("step",)),
        st.tuples(st.just("abort"), st.integers(0, 8)),
        st.tuples(st.just("schedule"), schedule),
        st.just(("check",)),
        st.just(("reset_gate",)),
    )
    return config, requests, draw(st.lists(event, max_size=40)), draw(st.integers(0, 2**32))


def play(depth, load):
    config, requests, events, seed = load
    config = replace(config, pipeline_depth=depth)
    harness = Harness(config, seed=seed)
    queue = list(enumerate(requests))
    version = 0

    def add():
        number, spec = queue.pop(0)
        prompt = [(spec["family"] * 31 + i * 7) % 50 for i in range(spec["prompt_len"])]
        for i in range(min(spec["num_fresh"], len(prompt))):
            prompt[-1 - i] = (number * 13 + i) % 50
        room = config.max_model_len - len(prompt)
        max_tokens = spec["max_tokens"] if spec["max_tokens"] is None else min(spec["max_tokens"], room)
        harness.add(
            prompt,
            salt=spec["salt"],
            seed=number,
            max_tokens=max_tokens,
            min_tokens=min(spec["min_tokens"], max_tokens or room),
            stop_token_ids=(3, 4) if spec["stop"] else (),
            ignore_eos=spec["ignore_eos"],
        )

    add()
    for event in events:
        if event[0] == "add" and queue:
            add()
        elif event[0] == "step":
            harness.step()
        elif event[0] == "abort":
            harness.core.abort(f"r{event[1]}")
        elif event[0] == "schedule":
            version += 1
            assert harness.core.apply_schedule((1, version), event[1]).applied
        elif event[0] == "check":
            harness.core.check_integrity()
        elif event[0] == "reset_gate":
            harness.core.reset_gate()
    while queue:
        add()
    harness.run(max_steps=3000)
    return harness


@pytest.mark.parametrize("depth", [0, 1])
@settings(max_examples=MAX_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(load=loads())
def test_tokens_are_a_function_of_the_seed_alone(depth, load):
    harness = play(depth, load)
    harness.check_outcomes()
    harness.check_counters()
    harness.check_idle()
