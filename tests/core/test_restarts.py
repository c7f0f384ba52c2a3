"""A spoilt replica starts afresh without a condition of its own, which could hang."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import (
    _jax_internals,
    _momentum,
    _nan_policy,
    _power_iteration,
    synchronizers,
    triggers,
)

AXIS = helpers.AXIS
REPLICAS = 2
# Columns of a cosine transform, or R / (||R|| + 1e-8), in float32.
UNIT = 1e-6
pytestmark = pytest.mark.slow  # many programs


def dion(synchronizer):
    return helpers.synced_dion(
        0.1, 2, triggers.every_k(2), synchronizer, axis_name=AXIS
    )


OPTIMIZERS = {
    "curvadion": lambda: cd.curvadion(0.1, 0.3, axis_name=AXIS),
    "local_muon": lambda: cd.local_muon(0.1, axis_name=AXIS),
    "reconcile": lambda: dion(synchronizers.reconcile()),
    "factors": lambda: dion(synchronizers.average_factors()),
    "gradients": lambda: dion(synchronizers.average_gradients()),
}


def placed(tx, inner):
    """The mesh, and a state of matrices that lie on all devices of a replica."""
    mesh = cd.replicas.make_mesh(REPLICAS, inner)

    def place(x):
        split = x.shape in {(REPLICAS, *helpers.SHAPES[n]) for n in helpers.MATRICES}
        spec = PartitionSpec(AXIS, *inner) if split else PartitionSpec(AXIS)
        return jax.device_put(x, NamedSharding(mesh, spec))

    return mesh, jax.tree.map(place, helpers.start(tx, helpers.make_params(), mesh))


def conditions(tx, inner):
    """All that decides, in the program of a step."""
    mesh, state = placed(tx, inner)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    equations = helpers.equations(helpers.program_of(step, state, gradients))
    return [x for x in equations if x.primitive.name in ("cond", "while")]


@pytest.mark.parametrize("inner", [{}, {"fsdp": 2}], ids=["one", "two"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_condition_differs_between_replicas(name, inner):
    """Neither where several devices of a replica move arrays, nor anywhere else."""
    found = conditions(OPTIMIZERS[name](), inner)
    assert found  # whether to synchronise, at least
    for equation in found:
        assert not _jax_internals.decides_alone(equation, AXIS), str(equation)


def test_what_starts_afresh_and_what_stays():
    """Moments with their count, beside what is masked; not schedules and rates."""
    params = helpers.make_params()
    for make in (optax.adam, lambda x: cd.dion(x, other_optimizer=optax.adam(x))):
        for rate in (0.1, optax.linear_schedule(0.1, 0, 9)):
            tx = optax.inject_hyperparams(make)(rate)
            state = tx.init(params)
            for _ in range(2):
                _, state = tx.update(params, state, params)
            again = _nan_policy.restarted(tx, params, state, jnp.array(False))
            helpers.assert_bitwise(again.hyperparams, state.hyperparams)
            assert (again.count, state.count) == (2, 2)  # of the injected schedule
            counts = optax.tree.get_all_with_path(again.inner_state, "count")
            assert counts
            assert {int(x) for _, x in counts} == {0}
            kept = _nan_policy.restarted(tx, params, state, jnp.array(True))
            helpers.assert_bitwise(kept, state)
    tx = optax.adam(optax.linear_schedule(0.1, 0, 9))
    _, state = tx.update(params, tx.init(params), params)
    adam, schedule = _nan_policy.restarted(tx, params, state, jnp.array(False))
    assert (adam.count, schedule.count) == (0, 1)


@pytest.mark.parametrize("shape", [(6, 2), (3, 5, 5), (7, 1)])
def test_q_starts_afresh_with_orthonormal_columns(shape):
    q = np.asarray(_power_iteration.cosines(np.zeros(shape, np.float32)))
    unit = np.broadcast_to(np.eye(shape[-1]), (*shape[:-2], *[shape[-1]] * 2))
    np.testing.assert_allclose(q.swapaxes(-1, -2) @ q, unit, atol=UNIT)


@pytest.mark.parametrize("inner", [{}, {"fsdp": 2}], ids=["one", "two"])
@pytest.mark.parametrize("name", ["reconcile", "factors"])
def test_q_of_a_spoilt_replica_restarts(name, inner):
    """Momentum and Q of replica 1 are NaN in front of a sync, which excludes it."""
    tx = OPTIMIZERS[name]()
    mesh, state = placed(tx, inner)
    first, second, third = helpers.make_gradients(3, REPLICAS)
    step = helpers.quick(helpers.replica_step(tx, mesh), state, first)
    state, _ = step(state, first)

    def spoil(x):
        numbers = np.array(x)
        numbers[1] = np.nan
        return jax.device_put(numbers, x.sharding)

    params, opt_state = state
    opt_state = opt_state._replace(
        inner_state=_momentum.with_dion(
            opt_state.inner_state, lambda x: jax.tree.map(spoil, x)
        )
    )
    state, _ = step((params, opt_state), second)
    found = state[1].metrics
    assert found.synced.all()
    assert found.excluded.tolist() == [0, 1]
    for _ in range(2):
        chex.assert_tree_all_finite((state[0], state[1].inner_state))
        found = helpers.dion_state(state[1])
        for name in helpers.MATRICES:
            lengths = np.linalg.norm(found.dion_q[name], axis=-2)
            np.testing.assert_allclose(lengths, 1, atol=UNIT)
        state, _ = step(state, third)
    assert state[1].metrics.excluded.tolist() == [0, 1]
    for name in helpers.MATRICES:  # it takes part again
        assert np.abs(helpers.dion_state(state[1]).momentum[name][1]).max() > 0.1
