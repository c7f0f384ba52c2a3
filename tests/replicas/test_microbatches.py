"""Optax's micro-batches inside a step are the whole batch."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvadion_jax as cd

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
MEAN = optax.microbatching.AccumulationType.MEAN


def test_microbatches_inside_a_step():
    """And under `shard_map`, where types tell replicas apart."""
    mesh = cd.replicas.make_mesh(2)
    whole = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))
    parts = optax.microbatch(whole, 1, microbatch_size=2, accumulator=MEAN)

    def train(w, x):
        return w, parts(w, x)

    w = jnp.ones((6, 2))
    state = cd.replicas.replicate(w, mesh)
    each = [whole(w, x) for x in np.split(X, 2)]
    expected = jax.tree.map(lambda *x: np.stack(x), *each)
    step = cd.replicas.step(train, mesh, donate=False)
    for run in (step, helpers.manual(train, mesh, state)):
        _, found = run(state, X)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected
        )
