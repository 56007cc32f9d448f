"""`GpuWorker`: the Ray actor of one tensor-parallel rank (a CPU rank as well; the name is the architecture's).

Its one long call, `run`, builds the rank, works, and returns a `RankExit`; it is watched, so its end shows at once.
The short calls (`prepare`, `progress`, and on rank 0 those of the speculation controller) run in other threads of the
actor. What a rank is made of comes from a factory, named by a dotted path, so that tests can put in another.
"""

import importlib
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.config.engine import EngineConfig
from engine.heap import freeze_heap
from engine.parallel.plan_channel import plan_sender, plan_writer
from engine.parallel.plan_ring import PlanReader, PlanRingClosed, PlanWriter
from engine.parallel.process_identity import ProcessIdentity
from engine.speculative.counters import StepTime
from engine.speculative.schedule import ScheduleAck, Version
from engine.step import StepPlan
from workers.engine_loop import Core, EngineLoop

DEFAULT_FACTORY = "workers.gpu_worker:build_rank"
READY = "ready"
MAX_CONCURRENCY = 8  # run, and room for the short calls
_ATTACH_TIMEOUT_S = 60.0


class Rank(Protocol):
    """What a factory returns. `core` is None on ranks 1.., which get `follow` called instead."""

    @property
    def core(self) -> Core | None:
        """Rank 0's engine."""

    def follow(self, reader: PlanReader) -> None:
        """Executes plans until the ring is closed."""

    def measure_step_times(self, budget_s: float) -> tuple[StepTime, ...]:
        """Rank 0, before it serves: seconds of decode steps; the other ranks follow meanwhile."""

    def close(self) -> None:
        """Gives up what the rank holds."""


class RankFactory(Protocol):
    """`module:callable` of this shape. Runs in the thread that will do the rank's work.

    broadcast: rank 0 at tensor_parallel_size > 1: hands a plan to the other ranks. progress: told a short phase name.
    """

    def __call__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        init_method: str | None,
        broadcast: Callable[[StepPlan], None] | None,
        progress: Callable[[str], None],
    ) -> Rank:
        """Builds one rank; raises to end the start-up with that cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """What a rank is told. socket_path: rank 0 only. ring_name, init_method: None at tensor_parallel_size 1.

    step_times_budget_s: how long rank 0 may measure step times before it serves; 0: it does not.
    """

    config: EngineConfig
    factory: str
    init_method: str | None
    ring_name: str | None
    socket_path: str | None
    step_times_budget_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Where a rank's process is.

    visible_devices: CUDA_VISIBLE_DEVICES as the process sees it. free_port: a TCP port for the rendezvous, rank 0 only.
    """

    rank: int
    process: ProcessIdentity
    hostname: str
    visible_devices: str | None
    free_port: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """phase: what start-up is doing, then READY. num_steps: steps done (rank 0) or plans taken (others)."""

    phase: str
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How `run` ended. cause: None for a clean end. at_s: time.monotonic(), comparable between processes of a host."""

    rank: int
    cause: str | None
    details: str
    at_s: float


class GpuWorker:
    """One rank. Never restarted: a group whose rank ends is replaced as a whole."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._phase = "starting"
        self._num_steps: Callable[[], int] = lambda: 0
        self._loop: EngineLoop | None = None

    def prepare(self) -> RankInfo:
        """The process exists. Rank 0 also looks for a free port.

        The rendezvous binds it a moment later; a port taken in between makes the start fail with that cause.
        """
        free_port = None
        if self._rank == 0:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind(("127.0.0.1", 0))
                free_port = probe.getsockname()[1]
        return RankInfo(
            rank=self._rank,
            process=ProcessIdentity.current(),
            hostname=socket.gethostname(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            free_port=free_port,
        )

    def progress(self) -> RankProgress:
        """How far the rank is."""
        return RankProgress(phase=self._phase, num_steps=self._num_steps())

    def apply_schedule(self, version: Version, schedule: dict[int, int]) -> ScheduleAck:
        """Rank 0: puts a draft-length schedule in force between two steps, if its version is greater than the engine's.

        Raises:
            ValueError: an entry no schedule may have.
            RuntimeError: the engine is not loaded yet, or ends.
        """
        ack: ScheduleAck = self._running_loop().call(lambda core: core.apply_schedule(version, schedule))
        return ack

    def reset_gate(self) -> None:
        """Rank 0: lets a tripped speculation gate speculate again. Raises RuntimeError as `apply_schedule` does."""
        self._running_loop().call(lambda core: core.reset_gate())

    def _running_loop(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError(f"rank {self._rank} runs no engine loop (phase: {self._phase})")
        return self._loop

    def run(self, job: RankJob) -> RankExit:
        """The rank's whole life: build, serve, end. Exceptions come back as a RankExit with their traceback."""
        try:
            if self._rank == 0:
                self._lead(job)
            else:
                self._follow(job)
        except Exception as error:
            # The rank is not closed here: leaving a process group whose peers are gone can block for ever, and the
            # group ends this process as soon as it has the cause.
            cause = f"{type(error).__name__}: {error}"[:4000]
            details = "".join(traceback.format_exception(error))[-20000:]
            return RankExit(rank=self._rank, cause=cause, details=details, at_s=time.monotonic())
        return RankExit(rank=self._rank, cause=None, details="", at_s=time.monotonic())

    # ------------------------------------------------------------------------------------------------------ rank 0

    def _lead(self, job: RankJob) -> None:
        assert job.socket_path is not None
        self._phase = "connecting to the replica"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(job.socket_path)
        except OSError as error:
            connection.close()
            raise RuntimeError(
                f"rank 0 cannot reach the replica's socket {job.socket_path} ({error}): both must be on one node"
            ) from error
        writer: PlanWriter | None = None
        if job.ring_name is not None:
            writer = plan_writer(job.ring_name, job.config)
        rank = self._build(job, broadcast=plan_sender(writer) if writer is not None else None)
        core = rank.core
        assert core is not None, "rank 0 has no core"
        if writer is not None:
            self._phase = "waiting for the other ranks"
            writer.wait_attached(_ATTACH_TIMEOUT_S)
        step_times: tuple[StepTime, ...] = ()
        if job.step_times_budget_s > 0.0:
            self._phase = "measuring step times"
            step_times = rank.measure_step_times(job.step_times_budget_s)
        loop = EngineLoop(core, connection, step_times=step_times, device_name=device_name(job.config.device))
        self._num_steps = lambda: loop.beats
        self._loop = loop
        freeze_heap()
        self._phase = READY
        loop.run()
        self._phase = "ending"
        if writer is not None:
            writer.close()
        rank.close()

    # ------------------------------------------------------------------------------------------------------ ranks 1..

    def _follow(self, job: RankJob) -> None:
        assert job.ring_name is not None
        self._phase = "attaching to the plan ring"
        reader = PlanReader(job.ring_name, index=self._rank - 1, attach_timeout_s=_ATTACH_TIMEOUT_S)
        rank = self._build(job, broadcast=None)
        self._num_steps = lambda: reader.num_received
        freeze_heap()
        self._phase = READY
        try:
            rank.follow(reader)
        except PlanRingClosed:  # a clean end as well: rank 0 closed the ring
            self._phase = "ending"
        reader.close()
        rank.close()

    def _build(self, job: RankJob, *, broadcast: Callable[[StepPlan], None] | None) -> Rank:
        self._phase = "loading"
        return load_factory(job.factory)(
            job.config,
            rank=self._rank,
            init_method=job.init_method,
            broadcast=broadcast,
            progress=self._set_phase,
        )

    def _set_phase(self, phase: str) -> None:
        if phase != READY:  # ours to say, after everything else is in place
            self._phase = phase


def load_factory(path: str) -> RankFactory:
    """The callable that `module:callable` names.

    Raises:
        ValueError: not of that form, or nothing there.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError(f"factory: {path!r} is not of the form 'module:callable'")
    try:
        factory: RankFactory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"factory: {path!r} cannot be loaded: {error}") from error
    return factory


def device_name(device: str) -> str:
    """The model of this process's current GPU; empty for a device that is none."""
    if device != "cuda":
        return ""
    import torch

    name: str = torch.cuda.get_device_name()
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class _EngineRank:
    """The real device: an `engine.rank.EngineRank`, and an `EngineCore` on rank 0."""

    core: Core | None
    follow: Callable[[PlanReader], None]
    measure_step_times: Callable[[float], tuple[StepTime, ...]]
    close: Callable[[], None]


def build_rank(
    config: EngineConfig,
    *,
    rank: int,
    init_method: str | None,
    broadcast: Callable[[StepPlan], None] | None,
    progress: Callable[[str], None],
) -> Rank:
    """The default factory: loads this rank's shard of target and drafter onto its device, or simulates one."""
    # Ray sets OMP_NUM_THREADS=1 for actors without CPUs; libraries that read it after torch shall agree.
    os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    # Between two steps its threads spin 0.2 ms for work, then sleep: by default they spin longer than the replica takes
    # to send what the last step made, for which it needs a core.
    if "OMP_WAIT_POLICY" not in os.environ:  # which it would override
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    from engine.core import EngineCore
    from engine.rank_factory import make_rank
    from engine.speculative.measure import measure_step_times

    engine_rank = make_rank(config, rank=rank, init_method=init_method, progress=progress)
    core = None
    if rank == 0:
        core = EngineCore(config=engine_rank.config, runner=engine_rank.runner, broadcast=broadcast)
    return _EngineRank(
        core=core,
        follow=engine_rank.follow,
        measure_step_times=lambda budget_s: measure_step_times(
            engine_rank.config, engine_rank.runner, broadcast=broadcast, budget_s=budget_s
        ),
        close=engine_rank.close,
    )
