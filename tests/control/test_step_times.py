"""Start-up measurements are corrected in service, and pairs nobody measured lie between those somebody did."""

import pytest

from cluster.control.counts import ProgramSteps
from cluster.control.step_times import StepTimes
from engine.speculative.counters import StepTime


def entry(rows: int, draft_len: int, seconds: float) -> StepTime:
    return StepTime(batch_bucket=rows, draft_len=draft_len, seconds=seconds)


def served(bucket: int, draft_len: int, steps: int, seconds: float, *, rows: float | None = None) -> list[ProgramSteps]:
    num_rows = round((bucket if rows is None else rows) * steps)
    return [ProgramSteps(bucket, draft_len, steps, num_rows, steps, seconds)]


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


def test_what_contexts_cost_depends_on_the_rows_that_ran_and_not_on_the_buckets_bound() -> None:
    """Batches of 5 and 10 rows run as 8 and 16; a full one of 32 is to be foretold."""
    row_s = 0.0005

    def start_up(bucket: int, draft_len: int) -> float:
        return 0.010 + 0.0005 * bucket * (1 + draft_len)

    times = StepTimes()
    times.measured([entry(bucket, k, start_up(bucket, k)) for bucket in (8, 16, 32) for k in (0, 3)])
    for bucket, rows in ((8, 5), (16, 10)):
        seconds = 1000 * (start_up(bucket, 3) + rows * row_s)
        times.served(served(bucket, 3, 1000, seconds, rows=rows), now=0.0)
    assert times.seconds(32, 0, max_num_seqs=32) == pytest.approx(start_up(32, 0) + 32 * row_s, rel=0.09)
    assert times.seconds(16, 3, max_num_seqs=32) == pytest.approx(start_up(16, 3) + 10 * row_s, rel=0.01)
    assert times.seconds(16, 0, max_num_seqs=32) == pytest.approx(start_up(16, 0) + 10 * row_s, rel=0.05)


def test_what_lies_between_others_is_known_less_than_what_was_measured_or_served() -> None:
    times = StepTimes()
    times.measured([entry(1, 0, 0.01), entry(1, 4, 0.03), entry(4, 0, 0.02), entry(4, 4, 0.06)])
    measured, between = (times.deviation(1, k, max_num_seqs=4) for k in (4, 2))
    assert between >= 5 * measured
    times.served(served(1, 2, 7, 0.14), now=0.0)  # too few steps to say
    assert times.deviation(1, 2, max_num_seqs=4) == between
    times.served(served(1, 2, 200, 4.0), now=0.0)
    assert times.deviation(1, 2, max_num_seqs=4) < measured


def test_steps_long_ago_count_little_however_long_it_was() -> None:
    times = StepTimes()
    times.measured([entry(4, 3, 0.020)])
    for now in (0.0, 600.0, 2000.0, 2001.0, 1e6):
        times.served(served(4, 3, 1000, 20.0 if now < 1e6 else 30.0), now=now)
        assert times.deviation(4, 3, max_num_seqs=4) == pytest.approx(0.02 * (20 / 1020) ** 0.5, rel=0.3)
    assert times.seconds(4, 3, max_num_seqs=4) == pytest.approx(0.030, rel=0.01)


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
