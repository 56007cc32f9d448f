"""One tensor-parallel rank: process group, its weight shards, its KV cache, its runner.

Rank 0's owner drives `runner` with an `EngineCore`; every other rank follows the plans that rank 0 sends. Run as a
module (`python -m engine.rank`) it is a follower process: a pickled `FollowerSpec` arrives on standard input.
"""

import logging
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.engine import EngineConfig
from engine.heap import freeze_heap
from engine.parallel.plan_channel import follow_plans
from engine.parallel.plan_ring import PlanReader
from engine.parallel.tp_group import TpGroup
from engine.rank_factory import make_rank
from engine.runner.memory_probe import given_blocks_fit, measured_config, run_largest_steps
from engine.runner.runner import ModelRunner
from engine.weights.loader import load_drafter, load_target

logger = logging.getLogger(__name__)

_GROUP_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class FollowerSpec:
    """What a follower process needs: the config, its rank, the rendezvous, and the plan ring's name."""

    config: EngineConfig
    rank: int
    init_method: str
    ring_name: str


class EngineRank:
    """Loads one rank. init_method: torch.distributed rendezvous, e.g. "tcp://127.0.0.1:29500"; None at size 1.

    progress: called with a short phase name as start-up proceeds; None logs it. `config` afterwards: the one given, its
    KV blocks measured where it left them open.

    Raises:
        ValueError: a checkpoint that does not fit its config (names the tensor and the shapes); a KV cache that does
            not fit the GPU (shows the arithmetic).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        init_method: str | None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        say = progress or logger.info
        self.config = config
        torch.set_num_threads(config.num_threads)
        say("joining the process group")
        self.tp = TpGroup.create(
            rank=rank,
            size=config.tensor_parallel_size,
            init_method=init_method,
            device=config.device,
            timeout_s=_GROUP_TIMEOUT_S,
        )
        device = torch.device("cpu")
        if config.device == "cuda":
            # A Ray actor sees only its own GPU; processes started by hand see all of them.
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        with ThreadPoolExecutor(max_workers=1) as beside:
            # Writing zeros to a CPU's cache takes seconds per GiB, in which the weights can be read.
            on_cpu = beside.submit(KvCache.create, config, self.tp) if device.type == "cpu" else None
            say("loading the target")
            target = load_target(config, self.tp)
            drafter = None
            if config.drafter is not None:
                say("loading the drafter")
                drafter = load_drafter(config, self.tp)
        measured = config.num_blocks == 0
        if measured:
            say("measuring the GPU's memory")
            config = self.config = measured_config(config, target=target, drafter=drafter, tp=self.tp, device=device)
        say("allocating the KV cache")
        checked = device.type == "cuda" and not measured
        with given_blocks_fit(config, device) if checked else nullcontext():
            self.runner = ModelRunner(
                config=config,
                target=target,
                drafter=drafter,
                kv=KvCache.create(config, self.tp) if on_cpu is None else on_cpu.result(),
                tp=self.tp,
                device=device,
                progress=say,
            )
            if checked:
                say("running the largest steps")
                run_largest_steps(self.runner, config, device)
        say("ready")

    def follow(self, reader: PlanReader) -> None:
        """Execute plans until rank 0 closes the ring.

        Raises:
            PlanRingError: rank 0 died.
        """
        follow_plans(reader, self.runner)

    def close(self) -> None:
        """Leave the process group."""
        self.tp.close()


def follow_from_stdin() -> None:
    """Entry point of a follower process."""
    spec: FollowerSpec = pickle.load(sys.stdin.buffer)
    rank = make_rank(spec.config, rank=spec.rank, init_method=spec.init_method)
    reader = PlanReader(spec.ring_name, index=spec.rank - 1)
    freeze_heap()
    try:
        rank.follow(reader)
    finally:
        reader.close()
        rank.close()


if __name__ == "__main__":
    # The module runs as __main__ here, but the pickled spec names engine.rank: import it under that name.
    from engine.rank import follow_from_stdin as run

    run()
