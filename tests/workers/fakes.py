"""Engines without a model, injected by dotted path. A request with prompt (b, ...) gets the tokens b+1, b+2, ..."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.core import EngineStats
from engine.parallel.plan_ring import PlanReader
from engine.request import EngineRequest, TokenDelta
from engine.speculative.counters import SpeculationCounters
from engine.speculative.schedule import ScheduleAck
from engine.step import StepPlan
from tests.stats import engine_stats


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """The fields of EngineConfig that workers read, and what shall go wrong."""

    tensor_parallel_size: int = 1
    device: str = "cpu"
    max_num_batched_tokens: int = 512
    max_upload_len: int = 512
    step_s: float = 0.0
    fail_rank: int = -1  # this rank's construction raises
    hang_rank: int = -1  # this rank sleeps for ever ...
    hang_step: int = 5  # ... at this step
    raise_step: int = -1  # rank 0's step raises


class FakeCore:
    """Deterministic core: one token per request and step."""

    def __init__(self, step_s: float = 0.0, execute: Callable[[int], None] = lambda step: None) -> None:
        self.requests: dict[str, tuple[EngineRequest, int]] = {}
        self.aborted: list[str] = []
        self.num_steps = 0
        self.raise_step = -1
        self.broken = ""
        self.tokens_per_step = 1
        self._pending: list[TokenDelta] = []
        self._step_s = step_s
        self._execute = execute

    def add_request(self, request: EngineRequest) -> None:
        if not request.prompt_token_ids:
            raise ValueError("prompt_token_ids: the prompt is empty")
        self.requests[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self._pending.append(TokenDelta(request_id=request_id, finish_reason="abort"))

    def has_work(self) -> bool:
        return bool(self.requests or self._pending)

    def step(self) -> list[TokenDelta]:
        self.num_steps += 1
        if self.num_steps == self.raise_step:
            raise RuntimeError("the device is on fire")
        time.sleep(self._step_s)
        self._execute(self.num_steps)
        deltas, self._pending = self._pending, []
        for request_id, (request, done) in list(self.requests.items()):
            limit = request.params.max_tokens or 0
            new = min(self.tokens_per_step, limit - done)
            first = request.prompt_token_ids[0] + done + 1
            is_last = done + new == limit
            deltas.append(
                TokenDelta(
                    request_id=request_id,
                    token_ids=tuple(range(first, first + new)),
                    finish_reason="length" if is_last else None,
                )
            )
            if is_last:
                del self.requests[request_id]
            else:
                self.requests[request_id] = (request, done + new)
        return deltas

    def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        if min(schedule, default=1) < 1:
            raise ValueError("schedule: a batch size below 1")
        return ScheduleAck(applied=True, version=version, schedule=schedule)

    def reset_gate(self) -> None:
        self.broken = ""

    def reset_prefix_cache(self) -> None:
        self.broken = ""

    def counters(self) -> object:
        return SpeculationCounters(max_num_seqs=8).snapshot(
            preemptions=0, prompt_tokens=11, prefix_cache_queries=0, prefix_cache_hits=0, prefix_cache_evictions=0
        )

    def stats(self) -> EngineStats:
        return engine_stats(num_running=len(self.requests), free_blocks=7, total_blocks=7, schedule={8: 3})

    def check_integrity(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)


class FakeRank:
    """Rank 0 sends a plan and, as a collective would, waits for the other rank's byte over TCP."""

    def __init__(
        self, config: FakeConfig, rank: int, init_method: str | None, broadcast: Callable[[StepPlan], None] | None
    ) -> None:
        self._config, self._rank, self._broadcast = config, rank, broadcast
        self._peer: socket.socket | None = None
        if init_method is not None:
            host, port = init_method.removeprefix("tcp://").split(":")
            self._peer = _rendezvous(host, int(port), rank)
        self.core = FakeCore(config.step_s, self._execute) if rank == 0 else None
        if self.core is not None:
            self.core.raise_step = config.raise_step

    def _execute(self, step: int) -> None:
        self._maybe_hang(step)
        if self._broadcast is not None:
            assert self._peer is not None
            self._broadcast(StepPlan(step_id=step, verify_len=0, draft_len=0))
            if self._peer.recv(1) != b"x":
                raise ConnectionError("connection closed by peer")

    def follow(self, reader: PlanReader) -> None:
        assert self._peer is not None
        while True:
            plan = msgspec.msgpack.decode(reader.recv(), type=StepPlan)
            self._maybe_hang(plan.step_id)
            self._peer.sendall(b"x")

    def _maybe_hang(self, step: int) -> None:
        if self._rank == self._config.hang_rank and step >= self._config.hang_step:
            time.sleep(3600)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


def _rendezvous(host: str, port: int, rank: int) -> socket.socket:
    if rank == 0:
        with socket.create_server((host, port)) as server:
            return server.accept()[0]
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def build_fake_rank(
    config: FakeConfig,
    *,
    rank: int,
    init_method: str | None,
    broadcast: Callable[[StepPlan], None] | None,
    progress: Callable[[str], None],
) -> FakeRank:
    """A `RankFactory`."""
    progress("loading the fake")
    if rank == config.fail_rank:
        raise ValueError(f"dtype: this checkpoint does not fit rank {rank}")
    return FakeRank(config, rank, init_method, broadcast)
