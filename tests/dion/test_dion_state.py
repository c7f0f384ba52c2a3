"""Dion's state: initial Q, dtypes, accumulation alone, parameter-like leaves."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from dion_runs import (
    MU,
    NUMBERS,
    SHAPES,
    close,
    normal,
    random_state,
    same_columns,
    zeros,
)

import curvadion_jax as cd

# One step in float32, numbers of order one: measured 6e-7.
FLOAT32_ATOL = 3e-6
# Half a unit in the last place, relative to the largest number.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
EPS = float(np.finfo(np.float32).eps)

Q_SHAPES = {"wide": (5, 3), "tall": (5, 3), "square": (9, 3)}


def gradients_at(seed, dtype=np.float32):
    return jax.tree.map(lambda g: g[0], normal(SHAPES, 1, seed, dtype))


@pytest.mark.slow
def test_initial_state():
    shapes = {"kernel": (9, 5), "stack": (2, 5, 9)}
    params = zeros(shapes, jnp.bfloat16)
    numbers = cd.DimensionNumbers(-2, -1)
    tx = cd.scale_by_dion(rank=3, dimension_numbers=numbers)
    state: Any = jax.jit(tx.init)(params)
    assert not any(x.any() for x in state.momentum.values())
    for name, shape in {"kernel": (5, 3), "stack": (2, 5, 3)}.items():
        assert state.momentum[name].dtype == state.dion_q[name].dtype == jnp.bfloat16
        q = np.asarray(state.dion_q[name], np.float64)
        assert q.shape == shape
        # Nine entries rounded to bfloat16.
        close(np.linalg.norm(q, axis=-2), np.ones((*shape[:-2], 3)), 4e-3)
    assert np.abs(q[0] - q[1]).max() > 0.1


@pytest.mark.slow
def test_initial_q_depends_on_the_path_only():
    scale = cd.scale_by_dion(3, dimension_numbers=NUMBERS)
    init = lambda tree: optax.tree.get(scale.init(tree), "dion_q")
    params = {"a/kernel": jnp.ones((9, 5)), "c/kernel": jnp.ones((5, 9))}
    q = init(params)
    same = [
        init({name: x + 1 for name, x in params.items()}),
        init(params | {"another/kernel": jnp.ones((9, 5))}),
        init({"a/kernel": params["a/kernel"]}) | {"c/kernel": q["c/kernel"]},
        optax.tree.get(
            cd.dion(0.1, rank=3).init(params | {"bias": jnp.ones(3)}), "dion_q"
        ),
    ]
    for other in same:
        for name in params:
            np.testing.assert_array_equal(other[name], q[name])
    for name, jitted in jax.jit(init)(params).items():
        close(jitted, q[name], EPS, name)  # a compiled norm may round otherwise
    assert np.abs(np.asarray(q["a/kernel"] - q["c/kernel"])).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mu_dtype"), [("float16", None), ("float32", "bfloat16")]
)
def test_low_precision_is_storage_only(dtype, mu_dtype):
    """All algebra in float32: a step from the stored state rounds at its end only."""
    stored = mu_dtype or dtype
    tx = cd.scale_by_dion(3, MU, mu_dtype, dimension_numbers=NUMBERS)
    update, state = jax.jit(tx.update), random_state(gradients_at(0), Q_SHAPES)
    state = jax.tree.map(lambda x: jnp.asarray(x, stored), state)
    for t in range(3):
        gradients = jax.tree.map(lambda g: jnp.asarray(g, dtype), gradients_at(t))
        updates, new_state = update(gradients, state)
        for name in SHAPES:
            assert updates[name].dtype == jnp.dtype(dtype)
            assert new_state.momentum[name].dtype == jnp.dtype(stored)
            assert new_state.dion_q[name].dtype == jnp.dtype(stored)
            direction, momentum, q = ref.dion_step(
                *(np.asarray(x[name], np.float64) for x in (gradients, *state[:2])),
                mu=MU,
            )
            for got, expected, kind in (
                (updates[name], direction, dtype),
                (new_state.momentum[name], momentum, stored),
            ):
                limit = FLOAT32_ATOL + ROUNDING[kind] * np.abs(expected).max()
                close(got, expected, limit, (name, t))
            atol = FLOAT32_ATOL + ROUNDING[stored]
            same_columns(new_state.dion_q[name], q, atol, name)
        state = new_state


def products(jaxpr):
    """Precisions of all matrix products in a program, nested ones included."""
    for equation in helpers.equations(jaxpr):
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]


def test_all_products_are_in_full_precision():
    """By default TPUs round the factors of a float32 product to bfloat16.

    Then R is never zero where the momentum has nothing, and noise takes full steps.
    """
    params = zeros(SHAPES, np.float32)
    state = random_state(params, Q_SHAPES)
    tx = cd.scale_by_dion(3, dimension_numbers=NUMBERS)
    jaxpr = jax.make_jaxpr(tx.update)(params, state).jaxpr
    precisions = list(products(jaxpr))
    assert len(precisions) >= 4 * len(SHAPES)  # B Q, B^T P, P R^T, P Q^T
    highest = jax.lax.Precision.HIGHEST
    assert all(p == highest or p == (highest, highest) for p in precisions)


def test_a_lower_precision_is_that_of_the_four_products_alone():
    params = {"kernel": np.zeros((5, 9), np.float32)}
    state = random_state(params, {"kernel": (5, 3)})
    tx = cd.scale_by_dion(3, precision="default")
    precisions = list(products(jax.make_jaxpr(tx.update)(params, state).jaxpr))
    highest = jax.lax.Precision.HIGHEST
    lower = [p for p in precisions if p not in (highest, (highest, highest))]
    assert len(lower) == 4
    assert len(precisions) > 4


@pytest.mark.parametrize("error_feedback", [True, False])
def test_momentum_only(error_feedback):
    tx = cd.scale_by_dion(
        3, MU, dimension_numbers=NUMBERS, error_feedback=error_feedback
    )
    update = jax.jit(functools.partial(tx.update, momentum_only=True))
    state = random_state(zeros(SHAPES, np.float32), Q_SHAPES)
    state = state._replace(momentum=gradients_at(1))
    updates, new_state = update(gradients_at(2), state)
    for name in SHAPES:
        assert not np.asarray(updates[name]).any()
        np.testing.assert_array_equal(new_state.dion_q[name], state.dion_q[name])
        decay = 1 if error_feedback else MU
        expected = decay * state.momentum[name] + gradients_at(2)[name]
        close(new_state.momentum[name], expected, 8 * EPS, name)


def test_momentum_is_refused_where_a_transformation_hides_it():
    """RMMC would go by the momentum after error feedback."""
    inner = cd.dion(0.1, rank=2, dimension_numbers=NUMBERS)

    def update(updates, state, params=None):
        return inner.update(updates, state, params)

    plain = optax.GradientTransformation(inner.init, update)
    trigger = cd.triggers.relative_momentum_change(0.3, NUMBERS)
    tx = cd.adaptive_sync(plain, trigger, cd.synchronizers.reconcile())
    params = zeros(SHAPES, np.float32)
    with pytest.raises(ValueError, match=r"does not pass on.*momentum_only"):
        tx.update(params, tx.init(params), params)
    # Other triggers need no momentum.
    ever = cd.triggers.Trigger(look=lambda seen, _: (cd.triggers.Measured(1.0), ()))
    for trigger in (cd.triggers.every_k(2), ever):
        tx = cd.adaptive_sync(plain, trigger, cd.synchronizers.reconcile())
        tx.update(params, tx.init(params), params)


def test_map_params_touches_the_momentum_and_not_q():
    params, tx = {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}, cd.dion(0.1, rank=3)
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda x: x + 7, state)
    momentum = optax.tree.get(mapped, "momentum")["kernel"]
    np.testing.assert_array_equal(momentum, np.full((4, 8), 7.0))
    q = [optax.tree.get(tree, "dion_q")["kernel"] for tree in (mapped, state)]
    np.testing.assert_array_equal(*q)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_q_of_a_resized_state_is_copied_and_the_momentum_averaged(replicas):
    """Columns of Q may have opposite signs, and would cancel in a mean."""
    mesh = cd.replicas.simulated(4)
    tx = cd.adaptive_sync(
        cd.dion(0.1, rank=2),
        cd.triggers.relative_momentum_change(0.3),
        cd.synchronizers.reconcile(),
        mesh,
    )
    rows = cd.replicas.replicate({"kernel": jnp.ones((4, 6))}, mesh)
    state = tx.init(rows)
    number = lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
    numbered = state._replace(rows=jax.tree.map(number, state.rows))
    found = cd.replicas.resize(numbered, cd.replicas.simulated(replicas))
    first = np.arange(replicas) * 4 // replicas
    old, new = helpers.dion_state(numbered), helpers.dion_state(found)
    np.testing.assert_array_equal(new.dion_q["kernel"], old.dion_q["kernel"][first])
    momentum = np.asarray(old.momentum["kernel"])
    if replicas <= 4:
        wanted = momentum.reshape(replicas, -1, *momentum.shape[1:]).mean(1)
    else:
        wanted = momentum[first]
    np.testing.assert_array_equal(new.momentum["kernel"], wanted)
    copied = jax.tree.map(lambda x: x[first], numbered.rows.remembered)
    helpers.assert_bitwise(found.rows.remembered, copied)
    helpers.assert_bitwise(found.common.anchor, state.common.anchor)


def test_full_rank_has_three_large_products():
    """Error feedback takes a part of the whole momentum; `test_dion` has values."""
    params = {"kernel": np.zeros((5, 9), np.float32)}
    numbers = []
    for rank in (5, 3):
        state = random_state(params, {"kernel": (5, rank)})
        update = cd.scale_by_dion(rank).update
        numbers.append(len(list(products(jax.make_jaxpr(update)(params, state).jaxpr))))
    assert numbers[1] - numbers[0] == 1
