"""Plans over a plan ring: how large the ring is, how a plan becomes a message, what a rank does that gets them."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.config.engine import EngineConfig
from engine.parallel.plan_ring import PlanReader, PlanRingClosed, PlanWriter
from engine.step import StepPlan

# A plan is dominated by its prefill tokens, at most 5 bytes each, and by the logits rules of its new slots, at most 9
# bytes a number; the longest message is half of the ring.
_BYTES_PER_TOKEN = 32
_MIN_BYTES = 1 << 20


class Follower(Protocol):
    """The runner of a rank whose results nobody reads, as they are rank 0's as well."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a step."""

    def discard(self) -> None:
        """Lets go of its results."""


def plan_writer(name: str, config: EngineConfig) -> PlanWriter:
    """A ring from rank 0 to every other rank, wide enough for the longest plan of this config.

    Raises:
        FileExistsError: the name is in use.
    """
    capacity = max(_MIN_BYTES, _BYTES_PER_TOKEN * (config.max_num_batched_tokens + config.max_upload_len))
    return PlanWriter(name, num_readers=config.tensor_parallel_size - 1, capacity=capacity)


def plan_sender(writer: PlanWriter) -> Callable[[StepPlan], None]:
    """Sends a plan to every reader of the ring."""
    encoder = msgspec.msgpack.Encoder()

    def send(plan: StepPlan) -> None:
        writer.send(encoder.encode(plan))

    return send


def follow_plans(reader: PlanReader, runner: Follower) -> None:
    """Runs plans until rank 0 closes the ring.

    Raises:
        PlanRingError: rank 0 died.
    """
    decoder = msgspec.msgpack.Decoder(StepPlan)
    while True:
        try:
            message = reader.recv(timeout_s=None)
        except PlanRingClosed:
            return
        runner.launch(decoder.decode(message))
        runner.discard()
