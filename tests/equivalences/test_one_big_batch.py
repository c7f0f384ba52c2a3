"""`always` is one big batch, and one replica is plain Dion."""

import functools
from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

# Two float32 programs of the same mathematics, which sum in another order, over 6
# steps of size 0.1 on numbers of order 1. Measured: 9e-7.
SAME_ATOL = 5e-6
# One replica compiles to other fusions than plain Dion. Measured: 2e-8.
ALONE_ATOL = 1e-6
STEPS, LEARNING_RATE, MOMENTUM = 6, 0.1, 0.95
WITHIN = {
    "average_gradients": synchronizers.average_gradients(),
    "average_factors": synchronizers.average_factors(),
}
ALL = {**WITHIN, "reconcile": synchronizers.reconcile()}


def close(actual, expected, atol):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def optimizer(trigger, synchronizer, mesh, rank=0.5) -> Any:
    return helpers.synced_dion(
        LEARNING_RATE,
        rank,
        trigger,
        synchronizer,
        momentum=MOMENTUM,
        other_optimizer=optax.adamw(LEARNING_RATE),
        mesh=mesh,
    )


def plain(rank=0.5) -> Any:
    other = optax.adamw(LEARNING_RATE)
    return cd.dion(LEARNING_RATE, rank=rank, momentum=MOMENTUM, other_optimizer=other)


@functools.lru_cache(typed=True)  # 1 is rank one, 1.0 full
def one_batch(rank):
    """Plain Dion's trajectory on the mean gradients."""
    means = [
        jax.tree.map(lambda g: g.mean(0), tree)
        for tree in helpers.make_gradients(STEPS, 8)
    ]
    return list(helpers.run(plain(rank), None, helpers.make_params(), means))


@pytest.mark.parametrize(
    ("rank", "name", "kind"),
    [
        (1, "average_factors", "simulated"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, "average_factors", "mesh"),
                (1.0, "average_factors", "mesh"),
                (1, "average_gradients", "mesh"),
                (1, "average_gradients", "simulated"),
            )
        ),
    ],
)
def test_always_within_the_step_is_one_big_batch(rank, name, kind):
    mesh = helpers.mesh_of(kind, 8)
    tx = optimizer(triggers.always(), WITHIN[name], mesh, rank)
    params, gradients = helpers.make_params(), helpers.make_gradients(STEPS, 8)
    run = list(helpers.run(tx, mesh, params, gradients))
    assert helpers.decisions(run) == [True] * STEPS
    for (params, state), (expected, one) in zip(run, one_batch(rank), strict=True):
        momenta, qs, _ = helpers.dion_state(state)
        one = helpers.dion_state(one)
        for name, value in expected.items():
            close(params[name], np.broadcast_to(value, params[name].shape), SAME_ATOL)
        for name in helpers.MATRICES:
            close(momenta[name].mean(0), one.momentum[name], SAME_ATOL)
            q = np.broadcast_to(one.dion_q[name], qs[name].shape)
            close(qs[name], q, SAME_ATOL)


SYNCHRONOUS = {
    "adamw": (
        lambda mesh: cd.presets.synchronous_adamw(0.01, weight_decay=0.1, mesh=mesh),
        lambda: optax.adamw(0.01, b2=0.95, weight_decay=0.1),
    ),
    "muon": (
        lambda mesh: cd.presets.synchronous_muon(
            0.02, adam_learning_rate=0.005, weight_decay=0.1, mesh=mesh
        ),
        lambda: optax.contrib.muon(
            0.02,
            adam_learning_rate=0.005,
            adam_b2=0.95,
            weight_decay=0.1,
            muon_weight_dimension_numbers=cd.dimension_numbers.by_name(
                helpers.make_params()
            ),
        ),
    ),
    "dion": (
        lambda mesh: cd.presets.synchronous_dion(0.1, rank=0.5, mesh=mesh),
        lambda: cd.dion(0.1, rank=0.5),
    ),
}


@pytest.mark.parametrize("name", helpers.slow_but(["adamw"], SYNCHRONOUS))
def test_synchronous_presets_are_one_big_batch(name):
    """Of two replicas; all of them are alike."""
    make, alone = SYNCHRONOUS[name]
    params, gradients = helpers.make_params(), helpers.make_gradients(4, 2)
    means = [jax.tree.map(lambda g: g.mean(0), tree) for tree in gradients]
    run = helpers.run_simulated(make, params, gradients)
    expected = helpers.run(alone(), None, params, means)
    for (found, state), (wanted, _) in zip(run, expected, strict=True):
        assert state.counters.since == 0
        for key, x in wanted.items():
            close(found[key], np.stack([x, x]), SAME_ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_one_replica_is_plain_dion(name):
    # Two syncs with local steps between them, from which the momentum goes on.
    tx = optimizer(triggers.every_k(3), ALL[name], None)
    gradients = [
        jax.tree.map(lambda g: g[0], tree)
        for tree in helpers.make_gradients(9, 1, seed=3)
    ]
    dion = helpers.run(plain(), None, helpers.make_params(), gradients)
    run = helpers.run(tx, None, helpers.make_params(), gradients)
    for (params, state), (expected, dion_state) in zip(run, dion, strict=True):
        one, other = helpers.dion_state(state), helpers.dion_state(dion_state)
        for name in helpers.SHAPES:
            close(params[name], expected[name], ALONE_ATOL)
        for name in helpers.MATRICES:
            close(one.momentum[name], other.momentum[name], 10 * ALONE_ATOL)
            close(one.dion_q[name], other.dion_q[name], 10 * ALONE_ATOL)


def test_synchronous_muon_sends_gradients_in_the_compressors_form():
    """As the optimizer that is put together from parts."""
    form = cd.compressors.quantize(2)
    params, gradients = helpers.make_params(), helpers.make_gradients(3, 2)
    by_name = cd.dimension_numbers.by_name(params)
    muon = optax.contrib.muon(0.02, adam_b2=0.95, muon_weight_dimension_numbers=by_name)
    synchronizer = cd.synchronizers.average_gradients(form)

    def of_parts(mesh):
        return cd.adaptive_sync(muon, triggers.always(), synchronizer, mesh)

    def preset(mesh):
        return cd.presets.synchronous_muon(0.02, compressor=form, mesh=mesh)

    runs = (
        helpers.run_simulated(make, params, gradients) for make in (preset, of_parts)
    )
    for (found, state), (wanted, other) in zip(*runs, strict=True):
        sent = (cd.metrics.read(x)["bytes"] for x in (state, other))
        assert len({*sent}) == 1
        for key, x in wanted.items():
            close(found[key], x, SAME_ATOL)
