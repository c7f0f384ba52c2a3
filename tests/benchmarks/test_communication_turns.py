"""The study's signal beside RMMC: how far the momentum has turned since a sync."""

import bases
import jax
import jax.numpy as jnp
import optax
import optimizers
import pytest
import turns

import curvadion_jax as cd
from curvadion_jax import triggers


def adam(mu) -> optax.ScaleByAdamState:
    tree = {"w": jnp.asarray(mu, jnp.float32)}
    return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), tree, tree)


def seen(before, after, steps, local_steps) -> triggers.Observation:
    return triggers.Observation(
        inner_state=(adam(before), optax.EmptyState()),
        next_inner_state=lambda: (adam(after), optax.EmptyState()),
        steps=steps,
        local_steps=local_steps,
    )


def test_a_turn_is_measured_from_the_last_sync():
    trigger = turns.turn(0.5)
    state = trigger.init({}, adam([0.0, 0.0]), {})
    # Momentum after each step; the third takes the replicas together.
    path = [[0, 0], [1, 0], [1, 1], [0, 1], [-1, 1]]
    values, fired = [], []
    for step, local_steps in enumerate((0, 1, 2, 0)):
        before, after = path[step], path[step + 1]
        answer, state = trigger.decide(seen(before, after, step, local_steps), state)
        values.append(float(answer.value))
        fired.append(bool(answer.fire))
    # From [0, 0] nothing is turned; from [0, 1] a step to [-1, 1] is 45 degrees.
    assert values == pytest.approx([float("inf"), 0, 0, 1 - 0.5**0.5])
    assert fired == [True, False, False, False]


def test_a_quarter_turn_fires_and_lengths_do_not_matter():
    trigger = turns.turn(0.5)
    state = trigger.init({}, adam([0.0, 0.0]), {})
    _, state = trigger.decide(seen([2, 0], [5, 0], 3, 0), state)
    answer, _ = trigger.decide(seen([5, 0], [0, 7], 4, 1), state)
    assert float(answer.value) == pytest.approx(1.0)
    assert bool(answer.fire)


def test_it_asks_for_momenta():
    with pytest.raises(ValueError, match="momenta named 'mu', and there are none"):
        turns.turn(0.5).init({}, optax.EmptyState(), {})


def test_it_runs_in_local_muon_with_a_momentum_that_rises():
    run = bases.rising().but(trigger="turn 0.5 1 1", steps=8, replicas=2)
    params = {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}
    tx = optimizers.optimizer(run, params)
    state = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(params))
    update = jax.jit(
        jax.vmap(lambda s: tx.update(params, s, params)[1], axis_name=optimizers.AXIS)
    )
    for _ in range(3):
        state = update(state)
    # Gradients that do not change turn nothing; the first step is infinite.
    value = cd.metrics.read(state)["value"]
    assert value == pytest.approx(0, abs=1e-6)
