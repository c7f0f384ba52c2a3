"""Each optimizer is what it is called, whatever its arguments."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import _muon, triggers

RATE = 0.05
# An orthonormal basis of four columns in float32.
NORM_RTOL = 1e-5
KERNEL = {"kernel": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)}


def named(x) -> str:
    return "-".join(x) if isinstance(x, dict) else str(x)


def inside(state, kind) -> list[Any]:
    """The states of this kind in that of an optimizer."""
    is_kind = lambda x: isinstance(x, kind)  # noqa: E731
    return [x for x in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(x)]


@pytest.mark.parametrize(
    "options", [{"budget": 0.5}, {"bits": 8, "trigger": triggers.every_k(3)}], ids=named
)
def test_local_muon_of_one_replica_is_muon(options):
    tx = cd.local_muon(RATE, **options)
    expected = optax.contrib.muon(RATE, beta=0.9, eps=1e-7, adam_b2=0.95)
    runs = []
    for each in (tx, expected):
        params = {"kernel": jnp.asarray(KERNEL["kernel"]), "bias": jnp.ones(4)}
        state, update = each.init(params), jax.jit(each.update)
        for step in range(12):
            gradients = jax.tree.map(lambda x, step=step: jnp.cos(x + step), params)
            updates, state = update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        runs.append((params, state))
    (params, state), (muons, _) = runs
    assert state.metrics.syncs > 0
    assert len(inside(state.inner_state, _muon.MuonState)) == 1
    # At a sync parameters are anchor - (anchor - parameters): one rounding.
    chex.assert_trees_all_close(params, muons, rtol=1e-5)
