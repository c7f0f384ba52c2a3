"""CurvaDion on replicas: what its trigger sees, and the one condition around a sync."""

import functools

import helpers
import jax
import numpy as np
import pytest
import reference as ref

import curvadion_jax as cd
from curvadion_jax import _jax_internals

RATE, REPLICAS, STEPS = 0.05, 3, 6
# Norms of some dozens of numbers in float32, and the difference of two of them.
RTOL = 1e-5
# Three layers: a stack is of two.
SHAPES = {"bias": (5,), "stack": (2, 6, 4), "wide": (4, 6)}
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
def history(mode, number):
    """(Parameters, state) after each step of replicas."""
    rng = np.random.default_rng(2)
    params = {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    tx = cd.curvadion(RATE, **{mode: number}, rank=2, axis_name=helpers.AXIS)
    return list(helpers.run_mesh(tx, params, gradients()))


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


MODES = [("threshold", 0.6), ("budget", 0.1)]


@pytest.mark.parametrize(
    ("mode", "number"), [pytest.param(*MODES[0], marks=pytest.mark.slow), MODES[1]]
)
def test_the_value_is_the_change_of_m_plus_g(mode, number):
    states = history(mode, number)
    values = np.stack([state.metrics.value for _, state in states])
    layers = np.stack([state.metrics.layer for _, state in states])
    changes = reference_changes(states)
    np.testing.assert_array_equal(values[0], np.inf)
    np.testing.assert_allclose(values[1:], changes.max(axis=2), rtol=RTOL)
    # Places of the parameters: bias, stack, wide.
    np.testing.assert_array_equal(layers[1:], np.array([1, 1, 2])[changes.argmax(2)])


def test_the_largest_change_of_all_layers_and_replicas_decides():
    states = history("threshold", 0.6)
    largest = reference_changes(states).max(axis=(1, 2))
    assert np.abs(largest - 0.6).min() > 0.01  # no rounding decides
    decided = helpers.decisions(states)
    assert decided == [True, *(largest > 0.6).tolist()]
    # One layer of one replica synchronises all of them.
    for step in (3, 5):
        alone = reference_changes(states)[step - 1] > 0.6
        assert decided[step]
        assert alone.sum() == 1
    assert not all(decided)


def programs(equation):
    return _jax_internals.inner_jaxprs(equation)


def outermost_conditions(jaxpr):
    """Conditions that stand in no other one, and what else is done outside of them."""
    conditions, others = [], []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            conditions.append(equation)
            continue
        if not programs(equation):
            others.append(equation)
        for inner in programs(equation):
            more = outermost_conditions(inner)
            conditions += more[0]
            others += more[1]
    return conditions, others


@pytest.mark.parametrize(("mode", "number"), MODES)
def test_one_condition_stands_around_all_that_a_sync_sends(mode, number):
    tx = cd.curvadion(RATE, **{mode: number}, axis_name=helpers.AXIS)
    params, mesh = helpers.make_params(), cd.replicas.make_mesh(2)
    (batch,) = helpers.make_gradients(1, 2)
    step = helpers.replica_step(tx, mesh)
    jaxpr = jax.make_jaxpr(step)(helpers.start(tx, params, mesh), batch).jaxpr
    conditions, others = outermost_conditions(jaxpr)

    def sends(program):
        return _jax_internals.collectives_in(program, helpers.AXIS)

    talking = [each for each in conditions if any(map(sends, programs(each)))]
    assert len(talking) == 1
    local, sync = programs(talking[0])
    assert not sends(local)
    assert len(sends(sync)) > 1
    # Outside of it there is nothing but the flag.
    silent = ("axis_index", "pvary", "pcast")
    outside = [
        each
        for each in others
        if each.primitive.name not in silent
        and helpers.AXIS in str({k: each.params.get(k) for k in ("axes", "axis_name")})
    ]
    assert [each.primitive.name for each in outside] == ["pmax"]
    assert outside[0].outvars[0].aval.shape == ()
    assert outside[0].outvars[0].aval.dtype == np.int32
