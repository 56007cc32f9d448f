"""From a cluster config to a running engine with its tokenizer, inside a replica process.

Imports the engine's loaders only when called: importing the deployment class must not pull in torch.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.config import ClusterConfig, in_config_terms
from cluster.openai.generation import Engine
from engine.speculative.counters import StepTime
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.config.engine import EngineConfig
    from workers.engine_group import EngineGroup


class ReplicaClient(Engine, Protocol):
    """`workers.engine_client.EngineClient` as a replica uses it."""

    async def stats(self) -> Any:
        """EngineStats."""
        ...

    async def counters(self) -> Any:
        """CounterSnapshot."""
        ...

    async def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> Any:
        """ScheduleAck."""
        ...


class EngineOwner(Protocol):
    """`workers.engine_group.EngineGroup` as a replica uses it."""

    @property
    def client(self) -> ReplicaClient:
        """The connection to rank 0."""
        ...

    async def wait_dead(self) -> str:
        """Returns the root cause once the group has failed."""
        ...

    async def close(self) -> None:
        """End all ranks and free what they hold."""
        ...


_STEP_TIMES_BUDGET_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlFacts:
    """What a speculation controller needs to know of an engine. rank0: the actor handle of its rank 0.

    accelerator: engines that name the same one take the same time for the same step. block_width: rows of the drafter's
    block. step_times: measured at start-up.
    """

    rank0: Any
    accelerator: str
    block_width: int
    draft_lens: tuple[int, ...]
    step_times: tuple[StepTime, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaEngine:
    """A started engine. model_dir: where the checkpoint's generation_config.json would be.

    control: None for an engine whose draft length cannot be controlled.
    has_penalty, has_top_k, has_top_p: what requests may ask of sampling in this deployment.
    """

    group: EngineOwner
    tokenizer: Tokenizer
    model_dir: str
    max_model_len: int
    vocab_size: int
    max_draft_len: int
    static_schedule: dict[int, int]
    control: ControlFacts | None = None
    has_penalty: bool = True
    has_top_k: bool = True
    has_top_p: bool = True


EngineStarter = Callable[[ClusterConfig], Awaitable[ReplicaEngine]]


async def start_engine(config: ClusterConfig) -> ReplicaEngine:
    """Resolve the model (downloading it if need be), load the tokenizer and start the ranks.

    Raises:
        ValueError: the config and the checkpoint do not fit; the message names the field.
    """
    from engine.config.resolve import resolve_engine_config
    from workers.engine_group import EngineGroup

    try:
        engine_config = await asyncio.to_thread(lambda: resolve_engine_config(**config.engine_arguments()))
    except ValueError as error:
        raise ValueError(in_config_terms(str(error))) from error
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # from here on the GPUs are the ranks' alone; they do not inherit this
    # While the ranks' processes start; both take seconds of imports.
    loading = asyncio.create_task(
        asyncio.to_thread(lambda: Tokenizer.load(engine_config.model_dir, chat_template=config.model.chat_template))
    )
    is_controlled = config.controller.enabled and engine_config.drafter is not None
    starting = asyncio.create_task(
        EngineGroup.start(
            engine_config,
            stall_timeout_s=config.deployment.stall_timeout_s,
            step_times_budget_s=_STEP_TIMES_BUDGET_S if is_controlled else 0.0,
        )
    )
    try:
        await asyncio.wait({starting, loading}, return_when=asyncio.FIRST_EXCEPTION)
        if loading.done():
            loading.result()  # what is wrong with the tokenizer is said before the ranks have loaded their weights
        group, tokenizer = await starting, await loading
    except BaseException:
        loading.cancel()
        await asyncio.shield(_undo(starting))
        raise
    return ReplicaEngine(
        group=group,
        tokenizer=tokenizer,
        model_dir=engine_config.model_dir,
        max_model_len=engine_config.max_model_len,
        vocab_size=engine_config.target.vocab_size,
        max_draft_len=engine_config.max_draft_len,
        static_schedule=dict(engine_config.draft_len_schedule),
        control=ControlFacts(
            rank0=group.rank0,
            accelerator=accelerator_name(engine_config, group.client.device_name),
            block_width=engine_config.block_width,
            draft_lens=engine_config.draft_len_choices,
            step_times=group.client.step_times,
        )
        if is_controlled
        else None,
        has_penalty=engine_config.enable_penalty,
        has_top_k=engine_config.enable_top_k,
        has_top_p=engine_config.enable_top_p,
    )


async def _undo(starting: "asyncio.Task[EngineGroup]") -> None:
    """Ends a group that is starting or has started; returns when nothing of it is left."""
    starting.cancel()
    (result,) = await asyncio.gather(starting, return_exceptions=True)
    if not isinstance(result, BaseException):
        await result.close()


def accelerator_name(config: "EngineConfig", device_name: str) -> str:
    """A name for what a step's time depends on besides rows and draft length.

    Of the checkpoints it tells the shapes, not the weights: nodes that hold copies of one checkpoint, and new weights
    of one architecture, take the same time. device_name: of the GPU, empty without one.
    """
    shapes = hashlib.sha256(repr((config.target, config.drafter)).encode()).hexdigest()[:8]
    parts = [device_name or config.device, config.dtype, f"TP {config.tensor_parallel_size}", f"model {shapes}"]
    if config.drafter is not None and config.block_width != config.drafter.block_size:
        parts.append(f"block of {config.block_width}")
    if config.device == "cpu":
        parts.insert(1, f"{config.num_threads} threads")
    return ", ".join(parts)
