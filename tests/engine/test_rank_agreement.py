"""Ranks that decide differently are found out, at the steps where a comparison is due."""

import pytest
import torch

from engine.runner.agreement import COMPARE_EVERY, RankAgreement, checksum
from engine.runner.draft_program import Decision

OTHER_RANK = 4711


class Pair:
    """A group of two whose other rank always answers OTHER_RANK, or echoes this one."""

    def __init__(self, *, size: int = 2, agrees: bool = False) -> None:
        self.size = size
        self.agrees = agrees
        self.calls = 0

    def all_gather(self, x: torch.Tensor, *, dim: int) -> torch.Tensor:
        self.calls += 1
        return torch.cat([x, x if self.agrees else torch.full_like(x, OTHER_RANK)], dim=dim)


def decision(**changes: list) -> Decision:
    values = {
        "slots": [2, 0],
        "tokens": [[5, 6, 7], [8, 9, 9]],
        "num_emitted": [2, 1],
        "num_accepted": [1, 0],
        "num_drafted": [2, 2],
        "finish": [0, 0],
    }
    t = {name: torch.tensor(value) for name, value in (values | changes).items()}
    return Decision(
        slots_S=t["slots"],
        tokens_SE=t["tokens"],
        num_emitted_S=t["num_emitted"],
        num_accepted_S=t["num_accepted"],
        num_drafted_S=t["num_drafted"],
        finish_S=t["finish"],
    )


@pytest.mark.parametrize(("every_step", "due"), [(True, [0, 1, 2, 999, 1000]), (False, [0, COMPARE_EVERY])])
def test_a_difference_is_an_error_at_the_steps_that_are_compared(every_step: bool, due: list[int]) -> None:
    agreement = RankAgreement(Pair(), every_step=every_step)
    for step_id in (0, 1, 2, 999, 1000):
        if step_id in due:
            with pytest.raises(RuntimeError, match=f"disagree on the tokens of step {step_id}: .*{OTHER_RANK}"):
                agreement.check(step_id, decision())
        else:
            agreement.check(step_id, decision())


def test_equal_ranks_pass_and_a_single_rank_or_an_empty_step_costs_nothing() -> None:
    equal, single, empty = Pair(agrees=True), Pair(size=1), Pair()
    RankAgreement(equal, every_step=True).check(3, decision())
    RankAgreement(single, every_step=True).check(3, decision())
    RankAgreement(empty, every_step=True).check(3, None)
    assert (equal.calls, single.calls, empty.calls) == (1, 0, 0)


def test_the_checksum_follows_emitted_tokens_and_counts_alone() -> None:
    base = checksum(decision())
    assert checksum(decision(tokens=[[5, 6, 0], [8, 1, 2]])) == base, "not emitted"
    for change in (
        {"tokens": [[5, 0, 7], [8, 9, 9]]},
        {"num_emitted": [3, 1]},
        {"num_accepted": [2, 0]},
        {"num_drafted": [2, 1]},
    ):
        assert checksum(decision(**change)) != base, change
