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
# A block of each array in codes of a bit and a scale. Of eight replicas each averages
# one, of four more that are empty, too.
BLOCK = 256 // 8 + 4


def read(tx, mesh, params, steps=1, syncs=1, votes=0):
    """What is reported after so many steps and syncs, of which none is run."""
    counters = helpers.start(tx, params, mesh)[1].counters
    numbers = {"steps": steps, "syncs": syncs, "votes": votes}
    numbers = {name: jnp.int32(x) for name, x in numbers.items()}
    return metrics.read(counters._replace(**numbers))


PAYLOADS = [
    pytest.param(synchronizers.average_gradients(), 2, GRADIENTS, id="gradients"),
    # Factors (6 + 4) x 2 of each matrix, and 5 + 21 other elements.
    pytest.param(synchronizers.average_factors(), 2, 4 * (20 + 20 + 26), id="factors"),
    pytest.param(synchronizers.average_factors(), 1, 4 * (10 + 10 + 26), id="rank-1"),
    # (6 + 4) x 4 > 24: the matrices themselves.
    pytest.param(synchronizers.average_factors(), 1.0, GRADIENTS, id="full-rank"),
    pytest.param(reconcile(optax.adam(0.1)), 2, GRADIENTS, id="reconcile"),
    pytest.param(
        reconcile(compressor=compressors.quantize(1)),
        2,
        {2: 4 * BLOCK, 8: 8 * BLOCK},
        id="codes",
    ),
]


@pytest.mark.parametrize("replicas", [2, 8])
@pytest.mark.parametrize(("synchronizer", "rank", "payload"), PAYLOADS)
def test_a_sync_sends_its_payload_and_a_number(synchronizer, rank, payload, replicas):
    """An all-reduce of B bytes sends 2 (N - 1) / N B, and a number goes to each."""
    mesh = cd.replicas.simulated(replicas)
    tx = cd.adaptive_sync(
        cd.dion(0.1, rank=rank), triggers.always(), synchronizer, mesh
    )
    report = read(tx, mesh, helpers.make_params())
    others = replicas - 1
    payload = payload[replicas] if isinstance(payload, dict) else payload
    assert report["bytes"] == round(2 * others * payload / replicas + 4 * others)
    assert report["synchronous_bytes"] == 2 * others * GRADIENTS // replicas
    assert report["share"] == report["bytes"] / report["synchronous_bytes"]


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("form", [compressors.exact(), compressors.quantize(2)])
def test_what_is_counted_is_what_the_program_sends(form, replicas):
    """Two blocks, which three or more replicas fill up to as many as they are."""
    mesh = cd.replicas.make_mesh(replicas, devices=jax.devices()[:replicas])
    sync = reconcile(compressor=form)
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), sync, mesh)
    params = {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(3)}
    state = helpers.start(tx, params, mesh)
    sent = cd.replicas.audit(helpers.train_step(tx), mesh, state, state[0])
    messages = [*sent.every_step, *sent.sync]
    by_hand = sum(helpers.bytes_sent(x, replicas) for x in messages)
    assert read(tx, mesh, params)["bytes"] == round(by_hand)


def test_a_vote_sends_one_integer():
    mesh = cd.replicas.simulated(8)
    tx = cd.curvadion(0.1, mesh=mesh)
    assert read(tx, mesh, helpers.make_params(), 8, 0, 8)["bytes"] == 8 * 7


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_numbers_are_averaged_in_float32(dtype):
    mesh, params = cd.replicas.simulated(2), helpers.make_params(dtype=dtype)
    tx = cd.adaptive_sync(cd.dion(0.1, rank=2), triggers.always(), reconcile(), mesh)
    report = read(tx, mesh, params)
    assert report["bytes"] == GRADIENTS + 4
    assert report["synchronous_bytes"] == GRADIENTS


@pytest.mark.parametrize("replicas", [2, 8])
def test_more_bytes_than_an_int32_holds(replicas):
    mesh = cd.replicas.simulated(replicas)
    averaged, gathered, gradients = 5 * 2**33 + 123, 2**35 + 7, 4 * (2**33 + 1)
    tx = cd.presets.local_sgd(0.1, k=2, mesh=mesh)
    counters = helpers.start(tx, helpers.make_params(), mesh)[1].counters
    costs = metrics.Costs(averaged, gathered, number=4, gradients=gradients)
    counters = counters._replace(
        steps=jnp.int32(1000),
        syncs=jnp.int32(999),
        votes=jnp.int32(1000),
        costs=costs.as_words(),
    )
    report, others = metrics.read(counters), replicas - 1
    reduced = 2 * others * (999 * averaged + 4000) / replicas
    assert report["bytes"] == round(reduced + 999 * others * (gathered + 4))
    assert report["synchronous_bytes"] == 2 * others * 1000 * gradients // replicas


@pytest.mark.parametrize("mesh", [None, cd.replicas.simulated(1)], ids=["none", "one"])
def test_one_replica_sends_nothing(mesh):
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), reconcile(), mesh)
    params, state = helpers.start(tx, helpers.make_params(), mesh)
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    report = metrics.read(state)
    assert (report["syncs"], report["bytes"], report["synchronous_bytes"]) == (2, 0, 0)
    assert report["share"] == 0
