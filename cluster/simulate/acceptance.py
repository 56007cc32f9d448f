"""Which drafts are right: the classes' curves turned into tables, so that a step of many rows is two look-ups.

A request's log-odds are its class's, shifted by an offset of its own and by a value that wanders from token to token.
Both are standard normal before scaling and cut into levels of equal chance. How many leading drafts are right behind a
token is then a function of (class, offset level, wander level, uniform draw). The draws and the wandering come from one
long random text per class and seed, in which a request has a place: what is right where depends neither on K nor on the
policy, so policies are compared on the same texts.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from cluster.simulate.scenario import RequestClass

_LEVELS = 24  # of the offset, and of the wandering shift
DRAWS = 1024  # values of the uniform draw
NUM_PLACES = 1 << 19  # tokens of a class's text
_STRAND = 512  # tokens after which the wandering starts anew


def _level_values() -> np.ndarray:
    """The middle of each level, scaled to unit variance; [levels]."""
    normal = NormalDist()
    values = np.array([normal.inv_cdf((level + 0.5) / _LEVELS) for level in range(_LEVELS)])
    return values / values.std()


@dataclass(frozen=True, slots=True)
class AcceptanceTables:
    """num_right[cell * 1024 + draw]: leading drafts that are right; cell = (class * 24 + offset level) * 24 + wander.

    survival[cell, j-1]: chance that at least j drafts are right, exactly as the table above gives it.
    width: the largest draft length.
    """

    num_right: np.ndarray
    survival: np.ndarray
    width: int

    @classmethod
    def of(cls, classes: tuple[RequestClass, ...], width: int) -> "AcceptanceTables":
        """Tables of the classes, in order, for blocks of `width` drafts."""
        levels = _level_values()
        blocks = []
        for kind in classes:
            hazards = np.array([kind.hazards[min(j, len(kind.hazards) - 1)] for j in range(width)])
            log_odds = np.log(hazards / (1.0 - hazards))
            shifts = kind.spread * levels[:, None] + kind.wobble * levels[None, :]
            blocks.append(1.0 / (1.0 + np.exp(-(log_odds + shifts[:, :, None]))))
        survival = np.cumprod(np.stack(blocks), axis=-1).reshape(-1, width)
        thresholds = np.rint(survival * DRAWS).astype(np.int64)
        num_right = np.zeros((len(survival), DRAWS), dtype=np.int8)
        rows = np.arange(len(survival))
        for index in range(width):
            # one more draft is right for every draw below the threshold: a step down the row, summed up afterwards
            inside = thresholds[:, index] > 0
            num_right[rows[inside], thresholds[inside, index] - 1] += 1
        num_right = num_right[:, ::-1].cumsum(axis=1, dtype=np.int8)[:, ::-1]
        return cls(np.ascontiguousarray(num_right).ravel(), thresholds / DRAWS, width)

    def first_cells(self, kind: np.ndarray, offset_level: np.ndarray) -> np.ndarray:
        """The cells of requests at wander level 0."""
        return (kind * _LEVELS + offset_level) * _LEVELS

    def tokens(self, draft_lens: tuple[int, ...]) -> np.ndarray:
        """Expected tokens of a row's step; [cells, draft lengths]."""
        sums = np.concatenate([np.zeros((len(self.survival), 1)), np.cumsum(self.survival, axis=1)], axis=1)
        return (1.0 + sums[:, list(draft_lens)]).astype(np.float32)


def offset_levels(rng: np.random.Generator, num_requests: int) -> np.ndarray:
    """Levels of requests' own offsets; [requests]."""
    return rng.integers(_LEVELS, size=num_requests).astype(np.int32)


def text_keys(rng: np.random.Generator, kind: RequestClass) -> np.ndarray:
    """A class's random text: wander level * 1024 + draw at every place; [places], int16."""
    strands = NUM_PLACES // _STRAND
    wander = np.empty((strands, _STRAND))
    wander[:, 0] = rng.standard_normal(strands)
    scale = (1.0 - kind.memory**2) ** 0.5
    for place in range(1, _STRAND):
        wander[:, place] = kind.memory * wander[:, place - 1] + scale * rng.standard_normal(strands)
    edges = np.array([NormalDist().inv_cdf(level / _LEVELS) for level in range(1, _LEVELS)])
    levels = np.searchsorted(edges, wander.ravel())
    return (levels * DRAWS + rng.integers(DRAWS, size=NUM_PLACES)).astype(np.int16)


def places(rng: np.random.Generator, num_requests: int, longest: int) -> np.ndarray:
    """Where requests of at most `longest` tokens start in their class's text; [requests].

    Raises:
        ValueError: longer than a text.
    """
    if longest >= NUM_PLACES:
        raise ValueError(f"output.at_most: at most {NUM_PLACES - 1} tokens can be simulated, got {longest}")
    return rng.integers(NUM_PLACES - longest, size=num_requests).astype(np.int32)
