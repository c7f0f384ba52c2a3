"""Wrong combinations of the parts."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

TWO = cd.replicas.simulated(2)


def factors(inner, numbers=None) -> Any:
    synchronizer = synchronizers.average_factors(numbers)
    return cd.adaptive_sync(inner, triggers.always(), synchronizer, TWO)


def trace(tx, params=None):
    """Traces `init` and `update`, and runs neither."""
    params = helpers.make_params() if params is None else params
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    state = jax.eval_shape(tx.init, rows)
    jax.eval_shape(tx.update, rows, state, rows)


def swallowing(tx):
    """A wrapper that does not pass extra arguments on."""
    return optax.GradientTransformation(
        tx.init, lambda updates, state, params=None: tx.update(updates, state, params)
    )


@pytest.mark.parametrize("wide", [swallowing, lambda tx: tx], ids=["all", "one"])
def test_average_factors_needs_its_argument_to_reach_every_dion(wide):
    # Two Dions; of the second case only one is shut off.
    inner = optax.partition(
        {"a": swallowing(cd.dion(0.1)), "b": wide(cd.dion(0.1))},
        lambda params: {name: "b" if name == "wide/kernel" else "a" for name in params},
    )
    with pytest.raises(ValueError, match="does not pass on the extra argument reduce"):
        trace(factors(inner))


STACK = {
    "bias": None,
    "embed/embedding": None,
    "stack": cd.DimensionNumbers(1, 2),
    "tall/kernel": cd.DimensionNumbers(0, 1),
    "wide/kernel": cd.DimensionNumbers(0, 1),
}


@pytest.mark.parametrize(
    "other", [{"wide/kernel": None}, {"stack": cd.DimensionNumbers(0, 1)}]
)
def test_dimension_numbers_must_be_those_of_dion(other):
    params = {**helpers.make_params(), "stack": jnp.ones((2, 4, 4))}
    inner = cd.dion(0.1, dimension_numbers=STACK)
    with pytest.raises(ValueError, match="Pass both the same dimension_numbers"):
        trace(factors(inner, STACK | other), params)


def test_dimension_numbers_of_other_parameters_do_not_matter():
    change = triggers.relative_momentum_change(0.1)
    numbers = {name: x for name, x in STACK.items() if name != "stack"}
    inner = cd.dion(0.1, dimension_numbers=numbers | {"wide/kernel": None})
    trace(cd.adaptive_sync(inner, change, synchronizers.reconcile(), TWO))
