"""Messages of replicas that count what a given hazard curve does."""

import numpy as np

from cluster.control.messages import PROTOCOL_VERSION, CellCounts, Registration, Report
from engine.speculative.counters import StepTime

DRAFT_LENS = (0, 1, 2, 3, 5, 7)


def step_seconds(rows: int, draft_len: int) -> float:
    """A made-up device on which drafting pays for few rows."""
    return 0.02 + 0.001 * rows * (draft_len + 1) + 0.002 * (draft_len > 0)


STEP_TIMES = tuple(
    StepTime(batch_bucket=rows, draft_len=k, seconds=step_seconds(rows, k)) for rows in (1, 2, 4, 8) for k in DRAFT_LENS
)


class CountingReplica:
    """Counts as an engine does: cumulative, at risk up to the first refusal. `scored`: drafts observed, if not K."""

    def __init__(self, replica_id: str, *, seed: int, static: dict[int, int], incarnation: int = 1) -> None:
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.static = static
        self.version = (0, 0)
        self.schedule = dict(static)
        self.sequence = 0
        self._random = np.random.default_rng(seed)
        self._cells: dict[tuple[int, int], CellCounts] = {}

    def decode(self, *, rows: int, draft_len: int, hazards: list[float], steps: int, scored: int | None = None) -> None:
        """`steps` steps of one program."""
        num_rows = rows * steps
        num_scored = draft_len if scored is None else scored
        at_risk, accepted, alive = [], [], num_rows
        for hazard in hazards[:num_scored]:
            at_risk.append(alive)
            alive = int(self._random.binomial(alive, hazard))
            accepted.append(alive)
        old = self._cells.get((rows, draft_len))
        new = CellCounts(
            batch_bucket=rows,
            draft_len=draft_len,
            steps=steps,
            rows=num_rows,
            decode_steps=steps,
            decode_time_s=steps * step_seconds(rows, draft_len),
            at_risk=tuple(at_risk),
            accepted=tuple(accepted),
        )
        self._cells[rows, draft_len] = new if old is None else _sum(old, new)

    @property
    def cells(self) -> tuple[CellCounts, ...]:
        return tuple(self._cells.values())

    def registration(self, **changes: object) -> Registration:
        values = dict(
            protocol=PROTOCOL_VERSION,
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            accelerator="toy",
            block_width=16,
            draft_lens=DRAFT_LENS,
            max_num_seqs=8,
            static_schedule=self.static,
            version=self.version,
            schedule=self.schedule,
            step_times=STEP_TIMES,
            cells=self.cells,
        )
        return Registration(**(values | changes))

    def report(self) -> Report:
        self.sequence += 1
        return Report(
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            version=self.version,
            gate_disabled=False,
            cells=self.cells,
        )


def _sum(a: CellCounts, b: CellCounts) -> CellCounts:
    width = max(len(a.at_risk), len(b.at_risk))

    def add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
        padded = [(*counts, *[0] * (width - len(counts))) for counts in (left, right)]
        return tuple(x + y for x, y in zip(*padded, strict=True))

    return CellCounts(
        batch_bucket=a.batch_bucket,
        draft_len=a.draft_len,
        steps=a.steps + b.steps,
        rows=a.rows + b.rows,
        decode_steps=a.decode_steps + b.decode_steps,
        decode_time_s=a.decode_time_s + b.decode_time_s,
        at_risk=add(a.at_risk, b.at_risk),
        accepted=add(a.accepted, b.accepted),
    )
