"""verify() against a loop over single sequences that follows the rules word by word."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.verify import verify
from engine.step import Finish

torch.set_num_threads(1)


def by_hand(
    target: list[int],
    draft: list[int],
    k: int,
    committed: int,
    max_len: int,
    min_len: int,
    stops: list[int],
    invalid_at: int,
) -> tuple[list[int], int, Finish]:
    tokens_before = committed + 1
    accepted = 0
    while accepted < min(k, invalid_at) and draft[accepted] == target[accepted]:
        accepted += 1
    emitted: list[int] = []
    for token in target[: accepted + 1]:
        if len(emitted) == invalid_at:
            return emitted, accepted, Finish.ERROR
        masked = tokens_before + len(emitted) < min_len
        emitted.append(token)
        if token in stops and not masked:
            return emitted, accepted, Finish.STOP
        if tokens_before + len(emitted) == max_len:
            return emitted, accepted, Finish.LENGTH
    return emitted, accepted, Finish.NONE


@st.composite
def rows(draw: st.DrawFn, width: int) -> tuple[list[int], list[int], int, int, int, int, list[int], bool, int]:
    token = st.integers(0, 3)
    target = draw(st.lists(token, min_size=width + 1, max_size=width + 1))
    draft = [target[j] if draw(st.integers(0, 5)) else draw(token) for j in range(width)]
    committed = draw(st.integers(0, 6))
    max_len = committed + 2 + draw(st.integers(0, width + 3))
    min_len = draw(st.integers(0, committed + width + 4))
    stops = draw(st.lists(token, max_size=2, unique=True))
    finished, invalid_at = draw(st.integers(0, 4)) == 0, draw(st.integers(0, width + 1))
    return target, draft, draw(st.integers(0, width)), committed, max_len, min_len, stops, finished, invalid_at


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    width = data.draw(st.integers(0, 6))
    batch = data.draw(st.lists(rows(width), min_size=1, max_size=5))
    padded = data.draw(st.integers(0, 2))
    stop_width = max(len(row[6]) for row in batch) + padded
    verdict = verify(
        target_RK1=torch.tensor([row[0] for row in batch]),
        draft_RK=torch.tensor([row[1] for row in batch], dtype=torch.int64).reshape(len(batch), width),
        k_R=torch.tensor([row[2] for row in batch]),
        committed_R=torch.tensor([row[3] for row in batch]),
        max_len_R=torch.tensor([row[4] for row in batch]),
        min_len_R=torch.tensor([row[5] for row in batch]),
        stop_ids_RS=torch.tensor(
            [row[6] + [-1] * (stop_width - len(row[6])) for row in batch], dtype=torch.int64
        ).reshape(len(batch), stop_width),
        finished_R=torch.tensor([row[7] for row in batch]),
        valid_RK1=torch.tensor([[column != row[8] for column in range(width + 1)] for row in batch]),
    )
    for index, (target, draft, k, committed, max_len, min_len, stops, finished, invalid_at) in enumerate(batch):
        got = [int(tensor[index]) for tensor in (verdict.num_emitted_R, verdict.num_accepted_R, verdict.finish_R)]
        if finished:
            assert got == [0, 0, Finish.NONE]
            continue
        emitted, accepted, finish = by_hand(target, draft, k, committed, max_len, min_len, stops, invalid_at)
        assert got == [len(emitted), accepted, finish]
        assert not emitted or int(verdict.last_token_R[index]) == emitted[-1]


def run(**changes: object) -> tuple[int, int, int, int]:
    case = {
        "target_RK1": [[5, 6, 7, 8]],
        "draft_RK": [[5, 6, 7]],
        "k_R": [3],
        "committed_R": [9],
        "max_len_R": [100],
        "min_len_R": [0],
        "stop_ids_RS": [[-1]],
        "finished_R": [False],
    } | changes
    verdict = verify(**{name: torch.tensor(value) for name, value in case.items()})
    return (
        int(verdict.num_emitted_R),
        int(verdict.num_accepted_R),
        int(verdict.finish_R),
        int(verdict.last_token_R),
    )


def test_cases_worth_reading() -> None:
    assert run() == (4, 3, Finish.NONE, 8)
    assert run(draft_RK=[[5, 0, 7]]) == (2, 1, Finish.NONE, 6)
    assert run(k_R=[1]) == (2, 1, Finish.NONE, 6)  # a filler that happens to match is not accepted
    assert run(stop_ids_RS=[[6]]) == (2, 3, Finish.STOP, 6)
    assert run(stop_ids_RS=[[7]], draft_RK=[[5, 0, 7]]) == (2, 1, Finish.NONE, 6)  # the stop was not reached
    assert run(max_len_R=[12]) == (2, 3, Finish.LENGTH, 6)
    assert run(max_len_R=[12], stop_ids_RS=[[6]]) == (2, 3, Finish.STOP, 6)
    assert run(stop_ids_RS=[[6]], min_len_R=[11]) == (2, 3, Finish.STOP, 6)  # 11 tokens stand before it
    assert run(stop_ids_RS=[[6]], min_len_R=[12]) == (4, 3, Finish.NONE, 8)
    assert run(target_RK1=[[-1, 6, 7, 8]], draft_RK=[[0, 0, 0]]) == (1, 0, Finish.NONE, -1)  # padding is no stop id
    assert run(valid_RK1=[[True, True, False, True]]) == (2, 2, Finish.ERROR, 6)
    assert run(valid_RK1=[[False, True, True, True]]) == (0, 0, Finish.ERROR, 5)
    assert run(valid_RK1=[[True, True, False, True]], stop_ids_RS=[[6]]) == (2, 2, Finish.STOP, 6)  # it ended before
    assert run(valid_RK1=[[True, True, False, True]], draft_RK=[[5, 0, 7]]) == (2, 1, Finish.NONE, 6)  # not reached
