"""Context rows that wait: written in their order before a step could read them or give their blocks away."""

from itertools import count

import pytest
import torch
from torch import Tensor

from engine.attention.kv_cache_tensors import KvCache
from engine.runner.pending_context import MAX_PENDING_ROWS, PendingContext
from engine.step import BlockTableUpdate, StepPlan

BLOCK_SIZE = 4
KV = KvCache(target_kv=(), drafter_kv=(), drafter_stack=None)


class Drafter:
    """Notes what it is fed: (tap, position, slot) of every row, a list a call."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[float, int, int]]] = []

    def feed_context(self, taps_NTH: Tensor, positions_N: Tensor, slots_N: Tensor, kv: KvCache) -> None:
        assert kv is KV
        self.calls.append(list(zip(taps_NTH[:, 0, 0].tolist(), positions_N.tolist(), slots_N.tolist(), strict=True)))


class Steps:
    """Steps of `rows` rows without drafts; the positions and slots live in one place, as the runner's do."""

    def __init__(self, pending: PendingContext, rows: int) -> None:
        self._pending, self._number = pending, count()
        self._positions, self._slots = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        self.made: list[tuple[float, int, int]] = []

    def run(self) -> None:
        rows = self._slots.shape[0]
        numbers = [next(self._number) for _ in range(rows)]
        self._positions.copy_(torch.tensor(numbers) + 100)
        self._slots.copy_(torch.tensor(numbers) + BLOCK_SIZE)
        self.made += [(float(n), n + 100, n + BLOCK_SIZE) for n in numbers]
        taps_NTH = torch.tensor(numbers, dtype=torch.float32).view(rows, 1, 1).expand(rows, 2, 3)
        self._pending.add(taps_NTH, self._positions, self._slots)


def plan(draft_len: int = 0, blocks: tuple[int, ...] = (), zero: tuple[int, ...] = ()) -> StepPlan:
    updates = (BlockTableUpdate(slot=0, first_index=0, block_ids=blocks),) if blocks else ()
    return StepPlan(step_id=1, verify_len=0, draft_len=draft_len, block_updates=updates, zero_blocks=zero)


def test_rows_of_many_steps_are_one_call() -> None:
    drafter = Drafter()
    pending = PendingContext(drafter, KV, BLOCK_SIZE)  # type: ignore[arg-type]
    steps = Steps(pending, rows=5)
    for _ in range(-(-MAX_PENDING_ROWS // 5)):
        assert not drafter.calls
        pending.prepare(plan())
        steps.run()
    assert drafter.calls == [steps.made]
    pending.prepare(plan(draft_len=3))
    assert len(drafter.calls) == 1, "nothing waits"


@pytest.mark.parametrize(
    ("given", "is_written"),
    [
        (plan(), False),
        (plan(draft_len=1), True),
        (plan(zero=(9,)), True),
        (plan(blocks=(7, 4)), False),
        (plan(blocks=(7, 3)), True),  # a block of the three rows: slots 4 to 6 lie in block 1, 7 to 12 in 1, 2 and 3
    ],
)
def test_what_a_step_may_read_or_take_is_written_first(given: StepPlan, is_written: bool) -> None:
    drafter = Drafter()
    pending = PendingContext(drafter, KV, BLOCK_SIZE)  # type: ignore[arg-type]
    steps = Steps(pending, rows=3)
    for _ in range(3):
        steps.run()
    pending.prepare(given)
    assert drafter.calls == ([steps.made] if is_written else [])
