"""A local step of its own, as the paper's: a plain gradient step between syncs."""

import functools

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import triggers
from curvadion_jax.presets import _published_curvadion

AXIS = helpers.AXIS
# One float32 operation more or less (a fused multiply-add) on numbers of order 1.
ROUNDING = 3e-7
LOCAL_RATE, MU = 0.25, 0.9
paper = functools.partial(cd.presets.paper, orthonormalize=helpers.householder_qr)


def with_error_feedback():
    inner = cd.dion(0.1, 0.25, MU, orthonormalize=helpers.householder_qr)
    return cd.adaptive_sync(
        _published_curvadion._alternating(inner, optax.sgd(LOCAL_RATE)),
        triggers.at_most_every(triggers.always(), 9),
        _published_curvadion._with_mean_gradients(),
        AXIS,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "decay"),
    [
        pytest.param(
            paper(0.1, 1e6, LOCAL_RATE, momentum=MU, axis_name=AXIS), MU, id="paper"
        ),
        # Error feedback adds gradients as they are, and decays what a step takes.
        pytest.param(with_error_feedback(), 1, id="error-feedback"),
    ],
)
def test_a_local_step_is_a_plain_gradient_step(tx, decay):
    mesh = cd.replicas.make_mesh(2)
    state = helpers.start(tx, helpers.make_params(), mesh)
    gradients = helpers.make_gradients(3, 2)
    step = helpers.quick(helpers.replica_step(tx, mesh), state, gradients[0])
    state, _ = step(state, gradients[0])
    assert np.asarray(state[1].metrics.synced).all()
    for tree in gradients[1:]:
        before, (state, metrics) = jax.device_get(state), step(state, tree)
        assert not np.asarray(state[1].metrics.synced).any()
        old, new = helpers.dion_state(before[1]), helpers.dion_state(state[1])
        for name, gradient in tree.items():
            np.testing.assert_array_equal(
                metrics["updates"][name], np.float32(-LOCAL_RATE) * gradient
            )
            np.testing.assert_allclose(
                state[0][name], before[0][name] - LOCAL_RATE * gradient, atol=ROUNDING
            )
        for name in helpers.MATRICES:
            expected = decay * old.momentum[name] + tree[name]
            np.testing.assert_allclose(
                new.momentum[name], expected, atol=5 * ROUNDING, rtol=0
            )
            helpers.assert_bitwise(new.q[name], old.q[name])


def test_a_local_steps_schedule_counts_every_step():
    # Rates 1, 1/2, 1/4, ...; the second of every two steps is synchronised and takes
    # none of the local step, but the schedule goes on.
    between = optax.sgd(optax.exponential_decay(1.0, 1, 0.5))
    at_syncs = optax.with_extra_args_support(optax.sgd(0.0))
    tx = cd.adaptive_sync(
        _published_curvadion._alternating(at_syncs, between),
        triggers.every_k(2),
        _published_curvadion._with_mean_gradients(),
    )
    gradients = [{"w": np.ones(1, np.float32)}] * 5
    history = helpers.run_alone(tx, {"w": np.zeros(1, np.float32)}, gradients)
    assert [float(params["w"][0]) for params, _ in history] == [
        *(-1, -1, -1.25, -1.25, -1.25 - 1 / 16)
    ]
