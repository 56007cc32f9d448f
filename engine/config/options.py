"""Checks of a user's options by themselves: every message starts with the option's name and says what it takes.

Python takes True for 1, any text for true, and answers a comparison of text with a number by a TypeError that names no
option; here all three are told apart.
"""

import math
from numbers import Integral, Real
from typing import Any, TypeGuard

_LIMIT = 1 << 63


def is_whole(value: object) -> TypeGuard[int]:
    """Whether this is a whole number, of any integer type but bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether this is a number, of any real type but bool, that is neither NaN nor infinite nor beyond a float."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the allowed texts."""
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(allowed)}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raises ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be True or False, got {value!r}")


def check_whole(name: str, value: object) -> None:
    """Raises ValueError unless the value is a whole number that fits 64 bits."""
    if not is_whole(value):
        raise ValueError(f"{name}: must be a whole number, got {value!r}")
    if not -_LIMIT <= value < _LIMIT:
        raise ValueError(f"{name}: must be a whole number of at most 64 bits")


def check_count(name: str, value: object) -> None:
    """Raises ValueError unless the value is a whole number from 1."""
    check_whole(name, value)
    if value < 1:  # type: ignore[operator]
        raise ValueError(f"{name}: must be at least 1, got {value}")


def whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """The values as a tuple of ints. Raises ValueError unless they are a list, or another series, of whole numbers."""
    try:
        given: tuple[Any, ...] = tuple(values)  # type: ignore[arg-type]
    except TypeError as error:  # of an array without dimensions too, which has an iterator that it cannot give
        raise ValueError(f"{name}: must be a list of whole numbers, got {values!r}") from error
    if not all(map(is_whole, given)):
        raise ValueError(f"{name}: must be whole numbers, got {list(given)}")
    return tuple(map(int, given))
