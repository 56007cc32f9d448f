"""Keeps evaluation prompts out of training: a prompt that shares a run of words with one is refused."""

import re
from collections import Counter
from collections.abc import Iterable

_WORD = re.compile(r"[a-z0-9]+")


class OverlapIndex:
    """Runs of `size` words of the evaluation prompts.

    A run found in `shared_by` or more of them is their common instruction ("Please reason step by step ..."), which
    says nothing about any one of them, and is not counted.
    """

    def __init__(self, held_out: Iterable[str], *, size: int = 8, shared_by: int = 3) -> None:
        if size < 1 or shared_by < 2:
            raise ValueError(f"size must be at least 1 and shared_by at least 2, got {size} and {shared_by}.")
        self.size = size
        prompts = list(dict.fromkeys(held_out))
        counts = Counter(run for text in prompts for run in set(word_runs(text, size)))
        self.runs = {run for run, count in counts.items() if count < shared_by}
        self.short_runs = [run for run in self.runs if len(run) < size]

    def overlaps(self, text: str) -> bool:
        """A held-out prompt shorter than the run counts as a run of its own length and must be contained whole."""
        words = tuple(_WORD.findall(text.lower()))
        if any(run in self.runs for run in word_runs(text, self.size)):
            return True
        return any(words[i : i + len(run)] == run for run in self.short_runs for i in range(len(words) - len(run) + 1))


def word_runs(text: str, size: int) -> list[tuple[str, ...]]:
    """All runs of `size` words, lower-cased, punctuation dropped; a shorter text is one run."""
    words = _WORD.findall(text.lower())
    if len(words) <= size:
        return [tuple(words)] if words else []
    return [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
