"""Synchronizers whose syncs are of several variants that take turns."""

from typing import Any

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers
from curvadion_jax.synchronizers import SyncState

AXIS = helpers.AXIS
# What the gradients of each variant's sync are averaged of; 74 elements in all.
SENT = [("tall",), ("wide", "bias"), ("tall", "wide", "bias", "embed")]
ELEMENTS = [24, 24 + 5, 74]
CYCLE = (0, 1, 0, 2)
# One float32 mean of numbers of order one a step, five steps. Measured: 3e-7.
ATOL = 3e-6


def taking_turns(cycle=CYCLE) -> synchronizers.Synchronizer:
    """Averages the gradients of some of the parameters, and counts its syncs."""

    def sync(local, state, group, variant):
        sent = {name: local.gradients[name] for name in SENT[variant]}
        gradients = {**local.gradients, **local.mean(sent, group)}
        counts = state.common.at[variant].add(1)
        return *local.take(gradients), SyncState(common=counts)

    def payload(params, inner_state, views, variant):
        sent = {name: params[name] for name in SENT[variant]}
        return compressors.exact().payload(sent, views)

    return synchronizers.Synchronizer(
        lambda params, inner_state, views: SyncState(
            common=jnp.zeros(len(SENT), jnp.int32)
        ),
        sync,
        payload,
        cycle,
    )


def optimizer(k=1, synchronizer=None) -> Any:
    synchronizer = synchronizer or taking_turns()
    return cd.adaptive_sync(optax.sgd(1.0), triggers.every_k(k), synchronizer, AXIS)


def due(step: int, k: int) -> int | None:
    """The variant of the sync after a step, counted from 0, by hand."""
    syncs = (step + 1) // k
    return CYCLE[(syncs - 1) % len(CYCLE)] if (step + 1) % k == 0 else None


def sent_by_hand(counts) -> int:
    return sum(4 * e * int(c) for e, c in zip(ELEMENTS, counts, strict=True))


def words(sent, counts, steps):
    """The counter: also 4 bytes of each decision, and of a weight at each sync."""
    return [[0, sent + 4 * steps], [0, 4 * int(sum(counts))]]


@pytest.mark.parametrize("run_on", [helpers.run_mesh, helpers.run_vmap])
@pytest.mark.parametrize("k", [1, 2])
def test_variants_take_turns(run_on, k):
    params, gradients = helpers.make_params(), helpers.make_gradients(9, 3)
    expected = {
        name: np.repeat(np.asarray(x, np.float64)[None], 3, 0)
        for name, x in params.items()
    }
    counts = np.zeros(3, int)
    history = list(run_on(optimizer(k), params, gradients))
    for index, (tree, (got, state)) in enumerate(zip(gradients, history, strict=True)):
        variant = due(index, k)
        for name, gradient in tree.items():
            if variant is not None and name in SENT[variant]:
                gradient = np.mean(gradient, 0, np.float64, keepdims=True)
            expected[name] = expected[name] - gradient
            np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=ATOL)
        counts[[] if variant is None else [variant]] += 1
        assert state.sync_state.common.tolist() == [counts.tolist()] * 3
        assert state.metrics.syncs.tolist() == [counts.sum()] * 3
        sent = sent_by_hand(counts)
        assert state.metrics.sent.tolist() == [words(sent, counts, index + 1)] * 3
        read = metrics.read(state)
        # 2 (N - 1) / N with N = 3, rounded to bytes; and weights.
        weights = counts.sum() * 4 * 2
        assert read["bytes"] == round(4 / 3 * (sent + 4 * (index + 1)) + weights)
    assert counts.tolist() == ([5, 2, 2] if k == 1 else [2, 1, 1])


def test_one_replica_without_an_axis():
    tx = cd.adaptive_sync(optax.sgd(1.0), triggers.every_k(2), taking_turns())
    gradients = [{k: v[0] for k, v in g.items()} for g in helpers.make_gradients(8, 1)]
    params, state = helpers.last(
        helpers.run_alone(tx, helpers.make_params(), gradients)
    )
    assert state.sync_state.common.tolist() == [2, 1, 1]
    total = {k: sum(g[k] for g in gradients) for k in params}
    for name, start in helpers.make_params().items():
        np.testing.assert_allclose(params[name], start - total[name], atol=ATOL)


def test_each_branch_sends_what_its_payload_says():
    tx, mesh = optimizer(2), cd.replicas.make_mesh(8)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, 8)
    step = helpers.replica_step(tx, mesh)
    program = hlo.parse(step.lower(state, batch).compile().as_text())
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = program.conditionals()
    sent = [
        sum(x.bytes for x in program.collectives([branch]) if x.shape[:6] != "f32[8]")
        for branch in conditional.called
    ]
    assert sent == [0, *(4 * elements for elements in ELEMENTS)]
    for variant, elements in enumerate(ELEMENTS):
        payload = taking_turns().payload(helpers.make_params(), (), {}, variant)
        assert payload == compressors.Payload(averaged=4 * elements)


def test_replicas_whose_counters_disagree_still_take_one_branch():
    # The counters say variants 0, 1 and 2; the largest is taken by all.
    tx, mesh = optimizer(), cd.replicas.make_mesh(3)
    params, state = helpers.start(tx, helpers.make_params(), mesh)
    syncs = jax.device_put(np.array([0, 1, 3], np.int32), state.metrics.syncs.sharding)
    state = state._replace(metrics=state.metrics._replace(syncs=syncs))
    (gradients,) = helpers.make_gradients(1, 3)
    (_, after), _ = helpers.replica_step(tx, mesh)((params, state), gradients)
    assert after.sync_state.common.tolist() == [[0, 0, 1]] * 3
    assert after.metrics.sent.tolist() == [words(4 * 74, [1], 1)] * 3
    with pytest.raises(ValueError, match="disagree on syncs"):
        metrics.read(after)


def test_counters_survive_a_checkpoint(tmp_path):
    tx, mesh = optimizer(), cd.replicas.make_mesh(2)
    state, step = helpers.start(tx, helpers.make_params(), mesh), None
    step = helpers.replica_step(tx, mesh)
    gradients = helpers.make_gradients(5, 2)
    for tree in gradients[:3]:
        state, _ = step(state, tree)
    cd.checkpoint.save(tmp_path, 3, state)
    restored = cd.checkpoint.restore(
        tmp_path, helpers.start(tx, helpers.make_params(), mesh)
    )
    for tree in gradients[3:]:
        state, restored = step(state, tree)[0], step(restored, tree)[0]
    helpers.assert_bitwise(restored, state)
    counts = [3, 1, 1]
    assert restored[1].sync_state.common.tolist() == [counts] * 2
    expected = words(sent_by_hand(counts), counts, 5)
    assert restored[1].metrics.sent.tolist() == [expected] * 2


@pytest.mark.parametrize("cycle", [(), (1,), (0, 2), (0, -1, 1), [0, 1], (0, True), 2])
def test_a_cycle_that_names_no_variants_is_rejected(cycle):
    with pytest.raises(ValueError, match="names every variant from 0 on"):
        optimizer(synchronizer=taking_turns(cycle))


def test_a_variant_of_another_tree_is_rejected():
    def sync(local, state, group, variant):
        return *local.take(), state if variant == 0 else (state,)

    tx = optimizer(synchronizer=taking_turns()._replace(sync=sync))
    with pytest.raises(ValueError, match="return different trees"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)


def test_a_local_condition_around_a_variants_collective_is_rejected():
    def sync(local, state, group, variant):
        gradients = local.gradients
        if variant == 2:
            gradients = jax.lax.cond(
                gradients["bias"].sum() > 0, group.mean, lambda x: x, gradients
            )
        return *local.take(gradients), state

    tx = optimizer(synchronizer=taking_turns()._replace(sync=sync))
    with pytest.raises(ValueError, match="inside a condition that differs"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)
