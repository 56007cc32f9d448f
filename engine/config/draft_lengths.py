"""From a DFlashDecodingConfig to the draft lengths an engine runs: the declared widths and the static schedule."""

import itertools
import logging
from collections.abc import Sequence

from engine.config.decoding import DFlashDecodingConfig
from engine.config.options import is_finite, whole_numbers
from engine.speculative.schedule import round_down

logger = logging.getLogger(__name__)

# Widths between which the step time grows noticeably; every width is one more captured program.
DEFAULT_CHOICES = (0, 1, 2, 3, 5, 7, 11, 15)


def check_max_draft_len(max_draft_len: int, block_size: int) -> None:
    """Raises ValueError when a drafter of this block size cannot draft so many tokens."""
    if max_draft_len > block_size - 1:
        raise ValueError(
            f"speculative_config.max_draft_len: DFlash checkpoint was trained with block_size={block_size}. Lower "
            f"max_draft_len to at most {block_size - 1}. Current max_draft_len={max_draft_len}."
        )


def check_block_width(width: int | None, max_draft_len: int, trained: int) -> None:
    """Raises ValueError when the drafter's block cannot be so wide: trained is its own width, and a block of W rows
    makes at most W - 1 drafts."""
    if width is None or max_draft_len < width <= trained:
        return
    limits = f"must lie between max_draft_len + 1 = {max_draft_len + 1} and {trained}, the width the drafter has learnt"
    if width > trained:
        raise ValueError(f"draft_block_width: {limits}, got {width}; lower it, or leave it out for {trained}")
    fewer = f", or lower speculative_config.max_draft_len to at most {width - 1}" if width > 1 else ""
    raise ValueError(f"draft_block_width: {limits}, got {width}; raise it{fewer}")


def check_synthetic_length(length: float | None, max_draft_len: int) -> float | None:
    """The mean of tokens a step that drafts are accepted for by decree. Raises ValueError where no such mean can be."""
    if length is None:
        return None
    if not (is_finite(length) and 1.0 <= length <= max_draft_len + 1):
        raise ValueError(
            "synthetic_acceptance_length: must lie between 1 and max_draft_len + 1 = "
            f"{max_draft_len + 1}, got {length!r}"
        )
    logger.warning(
        "synthetic_acceptance_length: drafts are accepted by decree (%s tokens a step); the output means nothing",
        length,
    )
    return float(length)


def resolve_choices(max_draft_len: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """The program widths, ascending, from 0 to max_draft_len.

    Raises:
        ValueError: given widths that are no whole numbers, or do not ascend strictly from 0 to max_draft_len.
    """
    if given is None:
        return tuple(sorted({*(choice for choice in DEFAULT_CHOICES if choice <= max_draft_len), max_draft_len}))
    choices = whole_numbers("draft_len_choices", given)
    if not choices or choices[0] != 0 or any(a >= b for a, b in itertools.pairwise(choices)):
        raise ValueError(f"draft_len_choices: must ascend strictly and start with 0, got {list(choices)}")
    if choices[-1] != max_draft_len:
        raise ValueError(
            f"draft_len_choices: the largest must be max_draft_len={max_draft_len}, got {list(choices)}; change "
            "one of the two"
        )
    return choices


def resolve_schedule(
    config: DFlashDecodingConfig, choices: tuple[int, ...], max_num_seqs: int
) -> tuple[tuple[int, int], ...]:
    """((batch size upper bound, K), ...) ascending. Without a schedule: max_draft_len at every batch size.

    A length between two choices is rounded down, with a warning.
    """
    assert config.max_draft_len is not None
    schedule = config.draft_len_schedule or {max_num_seqs: config.max_draft_len}
    resolved = []
    for batch_size, draft_len in sorted(schedule.items()):
        rounded = round_down(draft_len, choices)
        if rounded != draft_len:
            logger.warning(
                "draft_len_schedule[%d]: %d is not one of draft_len_choices %s; using %d",
                batch_size,
                draft_len,
                list(choices),
                rounded,
            )
        resolved.append((batch_size, rounded))
    return tuple(resolved)


def rows_of_largest_step(schedule: tuple[tuple[int, int], ...], max_num_seqs: int) -> int:
    """Target rows of the largest pure decode step: the maximum over batch sizes b of b * (1 + K(b))."""
    largest, lower = max_num_seqs, 0
    for upper, draft_len in schedule:
        batch_size = min(upper, max_num_seqs)
        if batch_size > lower:
            largest = max(largest, batch_size * (1 + draft_len))
        lower = upper
    return largest
