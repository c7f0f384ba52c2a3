"""Checks of arguments, shared by the parts of the cost model.

Every message names the argument, prints the value that was got, and says what to
give instead. The comparisons are spelled so that NaN fails them.
"""

import math
import numbers
import operator
from typing import Any


def check_positive(name: str, value: float, unit: str) -> float:
    """Returns `value`, or raises `ValueError` unless it is above zero.

    Args:
      name: The argument's name, for the message.
      value: The value to check; infinity is allowed.
      unit: The unit that the argument has, for the message.

    Returns:
      `value`.

    Raises:
      ValueError: If `value` is zero, negative or NaN.
      TypeError: If `value` is no number.
    """
    if not _number(name, value) > 0:
        raise ValueError(f"{name} is {value!r}; give a number above 0, in {unit}.")
    return value


def check_not_negative(name: str, value: float, unit: str) -> float:
    """Returns `value`, or raises `ValueError` unless it is finite and not negative.

    Args:
      name: The argument's name, for the message.
      value: The value to check.
      unit: The unit that the argument has, for the message.

    Returns:
      `value`.

    Raises:
      ValueError: If `value` is negative, infinite or NaN.
      TypeError: If `value` is no number.
    """
    if not (_number(name, value) >= 0 and math.isfinite(value)):
        raise ValueError(
            f"{name} is {value!r}; give a finite number of at least 0, in {unit}."
        )
    return value


def check_rate(name: str, value: float) -> float:
    """Returns `value`, or raises `ValueError` unless it lies in [0, 1].

    Args:
      name: The argument's name, for the message.
      value: The share to check.

    Returns:
      `value`.

    Raises:
      ValueError: If `value` lies outside [0, 1] or is NaN.
      TypeError: If `value` is no number.
    """
    if not 0 <= _number(name, value) <= 1:
        raise ValueError(
            f"{name} is {value!r}; give a share of the steps between 0 and 1 "
            "(3% is 0.03)."
        )
    return value


def check_count(name: str, value: int, least: int) -> int:
    """Returns `value` as an int, or raises unless it is a whole number >= `least`.

    Args:
      name: The argument's name, for the message.
      value: The count to check.
      least: The smallest count allowed.

    Returns:
      `value` as a Python int.

    Raises:
      ValueError: If `value` is below `least`.
      TypeError: If `value` is not an integer.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give a whole number.") from None
    if count < least:
        raise ValueError(f"{name} is {value!r}; give a whole number >= {least}.")
    return count


def check_type(name: str, value: Any, kind: type, example: str) -> None:
    """Raises `TypeError` unless `value` is of the kind.

    Args:
      name: The argument's name, for the message.
      value: The value to check.
      kind: What it has to be.
      example: What to give instead, for the message.

    Raises:
      TypeError: If it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; give a {kind.__name__}: {example}.")


def _number(name: str, value: float) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; give a number.")
    return value
