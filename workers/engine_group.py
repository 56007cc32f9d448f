"""`EngineGroup`: a replica's tensor-parallel ranks from placement to the last trace of them.

Fails the replica, not the rank: when one rank dies, raises or hangs, everything pending gets EngineDeadError with the
root cause, which is logged once, and all ranks are ended. The owner is told by `wait_dead` and should end itself.
"""

import asyncio
import logging
import socket
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config.engine import EngineConfig
from engine.parallel.plan_ring import new_ring_name
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from workers.engine_client import EngineClient
from workers.errors import EngineClosedError, EngineDeadError, EngineStartError
from workers.gpu_worker import (
    DEFAULT_FACTORY,
    MAX_CONCURRENCY,
    READY,
    GpuWorker,
    RankExit,
    RankInfo,
    RankJob,
    RankProgress,
)
from workers.placement import Placement, PlacementError, check_ranks
from workers.replica_socket import ReplicaSocket
from workers.teardown import end_ranks

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PREPARE_TIMEOUT_S = 60.0  # a Ray worker process starts and imports this package
_PROGRESS_TIMEOUT_S = 1.0
_POLL_S = 0.25
_CAUSE_GRACE_S = 0.3  # ranks that fail together are heard before one of them is blamed
_SHUTDOWN_S = 3.0  # for a clean end, before ranks are killed


@dataclass(frozen=True, slots=True)
class _Timeouts:
    stall_s: float
    start_s: float
    place_s: float
    measure_s: float


class EngineGroup:
    """Made by `start`. Belongs to the event loop it was started in."""

    def __init__(self, config: EngineConfig, *, factory: str, timeouts: _Timeouts) -> None:
        self._config = config
        self._factory = factory
        self._timeouts = timeouts
        self._num_ranks = config.tensor_parallel_size
        self._placement: Placement | None = None
        self._actors: list[Any] = []
        self._infos: list[RankInfo] = []
        self._ends: list[asyncio.Future[RankExit]] = []  # one per rank: its run()
        self._ring_name = new_ring_name() if self._num_ranks > 1 else None
        self._client: EngineClient | None = None
        self._suspicion: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._death: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None
        self._teardown: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        stall_timeout_s: float = 60.0,
        start_timeout_s: float = 1800.0,
        place_timeout_s: float = 30.0,
        step_times_budget_s: float = 0.0,
        placement_group: PlacementGroup | None = None,
        factory: str = DEFAULT_FACTORY,
        on_progress: Callable[[int, str], None] | None = None,
    ) -> "EngineGroup":
        """Places the ranks, loads them, and returns once a real forward has run through all of them.

        Args:
            stall_timeout_s: the engine is dead when it owes answers and has not sent anything for this long. It must
                exceed the longest step.
            step_times_budget_s: time for measuring step times, which the client then has; 0: none are measured.
            placement_group: bundle i = rank i. Default: the current one (a Serve replica's), else one of our own.
            factory: `module:callable` of the shape of `workers.gpu_worker.RankFactory`.
            on_progress: told (rank, phase) as start-up proceeds; the phases are logged as well.

        Raises:
            EngineStartError: with the root cause; nothing is left behind.
        """
        timeouts = _Timeouts(stall_timeout_s, start_timeout_s, place_timeout_s, step_times_budget_s)
        group = cls(config, factory=factory, timeouts=timeouts)
        try:
            await group._bring_up(placement_group, on_progress)
        except EngineDeadError as error:
            await asyncio.shield(group._end_everything(error, is_clean=False))
            raise EngineStartError(f"the engine did not start: {error.cause}", error.details) from None
        except BaseException:  # cancelled, or a bug: leave nothing behind either
            await asyncio.shield(group._end_everything(EngineDeadError("interrupted start"), is_clean=False))
            raise
        group._watcher = asyncio.create_task(group._watch(), name="engine-group-watcher")
        group._watcher.add_done_callback(group._watcher_ended)
        return group

    @property
    def client(self) -> EngineClient:
        """The connection to rank 0."""
        assert self._client is not None, "not started"
        return self._client

    @property
    def rank0(self) -> Any:
        """The actor handle of rank 0, until `close`."""
        return self._actors[0]

    @property
    def processes(self) -> tuple[int, ...]:
        """The ranks' pids, rank by rank."""
        return tuple(info.process.pid for info in self._infos)

    async def wait_dead(self) -> str:
        """Returns the root cause once the group has failed; never returns for one that is closed in good health."""
        return (await asyncio.shield(self._death)).cause

    async def close(self) -> None:
        """Ends all ranks and removes everything the group made. Bounded, also when ranks hang; idempotent.

        Streams still open get EngineClosedError.
        """
        is_clean = not self._suspicion.done()
        await asyncio.shield(self._end_everything(EngineClosedError("the engine was shut down"), is_clean=is_clean))

    # ------------------------------------------------------------------------------------------------------ start

    async def _bring_up(self, given: PlacementGroup | None, on_progress: Callable[[int, str], None] | None) -> None:
        try:
            self._placement = await Placement.acquire(
                device=self._config.device, num_ranks=self._num_ranks, given=given, timeout_s=self._timeouts.place_s
            )
        except PlacementError as error:
            raise EngineDeadError(str(error)) from None
        await self._create_actors()
        connection = await self._launch()
        self._client = await EngineClient.attach(connection, on_disconnect=self._suspect)
        await self._barrier(on_progress)
        await self._try_forward()

    async def _create_actors(self) -> None:
        assert self._placement is not None
        actor_class = ray.remote(GpuWorker)
        for rank in range(self._num_ranks):
            strategy = PlacementGroupSchedulingStrategy(
                self._placement.group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=True
            )
            actor = actor_class.options(
                num_cpus=0,
                num_gpus=1 if self._config.device == "cuda" else 0,
                max_restarts=0,
                max_concurrency=MAX_CONCURRENCY,
                scheduling_strategy=strategy,
            ).remote(rank)
            self._actors.append(actor)
        prepared = asyncio.gather(*[_future(actor.prepare.remote()) for actor in self._actors])
        try:
            self._infos = await asyncio.wait_for(prepared, self._timeouts.place_s + _PREPARE_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError(
                f"the ranks' processes did not start within {self._timeouts.place_s + _PREPARE_TIMEOUT_S:g} s in "
                f"bundles {self._placement.group.bundle_specs[: self._num_ranks]}"
            ) from None
        except RayError as error:
            raise EngineDeadError("a rank's process did not start", str(error)) from None
        try:
            check_ranks(self._infos, device=self._config.device, hostname=socket.gethostname())
        except PlacementError as error:
            raise EngineDeadError(str(error)) from None

    async def _launch(self) -> socket.socket:
        """Starts every rank's run() and returns the connection from rank 0. The socket's name is gone afterwards."""
        try:
            listening = ReplicaSocket()
        except ValueError as error:
            raise EngineDeadError(str(error)) from None
        try:
            job = RankJob(
                config=self._config,
                factory=self._factory,
                init_method=f"tcp://127.0.0.1:{self._infos[0].free_port}" if self._num_ranks > 1 else None,
                ring_name=self._ring_name,
                socket_path=listening.path,
                step_times_budget_s=self._timeouts.measure_s,
            )
            self._ends = [_future(actor.run.remote(job)) for actor in self._actors]
            accepting = listening.accept(pid=self._infos[0].process.pid)
            return await self._unless_it_fails(accepting, _PREPARE_TIMEOUT_S, lambda: "rank 0 did not connect")
        except ConnectionRefusedError as error:
            raise EngineDeadError(str(error)) from None
        finally:
            listening.close()

    async def _barrier(self, on_progress: Callable[[int, str], None] | None) -> None:
        """Waits until every rank is loaded, saying what each is doing."""
        phases = ["starting"] * self._num_ranks
        started = time.monotonic()

        async def all_ready() -> None:
            while any(phase != READY for phase in phases):
                reports: list[RankProgress] = await asyncio.gather(
                    *[_future(actor.progress.remote()) for actor in self._actors]
                )
                for rank, report in enumerate(reports):
                    if report.phase != phases[rank]:
                        phases[rank] = report.phase
                        logger.info("rank %d: %s (%.1f s)", rank, report.phase, time.monotonic() - started)
                        if on_progress is not None:
                            on_progress(rank, report.phase)
                await asyncio.sleep(_POLL_S)
            await self.client.wait_ready()

        def what() -> str:
            return "the ranks are not loaded: " + ", ".join(f"rank {r}: {phase}" for r, phase in enumerate(phases))

        await self._unless_it_fails(all_ready(), self._timeouts.start_s, what)

    async def _try_forward(self) -> None:
        """Readiness: one prefill and one decode step of a two-token request, through the socket and every rank."""
        request = EngineRequest(
            request_id="dflash-readiness",
            prompt_token_ids=(0,),
            params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False),
            cache_salt="dflash-readiness",
        )

        async def forward() -> str | None:
            reason = None
            async for delta in self.client.submit(request):
                reason = delta.finish_reason
            return reason

        try:
            reason = await self._unless_it_fails(
                forward(), self._timeouts.start_s, lambda: "the readiness request got no answer"
            )
        except ValueError as error:
            raise EngineDeadError(f"the engine refused the readiness request: {error}") from error
        if reason != "length":
            raise EngineDeadError(f"the readiness request ended with finish_reason {reason!r} instead of 'length'")

    async def _unless_it_fails(self, work: Awaitable[T], timeout_s: float, what: Callable[[], str]) -> T:
        """`work`'s result; EngineDeadError if a rank ends, the socket breaks or timeout_s passes (see what)."""
        task = asyncio.ensure_future(work)
        try:
            signs: set[asyncio.Future[Any]] = {task, self._suspicion, *self._ends}
            await asyncio.wait(signs, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._suspicion.done() or any(end.done() for end in self._ends):
                raise await self._root_cause()
            if not task.done():
                raise EngineDeadError(f"{what()} (waited {timeout_s:g} s)")
            try:
                return task.result()
            except (RayError, EngineDeadError):  # the rank it asked is gone: say why
                raise await self._root_cause() from None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------ watch

    def _suspect(self, error: EngineDeadError) -> None:
        """The socket broke or rank 0 reported a failure; the watcher looks for the root cause."""
        if not self._suspicion.done():
            self._suspicion.set_result(error)

    async def _watch(self) -> None:
        """Ends the group when a rank ends, disappears or stands still, the socket breaks, or no step completes.

        An idle group owes nothing and sends nothing, so a rank held by a signal is looked for by itself.
        """
        stall_s = self._timeouts.stall_s
        poll_s = min(_POLL_S, stall_s / 8)
        signs: set[asyncio.Future[Any]] = {self._suspicion, *self._ends}
        seen, silent_s, last = self.client.num_messages, 0.0, time.monotonic()
        while True:
            await asyncio.wait(signs, timeout=poll_s, return_when=asyncio.FIRST_COMPLETED)
            is_failed = self._suspicion.done() or any(end.done() for end in self._ends)
            if is_failed or not all(info.process.is_alive() for info in self._infos):
                error = await self._root_cause()
                break
            now = time.monotonic()
            # Time in which this event loop itself was blocked does not count: the beats could not be seen.
            silent_s += min(now - last, 2 * poll_s)
            last = now
            is_silent = self.client.num_outstanding and self.client.num_messages == seen
            if not is_silent and not any(info.process.is_stopped() for info in self._infos):
                seen, silent_s = self.client.num_messages, 0.0
            elif silent_s > stall_s:
                error = await self._describe_stall()
                break
        self._declare_dead(error)

    def _watcher_ended(self, watcher: "asyncio.Task[None]") -> None:
        """A watcher that broke off leaves nobody who would notice a failure: the group counts as dead."""
        if watcher.cancelled() or watcher.exception() is None:
            return
        error = watcher.exception()
        self._declare_dead(
            EngineDeadError(
                f"the watch over the ranks failed: {type(error).__name__}: {error}",
                "".join(traceback.format_exception(error)),
            )
        )

    def _declare_dead(self, error: EngineDeadError) -> None:
        self._suspect(error)
        if not self._death.done():
            self._death.set_result(error)
            logger.error("The engine is dead: %s%s", error.cause, f"\n{error.details}" if error.details else "")
        self._end_everything(error, is_clean=False)

    async def _root_cause(self) -> EngineDeadError:
        """Whom to blame: a process that is gone, before the rank whose own exception came first, before the socket."""
        if not all(end.done() for end in self._ends):
            await asyncio.sleep(_CAUSE_GRACE_S)
        for info in self._infos:
            if not info.process.is_alive():
                return EngineDeadError(
                    f"rank {info.rank} (pid {info.process.pid}) died: its process ended without a report (killed, "
                    "out of memory, or a crash in native code)"
                )
        exits = [end.result() for end in self._ends if end.done() and not end.cancelled() and end.exception() is None]
        failed = min((e for e in exits if e.cause is not None), key=lambda e: e.at_s, default=None)
        if failed is not None:
            return EngineDeadError(f"rank {failed.rank} failed: {failed.cause}", failed.details)
        for rank, end in enumerate(self._ends):
            if end.done() and end.exception() is not None:
                return EngineDeadError(f"rank {rank} died", str(end.exception()))
        if self._suspicion.done():
            return self._suspicion.result()
        return EngineDeadError(f"ranks {[e.rank for e in exits]} ended without being asked to")

    async def _describe_stall(self) -> EngineDeadError:
        stopped = [info for info in self._infos if info.process.is_stopped()]
        if stopped:
            ranks = ", ".join(f"rank {info.rank} (pid {info.process.pid})" for info in stopped)
            return EngineDeadError(
                f"{ranks} stood still for {self._timeouts.stall_s:g} s: stopped by a signal (SIGSTOP) or a debugger"
            )
        reports = await asyncio.gather(*[self._ask_progress(actor) for actor in self._actors])
        ranks = ", ".join(f"rank {rank}: {report}" for rank, report in enumerate(reports))
        return EngineDeadError(
            f"the engine hangs: no step completed for {self._timeouts.stall_s:g} s with "
            f"{self.client.num_outstanding} requests outstanding ({ranks})"
        )

    async def _ask_progress(self, actor: Any) -> str:
        try:
            report: RankProgress = await asyncio.wait_for(_future(actor.progress.remote()), _PROGRESS_TIMEOUT_S)
        except TimeoutError:
            return "does not answer"
        except RayError as error:
            return f"is gone ({type(error).__name__})"
        return f"{report.num_steps} steps"

    # ------------------------------------------------------------------------------------------------------ end

    def _end_everything(self, error: EngineDeadError, *, is_clean: bool) -> "asyncio.Task[None]":
        if self._teardown is None:
            self._teardown = asyncio.create_task(self._take_down(error, is_clean=is_clean))
        return self._teardown

    async def _take_down(self, error: EngineDeadError, *, is_clean: bool) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._client is not None:
            if is_clean and self._ends:
                self._client.request_shutdown()
                await asyncio.wait(self._ends, timeout=_SHUTDOWN_S)
            self._client.fail(error)
        await end_ranks(actors=self._actors, infos=self._infos, ring_name=self._ring_name, placement=self._placement)
        self._actors.clear()


def _future(ref: Any) -> "asyncio.Future[Any]":
    """An object reference as a future whose exception may stay unread (killed actors leave many)."""
    future = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
