"""What a simulated device is like: its step times, and how often its drafter is right for which requests.

An acceptance profile is a YAML file:

    description: where the curves come from
    classes:
      easy: {hazards: [0.95, 0.94, 0.93], spread: 0.4, wobble: 0.5, memory: 0.9}
      hard: {hazards: [0.50, 0.45, 0.40], share: 2}

A request's class follows from its seed: `seed` modulo the sum of the shares counts through the classes, in the file's
order. With the two classes above seed 0, 3, 6, .. are easy, all others hard. A request without a seed is given a random
one, so classes come in proportion to their shares.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.config.options import is_finite
from engine.config.yaml_file import read_yaml
from engine.step_table import StepTable, load_step_table

T = TypeVar("T")


class HazardClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a kind of request accepts drafts.

    hazards: of draft 1, 2, ..: the probability that it is right if all before it were; the last one holds for the
        positions behind it. They are those of a request in the middle of its class.
    spread:  standard deviation, between requests, of a shift of the hazards' log-odds.
    wobble:  standard deviation of a further shift that wanders while a request is decoded.
    memory:  correlation of that shift from one token to the next, 0 (independent) to below 1.
    share:   how many of `sum of shares` consecutive seeds are of this class.
    """

    hazards: tuple[float, ...]
    spread: float = 0.0
    wobble: float = 0.0
    memory: float = 0.0
    share: int = 1

    def hazard(self, position: int) -> float:
        """Of draft `position`, counted from 1."""
        return self.hazards[min(position, len(self.hazards)) - 1]


class AcceptanceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The classes of requests, by name, in order."""

    description: str
    classes: dict[str, HazardClass]

    def class_of(self, seed: int) -> str:
        """Name of the class of a request with this seed."""
        place = seed % sum(kind.share for kind in self.classes.values())
        for name, kind in self.classes.items():
            if place < kind.share:
                return name
            place -= kind.share
        raise AssertionError("shares are positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """A simulated device as a config names it. steps, acceptance: files; speed: see `Simulation`."""

    steps: str
    acceptance: str
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A simulated device. speed: simulated seconds in a second of real time."""

    steps: StepTable
    acceptance: AcceptanceProfile
    speed: float


def load_simulation(options: SimulationOptions, *, max_num_seqs: int, draft_len_choices: tuple[int, ...]) -> Simulation:
    """Read the files and check that the step table covers the engine.

    Raises:
        ValueError: the message starts with "simulation.", the key and the file.
    """
    steps = _named("steps", load_step_table, options.steps)
    acceptance = _named("acceptance", load_acceptance, options.acceptance)
    if max_num_seqs > steps.buckets[-1]:
        raise ValueError(
            f"simulation.steps: {options.steps} ends at {steps.buckets[-1]} rows, max_num_seqs is {max_num_seqs}; "
            "lower max_num_seqs or extend the table"
        )
    missing = sorted(set(draft_len_choices) - set(steps.draft_lens))
    if missing:
        raise ValueError(
            f"simulation.steps: {options.steps} has no times for the draft lengths {missing}; extend the table, or set "
            f"draft_len_choices to some of {list(steps.draft_lens)}"
        )
    if not (is_finite(options.speed) and options.speed > 0.0):
        raise ValueError(f"simulation.speed: must be a finite number above 0, got {options.speed!r}")
    return Simulation(steps=steps, acceptance=acceptance, speed=options.speed)


def load_acceptance(path: str | Path) -> AcceptanceProfile:
    """Read an acceptance profile.

    Raises:
        ValueError: it cannot be read, or is no profile; the message starts with the path.
    """
    try:
        profile = msgspec.convert(read_yaml(Path(path)), AcceptanceProfile)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not profile.classes:
        raise ValueError(f"{path}: classes: at least one is needed")
    for name, kind in profile.classes.items():
        problem = _class_problem(kind)
        if problem is not None:
            raise ValueError(f"{path}: classes.{name}.{problem}")
    return profile


def _class_problem(kind: HazardClass) -> str | None:
    if not kind.hazards or not all(0.0 <= hazard <= 1.0 for hazard in kind.hazards):
        return f"hazards: must be probabilities, at least one, got {list(kind.hazards)}"
    for name in ("spread", "wobble"):
        if not 0.0 <= getattr(kind, name) < math.inf:
            return f"{name}: must not be negative, got {getattr(kind, name)}"
    if not 0.0 <= kind.memory < 1.0:
        return f"memory: must be at least 0 and below 1, got {kind.memory}"
    if kind.share < 1:
        return f"share: must be at least 1, got {kind.share}"
    return None


def _named(key: str, load: Callable[[Path], T], path: str) -> T:
    try:
        return load(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"simulation.{key}: {error}") from error
