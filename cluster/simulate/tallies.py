"""What lanes count: the engine's cumulative counters for the controller, and what the report is made of."""

import numpy as np

from cluster.control.messages import CellCounts
from cluster.simulate.lanes import Lanes

# How a row's step ended, as one number: draft code+1 was the first wrong one, or all code-CODES/2 at risk were right.
CODES = 64
ALL_RIGHT = CODES // 2
# Per (bucket, verify length): steps, rows, decode-only steps of equal verify and draft length, their seconds, tokens.
STEPS, ROWS, STEADY_STEPS, STEADY_S, STEADY_TOKENS = range(5)
# Per slice of time: tokens, row seconds, K seconds and seconds of steps with decode rows.
TOKENS, ROW_S, DRAFT_LEN_S, DECODE_S = range(4)
SLICE_S = 5.0  # of the report's curves


class Tallies:
    """Cumulative counts per lane. T slices of 5 s; I buckets; J draft lengths."""

    def __init__(self, lanes: Lanes) -> None:
        scenario = lanes.world.scenario
        count, num_buckets, num_lens = lanes.count, len(lanes.buckets), len(scenario.draft_lens)
        self._lanes = lanes
        self.cells_LIJ5 = np.zeros((count, num_buckets, num_lens, 5))
        self.codes_LIJC = np.zeros((count, num_buckets, num_lens, CODES), dtype=np.int64)
        self.tokens_L = np.zeros(count, dtype=np.int64)
        self.busy_s_L = np.zeros(count)
        self.finished_L = np.zeros(count, dtype=np.int64)
        self.finished_tokens_L = np.zeros(count, dtype=np.int64)
        self.request_s_L = np.zeros(count)  # seconds in the system, of finished requests and, at the end, of the others
        slices = int(scenario.duration_s / SLICE_S) + 1
        self.slices_LT4 = np.zeros((count, slices, 4))
        self.latencies: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # lane, seconds a token and to the first
        self.right_LIW = np.zeros(
            (count, num_buckets, scenario.draft_lens[-1] + 2), dtype=np.int64
        )  # rows by right drafts
        self._risk_CW, self._right_CW = _expansion(scenario.draft_lens[-1])

    def slices(self, clock: np.ndarray) -> np.ndarray:
        """The slice of each time; what runs past the end belongs to the last."""
        return np.minimum((clock / SLICE_S).astype(np.int64), self.slices_LT4.shape[1] - 1)

    def cells(self, lane: int) -> tuple[CellCounts, ...]:
        """The lane's counters as its engine would report them."""
        sums, codes = self.cells_LIJ5[lane], self.codes_LIJC[lane]
        result = []
        for bucket, length in zip(*np.nonzero(sums[:, :, STEPS]), strict=True):
            at_risk, accepted = codes[bucket, length] @ self._risk_CW, codes[bucket, length] @ self._right_CW
            steps, rows, steady_steps, steady_s, _ = sums[bucket, length].tolist()
            result.append(
                CellCounts(
                    batch_bucket=self._lanes.buckets[bucket],
                    draft_len=self._lanes.world.scenario.draft_lens[length],
                    steps=int(steps),
                    rows=int(rows),
                    decode_steps=int(steady_steps),
                    decode_time_s=steady_s,
                    at_risk=tuple(at_risk.tolist()),
                    accepted=tuple(accepted.tolist()),
                )
            )
        return tuple(result)


def _expansion(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which positions a code was at risk at, and accepted at; [codes, positions] each."""
    codes = np.arange(CODES)[:, None]
    positions = np.arange(1, width + 1)[None, :]
    all_right = codes >= ALL_RIGHT
    right = np.where(all_right, positions <= codes - ALL_RIGHT, positions <= codes)
    risk = np.where(all_right, positions <= codes - ALL_RIGHT, positions <= codes + 1)
    risk[-1] = right[-1] = False  # the last code: a slot without a row
    return risk.astype(np.int64), right.astype(np.int64)
