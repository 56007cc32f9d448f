"""`RequestStory`: what a simulated request emits and which of its drafts are right, from its seed alone.

Everything is a function of (seed, position), drawn in chunks of positions: the token at a position, and how many
leading drafts of a block that starts there are right. Neither depends on K, on the batch or on a preemption.
"""

import numpy as np
import numpy.typing as npt

from engine.simulated.profile import HazardClass

_CHUNK = 256  # positions drawn at once
_OFFSET_STREAM = 1 << 63  # a chunk number that no position reaches: the draw of the request's own offset
_SEED_MASK = (1 << 64) - 1


class RequestStory:
    """One request.

    first_position: of its first output token. token_ids: what tokens are drawn from. width: drafts of a full block.
    """

    def __init__(
        self, *, seed: int, first_position: int, kind: HazardClass, token_ids: npt.NDArray[np.int64], width: int
    ) -> None:
        self._seed = seed & _SEED_MASK
        self._first = first_position
        self._token_ids = token_ids
        self._kind = kind
        offset_rng = self._rng(_OFFSET_STREAM)
        self._offset = kind.spread * offset_rng.standard_normal()
        self._wander = kind.wobble * offset_rng.standard_normal()
        hazards = np.array([kind.hazard(j) for j in range(1, width + 1)], dtype=np.float64)
        with np.errstate(divide="ignore"):
            self._log_odds = np.log(hazards) - np.log1p(-hazards)  # infinite at 0 and 1, and stays so
        self._tokens: list[int] = []
        self._num_right: list[int] = []
        self._num_chunks = 0

    def tokens(self, start: int, stop: int) -> list[int]:
        """Output tokens at positions start .. stop-1."""
        self._draw_until(stop)
        return self._tokens[start - self._first : stop - self._first]

    def num_right(self, position: int) -> int:
        """Leading drafts that are right in a block behind the token at `position`."""
        self._draw_until(position + 1)
        return self._num_right[position - self._first]

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([self._seed, stream], dtype=np.uint64)))

    def _draw_until(self, stop: int) -> None:
        while len(self._tokens) < stop - self._first:
            rng = self._rng(self._num_chunks)
            self._num_chunks += 1
            self._tokens += self._token_ids[rng.integers(len(self._token_ids), size=_CHUNK)].tolist()
            shifts = self._shifts(rng.standard_normal(_CHUNK))
            coins = rng.random((_CHUNK, len(self._log_odds)))
            with np.errstate(over="ignore"):
                hazards = 1.0 / (1.0 + np.exp(-(self._log_odds + shifts[:, None])))
            self._num_right += np.cumprod(coins < hazards, axis=1).sum(axis=1).tolist()

    def _shifts(self, shocks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The log-odds' shift at each position of the next chunk: an offset and an AR(1) process."""
        memory = self._kind.memory
        scale = self._kind.wobble * (1.0 - memory * memory) ** 0.5
        shifts = np.empty(_CHUNK)
        wander = self._wander
        for index, shock in enumerate(shocks.tolist()):
            wander = memory * wander + scale * shock
            shifts[index] = wander
        self._wander = wander
        return shifts + self._offset
