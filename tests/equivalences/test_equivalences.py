"""On a mesh and on one device replicas are the NumPy reference's."""

from typing import Any

import helpers
import numpy as np
import optax
import pytest
import reference_replicas as reference

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

STEPS, LEARNING_RATE, MU, RANK = 12, 0.1, 0.9, 2
# float32 against float64 over 12 steps of size 0.1: one step rounds parameters of
# order 1 to 6e-8, and errors of P and Q, 1e-7 times the condition number of B Q (up
# to 10 here), enter every step. Measured: parameters 2e-6, momenta (of elements up to
# 100) 4e-5, Q 2e-5.
ATOL = {"params": 1e-5, "momenta": 1e-4, "qs": 1e-4}
# Steps with large gradients change the momentum's norm fast.
SCALES = [1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 40.0, 1.0, 1.0, 1.0]
THRESHOLD = 0.6

SYNCHRONIZERS = {
    "average_gradients": (
        synchronizers.average_gradients(),
        lambda: reference.AverageGradients(),
    ),
    "average_factors": (
        synchronizers.average_factors(),
        lambda: reference.AverageFactors(),
    ),
    "reconcile": (synchronizers.reconcile(), lambda: reference.Reconcile()),
    "reconcile-nesterov": (
        synchronizers.reconcile(optax.sgd(0.7, momentum=0.9, nesterov=True)),
        lambda: reference.Reconcile(reference.Nesterov(0.7, 0.9)),
    ),
}
TRIGGERS = {
    "every_k": (triggers.every_k(3), lambda: reference.every_k(3)),
    "rmmc": (
        triggers.relative_momentum_change(THRESHOLD),
        lambda: reference.MomentumChange(THRESHOLD),
    ),
}
WAYS = [
    *(("every_k", "mesh", 8), ("rmmc", "mesh", 2)),
    *(("every_k", "simulated", 2), ("rmmc", "simulated", 8)),
]
QUICK = [
    ("average_gradients", "rmmc", "simulated", 8),
    ("average_factors", "every_k", "simulated", 2),
    ("reconcile-nesterov", "every_k", "mesh", 8),
]


def optimizer(trigger, synchronizer, mesh) -> Any:
    return helpers.synced_dion(
        LEARNING_RATE,
        RANK,
        trigger,
        synchronizer,
        momentum=MU,
        other_optimizer=optax.sgd(LEARNING_RATE),
        mesh=mesh,
    )


def simulate(params, q, gradients, trigger, sync):
    replicas = helpers.replicas_of(gradients)
    other = reference.Sgd(LEARNING_RATE)
    inner = reference.Matrices(helpers.MATRICES, LEARNING_RATE, MU, other, qs=q)
    simulation = reference.Run(params, inner, replicas, trigger, sync)
    for tree in gradients:
        simulation.step(reference.rows_of(tree, replicas))
        yield simulation


def same_signs(q, like):
    """Q with the column signs of another: power iteration leaves them open."""
    signs = np.sign((q * like).sum(-2, keepdims=True))
    return q * np.where(signs == 0, 1, signs)


def compare(trajectory, simulations):
    """Every step's parameters, momenta and Q; returns both histories of decisions."""
    steps = []
    for (params, state), simulation in zip(trajectory, simulations, strict=True):
        steps.append((params, state))
        momenta, qs, _ = helpers.dion_state(state)
        for i, wanted in enumerate(simulation.params):
            for name, expected in wanted.items():
                close(params[name][i], expected, "params")
            for name, expected in simulation.states[i]["momentum"].items():
                close(momenta[name][i], expected, "momenta")
            for name, expected in simulation.states[i]["q"].items():
                close(same_signs(qs[name][i], expected), expected, "qs")
    return helpers.decisions(steps), simulation.synced


def close(actual, expected, what):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ATOL[what], err_msg=what)


CASES = [(name, *way) for name in SYNCHRONIZERS for way in WAYS]


@pytest.mark.parametrize(
    ("name", "trigger", "kind", "replicas"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_the_library_is_the_reference(name, trigger, kind, replicas):
    synchronizer, sync = SYNCHRONIZERS[name]
    mesh = helpers.mesh_of(kind, replicas)
    tx = optimizer(TRIGGERS[trigger][0], synchronizer, mesh)
    params = helpers.make_params()
    gradients = helpers.make_gradients(STEPS, replicas, scales=SCALES)
    q = helpers.dion_state(tx.init(cd.replicas.replicate(params, mesh))).dion_q
    q = {k: np.asarray(q[k][0]) for k in helpers.MATRICES}
    simulations = simulate(params, q, gradients, TRIGGERS[trigger][1](), sync())
    decided, expected = compare(helpers.run(tx, mesh, params, gradients), simulations)
    assert decided == expected
    assert {*decided} == {True, False}
