"""Checks of a user's options by themselves: every message starts with the option's name and says what it takes.

Python takes True for 1, any text for true, and answers a comparison of text with a number by a TypeError that names no
option; here all three are told apart.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether this is a whole number, of any integer type but bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether this is a number, of any real type but bool, that is neither NaN nor infinite."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the allowed texts."""
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(allowed)}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raises ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be True or False, got {value!r}")


def check_whole(name: str, value: object) -> None:
    """Raises ValueError unless the value is a whole number."""
    if not is_whole(value):
        raise ValueError(f"{name}: must be a whole number, got {value!r}")


def whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """The values as a tuple. Raises ValueError unless they are a list, or another series, of whole numbers."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}: must be a list of whole numbers, got {values!r}")
    given = tuple(values)
    if not all(map(is_whole, given)):
        raise ValueError(f"{name}: must be whole numbers, got {list(given)}")
    return given
