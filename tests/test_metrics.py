"""Counters and bytes, against counts by hand."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

reconcile = synchronizers.reconcile
# Elements: bias 5, embed 7 x 3 = 21, tall 6 x 4 = 24, wide 4 x 6 = 24; 74 together.
GRADIENTS = 4 * 74


def optimizer(synchronizer=None, rank=2, **options) -> Any:
    return cd.curvadion(
        0.1, rank, synchronizer=synchronizer, axis_name=helpers.AXIS, **options
    )


def counted(opt_state, **counters):
    """The state with other counters, replicated where they are lists."""
    if "syncs" in counters:  # all of the one variant
        counters["variant_syncs"] = counters["syncs"][..., None]
    return opt_state._replace(metrics=opt_state.metrics._replace(**counters))


PAYLOADS = [
    pytest.param(synchronizers.average_gradients(), 2, GRADIENTS, id="gradients"),
    # Factors (6 + 4) x 2 of each matrix, and 5 + 21 other elements.
    pytest.param(synchronizers.average_factors(), 2, 4 * (20 + 20 + 26), id="factors"),
    pytest.param(synchronizers.average_factors(), 1, 4 * (10 + 10 + 26), id="rank-1"),
    # (6 + 4) x 4 > 24: the matrices themselves.
    pytest.param(synchronizers.average_factors(), 1.0, GRADIENTS, id="full-rank"),
    # Parameters, and the momenta of the matrices.
    pytest.param(reconcile(), 2, GRADIENTS + 4 * 48, id="reconcile"),
    pytest.param(reconcile(momentum=False), 2, GRADIENTS, id="parameters-only"),
    pytest.param(reconcile(optax.adam(0.1)), 2, GRADIENTS + 4 * 48, id="outer"),
    # And AdamW's two moments of the other parameters.
    pytest.param(
        reconcile(other_state=True), 2, GRADIENTS + 4 * (48 + 2 * 26), id="other-state"
    ),
    pytest.param(
        reconcile(momentum=False, other_state=True),
        2,
        GRADIENTS + 4 * 2 * 26,
        id="other-state-only",
    ),
]


@pytest.mark.parametrize(("synchronizer", "rank", "payload"), PAYLOADS)
def test_bytes_by_hand(synchronizer, rank, payload):
    # 12 steps, 5 syncs; an all-reduce of B bytes sends 2 (N - 1) / N B: B for two
    # replicas, 7/4 B for eight. Every step sends 4 bytes to decide, and every sync 4 of
    # a weight to each of the others.
    state = optimizer(synchronizer, rank).init(helpers.make_params())
    state = counted(state, steps=jnp.array(12), syncs=jnp.array(5), asked=jnp.array(12))
    for replicas, factor in ((2, 1), (8, 7 / 4)):
        read = metrics.read(state, replicas=replicas)
        weights = 5 * 4 * (replicas - 1)
        assert read["bytes"] == factor * (5 * payload + 12 * 4) + weights
        assert read["synchronous_bytes"] == factor * 12 * GRADIENTS


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_numbers_are_averaged_in_float32(dtype):
    state = optimizer(reconcile()).init(helpers.make_params(dtype=dtype))
    assert state.metrics.sync_payload.tolist() == [0, GRADIENTS + 4 * 48]


@pytest.mark.slow
def test_a_run_on_two_replicas():
    tx = cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        triggers.relative_momentum_change(1e6),
        reconcile(),
        helpers.AXIS,
    )
    gradients = helpers.make_gradients(3, 2)
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    payload = 2 * GRADIENTS  # parameters and the traces
    for steps, (_, state) in enumerate(history, start=1):
        read = metrics.read(state)
        assert (read["steps"], read["syncs"]) == (steps, 1)
        assert read["sync_rate"] == 1 / steps
        assert read["synced"] is (steps == 1)
        assert read["replicas"] == 2
        assert read["bytes"] == payload + 4 * steps + 4  # of a weight
        assert read["synchronous_bytes"] == GRADIENTS * steps
        assert read["threshold"] == 1e6
        value = state.metrics.value
        assert read["value"] == value.max()
        assert read["layer"] == state.metrics.layer[value.argmax()]


KINDS = {
    **dict.fromkeys(("steps", "syncs", "asked", "layer", "replicas"), int),
    **dict.fromkeys(("skipped", "left_out", "absent", "empty_syncs", "moved"), int),
    "troubled": dict,
    **dict.fromkeys(("bytes", "synchronous_bytes"), int),
    **dict.fromkeys(("sync_rate", "value", "threshold"), float),
    "synced": bool,
}


def test_before_the_first_step():
    read = metrics.read(optimizer().init(helpers.make_params()), replicas=8)
    assert {name: type(value) for name, value in read.items()} == KINDS
    assert (read["steps"], read["bytes"], read["sync_rate"]) == (0, 0, 0)
    assert np.isnan(read["value"])
    assert read["layer"] == -1


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
    changed = counted(state, value=np.float32(values), layer=np.array([7, 8, 9]))
    read = metrics.read(changed)
    np.testing.assert_equal(np.float32(read["value"]), np.float32(values[worst]))
    assert read["layer"] == [7, 8, 9][worst]


def test_more_bytes_than_an_int32_holds():
    payload = compressors.Payload(averaged=5 * 2**33 + 123, gathered=2**35 + 7)
    elements = 2**33 + 1
    synchronizer = synchronizers.average_gradients()
    huge = synchronizer._replace(payload=lambda params, inner_state, views: payload)
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), huge)
    params = {"w": np.broadcast_to(np.float32(0), (elements,))}
    steps = jnp.array(1000)
    state = counted(tx.init(params), steps=steps, syncs=steps - 1, asked=steps)
    read = metrics.read(state, replicas=2)
    assert read["bytes"] == 999 * (sum(payload) + 4) + 4000
    assert read["synchronous_bytes"] == 1000 * 4 * elements


def test_gathered_bytes_are_sent_to_every_other_replica():
    # 5 syncs; each of 3 others gets 10 + 4 bytes, and means cost 2 x 3/4 of 100 or 4.
    payload = compressors.Payload(averaged=100, gathered=10)
    both = synchronizers.average_gradients()._replace(payload=lambda *_: payload)
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), both)
    state = counted(
        tx.init(helpers.make_params()),
        steps=jnp.array(12),
        syncs=jnp.array(5),
        asked=jnp.array(12),
    )
    read = metrics.read(state, replicas=4)
    assert read["bytes"] == 5 * 3 * (10 + 4) + 1.5 * (5 * 100 + 12 * 4)


def test_a_payload_that_is_a_number_is_refused():
    wrong: Any = synchronizers.average_gradients()._replace(payload=lambda *_: 100)
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), wrong)
    with pytest.raises(TypeError, match=r"Payload\(averaged=bytes\), got 100"):
        tx.init(helpers.make_params())


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


def test_a_state_without_replica_axis_is_read_with_their_number():
    state = optimizer().init(helpers.make_params())
    assert metrics.read(state, replicas=1)["bytes"] == 0


@pytest.mark.parametrize("name", ["steps", "syncs", "asked", "synced"])
def test_replicas_that_disagree_are_not_averaged(name):
    state = optimizer().init(helpers.make_params())
    state = cd.replicas.replicate(state, cd.replicas.make_mesh(2))
    with pytest.raises(ValueError, match=rf"disagree on {name}: .*cannot be trusted"):
        metrics.read(counted(state, **{name: np.array([0, 1])}))


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


@pytest.mark.parametrize(
    "name",
    [
        *("steps", "syncs", "quiet_steps", "asked"),
        *("synced", "value", "threshold", "layer"),
    ],
)
def test_optax_finds_metrics_by_name(name):
    state = optimizer().init(helpers.make_params())
    assert optax.tree.get(state, name) is getattr(state.metrics, name)
