"""Uses that would be silently wrong, hang or fail late are refused early.

Where a part has tests of its own refusals they are there.
"""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import metrics, replicas, synchronizers, triggers

AXIS = helpers.AXIS
PARAMS = helpers.make_params()
TWO = replicas.make_mesh(2)
SGD = optax.sgd(0.1, 0.9)


def synced(inner=SGD, trigger=None, synchronizer=None, axis_name=None):
    trigger = trigger or triggers.every_k(2)
    synchronizer = synchronizer or synchronizers.reconcile()
    return cd.adaptive_sync(inner, trigger, synchronizer, axis_name)


def changed(name: str, leaf: Any) -> dict[str, Any]:
    return {**PARAMS, name: leaf}


def init(tx: Any, params: Any = PARAMS) -> Any:
    return jax.eval_shape(tx.init, params)


def update(tx: Any, gradients=PARAMS, params=PARAMS, initial=None, **more) -> None:
    state = init(tx, params if initial is None else initial)
    jax.eval_shape(lambda g, s, p: tx.update(g, s, p, **more), gradients, state, params)


def on_replicas(tx: Any) -> None:
    value = lambda g: g["bias"].sum()
    helpers.trace(lambda p, s, g: tx.update(g, s, p, value=value(g)), tx)


def own_shard_map(strip: bool, **settings: Any) -> None:
    """An update in a shard_map of the user's own."""
    tx = cd.curvadion(0.1, axis_name=AXIS)

    def body(params, state, gradients):
        gradients = jax.tree.map(lambda x: x[0], gradients)
        if strip:
            params, state = jax.tree.map(lambda x: x[0], (params, state))
        return jax.tree.leaves(tx.update(gradients, state, params)[0])[0][None]

    mapped = jax.shard_map(
        body, mesh=TWO, in_specs=P(AXIS), out_specs=P(AXIS), **settings
    )
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
        (PARAMS, init(tx), PARAMS),
    )
    jax.eval_shape(mapped, *stacked)


def swallowing(inner: Any) -> Any:
    """A wrapper that does not pass extra arguments on."""
    return optax.GradientTransformation(
        inner.init,
        lambda updates, state, params=None: inner.update(updates, state, params),
    )


def step(state: Any, batch: Any, mesh=TWO) -> None:
    jax.eval_shape(replicas.step(lambda s, b: (s, {}), mesh), state, batch)


def disagreeing() -> Any:
    state = cd.curvadion(0.1).init(PARAMS)
    state = jax.tree.map(lambda x: np.stack([x, x]), state)
    return state._replace(metrics=state.metrics._replace(steps=np.array([3, 4])))


change = triggers.relative_momentum_change(0.1)
FEWER = {name: leaf for name, leaf in PARAMS.items() if name != "bias"}
WIDER = changed("bias", jnp.zeros(9))
COMPLEX = changed("bias", jnp.ones(5, "complex64"))
EIGHT_BITS = changed("tall", jnp.ones((6, 4), jnp.float8_e4m3fn))
PLATEAU = optax.chain(SGD, optax.contrib.reduce_on_plateau())
TALL, ONE_ROW = {"tall": jnp.ones((6, 4))}, {"tall": jnp.ones((1, 4))}
TWO_ROWS = {"w": jnp.ones((2, 3))}

# What is wrong -> (use, error, a piece of the message: what was given).
CASES = {
    # Numbers that would train something else.
    "learning rate NaN": (lambda: cd.dion(float("nan")), ValueError, "nan"),
    "rate in percent": (lambda: cd.triggers.evenly(10), ValueError, "rate is"),
    "momentum of 1": (lambda: cd.curvadion(0.1, momentum=1), ValueError, "got 1"),
    "threshold below 0": (lambda: cd.curvadion(0.1, -0.3), ValueError, "-0.3"),
    "budget in percent": (lambda: cd.curvadion(0.1, budget=10), ValueError, "10"),
    "rank 2.0": (lambda: cd.dion(0.1, rank=2.0), ValueError, "2.0"),
    "injected rank": (
        lambda: init(optax.inject_hyperparams(cd.dion)(0.1, rank=2)),
        *(TypeError, "static_args"),
    ),
    # Arguments of which one would be ignored.
    "threshold and budget": (
        lambda: cd.curvadion(0.1, threshold=0.3, budget=0.01),
        *(ValueError, "threshold.*budget"),
    ),
    # Trees that do not belong together.
    "no parameters": (
        lambda: cd.dion(0.1).update(PARAMS, cd.dion(0.1).init(PARAMS)),
        *(ValueError, "params"),
    ),
    "no gradient of bias": (lambda: update(synced(), FEWER), ValueError, "bias"),
    "gradient of another shape": (lambda: update(synced(), WIDER), ValueError, "bias"),
    "gradient that would be broadcast": (
        lambda: update(cd.scale_by_dion(), ONE_ROW, TALL),
        *(ValueError, r"\(1, 4\), expected \(6, 4\)"),
    ),
    "complex parameter": (lambda: init(synced(), COMPLEX), TypeError, "complex64"),
    "float8 parameter": (lambda: init(synced(), EIGHT_BITS), TypeError, "float8"),
    "two parameters of one path": (
        lambda: init(cd.dion(0.1), {"a/b": jnp.ones(3), "a": {"b": jnp.ones((2, 3))}}),
        *(ValueError, "a/b"),
    ),
    "no matrix": (
        lambda: init(cd.local_muon(0.1), {"embed": jnp.ones((5, 3))}),
        *(ValueError, "describe_partition"),
    ),
    "attention or a stack of layers": (
        lambda: init(cd.dion(0.1), {"query": jnp.ones((8, 2, 4))}),
        *(cd.dimension_numbers.PartitionWarning, r"query \(8, 2, 4\)"),
    ),
    "other things as dimension numbers": (
        lambda: init(cd.dion(0.1, dimension_numbers=lambda params: "dion")),
        *(TypeError, "'dion'"),
    ),
    "bias for scale_by_dion": (lambda: init(cd.scale_by_dion()), ValueError, "bias"),
    "weight below 0": (lambda: update(synced(), weight=-1), ValueError, "-1"),
    # Parts that do not go together.
    "RMMC without a momentum": (
        lambda: update(synced(optax.sgd(0.1), change)),
        *(ValueError, "momentum"),
    ),
    "factors of AdamW": (
        lambda: init(
            synced(optax.adamw(0.1), synchronizer=synchronizers.average_factors())
        ),
        *(ValueError, "dion"),
    ),
    "wrapper that drops extra arguments": (
        lambda: on_replicas(synced(swallowing(cd.dion(0.1)), change, axis_name=AXIS)),
        *(ValueError, "extra argument"),
    ),
    "reduce_on_plateau inside": (  # JAX's own words, which docs/troubleshooting.md has
        lambda: on_replicas(synced(PLATEAU, axis_name=AXIS)),
        *(TypeError, "cond branches must have equal output types.*\n(.*\n)*.*varying"),
    ),
    # Replicas that would train apart, or average what is not theirs.
    "no axis": (
        lambda: on_replicas(cd.presets.local_sgd(0.1)),
        *(ValueError, "axis_name=None"),
    ),
    "check_vma=False": (
        lambda: own_shard_map(True, check_vma=False),
        *(ValueError, "check_vma"),
    ),
    "replica axis left on the state": (
        lambda: own_shard_map(False),
        *(ValueError, "replica axis"),
    ),
    "state without replica axis": (
        lambda: step(PARAMS, jnp.ones(2)),
        *(ValueError, "bias"),
    ),
    "state of other replicas": (
        lambda: step(TWO_ROWS, jnp.ones(4), replicas.make_mesh(4)),
        *(ValueError, r"\(2, 3\)"),
    ),
    "rows that replicas cannot share": (
        lambda: step(TWO_ROWS, {"x": jnp.ones((5, 4))}),
        *(ValueError, "has 5"),
    ),
    "replicated twice": (
        lambda: replicas.replicate(replicas.replicate(PARAMS, TWO), TWO),
        *(ValueError, "replica"),
    ),
    "mesh of another axis": (
        lambda: replicas.replicate(PARAMS, jax.make_mesh((2,), ("data",))),
        *(ValueError, "data"),
    ),
    "counters that differ": (lambda: metrics.read(disagreeing()), ValueError, "steps"),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_use_is_refused(name):
    use, error, given = CASES[name]
    with pytest.raises(error, match=given):
        use()
