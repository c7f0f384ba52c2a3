"""Each optimizer is what it is called, whatever its arguments."""

import math
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import _muon, synchronizers, triggers

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


def one_update(tx: Any):
    return jax.jit(lambda x: tx.update(x, tx.init(x), x))(KERNEL)


@pytest.mark.parametrize(
    ("options", "rank"),
    [
        ({}, 4),
        ({"rank": 1.0}, 4),
        ({"rank": 0.5}, 2),
        ({"rank": 1}, 1),
        ({"threshold": 0.3}, 4),
        ({"budget": 0.5}, 4),
        ({"bits": 8}, 4),
        ({"momentum": 0.5}, 4),
        ({"error_feedback": False}, 4),
        ({"orthonormalize": helpers.householder_qr}, 4),
        ({"seed": 1}, 4),
        ({"adam_learning_rate": 0.1}, 4),
        ({"other_optimizer": optax.sgd(0.1)}, 4),
        ({"synchronizer": synchronizers.reconcile()}, 4),
        ({"synchronizer": synchronizers.average_factors()}, 4),
    ],
    ids=named,
)
def test_no_argument_swaps_the_optimizer(options, rank):
    updates, state = one_update(cd.curvadion(RATE, **options))
    (dion,) = inside(state.inner_state, cd.DionState)
    assert dion.momentum["kernel"].shape == (4, 8)
    assert dion.q["kernel"].shape == (4, rank)
    # r singular values of one, and no outer step on a single replica.
    expected = RATE * math.sqrt(8 / 4) * math.sqrt(rank)
    norm = np.linalg.norm(updates["kernel"])
    np.testing.assert_allclose(norm, expected, rtol=NORM_RTOL)


def test_no_rank_is_full_rank():
    results = [one_update(cd.curvadion(RATE, rank=rank)) for rank in (None, 1.0)]
    helpers.assert_bitwise(*results)


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


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (cd.local_muon, {"rank": 0.25}),
        (cd.local_muon, {"rank": None}),
        (cd.local_muon, {"threshold": 0.3}),
        (cd.local_muon, {"seed": 0}),
        (cd.local_muon, {"error_feedback": True}),
        (cd.local_muon, {"orthonormalize": cd.cholesky_qr}),
        (cd.curvadion, {"trigger": triggers.always()}),
        (cd.curvadion, {"rank": 0.25, "trigger": triggers.always()}),
        (cd.dion, {"threshold": 0.3}),
    ],
)
def test_arguments_of_another_method_are_rejected(build: Any, options):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        build(RATE, **options)
