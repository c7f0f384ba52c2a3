"""After a sync of `reconcile` replicas are together: anchor and parameters."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

# `params + update` rounds: where a parameter is smaller than its update, no update
# leads to it exactly. Measured with steps of 1% of the parameters' size: 0.2% of the
# elements of float32, 0.4% of bfloat16; they miss by a rounding of the update.
UNEQUAL_SHARE = 0.01


def optimizer(inner, k=2, outer=None, **options) -> Any:
    synchronizer = synchronizers.reconcile(outer, **options)
    return lambda mesh: cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, mesh)


def run(make, params, gradients):
    """(params, opt_state) on the host after every step."""
    return list(helpers.run_simulated(make, params, gradients))


def equal_rows(array):
    """Whether all replicas hold the same bits."""
    return len({row.tobytes() for row in np.asarray(array)}) == 1


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_replicas_come_together(dtype, kind):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=4000), dtype)}
    gradients = [{"w": jnp.asarray(rng.normal(size=(8, 4000)), dtype)} for _ in "1234"]
    mesh = helpers.mesh_of(kind, 8)
    tx = optimizer(optax.sgd(0.01, 0.9))(mesh)
    state, step = helpers.start(tx, params, mesh), jax.jit(helpers.train_step(tx))
    history = []
    for tree in gradients:  # compiled as users do, with all optimisations
        state, _ = step(state, tree)
        history.append(jax.device_get(state))
    (apart, _), (together, state) = history[-2:]
    anchor = state.common.anchor["w"]
    assert anchor.dtype == dtype
    assert not equal_rows(apart["w"])
    wide = np.float64(together["w"])
    unequal = wide != np.float64(anchor)
    assert unequal.mean() < UNEQUAL_SHARE
    update = np.abs(wide - np.float64(apart["w"]))
    assert (
        np.abs(wide - np.float64(anchor)) <= 2 * jnp.finfo(dtype).eps * update
    ).all()


def test_an_outer_schedule_advances_at_syncs_only():
    # Each replica drifts by -2 x 0.5 x 1 between syncs; the outer rates are 1, 1/2,
    # 1/4, so the anchor moves by -1, -1/2, -1/4.
    outer = optax.sgd(optax.exponential_decay(1.0, 1, 0.5))
    make = optimizer(optax.sgd(0.5), outer=outer)
    gradients = [{"w": np.ones((2, 1), np.float32)}] * 7
    history = run(make, {"w": jnp.zeros(1)}, gradients)
    anchors = [float(state.common.anchor["w"][0]) for _, state in history]
    assert anchors == [0, -1, -1, -1.5, -1.5, -1.75, -1.75]
    outer_state = history[-1][1].common.sync_state
    assert [int(x) for x in jax.tree.leaves(outer_state)] == [3]


# The outer momentum is kept in bfloat16.
BFLOAT16_RTOL = 2.0**-8


@pytest.mark.parametrize(
    ("build", "always"),
    [(cd.local_muon, {"trigger": triggers.always()}), (cd.curvadion, {"threshold": 0})],
)
def test_the_default_is_a_nesterov_step_of_rate_1_and_momentum_0_4(build, always):
    """By hand, of two syncs: v = d1, a1 = -(d1 + 0.4 v), v = d2 + 0.4 v, ..."""
    make = lambda mesh: build(1.0, other_optimizer=optax.sgd(1.0), mesh=mesh, **always)
    # Two bits hold elements of one size.
    signs = np.float32([1, -1, 1, 1, -1])
    gradients = [{"b": scale * np.stack([signs, signs])} for scale in (1, 3)]
    first, (params, state) = run(make, {"b": jnp.zeros(5)}, gradients)
    np.testing.assert_allclose(first[0]["b"], [-1.4 * signs] * 2, rtol=BFLOAT16_RTOL)
    second = -1.4 - (3 + 0.4 * (3 + 0.4))
    np.testing.assert_allclose(params["b"], [second * signs] * 2, rtol=BFLOAT16_RTOL)
    assert state.counters.syncs == 2
    assert not np.any(state.rows.residual["b"])


@pytest.mark.parametrize(
    ("mesh", "first"),
    [(None, -1.0), (cd.replicas.simulated(1), -1.4), (cd.replicas.make_mesh(1), -1.4)],
    ids=["none", "simulated", "mesh"],
)
def test_one_replica_takes_outer_steps_on_a_mesh_alone(mesh, first):
    tx = cd.local_muon(
        1.0, other_optimizer=optax.sgd(1.0), trigger=triggers.always(), mesh=mesh
    )
    gradients = {"b": np.ones(5 if mesh is None else (1, 5), np.float32)}
    ((params, _),) = helpers.run(tx, mesh, {"b": jnp.zeros(5)}, [gradients])
    np.testing.assert_allclose(params["b"], np.full_like(gradients["b"], first))


def test_an_outer_step_of_a_16_bit_anchor_is_rounded_once():
    """With the anchor, and not by itself before: here half a digit and some more."""
    digit = float(jnp.finfo(jnp.bfloat16).eps)
    make = optimizer(optax.sgd(1.0), k=1, outer=optax.sgd(1 + 2.0**-10))
    gradients = [{"w": jnp.array([[-digit], [0]], jnp.bfloat16)}]
    ((_, state),) = run(make, {"w": jnp.ones(1, jnp.bfloat16)}, gradients)
    assert state.common.anchor["w"].tolist() == [1 + digit]


def test_the_outer_optimizer_gets_the_anchor_as_parameters():
    # Outer weight decay: anchor <- anchor + drift - 1/4 anchor.
    outer = optax.chain(optax.add_decayed_weights(0.25), optax.sgd(1.0))
    make = optimizer(optax.sgd(0.5), k=1, outer=outer)
    params = {"w": jnp.array([4.0])}
    ((_, state),) = run(make, params, [{"w": np.ones((2, 1), np.float32)}])
    assert state.common.anchor["w"].tolist() == [2.5]
