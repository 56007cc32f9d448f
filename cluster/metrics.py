"""Prometheus metrics of one replica, under vLLM's names so that existing dashboards and load tools read them.

Counters and gauges of the engine are read from it when /metrics is asked for: the engine owns the truth, and a step
costs nothing here. Latencies are observed where the client is served. Own registry: nothing global.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.admission import Admission

if TYPE_CHECKING:
    from engine.core import EngineStats
    from engine.speculative.counters import CounterSnapshot

LABELS = ("model_name", "engine", "replica")
ENGINE_INDEX = "0"  # vLLM numbers the engines of a server; a replica has one

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class StatsSource(Protocol):
    """The part of the engine client that metrics read."""

    async def stats(self) -> "EngineStats":
        """Gauges."""
        ...

    async def counters(self) -> "CounterSnapshot":
        """Cumulative counts."""
        ...


class ServeMetrics:
    """The registry of one replica; also the observer of its generations."""

    def __init__(self, *, model_name: str, replica: str, admission: Admission) -> None:
        self._labels = (model_name, ENGINE_INDEX, replica)
        self._registry = CollectorRegistry()
        self._snapshot = _EngineSnapshot(self._labels, admission)
        self._registry.register(self._snapshot)
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a token after the first, per request.", _SECONDS
        )
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = self._histogram("vllm:request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._finished = Counter(
            "vllm:request_success",
            "Ended requests by reason; abort: the client hung up.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )

    def on_first_token(self, seconds: float) -> None:
        """A response has its first token, `seconds` after its request arrived."""
        self._first_token.observe(seconds)

    def on_finish(
        self, *, reason: str, prompt_tokens: int, generated: int, seconds: float, decode_seconds: float
    ) -> None:
        """A choice ended after `seconds`; decode_seconds of them lay behind its first token."""
        self._finished.labels(*self._labels, reason).inc()
        self._prompt_tokens.observe(prompt_tokens)
        self._generated.observe(generated)
        self._end_to_end.observe(seconds)
        if generated > 1:
            self._per_token.observe(decode_seconds / (generated - 1))

    async def render(self, source: StatsSource, *, is_controller_connected: bool | None = None) -> tuple[bytes, str]:
        """Body and content type of /metrics; the engine's numbers are asked for first.

        is_controller_connected: None where the config wants no speculation controller.

        Raises:
            EngineDeadError: the engine is gone.
        """
        self._snapshot.update(await source.stats(), await source.counters())
        self._snapshot.is_controller_connected = is_controller_connected
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, registry=self._registry, buckets=buckets).labels(*self._labels)


class _EngineSnapshot(Collector):
    """The engine's last stats and counters as metric families; counters may therefore be set, not only added to."""

    def __init__(self, labels: tuple[str, str, str], admission: Admission) -> None:
        self._labels = labels
        self._admission = admission
        self._created = time.time()
        self._stats: EngineStats | None = None
        self._counters: CounterSnapshot | None = None
        self.is_controller_connected: bool | None = None  # None: the config wants no controller

    def update(self, stats: "EngineStats", counters: "CounterSnapshot") -> None:
        """Take newer numbers."""
        self._stats, self._counters = stats, counters

    def collect(self) -> Iterator[Metric]:
        """Families of everything that is known; called by the registry."""
        yield self._counter("dflash:requests_rejected", "Requests refused with 429.", self._admission.num_rejected)
        yield self._gauge("dflash:choices_admitted", "Choices in the replica.", self._admission.num_admitted)
        yield self._gauge("dflash:choices_capacity", "Choices that may be in the replica.", self._admission.capacity)
        if self.is_controller_connected is not None:
            yield self._gauge(
                "dflash:controller_connected",
                "1 while the speculation controller answers.",
                int(self.is_controller_connected),
            )
        if self._stats is not None:
            yield from self._gauges(self._stats)
        if self._counters is not None:
            yield from self._totals(self._counters)

    def _gauges(self, stats: "EngineStats") -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a place.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use (1 is all).", stats.kv_usage)
        yield self._gauge("dflash:kv_blocks", "KV blocks of the cache.", stats.total_blocks)
        yield self._gauge("dflash:kv_blocks_free", "KV blocks with neither owner nor prefix key.", stats.free_blocks)
        yield self._gauge("dflash:kv_blocks_cached", "KV blocks that only a prefix hit revives.", stats.cached_blocks)
        yield self._gauge("dflash:draft_len", "Draft length of the last step.", stats.draft_len)
        epoch, number = stats.schedule_version
        yield self._gauge("dflash:schedule_epoch", "Epoch of the schedule in force; 0: the configured one.", epoch)
        yield self._gauge("dflash:schedule_number", "Number of the schedule in force within its epoch.", number)
        yield self._gauge(
            "dflash:speculation_disabled", "1 once the acceptance gate has tripped.", int(stats.speculation_disabled)
        )

    def _totals(self, counters: "CounterSnapshot") -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", counters.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", counters.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions.", counters.preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", counters.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", counters.prefix_cache_hits)
        yield self._counter(
            "dflash:prefix_cache_evictions", "Cached KV blocks given to others.", counters.prefix_cache_evictions
        )
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified.", counters.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", counters.num_draft_tokens)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", counters.num_accepted_tokens
        )
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position (0 is the first).",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(counters.num_accepted_tokens_per_pos):
            per_position.add_metric((*self._labels, str(position)), count, created=self._created)
        yield per_position

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value, created=self._created)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
