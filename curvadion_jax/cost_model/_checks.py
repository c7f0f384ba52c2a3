"""Checks of arguments: comparisons are spelled so that NaN fails them."""

import math
import numbers
import operator
from typing import Any


def check_positive(name: str, value: float, unit: str) -> float:
    """Returns what is above zero, infinity included."""
    if not _number(name, value) > 0:
        raise ValueError(f"{name} is {value!r}; give a number above 0, in {unit}.")
    return value


def check_not_negative(name: str, value: float, unit: str) -> float:
    """Returns what is finite and not negative."""
    if not (_number(name, value) >= 0 and math.isfinite(value)):
        raise ValueError(
            f"{name} is {value!r}; give a finite number of at least 0, in {unit}."
        )
    return value


def check_rate(name: str, value: float) -> float:
    """Returns what lies in [0, 1]."""
    if not 0 <= _number(name, value) <= 1:
        raise ValueError(
            f"{name} is {value!r}; give a share of the steps between 0 and 1 "
            "(3% is 0.03)."
        )
    return value


def check_count(name: str, value: int, least: int) -> int:
    """Returns a whole number of at least `least`, NumPy's too, as Python's int."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give a whole number.") from None
    if count < least:
        raise ValueError(f"{name} is {value!r}; give a whole number >= {least}.")
    return count


def check_type(name: str, value: Any, kind: type, example: str) -> None:
    """Rejects what is not of the kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; give a {kind.__name__}: {example}.")


def _number(name: str, value: float) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; give a number.")
    return value
