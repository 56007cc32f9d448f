"""Which ids of a vocabulary the target writes, and how often: what a drafter's head may be cut to.

A draft outside the cut is never made, so the target's own token takes its place: output stays as it is, a step is one
token shorter now and then. Shapes: V vocabulary, D ids kept.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.training.corpus import Corpus


def token_counts(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """How often each id occurs in the corpus' responses, int64 [V]; prompts are not drafted and do not count."""
    lengths = np.diff(corpus.start)
    place = np.arange(len(corpus.tokens)) - np.repeat(corpus.start[:-1], lengths)
    in_response = place >= np.repeat(corpus.prompt_len, lengths)
    return np.bincount(corpus.tokens[in_response], minlength=vocab_size)


def most_frequent(counts_V: np.ndarray, size: int, *, always: Sequence[int] = ()) -> np.ndarray:
    """The `size` most frequent ids, ascending, int64 [D]; equal counts: the lower id. `always` are among them.

    Raises:
        ValueError: a size outside 1 .. V, or below the number of ids in `always`.
    """
    V = len(counts_V)
    if not max(1, len(always)) <= size <= V:
        raise ValueError(f"a head of {size} rows: must lie in {max(1, len(always))}..{V}.")
    rank_V = counts_V.astype(np.int64).copy()
    rank_V[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-rank_V, kind="stable")[:size])


def read_counts(path: Path, vocab_size: int) -> np.ndarray:
    """Counts of a .npy file, int64 [V].

    Raises:
        ValueError: no such file, or not one count for each id.
    """
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a .npy file of counts: {error}") from error
    if counts.shape != (vocab_size,) or counts.dtype.kind not in "iu" or counts.min() < 0:
        raise ValueError(
            f"{path}: holds {counts.dtype} {list(counts.shape)}; wanted one count >= 0 for each of the target's "
            f"{vocab_size} ids."
        )
    return counts.astype(np.int64)
