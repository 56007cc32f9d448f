"""What `dflash bench` makes of its records: pure functions from records to figures, and the figures as a table.

Definitions, per successful request: TTFT is start to first text; latency is start to end of stream; TPOT is
(latency - TTFT) / (output tokens - 1); tokens/s/user is 1 / TPOT; inter-token latency is the gap between two events
with text (a speculative step sends several tokens in one event, so its percentiles show steps, not tokens). Acceptance
length is 1 + accepted drafts / verify steps, over all requests in the summary; acceptance by position j is the share of
those steps that accepted at least j drafts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from rich.table import Table

from cluster.cli.bench_load import RequestRecord

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Mean, extremes and percentiles (linear interpolation) of one quantity."""

    count: int
    mean: float
    min: float
    max: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """None for no values."""
        if not values:
            return None
        array = np.asarray(values, dtype=np.float64)
        return cls(
            count=len(values),
            mean=float(array.mean()),
            min=float(array.min()),
            max=float(array.max()),
            percentiles={p: float(np.percentile(array, p)) for p in PERCENTILES},
        )

    def plain(self) -> dict[str, float]:
        """JSON form: count, mean, min, max, p50, ..."""
        return {"count": self.count, "mean": self.mean, "min": self.min, "max": self.max} | {
            f"p{p}": value for p, value in self.percentiles.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Figures of one run. `duration_s` is first start to last end, failures included."""

    num_requests: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    distributions: dict[str, Distribution]
    acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    drafted_tokens: int
    accepted_tokens: int

    @property
    def num_succeeded(self) -> int:
        return self.num_requests - sum(self.errors.values())

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_succeeded / self.duration_s if self.duration_s > 0 else 0.0

    def plain(self) -> dict[str, Any]:
        """JSON form; times in seconds."""
        return {
            "num_requests": self.num_requests,
            "num_succeeded": self.num_succeeded,
            "errors": self.errors,
            "duration_s": self.duration_s,
            "requests_per_s": self.requests_per_s,
            "tokens_per_s": self.tokens_per_s,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": list(self.acceptance_by_position),
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
        } | {name: distribution.plain() for name, distribution in self.distributions.items()}


def request_figures(record: RequestRecord) -> dict[str, float]:
    """The figures of one successful request; a figure that it does not define (TPOT of one token) is left out."""
    assert record.error is None
    figures = {"latency_s": record.end_s - record.start_s}
    if record.event_times_s:
        figures["ttft_s"] = record.event_times_s[0] - record.start_s
        if record.completion_tokens > 1 and record.event_times_s[-1] > record.event_times_s[0]:
            tpot_s = (figures["latency_s"] - figures["ttft_s"]) / (record.completion_tokens - 1)
            figures["tpot_s"] = tpot_s
            figures["tokens_per_s_user"] = 1 / tpot_s
    if record.spec is not None and record.spec.acceptance_length is not None:
        figures["acceptance_length"] = record.spec.acceptance_length
    return figures


def summarise(records: Sequence[RequestRecord]) -> Summary:
    """Figures of a run of at least one request."""
    good = [record for record in records if record.error is None]
    columns: dict[str, list[float]] = {}
    for record in good:
        for name, value in request_figures(record).items():
            columns.setdefault(name, []).append(value)
    columns["inter_token_s"] = [
        float(gap) for record in good if len(record.event_times_s) > 1 for gap in np.diff(record.event_times_s)
    ]
    if "acceptance_length" in columns:
        columns["acceptance_length_per_request"] = columns.pop("acceptance_length")
    specs = [record.spec for record in good if record.spec is not None]
    num_steps = sum(spec.num_steps for spec in specs)
    accepted = sum(spec.num_accepted for spec in specs)
    return Summary(
        num_requests=len(records),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=max(record.end_s for record in records) - min(record.start_s for record in records),
        prompt_tokens=sum(record.prompt_tokens for record in good),
        completion_tokens=sum(record.completion_tokens for record in good),
        distributions={name: found for name, values in columns.items() if (found := Distribution.of(values))},
        acceptance_length=1 + accepted / num_steps if num_steps else None,
        acceptance_by_position=_by_position([spec.histogram for spec in specs]),
        drafted_tokens=sum(spec.num_drafted for spec in specs),
        accepted_tokens=accepted,
    )


def _by_position(histograms: Sequence[tuple[int, ...]]) -> tuple[float, ...]:
    """Share of all steps that accepted at least 1, 2, .. drafts; empty without steps."""
    counts = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    num_steps = sum(counts)
    return tuple(sum(counts[j:]) / num_steps for j in range(1, len(counts))) if num_steps else ()


_ROWS = (
    ("ttft_s", "first token (ms)", 1e3),
    ("inter_token_s", "between texts (ms)", 1e3),
    ("tpot_s", "per token (ms)", 1e3),
    ("latency_s", "whole request (ms)", 1e3),
    ("tokens_per_s_user", "tokens/s/user", 1.0),
    ("acceptance_length_per_request", "acceptance length", 1.0),
)


def as_table(summary: Summary) -> Table:
    """The distributions as a rich table."""
    table = Table(title=None)
    table.add_column("", no_wrap=True)
    for name in ("mean", *(f"p{p}" for p in PERCENTILES), "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, label, scale in _ROWS:
        found = summary.distributions.get(name)
        if found is not None:
            values = (found.mean, *found.percentiles.values(), found.max)
            table.add_row(label, *(_figure(value * scale) for value in values))
    return table


def _figure(value: float) -> str:
    """Four significant digits or so: no decimals from 1,000 on."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def headline(summary: Summary) -> str:
    """The figures of the whole run in up to three lines."""
    lines = [
        f"{summary.num_succeeded} of {summary.num_requests} requests in {summary.duration_s:.2f} s: "
        f"{summary.tokens_per_s:.1f} tokens/s, {summary.requests_per_s:.2f} requests/s, "
        f"{summary.prompt_tokens} prompt and {summary.completion_tokens} output tokens"
    ]
    if summary.acceptance_length is not None:
        lines.append(
            f"acceptance length {summary.acceptance_length:.3f} "
            f"({summary.accepted_tokens} of {summary.drafted_tokens} drafted tokens accepted)"
        )
    if summary.acceptance_by_position:
        shares = " ".join(f"{share:.1%}" for share in summary.acceptance_by_position)
        lines.append(f"accepted up to position 1, 2, ..: {shares}")
    return "\n".join(lines)
