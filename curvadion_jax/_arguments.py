"""Arguments that several functions take: their checks, and numbers or schedules.

Of a schedule or an array, such as `optax.inject_hyperparams` makes of every number, the
value is not known yet.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_PLAIN = (int, float, np.number)
_SMALLEST_BUDGET = 1e-6


def check_part(value: Any, is_one: bool, what: str, example: str) -> None:
    """Rejects what is not the part of an optimizer that it should be."""
    if not is_one:
        raise TypeError(
            f"{what} is {value!r:.80}. Give what a call returns, such as {example}."
        )


def check_static(value: Any, what: str) -> None:
    """Rejects an array, traced or not, where a Python value is needed."""
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{what} must be a Python value, got an array. With "
            f"optax.inject_hyperparams, pass static_args=({what!r},)."
        )


def check_dtype(value: Any, what: str) -> None:
    """Rejects a dtype that cannot hold momenta, such as one of integers."""
    check_static(value, what)
    if value is not None and not jnp.issubdtype(jnp.dtype(value), jnp.floating):
        raise ValueError(
            f"{what} is {jnp.dtype(value)}, which is no dtype of real numbers. Give "
            "one such as bfloat16, or None."
        )


def check_int(value: Any, what: str) -> None:
    """Rejects what is not a plain int, an array included, or is below 1."""
    if not isinstance(value, int):
        hint = "Pass a Python int; name it in static_args of optax.inject_hyperparams."
        raise TypeError(f"{what} must be an int, got {value!r}. {hint}")
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}.")


def check_numbers(
    below: float | None = None, schedules: bool = True, **values: Any
) -> None:
    """Rejects what is no number, and numbers that are negative, NaN or too large.

    With ``schedules=False`` a schedule is rejected too.
    """
    for name, value in values.items():
        if isinstance(value, optax.GradientTransformation):
            raise TypeError(
                f"{name} is an optimizer, and must be a number or a schedule. To train "
                "with an optimizer of your own, call adaptive_sync(optimizer, trigger, "
                "synchronizer, mesh)."
            )
        is_scalar = hasattr(value, "dtype") and jnp.ndim(value) == 0
        if isinstance(value, _PLAIN):
            if not value >= 0 or (below is not None and value >= below):
                limit = "" if below is None else f" and below {below}"
                raise ValueError(f"{name} must be at least 0{limit}, got {value}.")
        elif callable(value) and not schedules:
            raise TypeError(f"{name} is a schedule. Give a number.")
        elif not callable(value) and not is_scalar:
            raise TypeError(
                f"{name} must be a number or a schedule, got {value!r:.80}. YAML reads "
                "2e-2 as text: write 2.0e-2, or call float on it."
            )


def check_fraction(value: Any, what: str) -> None:
    """Rejects what is no fraction in (0, 1]: a traced number, or a percentage."""
    check_static(value, what)
    if not isinstance(value, _PLAIN) or not 0 < value <= 1:
        raise ValueError(
            f"{what} is a fraction in (0, 1], got {value!r}. One percent is 0.01."
        )


def check_budget(value: Any) -> None:
    """Rejects a budget that is no fraction or pays for no sync; warns of one near 1."""
    check_fraction(value, "budget")
    if value < _SMALLEST_BUDGET:
        raise ValueError(
            f"budget={value} would pay for a sync in 2 bits every {0.07 / value:,.0f} "
            f"steps. Give at least {_SMALLEST_BUDGET}, or trigger=triggers.never()."
        )
    if value > 0.5:
        warnings.warn(
            f"budget={value} is {value:.0%} of the bytes of synchronous training. One "
            "percent is 0.01.",
            stacklevel=3,
        )


def check_exclusive(**values: Any) -> None:
    """Rejects two arguments of which one would be ignored."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be combined. Pass one of them.")


def check_mask(mask: Any) -> None:
    """Rejects a single value, which `optax.inject_hyperparams` makes of a function."""
    if isinstance(mask, bool) or (hasattr(mask, "dtype") and jnp.ndim(mask) == 0):
        raise TypeError(
            f"weight_decay_mask is {mask!r:.80}, and must be a tree of bools or a "
            "function of the parameters. optax.inject_hyperparams takes a function for "
            "a schedule: pass static_args=('weight_decay_mask',)."
        )


def decayed_weights(
    weight_decay: Any, mask: Any
) -> optax.GradientTransformationExtraArgs:
    """`optax.add_decayed_weights`, which names the mask that does not fit."""

    def checked(params):
        tree = mask(params) if callable(mask) else mask
        try:
            jax.tree.map(lambda _, subtree: subtree, tree, params)
        except ValueError as error:
            raise ValueError(
                "weight_decay_mask has another structure than the parameters. Give a "
                "tree of bools like these, or a prefix of it, or a function of them."
            ) from error
        return tree

    # It takes schedules, whatever its types say.
    decay = optax.add_decayed_weights(weight_decay, mask and checked)  # pyright: ignore[reportArgumentType]
    return optax.with_extra_args_support(decay)


def at_step(value: Any, step: Any) -> Any:
    """Evaluates a schedule; a number is the same at every step."""
    return value(step) if callable(value) else value


def with_schedule(
    make: Callable[[Any], optax.GradientTransformation], value: Any
) -> optax.GradientTransformation:
    """Makes a transformation, of a number or at every step of a schedule's value."""
    if not callable(value):
        return make(value)
    # By default Optax casts to the dtype of the updates; 0.999 in bfloat16 is 1.
    dtype = jnp.result_type(float)
    return optax.inject_hyperparams(make, hyperparam_dtype=dtype)(value)
