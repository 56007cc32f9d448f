"""The speculation counters of a replica in Ray's own metrics too, where one scrape per node finds every replica.

Ray puts `ray_` before a name and takes no colon in it: `vllm:spec_decode_num_drafts` becomes
`ray_vllm_spec_decode_num_drafts`. The owner of the truth is `/metrics` of the replica.
"""

import asyncio
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge

from cluster.metrics import ENGINE_INDEX, LABELS, StatsSource
from workers.errors import EngineDeadError

if TYPE_CHECKING:
    from engine.core import EngineStats
    from engine.speculative.counters import CounterSnapshot

_PERIOD_S = 5.0
_PER_POSITION = "vllm_spec_decode_num_accepted_tokens_per_pos"


class RayMetrics:
    """Mirrors the counters of one replica."""

    def __init__(self, *, model_name: str, replica: str) -> None:
        self._tags = dict(zip(LABELS, (model_name, ENGINE_INDEX, replica), strict=True))
        self._seen: dict[tuple[str, int], int] = {}
        self._counters = {
            "vllm_generation_tokens": Counter("vllm_generation_tokens", "Generated tokens.", LABELS),
            "vllm_spec_decode_num_drafts": Counter("vllm_spec_decode_num_drafts", "Drafts verified.", LABELS),
            "vllm_spec_decode_num_draft_tokens": Counter(
                "vllm_spec_decode_num_draft_tokens", "Draft tokens verified.", LABELS
            ),
            "vllm_spec_decode_num_accepted_tokens": Counter(
                "vllm_spec_decode_num_accepted_tokens", "Draft tokens accepted.", LABELS
            ),
            _PER_POSITION: Counter(
                _PER_POSITION, "Draft tokens accepted, by position (0 is the first).", (*LABELS, "position")
            ),
        }
        self._draft_len = Gauge("dflash_draft_len", "Draft length of the last step.", LABELS)
        self._disabled = Gauge("dflash_speculation_disabled", "1 once the acceptance gate has tripped.", LABELS)

    async def run(self, source: StatsSource) -> None:
        """Mirrors every few seconds, until cancelled or the engine is dead."""
        try:
            while True:
                self.update(await source.stats(), await source.counters())
                await asyncio.sleep(_PERIOD_S)
        except EngineDeadError:
            return  # the replica ends, and says why

    def update(self, stats: "EngineStats", counters: "CounterSnapshot") -> None:
        """Takes over newer numbers."""
        self._add("vllm_generation_tokens", counters.generation_tokens)
        self._add("vllm_spec_decode_num_drafts", counters.num_drafts)
        self._add("vllm_spec_decode_num_draft_tokens", counters.num_draft_tokens)
        self._add("vllm_spec_decode_num_accepted_tokens", counters.num_accepted_tokens)
        for position, count in enumerate(counters.num_accepted_tokens_per_pos):
            self._add(_PER_POSITION, count, position)
        self._draft_len.set(stats.draft_len, self._tags)
        self._disabled.set(int(stats.speculation_disabled), self._tags)

    def _add(self, name: str, total: int, position: int = -1) -> None:
        new = total - self._seen.get((name, position), 0)
        if new > 0:  # Ray refuses to count nothing
            tags = self._tags if position < 0 else {**self._tags, "position": str(position)}
            self._counters[name].inc(new, tags)
            self._seen[name, position] = total
