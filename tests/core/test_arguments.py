"""Wrong combinations of the parts."""

from typing import Any

import helpers
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

SGD = optax.sgd(0.1, 0.9)


def build(**changed) -> Any:
    arguments = {
        "inner": SGD,
        "trigger": triggers.every_k(2),
        "synchronizer": synchronizers.reconcile(),
    }
    return cd.adaptive_sync(**{**arguments, **changed})


def swallowing(tx):
    """A wrapper that does not pass extra arguments on."""
    return optax.GradientTransformation(
        tx.init, lambda updates, state, params=None: tx.update(updates, state, params)
    )


def factors(inner):
    return build(
        inner=inner,
        trigger=triggers.always(),
        synchronizer=synchronizers.average_factors(),
        axis_name=helpers.AXIS,
    )


@pytest.mark.parametrize("wide", [swallowing, lambda tx: tx], ids=["all", "one"])
def test_average_factors_needs_its_argument_to_reach_every_dion(wide):
    # Two Dions; of the second case only one is shut off.
    inner = optax.partition(
        {"a": swallowing(cd.dion(0.1)), "b": wide(cd.dion(0.1))},
        lambda params: {name: "b" if name == "wide" else "a" for name in params},
    )
    tx = factors(inner)
    with pytest.raises(ValueError, match="does not pass on the extra argument reduce"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)


def wide_is_other(params):
    numbers = cd.default_dimension_numbers(params)
    return {**numbers, "wide": None}


def stack_is_transposed(params):
    numbers = cd.default_dimension_numbers(params)
    return {**numbers, "stack": cd.DimensionNumbers(0, 1)}


@pytest.mark.parametrize("numbers", [wide_is_other, stack_is_transposed])
def test_dimension_numbers_must_be_those_of_dion(numbers):
    params = {**helpers.make_params(), "stack": jnp.ones((2, 4, 4))}
    params["stack_bias"] = jnp.ones((2, 4))  # tells that it is a stack
    tx = build(
        inner=cd.dion(0.1),
        synchronizer=synchronizers.average_factors(),
        axis_name=helpers.AXIS,
        dimension_numbers=numbers,
    )
    with pytest.raises(ValueError, match="Pass adaptive_sync the same dimension_num"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx, params)


def test_dimension_numbers_of_other_parameters_do_not_matter():
    inner = cd.dion(0.1, dimension_numbers=wide_is_other)
    tx = build(inner=inner, axis_name=helpers.AXIS, dimension_numbers=None)
    helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)
