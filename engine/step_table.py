"""`StepTable`: how long a step takes on one accelerator, read from a YAML file.

Shared by the simulated device and the cluster simulator, so that one file describes a machine to both. Knows no clock
and adds no noise. The files and their keys are described in `configs/sim/steps/README.md`.
"""

import itertools
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.yaml_file import read_yaml

_KEYS = frozenset(
    {
        "accelerator",
        "model",
        "source",
        "measured",
        "reference_context",
        "context_token_s",
        "prefill_base_s",
        "prefill_token_s",
        "draft_lens",
        "seconds",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """Step times of one model, drafter and accelerator, in seconds.

    measured:          the batch buckets whose entries were measured; the others are estimates.
    reference_context: tokens of context per row at which the entries hold.
    context_token_s:   seconds for each token of context above that, summed over the rows.
    prefill_base_s:    a step that has prompt chunks and no decode rows, without its tokens.
    prefill_token_s:   seconds for each prompt token of a step.
    seconds[i][j]:     a decode step of buckets[i] rows at draft_lens[j], verify and draft included.
    """

    accelerator: str
    model: str
    source: str
    measured: tuple[int, ...]
    reference_context: int
    context_token_s: float
    prefill_base_s: float
    prefill_token_s: float
    draft_lens: tuple[int, ...]
    buckets: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def bucket(self, num_rows: int) -> int:
        """The program's rows: the smallest bucket that holds the batch.

        Raises:
            ValueError: more rows than the largest bucket.
        """
        index = bisect_left(self.buckets, num_rows)
        if index == len(self.buckets):
            raise ValueError(
                f"step table {self.accelerator}: {num_rows} rows, but its largest batch is {self.buckets[-1]}"
            )
        return self.buckets[index]

    def step_s(self, *, num_rows: int, draft_len: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        """Seconds of a step.

        context_tokens: tokens of context, summed over the decode rows.

        Raises:
            ValueError: a batch or draft length the table does not have.
        """
        prefill_s = prefill_tokens * self.prefill_token_s
        if num_rows == 0:
            return self.prefill_base_s + prefill_s
        row = self.seconds[self.buckets.index(self.bucket(num_rows))]
        if draft_len not in self.draft_lens:
            raise ValueError(
                f"step table {self.accelerator}: draft length {draft_len} is not one of {list(self.draft_lens)}"
            )
        beyond = context_tokens - num_rows * self.reference_context
        return row[self.draft_lens.index(draft_len)] + beyond * self.context_token_s + prefill_s


def load_step_table(path: Path) -> StepTable:
    """Reads a table.

    Raises:
        ValueError: names the file, the key and what is wrong. OSError: the file cannot be read.
    """
    try:
        return _parse(read_yaml(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(values: Any) -> StepTable:
    if not isinstance(values, dict) or set(values) != _KEYS:
        found = set(values) if isinstance(values, dict) else set()
        missing, unknown = sorted(_KEYS - found), sorted(map(str, found - _KEYS))
        raise ValueError(f"a step table has the keys {sorted(_KEYS)}; missing: {missing}, unknown: {unknown}")
    draft_lens = _ascending("draft_lens", values["draft_lens"], lowest=0)
    rows = values["seconds"]
    if not isinstance(rows, dict) or not rows:
        raise ValueError("seconds: must map batch buckets to lists of seconds")
    buckets = _ascending("seconds", sorted(rows), lowest=1)
    for bucket in buckets:
        if not isinstance(rows[bucket], list) or len(rows[bucket]) != len(draft_lens):
            raise ValueError(f"seconds[{bucket}]: must hold {len(draft_lens)} values, one for each of draft_lens")
        for value in rows[bucket]:
            _number(f"seconds[{bucket}]", value)
    measured = values["measured"]
    if not isinstance(measured, list) or not set(measured) <= set(buckets):
        raise ValueError(f"measured: must list buckets of seconds ({list(buckets)}), got {measured!r}")
    reference_context = values["reference_context"]
    if type(reference_context) is not int or reference_context < 0:
        raise ValueError(f"reference_context: must be an integer >= 0, got {reference_context!r}")
    slope = _number("context_token_s", values["context_token_s"])
    for bucket in buckets:
        if min(rows[bucket]) <= slope * reference_context * bucket:
            raise ValueError(f"context_token_s: a step of {bucket} rows without context would take no time")
    texts = {key: values[key] for key in ("accelerator", "model", "source")}
    for key, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ValueError(f"{key}: must be a text, got {text!r}")
    return StepTable(
        **texts,
        measured=tuple(sorted(measured)),
        reference_context=reference_context,
        context_token_s=slope,
        prefill_base_s=_number("prefill_base_s", values["prefill_base_s"]),
        prefill_token_s=_number("prefill_token_s", values["prefill_token_s"]),
        draft_lens=draft_lens,
        buckets=buckets,
        seconds=tuple(tuple(float(value) for value in rows[bucket]) for bucket in buckets),
    )


def _ascending(key: str, values: Any, *, lowest: int) -> tuple[int, ...]:
    """Strictly ascending integers from `lowest` (the first of them) on."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{key}: must be integers, got {values!r}")
    if not values or values[0] != lowest or any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{key}: must ascend strictly and start with {lowest}, got {values}")
    return tuple(values)


def _number(key: str, value: Any) -> float:
    """A finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{key}: must be seconds >= 0, got {value!r} (YAML needs a dot before an exponent: 1.0e-6)")
    return float(value)
