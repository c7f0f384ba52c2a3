"""Reconciling Dion: a common Q from the common momentum, and local steps."""

from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = helpers.AXIS
# Columns of Q are R / (||R|| + 1e-8) in float32.
UNIT_ATOL = 1e-6
# One float32 operation more or less (a fused multiply-add) on numbers of order 1.
ROUNDING = 3e-7


def optimizer(**options) -> Any:
    return helpers.averaging_dion(
        0.1,
        0.5,
        axis_name=AXIS,
        other_optimizer=optax.sgd(0.1),
        orthonormalize=helpers.householder_qr,
        trigger=triggers.every_k(2),
        **options,
    )


@pytest.fixture(scope="module")
def reconciled():
    """A step of four replicas, local and sync in turn, and a state in between."""
    tx, mesh = optimizer(), cd.replicas.make_mesh(4)
    start = helpers.start(tx, helpers.make_params(), mesh)
    first, second = helpers.make_gradients(2, 4)
    step = helpers.quick(helpers.replica_step(tx, mesh), start, first)
    apart, _ = step(start, first)
    return lambda change: jax.device_get(step(change(apart), second)[0]), apart


def with_q(state, change):
    """The state with another Q in Dion's state, not in the synchronizer's."""

    def replace(node):
        if isinstance(node, cd.DionState):
            return node._replace(q=jax.tree.map(change, node.q))
        return node

    params, opt_state = state
    inner = jax.tree.map(
        replace, opt_state.inner_state, is_leaf=lambda x: isinstance(x, cd.DionState)
    )
    return params, opt_state._replace(inner_state=inner)


def test_momentum_and_q_are_common_after_a_sync(reconciled):
    step, apart = reconciled
    before = helpers.dion_state(apart[1])
    _, state = step(lambda state: state)
    momenta, qs = helpers.dion_state(state)
    for name in helpers.MATRICES:
        assert len({row.tobytes() for row in np.asarray(before.q[name])}) == 4
        for after in (momenta[name], qs[name], state.sync_state.common.q[0][name]):
            assert len({row.tobytes() for row in after}) == 1
        lengths = np.linalg.norm(qs[name], axis=-2)
        np.testing.assert_allclose(lengths, 1, atol=UNIT_ATOL)
        helpers.assert_bitwise(state.sync_state.common.q[0][name], qs[name])


def test_opposite_columns_do_not_cancel(reconciled):
    # The signs of Q's columns are arbitrary, and so must be without effect: half of
    # the replicas with the opposite signs would average to nothing.
    step, _ = reconciled
    signs = np.array([1, -1, 1, -1], np.float32).reshape(4, 1, 1)
    expected, _ = step(lambda state: state)
    params, state = step(lambda state: with_q(state, lambda q: q * signs))
    for name in helpers.MATRICES:
        q = helpers.dion_state(state).q[name]
        np.testing.assert_allclose(np.linalg.norm(q, axis=-2), 1, atol=UNIT_ATOL)
        np.testing.assert_allclose(params[name], expected[name], atol=ROUNDING)


@pytest.mark.slow
def test_q_stays_local_with_the_momentum():
    tx = optimizer(synchronizer=synchronizers.reconcile(momentum=False))
    gradients = helpers.make_gradients(2, 3)
    _, state = helpers.last(helpers.run_mesh(tx, helpers.make_params(), gradients))
    momenta, qs = helpers.dion_state(state)
    assert state.metrics.synced.all()
    assert state.sync_state.common.q == []
    for name in helpers.MATRICES:
        assert len({row.tobytes() for row in momenta[name]}) == 3
        assert len({row.tobytes() for row in qs[name]}) == 3
