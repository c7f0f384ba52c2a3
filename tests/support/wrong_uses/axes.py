"""Axes that are not there, and what was averaged over the replicas before."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from wrong_uses.build import PARAMS, TWO, initialised, on_replicas, parts, updated
from wrong_uses.case import wrong

AXIS = helpers.AXIS
FINITE = cd.adaptive_sync(
    optax.apply_if_finite(cd.dion(0.1), 3),
    triggers.every_k(2),
    synchronizers.average_factors(),
    AXIS,
)


def averaging(tx: Any, reduce: Any) -> None:
    """A training step with a collective among its own lines."""

    def step(params, state, gradients):
        return tx.update(reduce(gradients), state, params)

    helpers.trace(step, tx)


def averaged_loss() -> None:
    tx = parts(axis_name=AXIS)

    def step(params, state, gradients):
        def loss(p):
            return lax.pmean(jnp.vdot(p["bias"], gradients["bias"]), AXIS)

        _, found = cd.replicas.value_and_grad(loss)(params)
        return tx.update(found, state, params)

    helpers.trace(step, tx, manual=True)


def own_shard_map(**settings: Any) -> None:
    """An update in a shard_map of the user's own."""
    tx = cd.curvadion(0.1, axis_name=AXIS)
    strip = settings.pop("strip", True)

    def body(params, state, gradients):
        gradients = jax.tree.map(lambda x: x[0], gradients)
        if strip:
            params, state = jax.tree.map(lambda x: x[0], (params, state))
        return jax.tree.leaves(tx.update(gradients, state, params)[0])[0][None]

    spec = jax.sharding.PartitionSpec(AXIS)
    mapped = jax.shard_map(body, mesh=TWO, in_specs=spec, out_specs=spec, **settings)
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
        (PARAMS, initialised(tx), PARAMS),
    )
    jax.eval_shape(mapped, *stacked)


def shared_parameters() -> None:
    """Gradients of parameters that are the same on all replicas, which JAX sums."""
    tx = cd.presets.synchronous_dion(0.1, axis_name=AXIS)

    def body(params, gradients):
        loss = lambda p: jnp.vdot(p["tall"], gradients["tall"][0])  # noqa: E731
        found = jax.grad(loss)(params)
        return tx.update(found, tx.init(params), params)[0]

    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        body, mesh=TWO, in_specs=(spec(), spec(AXIS)), out_specs=spec()
    )
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    jax.eval_shape(mapped, PARAMS, stacked)


def swallowing(inner: Any) -> Any:
    """A wrapper that does not pass extra arguments on."""
    return optax.GradientTransformation(
        inner.init,
        lambda updates, state, params=None: inner.update(updates, state, params),
    )


def asked(step: Any) -> None:
    tx = parts(ask_every=2, axis_name=AXIS)
    on_replicas(tx, step=step)


def skipping_spikes() -> None:
    """A step that leaves out what a replica's own loss says."""
    tx = parts(axis_name=AXIS)

    def step(params, state, gradients):
        def skip():
            return jax.tree.map(jnp.zeros_like, params), state

        update = lambda: tx.update(gradients, state, params)  # noqa: E731
        return lax.cond(gradients["bias"][0] > 3, skip, update)

    helpers.trace(step, tx)


def updated_for_two_models(tx: Any) -> None:
    def step(params, state, gradients):
        two = jax.tree.map(lambda x: jnp.stack([x, x]), (gradients, state, params))
        return jax.vmap(tx.update)(*two)

    helpers.trace(step, tx)


CASES = [
    wrong(
        "update with axis_name='replica' outside of replicas.step",
        lambda: updated(cd.curvadion(0.1, axis_name=AXIS)),
        *(ValueError, "'replica' is not bound here", "call `update` inside curvadion"),
    ),
    wrong(
        "presets.synchronous_dion(0.1, axis_name='replica').update outside of "
        "replicas.step",
        lambda: updated(cd.presets.synchronous_dion(0.1, axis_name=AXIS)),
        *(ValueError, "'replica' is not bound here", "pass axis_name=None for one"),
    ),
    wrong(
        "axis_name='pod' in a step over 'replica'",
        lambda: on_replicas(cd.curvadion(0.1, axis_name="pod")),
        *(
            ValueError,
            "axis_name='pod' and replicas.step maps over 'replica'",
            "Build the optimizer with axis_name='replica'",
        ),
    ),
    wrong(
        "curvadion(0.1) without axis_name in replicas.step",
        lambda: on_replicas(cd.curvadion(0.1)),
        *(
            ValueError,
            "axis_name=None and replicas.step maps over 'replica'",
            "Build the optimizer with axis_name='replica'",
        ),
    ),
    wrong(
        "presets.local_sgd(0.1) without axis_name in replicas.step",
        lambda: on_replicas(cd.presets.local_sgd(0.1)),
        *(
            ValueError,
            "axis_name=None and replicas.step maps over 'replica'",
            "Build the optimizer with axis_name='replica'",
        ),
    ),
    wrong(
        "gradients through jax.lax.pmean",
        lambda: averaging(
            cd.curvadion(0.1, axis_name=AXIS), lambda g: lax.pmean(g, AXIS)
        ),
        *(ValueError, "the gradient ['bias'] is the same on all", "psum: remove it"),
    ),
    wrong(
        "one gradient through jax.lax.psum",
        lambda: averaging(
            parts(axis_name=AXIS), lambda g: {**g, "tall": lax.psum(g["tall"], AXIS)}
        ),
        *(ValueError, "the gradient ['tall'] is the same on all", "psum: remove it"),
    ),
    wrong(
        "a loss through jax.lax.pmean, in a shard_map of one's own",
        averaged_loss,
        *(ValueError, "on all replicas of 'replica'", "Remove the reduction; each"),
    ),
    wrong(
        "jax.grad of parameters with in_specs=P()",
        shared_parameters,
        *(
            ValueError,
            "on all replicas of 'replica'",
            "use curvadion_jax.replicas",
        ),
    ),
    wrong(
        "shard_map(..., check_vma=False)",
        lambda: own_shard_map(check_vma=False),
        *(ValueError, "with check_vma=False", "Leave check_vma on, or use curvadion"),
    ),
    wrong(
        "a shard_map of one's own that leaves the replica axis on the state",
        lambda: own_shard_map(strip=False),
        *(ValueError, "has shape (5,), the parameter (1, 5)", "differentiate with"),
    ),
    wrong(
        "an inner optimizer with an axis of its own",
        lambda: on_replicas(
            parts(
                inner=cd.presets.synchronous_dion(0.1, axis_name=AXIS), axis_name=AXIS
            )
        ),
        *(ValueError, "over the axis 'replica'", "leave that to the synchronizer"),
    ),
    wrong(
        "optax.apply_if_finite around Dion inside average_factors()",
        lambda: helpers.trace(
            lambda params, state, gradients: FINITE.update(gradients, state, params),
            FINITE,
            {name: PARAMS[name] for name in helpers.MATRICES},
        ),
        *(ValueError, "replicas of axis 'replica'", "such as optax.apply_if_finite or"),
    ),
    wrong(
        "a wrapper around Dion that drops extra arguments",
        lambda: on_replicas(
            parts(
                inner=swallowing(cd.dion(0.1)),
                trigger=triggers.relative_momentum_change(0.1),
                axis_name=AXIS,
            )
        ),
        *(
            ValueError,
            "the extra argument momentum_only",
            "Build it as an optax.Gradient",
        ),
    ),
    wrong(
        "other dimension_numbers for adaptive_sync than for dion",
        lambda: on_replicas(
            parts(
                inner=cd.dion(0.1),
                dimension_numbers=lambda params: {name: None for name in params},
                axis_name=AXIS,
            )
        ),
        *(ValueError, "the parameter 'tall'", "pass adaptive_sync the same dimension_"),
    ),
    wrong(
        "ask_every=2 without the number of the step",
        lambda: asked(lambda state: None),
        *(
            ValueError,
            "ask_every=2",
            "call update(gradients, state, params, step",
        ),
    ),
    wrong(
        "ask_every=2 with step=1.0",
        lambda: asked(lambda state: 1.0),
        *(TypeError, "got float32[]", "step must be one integer"),
    ),
    wrong(
        "ask_every=2 with a step for every replica",
        lambda: asked(lambda state: jnp.arange(2)),
        *(TypeError, "got int32[2]", "step must be one integer"),
    ),
    wrong(
        "ask_every=2 with the state's own counter",
        lambda: asked(lambda state: state.metrics.steps),
        *(ValueError, "replicas of axis 'replica'", "Reduce it over the axis first"),
    ),
    wrong(
        "lax.cond on a replica's own loss around the optimizer",
        skipping_spikes,
        *(
            ValueError,
            "stands inside a condition or a while loop that a replica decides alone",
            "such as optax.apply_if_finite or lax.cond on a loss, goes around the",
        ),
    ),
    wrong(
        "jax.vmap around update, for two models",
        lambda: updated_for_two_models(cd.curvadion(0.1, axis_name=AXIS)),
        *(
            ValueError,
            "update runs under vmap, for 2 models",
            "Give one update the parameters of all models, stacked",
        ),
    ),
]
