"""The counters, read as Python numbers."""

from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import _counters, metrics, synchronizers, triggers


def optimizer() -> Any:
    change = triggers.relative_momentum_change(0.5)
    return helpers.synced_dion(
        0.1, 2, change, synchronizers.reconcile(), axis_name=helpers.AXIS
    )


def changed(opt_state, **counters):
    """The state with other counters, replicated where they are lists."""
    return opt_state._replace(metrics=opt_state.metrics._replace(**counters))


KINDS = {
    **dict.fromkeys(("steps", "syncs", "votes", "replicas"), int),
    **dict.fromkeys(("nonfinite", "zeroed", "excluded", "absent"), int),
    **dict.fromkeys(("bytes", "synchronous_bytes"), int),
    **dict.fromkeys(("value", "threshold", "layer"), type(None)),
    **{"troubled": dict, "sync_rate": float, "synced": bool},
}


def test_before_the_first_step():
    read = metrics.read(optimizer().init(helpers.make_params()))
    assert {name: type(value) for name, value in read.items()} == KINDS
    assert (read["steps"], read["bytes"], read["sync_rate"]) == (0, 0, 0)
    assert (read["value"], read["threshold"], read["layer"]) == (None, None, None)


@pytest.mark.parametrize(
    ("values", "worst"),
    [
        pytest.param([0.1, 0.5, 0.2], 1, id="largest"),
        pytest.param([0.1, np.nan, 0.2], 2, id="beside-nan"),
        pytest.param([0.1, 3.0, np.inf], 2, id="infinite"),
        pytest.param([np.nan] * 3, 0, id="none"),
    ],
)
def test_the_largest_value_and_its_layer(values, worst):
    state = optimizer().init(helpers.make_params())
    state = cd.replicas.replicate(state, cd.replicas.make_mesh(3))
    layers, thresholds = np.array([7, 8, 9]), np.float32([0.25, 0.5, 0.75])
    state = changed(state, value=np.float32(values), layer=layers, threshold=thresholds)
    read = metrics.read(state)
    assert read["threshold"] == thresholds[worst]
    np.testing.assert_equal(np.float32(read["value"]), np.float32(values[worst]))
    assert read["layer"] == [7, 8, 9][worst]
    params = {f"layer_{index:02}": {"kernel": 0.0} for index in range(10)}
    assert metrics.read(state, params)["layer"] == f"layer_0{read['layer']}/kernel"


@pytest.mark.slow
def test_observe_inside_of_a_step_and_read_later():
    tx = cd.presets.local_sgd(0.1, 2, axis_name=helpers.AXIS)
    mesh = cd.replicas.make_mesh(2)

    def train(state, gradients):
        params, opt_state = state
        local = jax.tree.map(lambda g: g[0], gradients)
        updates, opt_state = tx.update(local, opt_state, params)
        state = (optax.apply_updates(params, updates), opt_state)
        return state, {"loss": 0.0, "sync": metrics.observe(opt_state)}

    state, late = helpers.start(tx, helpers.make_params(), mesh), []
    gradients = helpers.make_gradients(3, 2)
    step = helpers.quick(cd.replicas.step(train, mesh), state, gradients[0])
    for tree in gradients:
        state, out = step(state, tree)
        late.append(out)
    assert [metrics.read(out)["synced"] for out in late] == [False, True, False]
    assert metrics.read(late[1])["steps"] == 2
    np.testing.assert_equal(metrics.read(late[2]), metrics.read(state))


@pytest.mark.parametrize("name", ["steps", "syncs", "votes", "synced"])
def test_replicas_that_disagree_are_not_averaged(name):
    state = optimizer().init(helpers.make_params())
    state = cd.replicas.replicate(state, cd.replicas.make_mesh(2))
    with pytest.raises(ValueError, match=rf"disagree on {name}, .*cannot be trusted"):
        metrics.read(changed(state, **{name: np.array([0, 1])}))


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda tx: optax.chain(optax.clip(1.0), tx), id="chain"),
        pytest.param(lambda tx: optax.MultiSteps(tx, 2), id="MultiSteps"),
        pytest.param(
            lambda tx: optax.inject_hyperparams(lambda rate: tx)(rate=0.1),
            id="inject_hyperparams",
        ),
    ],
)
def test_wrapped_states_are_found(wrap):
    tx = optimizer()
    params = helpers.make_params()
    wrapped = metrics.observe(wrap(tx).init(params))
    helpers.assert_bitwise(wrapped, tx.init(params).metrics)


def test_a_copy_of_counters_is_no_state_and_an_optimizer_without_arrays_is_one():
    make = lambda inner, sync: cd.adaptive_sync(inner, triggers.every_k(2), sync)
    adam = make(optax.adam(0.1), synchronizers.reconcile()).init(np.ones(2))
    sgd = make(optax.sgd(0.1), synchronizers.average_gradients()).init(np.ones(2))
    state = {"adam": adam, "sgd": sgd, "copy": {"metrics": metrics.observe(adam)}}
    assert _counters.optimizer_paths(state) == [("adam",), ("sgd",)]
