"""Start-up measurements are corrected in service, and pairs nobody measured lie between those somebody did."""

import pytest

from cluster.control.messages import CellCounts
from cluster.control.step_times import StepTimes
from engine.speculative.counters import StepTime


def entry(rows: int, draft_len: int, seconds: float) -> StepTime:
    return StepTime(batch_bucket=rows, draft_len=draft_len, seconds=seconds)


def served(rows: int, draft_len: int, steps: int, seconds: float) -> list[CellCounts]:
    return [
        CellCounts(
            batch_bucket=rows,
            draft_len=draft_len,
            steps=steps,
            rows=rows * steps,
            decode_steps=steps,
            decode_time_s=seconds,
            at_risk=(),
            accepted=(),
        )
    ]


def test_start_up_measurements_of_replicas_are_averaged_and_batch_sizes_fall_into_buckets() -> None:
    times = StepTimes()
    times.measured([entry(4, 2, 0.02), entry(8, 2, 0.03)])
    times.measured([entry(4, 2, 0.04)])
    assert times.seconds(3, 2, max_num_seqs=8) == pytest.approx(0.03)
    assert times.seconds(7, 2, max_num_seqs=8) == pytest.approx(0.03)


def test_service_corrects_all_pairs_alike_and_the_served_pair_by_its_own() -> None:
    times = StepTimes()
    times.measured([entry(4, 0, 0.010), entry(4, 3, 0.020)])
    times.served(served(4, 3, 1000, 30.0), now=0.0)  # 30 ms instead of 20
    assert times.seconds(4, 3, max_num_seqs=4) == pytest.approx(0.030, rel=0.001)
    assert 0.015 < times.seconds(4, 0, max_num_seqs=4) < 0.020  # it may be the host, or the rows' contexts
    times.served(served(4, 0, 1000, 10.0), now=0.0)  # 10 ms, as measured
    assert times.seconds(4, 0, max_num_seqs=4) == pytest.approx(0.010, rel=0.02)
    assert times.seconds(4, 3, max_num_seqs=4) == pytest.approx(0.030, rel=0.02)
    times.served(served(4, 3, 1000, 20.0), now=300.0)  # ten half-lives on
    assert times.seconds(4, 3, max_num_seqs=4) == pytest.approx(0.020, rel=0.02)


@pytest.mark.parametrize(("factor", "row_s"), [(1.0, 0.001), (1.1, 0.0), (1.05, 0.0005)])
def test_a_busy_host_and_long_contexts_are_told_apart(factor: float, row_s: float) -> None:
    def start_up(rows: int, draft_len: int) -> float:
        return 0.010 + 0.0005 * rows * (1 + draft_len)

    times = StepTimes()
    times.measured([entry(rows, k, start_up(rows, k)) for rows in (1, 2, 4, 8, 16) for k in (0, 3)])
    for rows, draft_len in ((1, 3), (2, 3), (4, 3), (8, 3)):
        times.served(served(rows, draft_len, 1000, 1000 * (factor * start_up(rows, draft_len) + rows * row_s)), now=0.0)
    for rows in (1, 8, 16):
        expected = factor * start_up(rows, 0) + rows * row_s
        assert times.seconds(rows, 0, max_num_seqs=16) == pytest.approx(expected, rel=0.06)


def test_unmeasured_pairs_are_interpolated() -> None:
    times = StepTimes()
    times.measured([entry(1, 0, 0.01), entry(1, 4, 0.03), entry(4, 0, 0.02), entry(4, 4, 0.06)])
    assert times.seconds(1, 2, max_num_seqs=8) == pytest.approx(0.02)
    assert times.seconds(2, 4, max_num_seqs=8) == pytest.approx(0.04)
    assert times.seconds(8, 0, max_num_seqs=8) == pytest.approx(0.02 + 4 * 0.01 / 3)
    assert times.seconds(1, 8, max_num_seqs=8) == pytest.approx(0.05)


def test_nothing_is_said_where_nothing_is_known() -> None:
    times = StepTimes()
    assert times.seconds(1, 0, max_num_seqs=4) is None
    times.served(served(4, 3, 100, 2.0), now=0.0)
    assert times.seconds(4, 3, max_num_seqs=4) == pytest.approx(0.02)
    assert times.seconds(4, 0, max_num_seqs=4) is None
    times.served(served(4, 0, 2, 0.02), now=0.0)  # too few steps to believe
    assert times.seconds(4, 0, max_num_seqs=4) is None


def test_a_time_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        StepTimes().measured([entry(1, 0, 0.0)])
