"""Warps of a GPU kernel as threads on the CPU: its own source, on modelled barriers and copies that end late.

They take turns at random. What a barrier's wait tells is the parity of a phase: one that is still to come looks like
the one before it.
"""

import ast
import random
import threading
from collections.abc import Collection
from types import CodeType
from typing import Any

MOST_TURNS = 50_000


def definitions(source: str, names: Collection[str] | None = None) -> CodeType:
    """The functions of these names, or all functions and constants, without decorators: to be run in any namespace."""
    kept = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            wanted = names is None or node.name in names
        else:
            wanted = names is None and isinstance(node, ast.Assign)
        if wanted:
            kept.append(node)
    return compile(ast.Module(body=list(kept), type_ignores=[]), "kernel", "exec")


class Whatever:
    """A tensor or type that says nothing about barriers: all that is done with it gives it again."""

    def __getattr__(self, name: str) -> Any:
        return self

    def _again(self, *_: Any, **__: Any) -> Any:
        return self

    __call__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __lt__ = __and__ = _again
    __ne__ = _again  # type: ignore[assignment]


class Barrier:
    """One that completes a phase with one arrival and all bytes that it was told to expect."""

    def __init__(self) -> None:
        self.ended, self.arrivals, self.missing = 0, 1, 0

    def settle(self) -> None:
        if self.arrivals == 0 and self.missing == 0:
            self.ended, self.arrivals = self.ended + 1, 1

    def arrive(self, expected: int = 0) -> None:
        assert self.arrivals == 1, "more arrivals than a phase has"
        self.arrivals, self.missing = 0, self.missing + expected
        self.settle()


class Cells:
    """Shared memory in pieces that an index picks."""

    def __init__(self, cells: list[Any]) -> None:
        self.cells = cells

    def index(self, at: int) -> Any:
        assert 0 <= at < len(self.cells)
        return self.cells[at]


class Turns:
    """Threads of which one runs at a time, until it lets the next one do; copies in flight between them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), 0
        self.coming: list[tuple[int, Any]] = []
        self.errors: list[BaseException] = []
        self.stuck = False
        self._ready = threading.Semaphore(0)

    def run(self, parts: list[Any]) -> bool:
        """Whether all came to an end."""
        self._turn = [threading.Semaphore(0) for _ in parts]
        self._waits_for: list[Any] = [None] * len(parts)
        left = set(range(len(parts)))
        threads = [threading.Thread(target=self._part, args=(i, part), daemon=True) for i, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        self._left = left
        while left:
            self.now += 1
            for due, land in [come for come in self.coming if come[0] <= self.now]:
                self.coming.remove((due, land))
                land()
            able = [i for i in sorted(left) if self._waits_for[i] is None or self._waits_for[i]()]
            if (not able and not self.coming) or self.now > MOST_TURNS:
                self.stuck = True
                able = sorted(left)
            if able:
                self._turn[self.rng.choice(able)].release()
                self._ready.acquire()
        for thread in threads:
            thread.join()
        return not self.stuck

    def _part(self, number: int, part: Any) -> None:
        self._local.number = number
        self._turn[number].acquire()
        try:
            part()
        except SystemExit:
            pass
        except BaseException as error:
            self.errors.append(error)
        self._left.discard(number)
        self._ready.release()

    _local = threading.local()

    @property
    def number(self) -> int:
        """Of the part whose turn it is."""
        return int(self._local.number)

    def until(self, holds: Any = None) -> None:
        """Lets others run, and comes back when it holds."""
        number = self._local.number
        self._waits_for[number] = holds
        self._ready.release()
        self._turn[number].acquire()
        if self.stuck:
            raise SystemExit
        self._waits_for[number] = None
