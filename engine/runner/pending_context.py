"""Context rows of steps that draft nothing, kept back until there are enough of them to be worth a call.

At few rows the drafter's context costs the reading of its matrices, whatever the number of rows. Nobody reads the
context of a step without drafts before one with drafts comes, so the rows of several steps are written together.
"""

from torch import Tensor, cat

from engine.attention.kv_cache_tensors import KvCache
from engine.models.dflash import DFlashDrafter
from engine.step import StepPlan

MAX_PENDING_ROWS = 64  # a step that finds so many writes them: a few milliseconds at most


class PendingContext:
    """Of one rank that holds the whole drafter. Rows keep their order; a cache slot is written by one of them.

    Shapes: N rows of a step, T taps, H target hidden.
    """

    def __init__(self, drafter: DFlashDrafter, kv: KvCache, block_size: int) -> None:
        self._drafter, self._kv, self._block_size = drafter, kv, block_size
        self._taps: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._blocks: set[int] = set()
        self._num_rows = 0

    def add(self, taps_NTH: Tensor, positions_N: Tensor, slots_N: Tensor) -> None:
        """Takes a step's rows. taps_NTH is kept, not copied: nobody may write to it."""
        self._taps.append(taps_NTH)
        self._positions.append(positions_N.clone())
        self._slots.append(slots_N.clone())
        self._blocks.update(slot // self._block_size for slot in slots_N.tolist())
        self._num_rows += taps_NTH.shape[0]
        if self._num_rows >= MAX_PENDING_ROWS:
            self.write()

    def prepare(self, plan: StepPlan) -> None:
        """To be called before a step. Writes what it could read, and what it could give to another owner."""
        if not self._num_rows:
            return
        taken = any(not self._blocks.isdisjoint(update.block_ids) for update in plan.block_updates)
        if plan.draft_len or plan.zero_blocks or taken:
            self.write()

    def write(self) -> None:
        """Everything that is kept back goes to the cache."""
        taps, positions, slots = (cat(parts) for parts in (self._taps, self._positions, self._slots))
        for parts in (self._taps, self._positions, self._slots):
            parts.clear()
        self._blocks.clear()
        self._num_rows = 0
        self._drafter.feed_context(taps, positions, slots, self._kv)
