"""Local steps of one replica depend on nothing that another one has."""

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = helpers.AXIS
CHANGED, KEPT = 1, [0, 2]
LOCAL = {
    "sgd": cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        triggers.relative_momentum_change(1e6),
        synchronizers.reconcile(),
        AXIS,
    ),
    "curvadion": cd.curvadion(0.1, 1e6, axis_name=AXIS),
    "local_muon": cd.local_muon(
        0.1, axis_name=AXIS, trigger=triggers.relative_momentum_change(1e6)
    ),
    "averaging_dion": helpers.averaging_dion(
        0.1,
        0.5,
        orthonormalize=helpers.householder_qr,
        axis_name=AXIS,
        trigger=triggers.relative_momentum_change(1e6),
    ),
    "paper": cd.presets.paper(0.1, 1e6, axis_name=AXIS),
    "authors_code": cd.presets.authors_code(0.1, 1e6, axis_name=AXIS),
    "factors-every_k": helpers.synced_dion(
        0.1, 0.5, triggers.every_k(4), synchronizers.average_factors(), axis_name=AXIS
    ),
}
QUICK = ("sgd",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in LOCAL],
)
def test_another_replicas_gradient_changes_nothing_until_the_sync(name):
    """Three replicas, four steps, of which 1 and 2 are local; one gradient differs."""
    gradients = helpers.make_gradients(4, 3)
    gradients[3]["tall"] *= 1e9  # the last step synchronises
    changed = [jax.tree.map(np.copy, tree) for tree in gradients]
    for array in changed[1].values():
        array[CHANGED] *= -3
    mesh = cd.replicas.make_mesh(3)
    tx = LOCAL[name]
    first = helpers.start(tx, helpers.make_params(), mesh)
    step = helpers.quick(helpers.replica_step(tx, mesh), first, gradients[0])
    one = other = step(first, gradients[0])[0]
    for index in (1, 2):
        one, _ = step(one, gradients[index])
        other, _ = step(other, changed[index])
        assert not np.asarray(one[1].metrics.synced).any()
        helpers.assert_bitwise(rows(one, KEPT), rows(other, KEPT))
        assert differs(rows(one, [CHANGED]), rows(other, [CHANGED]))
    one, _ = step(one, gradients[3])
    other, _ = step(other, gradients[3])
    assert np.asarray(one[1].metrics.synced).all()
    assert np.asarray(other[1].metrics.synced).all()


def rows(state, replicas):
    return jax.tree.map(lambda x: np.asarray(x)[replicas], state)


def differs(one, other):
    (params, _), (others, _) = one, other
    return all((params[name] != others[name]).all() for name in helpers.MATRICES)


@pytest.mark.slow
def test_a_sync_lets_the_change_through():
    # What the test above would see if local steps leaked.
    inner, trigger = optax.sgd(0.1, 0.9), triggers.always()
    tx = cd.adaptive_sync(inner, trigger, synchronizers.reconcile(), AXIS)
    gradients = helpers.make_gradients(1, 3)
    changed = [jax.tree.map(np.copy, gradients[0])]
    changed[0]["tall"][CHANGED] *= -3
    one, other = (
        helpers.last(helpers.run_mesh(tx, helpers.make_params(), each))
        for each in (gradients, changed)
    )
    assert (rows(one, KEPT)[0]["tall"] != rows(other, KEPT)[0]["tall"]).all()
