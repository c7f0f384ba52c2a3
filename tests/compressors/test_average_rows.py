"""Stacked rows without a mesh are averaged as a sync averages replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd

# Both programs round sums of numbers below 16 in their own order.
ROUNDING = 1e-5
STEPS = 3


def drift(step, replicas):
    rng = np.random.default_rng(step)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(replicas, *shape)), jnp.float32)
    return {"w": draw(24, 16), "b": draw(40)}


@pytest.mark.parametrize(("replicas", "bits"), [(2, 2), (4, 8), (4, 2), (4, None)])
def test_means_and_residuals_are_those_of_a_sync(replicas, bits):
    form = cd.compressors.quantize(bits, 16) if bits else cd.compressors.exact()
    mesh = cd.replicas.make_mesh(replicas)
    tx = cd.adaptive_sync(
        optax.sgd(1.0),
        cd.triggers.every_k(1),
        cd.synchronizers.reconcile(compressor=form),
        mesh,
    )
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), drift(0, replicas))
    params = cd.replicas.replicate(zeros, mesh)
    state, update = tx.init(params), jax.jit(tx.update)
    anchor = zeros
    residual = jax.tree.map(jnp.zeros_like, drift(0, replicas))
    average = jax.jit(form.average_rows)
    for step in range(STEPS):
        moved = drift(step, replicas)
        against = jax.tree.map(jnp.negative, moved)
        _, state = update(cd.replicas.place(against, mesh), state, params)
        mean, residual = average(moved, residual)
        anchor = jax.tree.map(jnp.add, anchor, mean)
        params = cd.replicas.replicate(cd.replicas.anchor(state), mesh)
        for name, x in cd.replicas.anchor(state).items():
            np.testing.assert_allclose(anchor[name], x, atol=ROUNDING)
            own = state.rows.residual[name]
            np.testing.assert_allclose(residual[name], own, atol=ROUNDING)
        if bits:
            assert any(jnp.abs(x).max() > 0.01 for x in residual.values())
