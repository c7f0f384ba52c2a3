"""Wrong arguments of adaptive_sync and its parts: errors that say what to do."""

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


def test_a_budget_beside_a_trigger_is_refused():
    with pytest.raises(ValueError, match="give a budget or a trigger"):
        cd.curvadion(0.1, budget=0.1, trigger=triggers.always())


def test_a_budget_is_a_share():
    with pytest.raises(ValueError, match=r"got 10; ten percent is 0\.1"):
        cd.curvadion(0.1, budget=10)
    cd.curvadion(0.1, budget=1.0)


@pytest.mark.parametrize(
    "argument", [{"orthonormalize": cd.householder_qr}, {"error_feedback": False}]
)
def test_what_only_dion_reads_needs_a_rank(argument):
    cd.curvadion(0.1, rank=2, **argument)
    with pytest.raises(ValueError, match=r"such as rank=0\.25"):
        cd.curvadion(0.1, **argument)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"inner": 0.1}, "inner must be an Optax trans", id="inner-number"),
        pytest.param(
            {"inner": optax.sgd}, r"such as optax\.adamw", id="inner-function"
        ),
        pytest.param({"inner": None}, "inner must be an Optax trans", id="inner-none"),
        pytest.param(
            {"trigger": triggers.every_k}, r"every_k\(10\)", id="trigger-call"
        ),
        pytest.param({"trigger": 10}, "trigger must be a curvadion", id="trigger-int"),
        pytest.param(
            {"synchronizer": synchronizers.reconcile}, r"reconcile\(\)", id="function"
        ),
        pytest.param({"synchronizer": None}, "got None", id="synchronizer-none"),
        pytest.param({"local_step": 0.1}, "local_step must be", id="local_step"),
        pytest.param({"axis_name": ("replica",)}, "string or None", id="axis-tuple"),
        pytest.param({"axis_name": 0}, "axis_name must be a string", id="axis-int"),
    ],
)
def test_wrong_types(changed, message):
    with pytest.raises(TypeError, match=message):
        build(**changed)


@pytest.mark.parametrize(
    "outer", [pytest.param(0.7, id="number"), pytest.param(optax.sgd, id="function")]
)
def test_wrong_outer_optimizer(outer):
    with pytest.raises(TypeError, match="outer must be an Optax transformation such"):
        synchronizers.reconcile(outer)


def test_parameters_are_needed():
    params = helpers.make_params()
    tx = build()
    with pytest.raises(ValueError, match=r"call update\(gradients, state, params\)"):
        tx.update(params, tx.init(params))


def test_trees_must_be_equal():
    params = helpers.make_params()
    fewer = {k: v for k, v in params.items() if k != "bias"}
    tx = build()
    with pytest.raises(ValueError, match="trees of the same structure"):
        tx.update(fewer, tx.init(params), params)


def test_shapes_must_be_equal():
    params = helpers.make_params()
    wrong = {**params, "bias": jnp.zeros(4)}
    tx = build()
    with pytest.raises(ValueError, match=r"'bias' has shape \(4,\), the parameter"):
        tx.update(wrong, tx.init(params), params)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
def test_parameters_must_be_real_numbers(dtype):
    params = {**helpers.make_params(), "bias": jnp.ones(5, dtype)}
    tx = build(inner=optax.sgd(0.1))
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"'bias' has dtype .*optax\.masked around"):
        tx.update(params, state, params)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_matrices_of_dion_must_be_real_numbers(dtype):
    params = {**helpers.make_params(), "tall": jnp.ones((6, 4), dtype)}
    with pytest.raises(TypeError, match=r"real floating-point arrays, got .*'tall'"):
        cd.curvadion(0.1, 0.25).init(params)


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


def test_a_local_step_needs_its_argument_to_reach_dion():
    tx = build(
        inner=swallowing(cd.dion(0.1)),
        axis_name=helpers.AXIS,
        local_step=optax.sgd(0.1),
    )
    with pytest.raises(ValueError, match="does not pass on the extra argument moment"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)


@pytest.mark.parametrize("inner", [optax.adamw(0.1), SGD, optax.contrib.muon(0.1)])
def test_average_factors_needs_dion(inner):
    with pytest.raises(ValueError, match=r"curvadion_jax\.dion, or curvadion with a"):
        factors(inner).init(helpers.make_params())


def wide_is_other(params):
    numbers = cd.default_dimension_numbers(params)
    return {**numbers, "wide": None}


def stack_is_transposed(params):
    numbers = cd.default_dimension_numbers(params)
    return {**numbers, "stack": cd.DimensionNumbers(0, 1)}


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(wide_is_other, id="not-a-matrix"),
        pytest.param(stack_is_transposed, id="other-axes"),
    ],
)
def test_dimension_numbers_must_be_those_of_dion(numbers):
    params = {**helpers.make_params(), "stack": jnp.ones((2, 4, 4))}
    tx = build(inner=cd.dion(0.1), axis_name=helpers.AXIS, dimension_numbers=numbers)
    with pytest.raises(ValueError, match="pass adaptive_sync the same dimension_num"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx, params)


def test_dimension_numbers_of_other_parameters_do_not_matter():
    numbers = {"bias": None, "embed": None, "tall": None, "wide": None}
    inner = cd.dion(0.1, dimension_numbers=numbers)
    tx = build(inner=inner, axis_name=helpers.AXIS, dimension_numbers=None)
    helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)
