"""`DraftLengthSchedule`: batch size -> draft length K, with TensorRT-LLM's meaning of `draft_len_schedule`.

Keys are inclusive upper bounds of the batch size: {4: 4, 8: 2, 32: 1} means 4 drafts up to 4 rows, 2 up to 8, 1 up to
32, and none above the largest key.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Self

import msgspec

Version = tuple[int, int]  # (controller epoch, number within the epoch)


class ScheduleAck(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a pushed schedule.

    applied:  False when the version in force is as new or newer; `version` and `schedule` are always those in force.
    rounded:  which entries were lowered to a declared draft length, in words; empty when none were.
    """

    applied: bool
    version: Version
    schedule: dict[int, int]
    rounded: str = ""


class DraftLengthSchedule:
    """An immutable schedule. No entries: never draft."""

    def __init__(self, entries: Mapping[int, int]) -> None:
        self._bounds = sorted(entries)
        self._draft_lens = [entries[bound] for bound in self._bounds]

    @classmethod
    def live(cls, entries: Mapping[int, int], *, max_draft_len: int, choices: tuple[int, ...]) -> tuple[Self, str]:
        """A schedule pushed while serving, lowered to the declared draft lengths, and what was lowered.

        Unlike the configured schedule, the smallest batch size need not draft max_draft_len: lowering that entry is
        what a controller is for.

        Raises:
            ValueError: empty, a key below 1, a value below 0 or above max_draft_len.
        """
        check_schedule(entries, max_draft_len=max_draft_len)
        lowered = {bound: round_down(draft_len, choices) for bound, draft_len in sorted(entries.items())}
        changes = [f"batch size {b}: {entries[b]} -> {k}" for b, k in lowered.items() if k != entries[b]]
        why = f"rounded down to draft_len_choices {list(choices)}: {', '.join(changes)}" if changes else ""
        return cls(lowered), why

    @property
    def entries(self) -> dict[int, int]:
        """Ascending by batch size."""
        return dict(zip(self._bounds, self._draft_lens, strict=True))

    def draft_len(self, batch_size: int) -> int:
        """K for a step with `batch_size` sampling rows; 0 for none."""
        index = bisect_left(self._bounds, batch_size)
        return self._draft_lens[index] if batch_size > 0 and index < len(self._bounds) else 0


def round_down(draft_len: int, choices: tuple[int, ...]) -> int:
    """The largest declared draft length that is not above `draft_len`. `choices` is ascending and contains 0."""
    return max(choice for choice in choices if choice <= draft_len)


def check_schedule(entries: Mapping[int, int], *, max_draft_len: int) -> None:
    """Raises ValueError on an entry no schedule may have."""
    if not entries:
        raise ValueError("draft_len_schedule: at least one entry is needed; use {1: 0} to switch drafting off")
    for bound, draft_len in sorted(entries.items()):
        if bound < 1:
            raise ValueError(f"draft_len_schedule: batch size threshold must be >= 1, got {bound}")
        if draft_len < 0:
            raise ValueError(f"draft_len_schedule: draft length must be >= 0, got {draft_len}")
    for bound, draft_len in sorted(entries.items()):
        if draft_len > max_draft_len:
            raise ValueError(
                f"draft_len_schedule: all draft lengths must be <= max_draft_len. Got draft_len={draft_len} for "
                f"batch_size={bound}, but max_draft_len={max_draft_len}."
            )
