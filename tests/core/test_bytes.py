"""Bytes that were sent, against counts by hand."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import (
    _counters,
    _partition,
    compressors,
    metrics,
    synchronizers,
    triggers,
)
from curvadion_jax._payload import WEIGHT

reconcile = synchronizers.reconcile
# Elements: bias 5, embed 7 x 3 = 21, tall 6 x 4 = 24, wide 4 x 6 = 24; 74 together.
GRADIENTS = 4 * 74


def payload_of(synchronizer, inner, params):
    """What a sync sends, from shapes alone."""
    inner_state = jax.eval_shape(inner.init, params)
    return synchronizer.payload(params, inner_state, _partition.matrix_views(params))


def counted(payload, gradient_bytes, steps, syncs):
    """The counters after so many steps, of which the first synchronised."""

    def one(step, counters):
        which = (step < syncs).astype(jnp.int32)
        return _counters.following(
            *(counters, triggers.decision(True), True, which, which),
            *(_counters.no_faults(), [payload + WEIGHT], gradient_bytes),
        )

    loop = jax.jit(lambda: jax.lax.fori_loop(0, steps, one, _counters.initial()))
    return loop()


def on_first(steps):
    """A sync on each of the first steps."""
    return triggers.stateless(lambda seen: triggers.decision(seen.steps < steps))


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
def test_the_payload_of_a_sync_by_hand(synchronizer, rank, payload):
    found = payload_of(synchronizer, cd.dion(0.1, rank), helpers.make_params())
    assert found == compressors.Payload(averaged=payload)


@pytest.mark.parametrize("payload", [GRADIENTS, GRADIENTS + 4 * 48])
def test_bytes_by_hand(payload):
    # 12 steps, 5 syncs; an all-reduce of B bytes sends 2 (N - 1) / N B: B for two
    # replicas, 7/4 B for eight. Every step sends 4 bytes to decide, and every sync 4 of
    # a weight to each of the others.
    counters = counted(compressors.Payload(payload), GRADIENTS, steps=12, syncs=5)
    for replicas, factor in ((2, 1), (8, 7 / 4)):
        read = metrics.read(counters, replicas=replicas)
        weights = 5 * 4 * (replicas - 1)
        assert read["bytes"] == factor * (5 * payload + 12 * 4) + weights
        assert read["synchronous_bytes"] == factor * 12 * GRADIENTS


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_numbers_are_averaged_in_float32(dtype):
    params = helpers.make_params(dtype=dtype)
    found = payload_of(reconcile(), cd.dion(0.1, 2), params)
    assert found == compressors.Payload(averaged=GRADIENTS + 4 * 48)


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
        layer = int(state.metrics.layer[value.argmax()])
        assert read["layer"] == (None if layer < 0 else layer)


def test_more_bytes_than_an_int32_holds():
    payload = compressors.Payload(averaged=5 * 2**33 + 123, gathered=2**35 + 7)
    gradients = 4 * (2**33 + 1)
    counters = counted(payload, gradients, steps=1000, syncs=999)
    read = metrics.read(counters, replicas=2)
    assert (read["steps"], read["syncs"], read["votes"]) == (1000, 999, 1000)
    assert read["bytes"] == 999 * (sum(payload) + 4) + 4000
    assert read["synchronous_bytes"] == 1000 * gradients


def run_one(tx, params, steps, state=None):
    """The state of one replica; what it sends does not depend on how many there are."""
    add = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)  # noqa: E731
    update = jax.jit(jax.vmap(tx.update, axis_name=helpers.AXIS))
    state, params = add(tx.init(params) if state is None else state), add(params)
    for _ in range(steps):
        _, state = update(params, state, params)
    return jax.tree.map(lambda x: x[0], state)


def test_gathered_bytes_are_sent_to_every_other_replica():
    # 5 syncs; each of 3 others gets 10 + 4 bytes, and means cost 2 x 3/4 of 100 or 4.
    payload = compressors.Payload(averaged=100, gathered=10)
    both = synchronizers.average_gradients()._replace(payload=lambda *_: payload)
    tx = cd.adaptive_sync(optax.sgd(0.1), on_first(5), both, helpers.AXIS)
    read = metrics.read(run_one(tx, helpers.make_params(), 12), replicas=4)
    assert (read["steps"], read["syncs"]) == (12, 5)
    assert read["bytes"] == 5 * 3 * (10 + 4) + 1.5 * (5 * 100 + 12 * 4)
    assert read["synchronous_bytes"] == 1.5 * 12 * GRADIENTS


def test_a_run_goes_on_in_another_form_and_counts_what_that_sends():
    """The payload is the optimizer's own, and nothing of it lies in the state."""
    params, state, expected = helpers.make_params(), None, 0
    for bits in (2, 8):
        form = compressors.quantize(bits, 8)
        synchronizer = reconcile(compressor=form, momentum=False)
        tx = cd.adaptive_sync(optax.sgd(0.1), on_first(100), synchronizer, helpers.AXIS)
        state = run_one(tx, params, 3, state)
        expected += 3 * (form.payload(params, {}).averaged + 4 + 4)
        assert metrics.read(state, replicas=2)["bytes"] == expected


@pytest.mark.parametrize("scheduled", [True, False])
def test_one_replica_sends_nothing_and_is_not_read_as_several(scheduled):
    """Under jit with a divided batch the counters would show a saving that is none."""
    trigger = on_first(2)._replace(scheduled=scheduled)
    tx = cd.adaptive_sync(optax.sgd(0.1), trigger, reconcile())
    params = helpers.make_params()
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(params, state, params)
    assert state.metrics.sent.tolist() == [[0, 0], [0, 0]]
    read = metrics.read(state, replicas=1)
    assert (read["syncs"], read["bytes"], read["synchronous_bytes"]) == (2, 0, 0)
    with pytest.raises(ValueError, match=r"replicas=8, and 2 syncs have sent nothing"):
        metrics.read(state, replicas=8)
    # Several replicas that start from it have sent nothing yet.
    started = cd.replicas.replicate(state, cd.replicas.make_mesh(2))
    assert metrics.read(started)["bytes"] == 0


def test_a_payload_that_is_a_number_is_rejected():
    wrong: Any = synchronizers.average_gradients()._replace(payload=lambda *_: 100)
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), wrong)
    params = helpers.make_params()
    with pytest.raises(TypeError, match=r"Payload\(averaged=bytes\), got 100"):
        jax.eval_shape(tx.update, params, tx.init(params), params)
