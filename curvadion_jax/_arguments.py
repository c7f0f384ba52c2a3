"""Checks of arguments that several parts take, with one wording.

Only plain numbers are looked at: schedules, and traced numbers as
`optax.inject_hyperparams` makes them, pass.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

_PLAIN = (int, float, np.number)


def check_static(value: Any, what: str) -> None:
    """Rejects a traced number where a Python number is needed."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{what} must be a Python number, got a traced value. With "
            f"optax.inject_hyperparams, pass static_args=({what!r},)."
        )


def check_int(value: Any, what: str, at_least: int = 1) -> None:
    """Rejects what is not a plain int, a traced number included, or is too small."""
    check_static(value, what)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {value!r}.")
    if value < at_least:
        raise ValueError(f"{what} must be at least {at_least}, got {value}.")


def check_number(value: Any, what: str, below: float | None = None) -> None:
    """Rejects a number that is negative, NaN, or not below a limit."""
    if not isinstance(value, _PLAIN):
        return
    if not value >= 0 or (below is not None and value >= below):
        limit = "" if below is None else f" and below {below}"
        raise ValueError(f"{what} must be at least 0{limit}, got {value}.")


def check_numbers(**values: Any) -> None:
    """Rejects numbers that are negative or NaN."""
    for name, value in values.items():
        check_number(value, name)


def check_positive(value: Any, what: str) -> None:
    """Rejects a number that is not above 0 and finite."""
    if isinstance(value, _PLAIN) and not 0 < value < math.inf:
        raise ValueError(f"{what} must be above 0 and finite, got {value}.")


def check_transformation(value: Any, what: str) -> None:
    """Rejects what is not an Optax transformation, such as the function that makes one.

    Args:
      value: what was given.
      what: name of the argument.
    """
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{what} must be an Optax transformation such as optax.sgd(0.1), got "
            f"{value!r:.200}. An optax.MultiSteps has one: gradient_transformation()."
        )


def check_fraction(value: Any, what: str) -> None:
    """Rejects a number outside (0, 1], such as a percentage."""
    if isinstance(value, _PLAIN) and not 0 < value <= 1:
        raise ValueError(
            f"{what} is a fraction in (0, 1], got {value}. Ten percent is 0.1."
        )


def check_one(**values: Any) -> None:
    """Rejects two arguments of which one would be ignored."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be combined. Pass one of them.")


def with_schedule(
    make: Callable[[Any], optax.GradientTransformation], value: Any
) -> optax.GradientTransformation:
    """What is made of a value, or of that of every step by a schedule."""
    if not callable(value):
        return make(value)
    # In the dtype of the updates, which is Optax's own choice, 0.999 may be 1.
    dtype = jnp.result_type(float)
    return optax.inject_hyperparams(make, hyperparam_dtype=dtype)(value)
