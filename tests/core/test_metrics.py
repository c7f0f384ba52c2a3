"""The counters, read as Python numbers."""

from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers

TWO = cd.replicas.simulated(2)
PARAMS = {"w": np.ones((2, 2), np.float32), "x": np.ones(3, np.float32)}


def optimizer(mesh=TWO, threshold=0.5) -> Any:
    change = triggers.relative_momentum_change(threshold)
    inner = optax.sgd(0.1, 0.9)
    return cd.adaptive_sync(inner, change, synchronizers.reconcile(), mesh)


def init(mesh=TWO):
    return optimizer(mesh).init(cd.replicas.replicate(PARAMS, mesh))


def changed(opt_state, **counters):
    return opt_state._replace(counters=opt_state.counters._replace(**counters))


KINDS = {
    **{"share": float, "steps": int, "syncs": int, "sync_rate": float, "since": int},
    **dict.fromkeys(("replicas", "votes", "bytes", "synchronous_bytes"), int),
}


@pytest.mark.parametrize("mesh", [TWO, None], ids=["two", "one"])
def test_before_the_first_step_rows_that_do_not_apply_are_left_out(mesh):
    report = metrics.read(init(mesh))
    assert {name: type(value) for name, value in report.items()} == KINDS
    assert next(iter(report)) == "share"
    assert (report["steps"], report["bytes"], report["share"]) == (0, 0, 0)
    assert report["replicas"] == (2 if mesh else 1)


@pytest.mark.parametrize(
    ("values", "worst"),
    [
        pytest.param([0.1, 0.5, 0.2], 1, id="largest"),
        pytest.param([0.1, np.nan, 0.2], 2, id="beside-nan"),
        pytest.param([0.1, 3.0, np.inf], 2, id="infinite"),
        pytest.param([np.nan, np.nan, np.nan], 0, id="nan"),
    ],
)
def test_the_largest_value_and_its_layer(values, worst):
    state = init(cd.replicas.simulated(3))
    layers = np.array([7, 8, 9])
    state = changed(
        state, value=np.float32(values), layer=layers, threshold=np.float32(0.25)
    )
    report = metrics.read(state)
    assert report["threshold"] == 0.25
    np.testing.assert_equal(np.float32(report["value"]), np.float32(values[worst]))
    assert report["layer"] == [7, 8, 9][worst]
    params = {f"layer_{index:02}": {"kernel": 0.0} for index in range(10)}
    assert metrics.read(state, params)["layer"] == f"layer_0{report['layer']}/kernel"


def test_counts_of_what_went_wrong_are_listed_where_there_are_any():
    state = changed(init(), excluded=np.array([0, 2]), absent=np.array([1, 0]))
    report = metrics.read(state)
    assert (report["excluded"], report["absent"]) == ([0, 2], [1, 0])
    assert not {"nonfinite", "zeroed", "displaced"} & set(report)


@pytest.mark.parametrize("differ", [True, False])
def test_copies_of_the_anchor_that_differ_are_told(differ):
    sums = np.array([3, 4 if differ else 3], np.uint32)
    report = metrics.read(changed(init(), anchor_checksum=sums))
    assert ("anchors_differ" in report) == differ


def test_a_report_is_a_table():
    text = str(metrics.read(changed(init(), steps=np.int32(1234), votes=np.int32(7))))
    rows = dict(line.split(None, 1) for line in text.splitlines())
    assert (rows["steps"], rows["votes"], rows["share"]) == ("1,234", "7", "0.08%")


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
def test_observe_inside_of_a_step_and_read_later(kind):
    mesh = helpers.mesh_of(kind, 2)
    tx = cd.presets.local_sgd(0.1, k=2, mesh=mesh)

    @jax.jit
    def train(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        state = (optax.apply_updates(params, updates), opt_state)
        return state, {"sync": metrics.observe(opt_state)}

    state, late = helpers.start(tx, PARAMS, mesh), []
    for step in range(3):
        gradients = jax.tree.map(lambda x, step=step: np.full_like(x, step), state[0])
        state, out = train(state, gradients)
        late.append(out)
    reports = [metrics.read(out) for out in late]
    assert [report["since"] for report in reports] == [1, 0, 1]
    assert [report["syncs"] for report in reports] == [0, 1, 1]
    np.testing.assert_equal(reports[2], metrics.read(state[1]))


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
    rows = cd.replicas.replicate(PARAMS, TWO)
    wrapped = metrics.observe(wrap(optimizer()).init(rows))
    helpers.assert_bitwise(wrapped, init().counters)


@pytest.mark.parametrize("number", [0, 2])
def test_none_and_several_optimizers_are_refused(number):
    with pytest.raises(ValueError, match=f"states of {number} optimizers"):
        metrics.read([init()] * number)
