"""Bytes that were sent, against counts by hand."""

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

reconcile = synchronizers.reconcile
# Elements: bias 5, embed 7 x 3 = 21, tall 6 x 4 = 24, wide 4 x 6 = 24; 74 together.
GRADIENTS = 4 * 74


def after(tx, mesh, params, steps):
    """The optimizer's state after so many steps."""
    rows = cd.replicas.replicate(params, mesh)

    def one(state, _):
        return tx.update(rows, state, rows)[1], ()

    scan = jax.jit(lambda state: jax.lax.scan(one, state, length=steps)[0])
    return scan(tx.init(rows))


def cost_of_sync(synchronizer, inner, params):
    """A sync's bytes over those of the gradients, as a trigger is told."""
    found = []

    def due(clock):
        found.append(clock.cost)
        return True

    mesh = cd.replicas.simulated(2)
    tx = cd.adaptive_sync(inner, triggers.Trigger(due=due), synchronizer, mesh)
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    jax.eval_shape(lambda: tx.update(rows, tx.init(rows), rows))
    return found[-1] * GRADIENTS


PAYLOADS = [
    pytest.param(synchronizers.average_gradients(), 2, GRADIENTS, id="gradients"),
    # Factors (6 + 4) x 2 of each matrix, and 5 + 21 other elements.
    pytest.param(synchronizers.average_factors(), 2, 4 * (20 + 20 + 26), id="factors"),
    pytest.param(synchronizers.average_factors(), 1, 4 * (10 + 10 + 26), id="rank-1"),
    # (6 + 4) x 4 > 24: the matrices themselves.
    pytest.param(synchronizers.average_factors(), 1.0, GRADIENTS, id="full-rank"),
    pytest.param(reconcile(optax.adam(0.1)), 2, GRADIENTS, id="reconcile"),
    # 4 blocks of 64 bytes and two scales.
    pytest.param(
        reconcile(compressor=compressors.quantize(2)), 2, 4 * (64 + 8), id="two bits"
    ),
]


@pytest.mark.parametrize(("synchronizer", "rank", "payload"), PAYLOADS)
def test_the_payload_of_a_sync_by_hand(synchronizer, rank, payload):
    found = cost_of_sync(synchronizer, cd.dion(0.1, rank), helpers.make_params())
    assert found == pytest.approx(payload)  # a weight counts as bytes, and no cost


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_numbers_are_averaged_in_float32(dtype):
    params = helpers.make_params(dtype=dtype)
    found = cost_of_sync(reconcile(), cd.dion(0.1, 2), params)
    assert found == pytest.approx(GRADIENTS)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("votes", [True, False])
def test_bytes_of_steps_votes_and_syncs_by_hand(replicas, votes):
    mesh, params = cd.replicas.simulated(replicas), {"w": jnp.ones((5, 4))}
    trigger = triggers.every_k(3)
    if votes:
        trigger = triggers.at_least_every(triggers.relative_momentum_change(jnp.inf), 3)
    tx = cd.adaptive_sync(optax.sgd(0.1, 0.9), trigger, reconcile(), mesh)
    report = metrics.read(after(tx, mesh, params, 7))
    # An all-reduce of B bytes sends 2 (N - 1) / N B; a weight of 4 goes to each.
    factor, others = 2 * (replicas - 1) / replicas, replicas - 1
    sent = round(factor * (2 * 80 + 7 * 4 * votes) + others * 2 * 4)
    assert (report["steps"], report["syncs"]) == (7, 2)
    assert report["votes"] == 7 * votes
    assert report["bytes"] == sent
    assert report["synchronous_bytes"] == round(factor * 7 * 80)
    assert report["share"] == sent / report["synchronous_bytes"]
    assert report["replicas"] == replicas


def test_more_bytes_than_an_int32_holds():
    """Of a payload that is more than 2**31, as shapes alone tell."""
    huge = 5 * 2**33 + 123

    def payload(params, inner_state, layout):
        return compressors.Payload(averaged=huge, gathered=2**35 + 7)

    mesh, params = cd.replicas.simulated(2), {"w": jnp.ones(3)}
    synchronizer = reconcile()._replace(payload=payload)
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), synchronizer, mesh)
    report = metrics.read(after(tx, mesh, params, 3))
    assert report["bytes"] == 3 * (huge + 2**35 + 7 + 4)
    assert report["synchronous_bytes"] == 3 * 12


@pytest.mark.parametrize(
    "trigger", [triggers.every_k(2), triggers.relative_momentum_change(0.1)]
)
def test_one_replica_sends_nothing(trigger):
    tx = cd.adaptive_sync(optax.sgd(0.1, 0.9), trigger, reconcile())
    report = metrics.read(after(tx, None, helpers.make_params(), 2))
    assert report["syncs"] >= 1
    assert (report["bytes"], report["synchronous_bytes"]) == (0, 0)
    assert report["share"] == 0
    assert report["replicas"] == 1
