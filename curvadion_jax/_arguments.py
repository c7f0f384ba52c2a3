"""Checks of arguments that several parts take, with one wording.

A message names the argument, says what it must be and what it got. A traced number, as
`optax.inject_hyperparams` makes it, cannot be looked at and is accepted as it is.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax import _matrices

SCHEDULE = " or a schedule"
_MOST = 2**31 - 1
_LONGEST = 200  # characters of a value in a message
Function = TypeVar("Function", bound=Callable[..., Any])


def shown(value: Any) -> str:
    """The value as it prints, or its type where that is long, as of a whole state."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"a {type(value).__name__}"


def check_int(value: Any, what: str) -> None:
    """Rejects what is not a plain int, a traced number included."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{what} must be an int, got {value!r}; with "
            "optax.inject_hyperparams name it in static_args"
        )


def check_steps(steps: Any, what: str, at_least: int = 1) -> None:
    """Rejects a number of steps that is not a plain int, or too small or large."""
    check_int(steps, what)
    if steps < at_least:
        raise ValueError(f"{what} must be at least {at_least}, got {steps}")
    if steps > _MOST:
        raise ValueError(
            f"{what} must be at most {_MOST}, since steps are counted in int32, got "
            f"{steps}; for 'never' there is triggers.never()"
        )


def called_here(**names: str) -> Callable[[Function], Function]:
    """Says what an argument is called here that is known by another name elsewhere."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & names.keys():
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}: use "
                    f"{names[name]}={kwargs[name]!r}, as it is called here"
                )
            return function(*args, **kwargs)

        parts = inspect.signature(function)
        of_call = cast(Any, call)
        of_call.__signature__ = _Readable(
            list(parts.parameters.values()),
            return_annotation=parts.return_annotation,
        )
        return of_call

    return decorate


class _Readable(inspect.Signature):
    """A signature that prints types by their names; written out they fill a screen."""

    def __str__(self) -> str:
        return _named(super().__str__())

    def format(self, **options: Any) -> str:  # of `help` from Python 3.13 on
        return _named(cast(Any, super()).format(**options))


def _named(text: str) -> str:
    def bare(text):  # without names of modules before those of types
        return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)

    text = bare(text)
    for name in ("ScalarOrSchedule", "Params", "ArrayLike", "DTypeLike"):
        alias = getattr(optax, name, None) or getattr(jax.typing, name)
        for written, suffix in ((alias | None, " | None"), (alias, "")):
            text = text.replace(bare(inspect.formatannotation(written)), name + suffix)
    return text


ELSEWHERE = {"lr": "learning_rate", "rank_fraction": "rank", "wd": "weight_decay"}


def plain(value: Any) -> Any:
    """A number of NumPy, as sweeps make them, as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def check_number(value: Any, what: str, or_schedule: str = "") -> None:
    """Rejects what is not a number (or a schedule), and a negative or NaN one."""
    value = plain(value)
    if not hasattr(value, "dtype") and not (or_schedule and callable(value)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{what} must be a number{or_schedule}, got {value!r}")
    if isinstance(value, int | float) and (value < 0 or math.isnan(value)):
        raise ValueError(f"{what} must not be negative or NaN, got {value}")


def check_positive(value: Any, what: str) -> None:
    """Rejects what is not a number above 0, and an infinite one."""
    check_number(value, what)
    value = plain(value)
    if isinstance(value, int | float) and not 0 < value < math.inf:
        raise ValueError(f"{what} must be above 0 and finite, got {value}")


def check_rate(value: Any, what: str = "learning_rate") -> None:
    """Rejects what is neither a schedule nor a finite number of at least 0."""
    check_number(value, what, SCHEDULE)
    value = plain(value)
    if isinstance(value, int | float) and math.isinf(value):
        raise ValueError(f"{what} must be finite, got {value}")


def check_momentum(momentum: Any, what: str = "momentum") -> None:
    """Rejects what is not a number, and a plain number outside [0, 1)."""
    momentum = plain(momentum)
    number = isinstance(momentum, int | float) or hasattr(momentum, "dtype")
    if isinstance(momentum, bool) or not number:
        hint = " (schedules by optax.inject_hyperparams)" if callable(momentum) else ""
        raise TypeError(f"{what} must be a number in [0, 1){hint}, got {momentum!r}")
    if isinstance(momentum, int | float) and not 0 <= momentum < 1:
        raise ValueError(f"{what} must lie in [0, 1), got {momentum}")


def check_seed(seed: Any) -> None:
    """Rejects what is not an int."""
    seed = plain(seed)
    if not hasattr(seed, "dtype"):
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an int, got {seed!r}")


def check_dtype(dtype: Any, what: str) -> None:
    """Rejects what is not a floating-point dtype; None is that of the parameters."""
    if dtype is None:
        return
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(
            f"{what} must be a floating-point dtype such as jax.numpy.bfloat16, or "
            f"None for that of the parameters, got {dtype!r}"
        )


def check_switch(value: Any, what: str) -> None:
    """Rejects what is not True or False: a text such as 'no' would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, got {value!r}")


def check_function(value: Any, what: str, example: str, optional: bool = True) -> None:
    """Rejects what cannot be called, but for a None that is the default."""
    if not callable(value) and not (optional and value is None):
        raise TypeError(f"{what} must be a function such as {example}, got {value!r}")


def check_orthonormalize(value: Any) -> None:
    """Rejects what is no way to make columns orthonormal."""
    check_function(value, "orthonormalize", "curvadion_jax.cholesky_qr")


def check_transformation(value: Any, what: str, example: str) -> None:
    """Rejects what is not an Optax transformation, such as the function that makes one.

    An `optax.MultiSteps` has one, `gradient_transformation()`.

    Args:
      value: what was given.
      what: name of the argument.
      example: what to give.
    """
    if not isinstance(value, optax.GradientTransformation):
        if hasattr(value, "gradient_transformation"):
            example = "its gradient_transformation()"
        raise TypeError(
            f"{what} must be an Optax transformation such as {example}, got {value!r}"
        )


def check_rates(learning_rate: Any, weight_decay: Any, adam_learning_rate: Any) -> None:
    """Rejects rates that are neither finite numbers of at least 0 nor schedules."""
    check_rate(learning_rate)
    check_rate(weight_decay, "weight_decay")
    if adam_learning_rate is not None:
        check_rate(adam_learning_rate, "adam_learning_rate")


def check_other_optimizer(other_optimizer: Any, adam_learning_rate: Any) -> None:
    """Rejects non-transformations, and `adam_learning_rate` with `other_optimizer`."""
    check_transformation(other_optimizer, "other_optimizer", "optax.adamw(1e-3)")
    if adam_learning_rate is not None:
        raise ValueError(
            "adam_learning_rate belongs to the default other optimizer: give it to "
            f"other_optimizer itself, got both, {adam_learning_rate!r} among them"
        )


def checked_budget(budget: Any, default: float) -> Any:
    """The share of the bytes, or the default; rejects what is no share."""
    if budget is None:
        return default
    check_positive(budget, "budget")
    share = plain(budget)
    if isinstance(share, int | float) and share > 1:
        raise ValueError(
            "budget is a share of the bytes of synchronous training, above 0 and at "
            f"most 1, got {share}; ten percent is 0.1"
        )
    return budget


def reject_both(what: str, beside: str, there: str) -> None:
    """Rejects an argument beside another one, in which it would be something else."""
    raise ValueError(
        f"give {what} or {beside}, got both: {beside} says it itself, as in {there}"
    )


def with_schedule(
    make: Callable[[Any], optax.GradientTransformation], value: Any
) -> optax.GradientTransformation:
    """What is made of a value, or of that of every step by a schedule."""
    if not callable(value):
        return make(value)
    # In the dtype of the updates, which is Optax's own choice, 0.999 may be 1.
    dtype = jnp.result_type(float)
    return optax.inject_hyperparams(make, hyperparam_dtype=dtype)(value)


def check_dion(rank, momentum, mu_dtype, orthonormalize, error_feedback, seed) -> None:
    """Rejects arguments of Dion that are out of range or of the wrong kind."""
    if rank is not None:
        _matrices.check_rank(rank)
    check_momentum(momentum)
    check_dtype(mu_dtype, "mu_dtype")
    check_orthonormalize(orthonormalize)
    check_switch(error_feedback, "error_feedback")
    check_seed(seed)
