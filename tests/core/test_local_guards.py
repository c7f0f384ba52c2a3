"""Parts that must stay local may not communicate, however deep they hide it."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import (
    _collectives,
    _guards,
    _xla,
    compressors,
    synchronizers,
    triggers,
)
from curvadion_jax.presets import _published_curvadion
from curvadion_jax.synchronizers import SyncState

AXIS = helpers.AXIS
# Each takes and returns float32[2], and sends something.
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, AXIS),
    "pmean": lambda x: lax.pmean(x, AXIS),
    "pmax": lambda x: lax.pmax(x, AXIS),
    "pmin": lambda x: lax.pmin(x, AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS).sum(0),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 0, 0),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]),
    "psum_scatter": lambda x: lax.psum_scatter(x, AXIS, tiled=True).repeat(2),
}


def vary(x):
    return _collectives.vary(x, AXIS)


def with_rule(function, define, *rules):
    getattr(function, define)(*rules)
    return function


NESTINGS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "custom_jvp": lambda f: with_rule(jax.custom_jvp(f), "defjvp", f),
    "custom_vjp": lambda f: with_rule(jax.custom_vjp(f), "defvjp", f, f),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "cond": lambda f: lambda x: lax.cond(True, lambda x: vary(f(x)), vary, x),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (vary(f(c)), ()), x, length=1)[0],
    "while": lambda f: (
        lambda x: lax.while_loop(lambda c: c[0] > 0, lambda c: vary(f(c)), x)
    ),
    "deep": lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
}


def communicating(function):
    """An optimizer that reduces gradients itself."""

    def update(updates, state, params=None):
        del params
        sent = function(updates["bias"][:2])
        return {**updates, "bias": updates["bias"].at[:2].set(sent)}, state

    return optax.GradientTransformation(optax.identity().init, update)


def rejected(tx):
    with pytest.raises(ValueError, match="themselves; leave that to the synchronizer"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)


def with_inner(inner, synchronizer=None, trigger=None) -> Any:
    return cd.adaptive_sync(
        inner,
        trigger or triggers.every_k(2),
        synchronizer or synchronizers.reconcile(),
        AXIS,
    )


@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_inner_optimizer_that_communicates_is_rejected(name):
    rejected(with_inner(communicating(COLLECTIVES[name])))


@pytest.mark.parametrize("name", NESTINGS)
def test_a_hidden_collective_is_found(name):
    rejected(with_inner(communicating(NESTINGS[name](COLLECTIVES["psum"]))))


@pytest.mark.parametrize(
    "synchronizer",
    [
        pytest.param(synchronizers.average_gradients(), id="average_gradients"),
        pytest.param(synchronizers.average_factors(), id="average_factors"),
        pytest.param(synchronizers.reconcile(), id="reconcile"),
    ],
)
def test_an_inner_optimizer_that_synchronises_itself_is_rejected(synchronizer):
    rejected(with_inner(cd.presets.synchronous_dion(0.1, axis_name=AXIS), synchronizer))


def test_an_optimizer_for_local_steps_that_communicates_is_rejected():
    inner = _published_curvadion._alternating(
        cd.dion(0.1), communicating(COLLECTIVES["pmean"])
    )
    rejected(with_inner(inner, _published_curvadion._with_mean_gradients()))


def test_a_trigger_that_communicates_is_rejected():
    def decide(seen):
        norm = lax.pmax(optax.tree.norm(seen.gradients), AXIS)
        return triggers.decision(norm > 1, norm)

    rejected(with_inner(optax.sgd(0.1), trigger=triggers.stateless(decide)))


def test_collectives_within_a_replica_pass():
    mesh = cd.replicas.make_mesh(2, {"part": 2})
    tx = with_inner(communicating(lambda x: lax.pmean(x, "part")))
    params = {"bias": jnp.ones(5)}

    def body(*stacked):
        state, params, gradients = jax.tree.map(lambda x: x[0, 0], stacked)
        updates, _ = tx.update(gradients, state, params)
        return updates["bias"][None, None]

    stacked = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (2, 2, *x.shape)), (tx.init(params), params)
    )
    specs = P(AXIS, "part")
    both = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs)
    jax.eval_shape(both, *stacked, stacked[1])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("local", "message"),
    [
        pytest.param(lambda x: x.astype(jnp.float16), "float32.*float16", id="dtype"),
        pytest.param(lambda x: x[:2], r"\[5\].*\[2\]", id="shape"),
        pytest.param(lambda x: (x,), "return different trees", id="tree"),
    ],
)
def test_branches_that_return_different_things_are_rejected(local, message, number):
    def step(params, opt_state, gradients):
        x = gradients["bias"]
        decision = _collectives.largest(jnp.argmax(x), AXIS)
        syncs = [lambda x: x] * number
        return _guards.switch(decision, local, syncs, x, axis_name=AXIS), ()

    with pytest.raises(ValueError, match=message):
        helpers.trace(step, with_inner(optax.sgd(0.1)))


def traced_with(sync, after_local_step):
    """Traces `adaptive_sync` with a synchronizer of this sync and a state of zeros."""
    synchronizer = synchronizers.Synchronizer(
        lambda params, inner_state, views: SyncState(own=jnp.zeros(2)),
        sync,
        lambda params, inner_state, views: cd.compressors.Payload(),
        after_local_step=after_local_step,
    )
    tx = with_inner(optax.sgd(0.1, 0.9), synchronizer)
    helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)


@pytest.mark.parametrize("after_local_step", [False, True])
def test_a_synchronizer_that_changes_its_states_dtype_is_rejected(after_local_step):
    def sync(local, state, group):
        return *local.take(), SyncState(own=state.own.astype(jnp.bfloat16))

    with pytest.raises(ValueError, match="must keep the shapes and dtypes"):
        traced_with(sync, after_local_step)


@pytest.mark.parametrize("after_local_step", [False, True])
def test_a_synchronizer_that_waits_for_some_replicas_is_rejected(after_local_step):
    def sync(local, state, group):
        updates, inner_state = local.take()
        large = updates["bias"][0] > 0
        state = lax.cond(large, lambda x: group.mean(x), vary, vary(state))
        return updates, inner_state, state

    with pytest.raises(ValueError, match="inside a condition that differs"):
        traced_with(sync, after_local_step)


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(
            lambda local, group: local.take(
                group.mean(local.gradients), local.inner_state
            ),
            id="other-gradients",
        ),
        pytest.param(
            lambda local, group: local.take(
                local.gradients, jax.tree.map(jnp.negative, local.inner_state)
            ),
            id="other-state",
        ),
        pytest.param(
            lambda local, group: local.take(
                local.gradients, local.inner_state, reduce_fn=group.mean
            ),
            id="extra-argument",
        ),
    ],
)
def test_after_the_local_step_there_is_no_other(take):
    sync = lambda local, state, group: (*take(local, group), state)  # noqa: E731
    with pytest.raises(TypeError, match=r"call local\.take\(\) without arguments"):
        traced_with(sync, True)


def test_a_decision_that_differs_is_rejected():
    def step(params, opt_state, gradients):
        x = gradients["bias"]
        return _xla.run_once(jnp.argmax(x), [lambda x: x], x, axis_name=AXIS), ()

    with pytest.raises(ValueError, match="some would wait for ever for the others"):
        helpers.trace(step, with_inner(optax.sgd(0.1)), manual=True)


def test_updates_and_states_may_be_the_same_on_all_replicas():
    """As of a parameter that is frozen by hand, or of a state made in the step."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
    frozen = optax.stateless(lambda updates, params: jax.tree.map(zeros, updates))
    eight_bits = synchronizers.reconcile(compressor=compressors.quantize(8))

    def step(params, opt_state, gradients):
        del opt_state
        return tx.update(gradients, tx.init(params), params)

    for inner in (frozen, optax.sgd(0.1, 0.9)):
        tx = with_inner(inner, eight_bits)
        helpers.trace(step, tx)
