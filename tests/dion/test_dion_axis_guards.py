"""Synchronous Dion rejects gradients that were averaged before it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

MESH = cd.replicas.make_mesh(8)
KERNEL = {"kernel": jnp.ones((5, 9))}
BOTH = KERNEL | {"bias": jnp.ones(9)}
BATCH = jnp.ones((8, 3, 5))


def synchronised(axis_name) -> Any:
    """`scale_by_dion` alone, with its factors averaged on every step."""
    always, factors = triggers.always(), synchronizers.average_factors()
    return cd.adaptive_sync(cd.scale_by_dion(), always, factors, axis_name)


def synchronous(axis_name) -> Any:
    return cd.presets.synchronous_dion(0.1, axis_name=axis_name)


CASES = [
    pytest.param(synchronised("replica"), KERNEL, id="scale_by_dion"),
    pytest.param(synchronous("replica"), BOTH, id="dion"),
    pytest.param(synchronous("replica"), {"bias": jnp.ones(9)}, id="bias"),
]


def loss(params, x):
    kernel, bias = params.get("kernel", jnp.ones((5, 9))), params.get("bias", 0.0)
    return jnp.mean(jnp.square(x @ kernel + jnp.broadcast_to(bias, (3, 9))))


def trace(tx, params, gradients, **settings):
    """Traces one update inside shard_map, with parameters P(), as beginners write it.

    `gradients` takes the parameters and this replica's batch.
    """

    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P(), P("replica")),
        out_specs=P("replica"),
        **settings,
    )
    def body(params, x):
        updates, _ = tx.update(gradients(params, x[0]), tx.init(params), params)
        return jax.tree.map(lambda u: u[None], updates)

    return jax.eval_shape(body, params, BATCH)


def vary(tree):
    return jax.tree.map(lambda x: lax.pcast(x, ("replica",), to="varying"), tree)


def local_gradients(params, x):
    return jax.grad(loss)(vary(params), x)


@pytest.mark.parametrize(("tx", "params"), CASES)
def test_local_gradients_pass(tx, params):
    updates = trace(tx, params, local_gradients)
    assert {name: u.shape[1:] for name, u in updates.items()} == {
        name: p.shape for name, p in params.items()
    }


@pytest.mark.parametrize(("tx", "params"), CASES)
@pytest.mark.parametrize(
    "gradients",
    [
        pytest.param(jax.grad(loss), id="shared-parameters"),
        pytest.param(
            lambda params, x: lax.pmean(local_gradients(params, x), "replica"),
            id="pmean",
        ),
        pytest.param(
            lambda params, x: lax.psum(local_gradients(params, x), "replica"),
            id="psum",
        ),
        pytest.param(
            lambda params, x: jax.grad(
                lambda p: lax.pmean(loss(p, x), "replica"),
            )(params),
            id="pmean-in-the-loss",
        ),
    ],
)
def test_averaged_gradients_are_rejected(tx, params, gradients):
    name = min(params)  # the first
    message = rf"Gradient \['{name}'\] was already averaged over axis 'replica'"
    with pytest.raises(ValueError, match=message):
        trace(tx, params, gradients)


@pytest.mark.parametrize(("tx", "params"), CASES)
def test_one_averaged_leaf_among_local_ones_is_rejected(tx, params):
    def gradients(params, x):
        tree = local_gradients(params, x)
        first = sorted(tree)[0]
        return tree | {first: lax.pmean(tree[first], "replica")}

    with pytest.raises(ValueError, match=rf"\['{sorted(params)[0]}'\] was already"):
        trace(tx, params, gradients)


@pytest.mark.parametrize(("tx", "params"), CASES)
def test_without_vma_nothing_can_be_told(tx, params):
    with pytest.raises(ValueError, match=r"check_vma=False.*cannot be told"):
        trace(tx, params, local_gradients, check_vma=False)


@pytest.mark.parametrize(("tx", "params"), CASES)
def test_unbound_axis(tx, params):
    state = jax.eval_shape(tx.init, params)  # init needs no axis
    message = r"the axis 'replica' is not bound here.*axis_name=None"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.update, params, state, params)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            jax.vmap(lambda g: tx.update(g, tx.init(params), params)[0], axis_name="i"),
            jax.tree.map(lambda x: jnp.stack([x, x]), params),
        )


@pytest.mark.parametrize(("tx", "params"), CASES)
def test_the_simulator_is_not_guarded(tx, params):
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    updates = jax.eval_shape(
        jax.vmap(
            lambda g: tx.update(g, tx.init(params), params)[0], axis_name="replica"
        ),
        stacked,
    )
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize(
    "build", [synchronised, synchronous], ids=["scale_by_dion", "dion"]
)
@pytest.mark.parametrize("axis_name", [0, ("replica",)], ids=str)
def test_a_name_that_is_not_a_string(build: Any, axis_name):
    """A tuple would work, and switch the guard off without a word."""
    with pytest.raises(TypeError, match="axis_name must be a string"):
        build(axis_name)


@pytest.mark.parametrize("build", [cd.scale_by_dion, functools.partial(cd.dion, 0.1)])
def test_dion_itself_is_of_one_replica(build: Any):
    with pytest.raises(TypeError, match="axis_name"):
        build(axis_name="replica")
