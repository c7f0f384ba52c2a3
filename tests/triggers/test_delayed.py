"""A decision of the step before: its flag needs none of this step's gradients."""

from typing import Any

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from curvadion_jax.triggers import delayed

change = triggers.relative_momentum_change


def compiled(trigger):
    """The program of a step with a forward and a backward pass, on two replicas."""
    tx: Any = cd.local_muon(0.1, axis_name=helpers.AXIS, trigger=trigger)
    mesh = cd.replicas.make_mesh(2)
    params = {"first": jnp.ones((8, 16)), "second": jnp.ones((16, 4))}

    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["first"]) @ params["second"])

    def train(state, batch):
        params, opt_state = state
        gradients = jax.grad(loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    state = helpers.start(tx, params, mesh)
    step = cd.replicas.step(train, mesh, donate=False)
    batch = np.ones((6, 8), np.float32)
    return hlo.parse(step.lower(state, batch).compile().as_text())


def needed_for_the_flag(trigger):
    """(Opcodes, arguments of the step) that the flag's all-reduce depends on."""
    program = compiled(trigger)
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    needed = program.ancestors(flag)
    named = [x.argument for x in needed if x.argument]
    return {x.opcode for x in needed}, named


@pytest.mark.slow
def test_the_flag_is_reduced_before_the_forward_pass():
    opcodes, arguments = needed_for_the_flag(delayed(change(0.1)))
    assert "dot" not in opcodes
    assert sorted(arguments) == [
        "state[1].metrics.excluded.last",
        "state[1].metrics.local_steps",
        "state[1].metrics.steps",
        "state[1].trigger_state.decision.fire",
    ]


@pytest.mark.slow
def test_counters_around_it_need_no_gradient_either():
    trigger = triggers.at_least_every(delayed(triggers.budget(0.01)), 50)
    opcodes, arguments = needed_for_the_flag(trigger)
    assert "dot" not in opcodes
    assert all(x.startswith("state[1].") for x in arguments)
    assert not any("momentum" in x for x in arguments)


@pytest.mark.slow
def test_without_the_delay_it_waits_for_the_gradients():
    opcodes, arguments = needed_for_the_flag(change(0.1))
    assert "dot" in opcodes
    assert {"batch", "state[0]['first']"} <= set(arguments)


def test_the_value_is_that_of_the_step_before():
    # Replica i sees the first element of its gradient, and requests a sync above 1.
    def decide(seen: Any):
        first = seen.gradients["bias"][0]
        return triggers.decision(first > 1, first, 1, 2)

    tx: Any = cd.adaptive_sync(
        optax.sgd(0.1),
        delayed(triggers.stateless(decide)),
        synchronizers.average_gradients(),
        helpers.AXIS,
    )
    # A request of replica 1 at step 2, still there at 3, which synchronises for it; one
    # of replica 0 at 4, after the sync.
    requests = np.array([[5, 5], [0, 0], [0, 9], [0, 9], [7, 0], [0, 0], [0, 0]])
    gradients = helpers.make_gradients(len(requests), 2)
    for tree, first in zip(gradients, requests, strict=True):
        tree["bias"][:, 0] = first
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    expected = [True, False, False, True, False, True, False]
    assert helpers.decisions(history) == expected
    values = np.stack([state.metrics.value for _, state in history])
    np.testing.assert_array_equal(values, [[np.inf] * 2, *requests[:-1]])
    layers = np.stack([state.metrics.layer for _, state in history])
    assert layers[:, 0].tolist() == [-1] + 6 * [2]


def test_the_momentum_change_comes_one_step_later():
    # Both synchronise the first step, and so take the same steps.
    first = triggers.after_steps(change(np.inf), 1)
    gradients = helpers.make_gradients(6, 3)
    found = []
    for trigger in (first, delayed(change(np.inf))):
        tx: Any = cd.adaptive_sync(
            optax.sgd(0.1, 0.9),
            trigger,
            synchronizers.average_gradients(),
            helpers.AXIS,
        )
        history = list(helpers.run_vmap(tx, helpers.make_params(), gradients))
        assert helpers.decisions(history) == [True] + 5 * [False]
        found.append(np.stack([state.metrics.value for _, state in history]))
    now, later = found
    np.testing.assert_allclose(later[1:], now[:-1], rtol=1e-6)
    assert len(np.unique(now[1:])) == 5 * 3
