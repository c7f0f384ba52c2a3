"""CurvaDion on replicas: what its trigger sees, and what decides."""

import functools

import helpers
import jax
import numpy as np
import optax
import pytest
import reference as ref

import curvadion_jax as cd

RATE, REPLICAS, STEPS = 0.05, 3, 6
# Norms of some dozens of numbers in float32, and the difference of two of them.
RTOL = 1e-5
# Three layers: a stack is of two.
SHAPES = {"bias": (5,), "stack": (2, 6, 4), "wide": (4, 6)}
NUMBERS = {
    "bias": None,
    "stack": cd.DimensionNumbers(1, 2),
    "wide": cd.DimensionNumbers(0, 1),
}
LAYERS = {"stack": (0, 1), "wide": (slice(None),)}


def gradients():
    """Standard normal; in steps 3 and 5 one layer of one replica is far larger."""
    rng = np.random.default_rng(1)
    steps = [
        {
            name: rng.normal(size=(REPLICAS, *shape)).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        for _ in range(STEPS)
    ]
    steps[3]["stack"][1, 1] *= 6
    steps[5]["wide"][2] *= 9
    return steps


@functools.cache
def history():
    """(Parameters, state) after each step of replicas."""
    rng = np.random.default_rng(2)
    params = {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    make = lambda mesh: cd.curvadion(
        RATE, threshold=0.6, rank=2, dimension_numbers=NUMBERS, mesh=mesh
    )
    return list(helpers.run_simulated(make, params, gradients()))


def reference_changes(states):
    """RMMC of M + G [steps, replicas, layers], M the library's own before the step."""
    totals, changes = None, []
    momenta = {n: np.zeros((REPLICAS, *SHAPES[n])) for n in LAYERS}
    for tree, (_, state) in zip(gradients(), states, strict=True):
        last = totals
        totals = {n: momenta[n] + tree[n].astype(float) for n in LAYERS}
        if last is not None:
            changes.append(
                [
                    [
                        ref.relative_momentum_change(totals[n][k][i], last[n][k][i])
                        for n, layers in LAYERS.items()
                        for i in layers
                    ]
                    for k in range(REPLICAS)
                ]
            )
        momentum = helpers.dion_state(state).momentum
        momenta = {n: momentum[n].astype(float) for n in LAYERS}
    return np.array(changes)


def test_the_largest_change_of_m_plus_g_of_all_layers_and_replicas_decides():
    states = history()
    values = np.stack([state.counters.value for _, state in states])
    layers = np.stack([state.counters.layer for _, state in states])
    changes = reference_changes(states)
    np.testing.assert_array_equal(values[0], np.finfo(np.float32).max)
    np.testing.assert_allclose(values[1:], changes.max(axis=2), rtol=RTOL)
    # Places of the parameters: bias, stack, wide.
    np.testing.assert_array_equal(layers[1:], np.array([1, 1, 2])[changes.argmax(2)])
    largest = changes.max(axis=(1, 2))
    assert np.abs(largest - 0.6).min() > 0.01  # no rounding decides
    decided = helpers.decisions(states)
    assert decided == [True, *(largest > 0.6).tolist()]
    # One layer of one replica synchronises all of them.
    for step in (3, 5):
        alone = changes[step - 1] > 0.6
        assert decided[step]
        assert alone.sum() == 1
    assert not all(decided)


@pytest.mark.parametrize(
    ("options", "rank"), [({}, 8), ({"rank": 0.3}, 3), ({"rank": 5}, 5)]
)
def test_the_rank_is_full_unless_given(options, rank):
    params = {"kernel": np.ones((8, 12), np.float32)}
    state = jax.eval_shape(cd.curvadion(RATE, **options).init, params)
    assert helpers.dion_state(state).dion_q["kernel"].shape == (8, rank)


@pytest.mark.parametrize("options", [{"threshold": 0.3}, {"budget": 0.1}])
def test_layers_are_made_by_the_given_dimension_numbers(options):
    """Of three axes, of which nothing tells that they are a stack."""
    params = {"w": np.ones((3, 4, 5), np.float32)}
    numbers = {"w": optax.contrib.MuonDimensionNumbers(1, 2)}
    tx = cd.curvadion(RATE, dimension_numbers=numbers, **options)
    state = jax.eval_shape(tx.init, params)
    assert state.rows.remembered.shape == (3,)
