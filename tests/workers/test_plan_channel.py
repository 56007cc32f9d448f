"""The plan ring's width follows from the config: the longest plan it can make passes, to every rank."""

import msgspec

from engine.parallel.plan_channel import plan_sender, plan_writer
from engine.parallel.plan_ring import PlanReader, new_ring_name
from engine.step import PrefillChunk, StepPlan
from tests.engine.fake_runner import make_config


def test_the_longest_plan_passes() -> None:
    config = make_config(tensor_parallel_size=3, max_num_batched_tokens=200_000)
    name = new_ring_name()
    writer = plan_writer(name, config)
    readers = [PlanReader(name, index=index) for index in range(2)]
    chunk = PrefillChunk(slot=0, start=0, token_ids=(2**31 - 1,) * config.max_num_batched_tokens, samples=True)
    plan = StepPlan(step_id=2**40, verify_len=7, draft_len=7, prefill=(chunk,), zero_blocks=(3, 4))
    plan_sender(writer)(plan)
    for reader in readers:
        assert msgspec.msgpack.decode(reader.recv(timeout_s=5), type=StepPlan) == plan
        reader.close()
    writer.close()
