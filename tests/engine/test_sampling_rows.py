"""A token depends on its own row's logits, parameters and key: not on the batch, the sharding or the path taken."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.filters import MAX_PARTIAL_SORT, FilterFlags
from engine.sampling.sampler import SamplingRows, _draw_any_row, argmax_pair, sample

torch.set_num_threads(1)
PARAMS = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.3),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (0.8, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.5, 0, 1.0, 0.05),
    (1.3, 40, 0.95, 0.02),
    (1.0, 1500, 0.8, 0.0),
    (3.0, 0, 0.99, 0.0),
    (1.0, 0, 0.9, 0.001),
]


class OneRank:
    rank = 0
    size = 1

    def all_gather(self, x: torch.Tensor, *, dim: int) -> torch.Tensor:
        return x


class ThreadRank:
    """A rank of a group of threads: all_gather concatenates in rank order, as a collective does."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, parts: list[torch.Tensor | None]) -> None:
        self.rank, self.size, self._barrier, self._parts = rank, size, barrier, parts

    def all_gather(self, x: torch.Tensor, *, dim: int) -> torch.Tensor:
        self._parts[self.rank] = x
        self._barrier.wait(timeout=30)
        whole = torch.cat([part for part in self._parts if part is not None], dim=dim)
        self._barrier.wait(timeout=30)
        return whole


def on_ranks(logits: torch.Tensor, rows: SamplingRows, size: int) -> list[torch.Tensor]:
    barrier, parts = threading.Barrier(size), [None] * size
    shard = logits.shape[1] // size
    results: list[torch.Tensor] = [torch.empty(0)] * size

    def work(rank: int) -> None:
        local = logits[:, rank * shard : (rank + 1) * shard].contiguous()
        results[rank] = sample(local, rows, ThreadRank(rank, size, barrier, parts), rank * shard)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def make_rows(params: list[tuple[float, int, float, float]], **extra: torch.Tensor) -> SamplingRows:
    columns = [list(column) for column in zip(*params, strict=True)]
    flags = FilterFlags.of(*columns)
    count = len(params)
    return SamplingRows(
        temperature_N=torch.tensor(columns[0], dtype=torch.float32),
        top_k_N=torch.tensor(columns[1]),
        top_p_N=torch.tensor(columns[2], dtype=torch.float32),
        min_p_N=torch.tensor(columns[3], dtype=torch.float32),
        seed_N=torch.arange(count) * 7919 + 3,
        position_N=torch.arange(count) % 4 + 10,
        all_greedy=flags.all_greedy,
        any_filter=flags.any_filter,
        sort_width=flags.sort_width,
        **extra,
    )


def make_logits(count: int, vocab: int, seed: int = 0, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [16, 3000])
def test_token_is_the_same_alone_in_a_batch_and_in_another_order(vocab: int, ties: bool) -> None:
    logits = make_logits(len(PARAMS), vocab, ties=ties)
    rows = make_rows(PARAMS)
    batch = sample(logits, rows, OneRank(), 0)
    order = torch.randperm(len(PARAMS), generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits[order], rows.take(order), OneRank(), 0), batch[order])
    for index, param in enumerate(PARAMS):
        flags = FilterFlags.of(*[[value] for value in param])
        one = rows.take(torch.tensor([index]))
        alone = SamplingRows(
            **{name: getattr(one, name) for name in one.__slots__}
            | {"all_greedy": flags.all_greedy, "any_filter": flags.any_filter, "sort_width": flags.sort_width}
        )
        assert sample(logits[index : index + 1], alone, OneRank(), 0).item() == batch[index].item()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [16, 3000])
def test_fixed_shape_path_equals_row_by_row_path(vocab: int, ties: bool) -> None:
    for seed in range(4):
        logits = make_logits(len(PARAMS), vocab, seed, ties)
        rows = make_rows(PARAMS)
        assert torch.equal(_draw_any_row(logits, rows, 0)[1], sample(logits, rows, OneRank(), 0))
        small = make_rows(PARAMS[:7])  # every threshold decided by a partial sort
        assert 0 < small.sort_width <= MAX_PARTIAL_SORT
        assert torch.equal(_draw_any_row(logits[:7], small, 0)[1], sample(logits[:7], small, OneRank(), 0))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("which", ["all", "greedy", "unfiltered"])
def test_every_sharding_draws_the_same_token(which: str, size: int) -> None:
    params = {"all": PARAMS, "greedy": [PARAMS[0]] * 3, "unfiltered": [PARAMS[0], PARAMS[2], PARAMS[3]]}[which]
    logits = make_logits(len(params), 2048, seed=5, ties=which == "greedy")
    logits[:, 2000:] = -math.inf  # padding of the vocabulary
    rows = make_rows(params)
    expected = sample(logits, rows, OneRank(), 0)
    for got in on_ranks(logits, rows, size):
        assert torch.equal(got, expected)


def test_masked_stops_on_every_sharding() -> None:
    params = [PARAMS[0], PARAMS[0], PARAMS[2], PARAMS[6]]
    logits = make_logits(4, 64)
    best, second = logits.argsort(dim=1, descending=True)[:, :2].unbind(1)
    stops = torch.stack([best, torch.full_like(best, -1)], dim=1)
    rows = make_rows(params, stop_ids_NS=stops, mask_stops_N=torch.tensor([True, False, True, True]))
    before = logits.clone()
    tokens = sample(logits, rows, OneRank(), 0)
    assert torch.equal(logits, before)
    assert tokens[0] == second[0]
    assert tokens[1] == best[1]
    assert tokens[2] != best[2]
    assert tokens[3] != best[3]
    for size in (2, 4):
        for got in on_ranks(logits, rows, size):
            assert torch.equal(got, tokens)


def test_top_k_one_at_temperature_one_is_greedy() -> None:
    logits = make_logits(64, 500)
    rows = make_rows([(1.0, 1, 1.0, 0.0)] * 64)
    assert torch.equal(sample(logits, rows, OneRank(), 0), logits.argmax(dim=1))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_greedy_is_the_lowest_id_of_the_largest(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 70))
    values = data.draw(st.lists(st.integers(-3, 3), min_size=vocab, max_size=vocab))
    value, token = argmax_pair(torch.tensor([values], dtype=torch.float32), 100)
    assert (value.item(), token.item()) == (max(values), values.index(max(values)) + 100)


def test_a_row_without_a_number_still_gives_a_valid_id() -> None:
    logits = torch.full((2, 40), math.nan)
    logits[1] = -math.inf
    assert sample(logits, make_rows([PARAMS[0]] * 2), OneRank(), 0).tolist() == [0, 0]
    drawn = sample(logits, make_rows([PARAMS[2], PARAMS[6]]), OneRank(), 0)
    assert bool(((drawn >= 0) & (drawn < 40)).all())


def test_flags() -> None:
    def flags(*params: tuple[float, int, float, float]) -> tuple[bool, bool, int]:
        got = FilterFlags.of(*[list(column) for column in zip(*params, strict=True)])
        return got.all_greedy, got.any_filter, got.sort_width

    assert flags((0.0, 9, 0.5, 0.5)) == (True, False, 1)
    assert flags((0.0, 0, 1.0, 0.0), (1.0, -1, 1.0, 0.0)) == (False, False, 1)
    assert flags((1.0, 50, 1.0, 0.0), (1.0, 20, 0.9, 0.0)) == (False, True, 64)
    assert flags((1.0, 0, 1.0, 0.1)) == (False, True, 1)
    assert flags((1.0, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0)) == (False, True, 0)
    assert flags((1.0, 1024, 1.0, 0.0)) == (False, True, 1024)
    assert flags((1.0, 1025, 1.0, 0.0)) == (False, True, 0)
