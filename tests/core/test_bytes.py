"""Bytes that were sent, against counts by hand."""

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import (
    _counters,
    _layout,
    _partition,
    compressors,
    metrics,
    synchronizers,
    triggers,
)

reconcile = synchronizers.reconcile
# Elements: bias 5, embed 7 x 3 = 21, tall 6 x 4 = 24, wide 4 x 6 = 24; 74 together.
GRADIENTS = 4 * 74


def payload_of(synchronizer, inner, params):
    """What a sync sends, from shapes alone."""
    inner_state = jax.eval_shape(inner.init, params)
    views = _partition.matrix_views(params)
    return synchronizer.payload(params, inner_state, views, _layout.ONE_DEVICE)


def counted(payload, gradient_bytes, steps, syncs):
    """The counters after so many steps, of which the first synchronised."""

    def one(step, counters):
        return _counters.update(
            counters,
            triggers.decision(True),
            voters=1,
            synced=step < syncs,
            finite=jnp.array(True),
            faults=_counters.Faults(*[jnp.array(False)] * 3, jnp.float32(0)),
            payload=payload + compressors.Payload(gathered=4),
            gradient_bytes=gradient_bytes,
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
    pytest.param(reconcile(optax.adam(0.1)), 2, GRADIENTS, id="reconcile"),
]


@pytest.mark.parametrize(("synchronizer", "rank", "payload"), PAYLOADS)
def test_the_payload_of_a_sync_by_hand(synchronizer, rank, payload):
    found = payload_of(synchronizer, cd.dion(0.1, rank), helpers.make_params())
    assert found == compressors.Payload(averaged=payload)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_numbers_are_averaged_in_float32(dtype):
    params = helpers.make_params(dtype=dtype)
    found = payload_of(reconcile(), cd.dion(0.1, 2), params)
    assert found == compressors.Payload(averaged=GRADIENTS)


def test_more_bytes_than_an_int32_holds():
    payload = compressors.Payload(averaged=5 * 2**33 + 123, gathered=2**35 + 7)
    gradients = 4 * (2**33 + 1)
    counters = counted(payload, gradients, steps=1000, syncs=999)
    # An all-reduce of B bytes sends 2 (N - 1) / N B, a vote 4; a weight 4 to each.
    with pytest.raises(ValueError, match="whose axis is missing"):
        metrics.read(counters)
    for replicas, factor in ((2, 1), (8, 7 / 4)):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *[counters] * replicas)
        read = metrics.read(stacked)
        assert (read["steps"], read["syncs"], read["votes"]) == (1000, 999, 1000)
        gathered = 999 * (replicas - 1) * (payload.gathered + 4)
        averaged = factor * (999 * payload.averaged + 4000)
        assert read["bytes"] == round(averaged + gathered)
        assert read["synchronous_bytes"] == factor * 1000 * gradients


@pytest.mark.parametrize("trigger", [on_first(2), triggers.always()])
def test_one_replica_sends_nothing(trigger):
    """Under jit with a divided batch the counters show no saving."""
    tx = cd.adaptive_sync(optax.sgd(0.1), trigger, reconcile())
    params = helpers.make_params()
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(params, state, params)
    assert state.metrics.sent.tolist() == [[0, 0], [0, 0]]
    read = metrics.read(state)
    assert (read["syncs"], read["bytes"], read["synchronous_bytes"]) == (2, 0, 0)
    # Several replicas that start from it have sent nothing yet.
    started = cd.replicas.replicate(state, cd.replicas.make_mesh(2))
    assert metrics.read(started)["bytes"] == 0
