"""Synchronizers with compressors: nothing is lost, and replicas stay together."""

import functools
from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import _partition, compressors, synchronizers, triggers

AXIS = helpers.AXIS
# Sums of some dozens of float32 numbers of order one. Measured: 2e-6.
ATOL = 2e-5
FORMS = {
    "exact": compressors.exact(),
    "int8": compressors.quantize(8, 4),
    "int4": compressors.quantize(4, 4),
    "int2": compressors.quantize(2, 4),
}
LOSSY = [
    pytest.param(name, marks=() if name == "int4" else pytest.mark.slow)
    for name in FORMS
    if name != "exact"
]


def optimizer(synchronizer, inner=None, k=2) -> Any:
    inner = optax.sgd(0.1) if inner is None else inner
    return cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, AXIS)


def run(tx, steps=6, replicas=3, run_on=helpers.run_vmap):
    gradients = helpers.make_gradients(steps, replicas)
    return list(run_on(tx, helpers.make_params(), gradients))


@functools.cache
def uncompressed():
    return run(optimizer(synchronizers.reconcile()))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_not_sent_is_held(name):
    """The gradients are given, so the sum of all drifts is known."""
    exact = uncompressed()
    lossy = run(optimizer(synchronizers.reconcile(compressor=FORMS[name])))
    for (_, expected), (_, state) in zip(exact, lossy, strict=True):
        for key, anchor in state.sync_state.anchor.items():
            held = state.sync_state.residual[key].mean(0)
            close(anchor[0] + held, expected.sync_state.anchor[key][0])
    assert np.abs(lossy[-1][1].sync_state.residual["tall"]).max() > 1e-4


def test_error_feedback_is_kept_in_the_dtype_that_is_asked_for():
    """It loses what rounding of the residual to bfloat16 loses at each of the syncs."""
    synchronizer = synchronizers.reconcile(
        compressor=FORMS["int4"], residual_dtype="bfloat16"
    )
    exact, lossy = uncompressed(), run(optimizer(synchronizer))
    largest = 0.0
    for step, ((_, expected), (_, state)) in enumerate(zip(exact, lossy, strict=True)):
        for key, anchor in state.sync_state.anchor.items():
            residual = state.sync_state.residual[key]
            assert residual.dtype == "bfloat16"
            residual = residual.astype(np.float32)
            largest = max(largest, np.abs(residual).max())
            error = anchor[0] + residual.mean(0) - expected.sync_state.anchor[key][0]
            syncs = (step + 1) // 2
            assert np.abs(error).max() <= syncs * largest * 2.0**-8 + ATOL
    assert largest > 1e-4


def test_a_dtype_for_no_error_feedback_is_rejected():
    with pytest.raises(ValueError, match="residual_dtype='bfloat16' without a comp"):
        synchronizers.reconcile(residual_dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8"])
def test_replicas_agree_after_a_compressed_sync(name):
    tx = optimizer(synchronizers.reconcile(compressor=FORMS[name]))
    params, state = run(tx, run_on=helpers.run_mesh)[-1]
    for key, anchor in state.sync_state.anchor.items():
        assert len({row.tobytes() for row in anchor}) == 1
        close(params[key], anchor)


def test_exact_is_no_compressor():
    plain = uncompressed()[-1]
    exact = run(optimizer(synchronizers.reconcile(compressor=FORMS["exact"])))[-1]
    for key, anchor in plain[1].sync_state.anchor.items():
        close(exact[1].sync_state.anchor[key], anchor)
        assert not exact[1].sync_state.residual[key].any()


@pytest.mark.parametrize("name", LOSSY)
def test_a_compressed_momentum_keeps_its_mean(name):
    """With given gradients and lr 0 momenta are known: the mean is that of no sync."""
    inner = optax.sgd(0.0, 0.5)
    alone = run(optimizer(synchronizers.reconcile(momentum=False), inner))[-1]
    tx = optimizer(synchronizers.reconcile(momentum=FORMS[name]), inner)
    compressed = run(tx)[-1]
    for key, expected in alone[1].inner_state[0].trace.items():
        momentum = compressed[1].inner_state[0].trace[key]
        close(momentum.mean(0), expected.mean(0))
        # Replicas have come closer, and not become equal.
        assert 0 < momentum.std(0).mean() < expected.std(0).mean()


@pytest.mark.parametrize("name", LOSSY)
def test_compressed_gradients_with_error_feedback(name):
    tx = optimizer(synchronizers.average_gradients(FORMS[name]), k=1)
    gradients = helpers.make_gradients(5, 3)
    params, state = helpers.last(helpers.run_vmap(tx, helpers.make_params(), gradients))
    for key, start in helpers.make_params().items():
        total = sum(tree[key].mean(0) for tree in gradients)
        held = state.sync_state.residual[key].mean(0)
        close(params[key][0], start - 0.1 * (total - held))


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_not_finite_is_excluded(name):
    """Two replicas, the gradient of one of which is not finite on the first step."""
    tx = optimizer(synchronizers.average_gradients(FORMS[name]), k=1)
    gradients = helpers.make_gradients(3, 2)
    poisoned = [{key: x.copy() for key, x in tree.items()} for tree in gradients]
    for x in poisoned[0].values():
        x[1] = np.nan
    first, *_, (params, _) = helpers.run_vmap(tx, helpers.make_params(), poisoned)
    for key, start in helpers.make_params().items():
        own = gradients[0][key][0] - first[1].sync_state.residual[key].mean(0)
        close(first[0][key][0], start - 0.1 * own)
        np.testing.assert_array_equal(params[key][0], params[key][1])
        assert np.isfinite(params[key]).all()
        assert np.abs(params[key][0] - start).max() > 0.01


def test_the_anchor_keeps_the_precision_of_its_parameters():
    third = np.full((8,), 1 / 3)
    sync = synchronizers.reconcile(compressor=FORMS["int8"])
    with jax.enable_x64():
        tx, params = optimizer(sync, k=1), {"w": third}
        zeros = [{"w": np.zeros((2, 8))}]
        ((after, state),) = helpers.run_vmap(tx, params, zeros)
    assert state.sync_state.anchor["w"].dtype == np.float64
    np.testing.assert_array_equal(state.sync_state.anchor["w"][0], third)
    np.testing.assert_array_equal(after["w"][0], third)


def payload_of(synchronizer, inner=None):
    params = helpers.make_params()
    inner_state = (optax.sgd(0.1) if inner is None else inner).init(params)
    return synchronizer.payload(params, inner_state, _partition.matrix_views(params))


def test_bytes_are_those_of_the_compressed_form():
    # Elements: bias 5, embed 21, tall 24, wide 24, in blocks of 4 of 4 + 4 bytes.
    blocks = 2 + 6 + 6 + 6
    drift = synchronizers.reconcile(compressor=FORMS["int8"], momentum=False)
    assert payload_of(drift) == compressors.Payload(averaged=8 * blocks)
    inner = optax.sgd(0.1, 0.9)
    both = synchronizers.reconcile(compressor=FORMS["int8"], momentum=FORMS["int4"])
    expected = compressors.Payload(averaged=8 * blocks + 6 * blocks)
    assert payload_of(both, inner) == expected


@pytest.mark.slow
def test_dion_with_everything_compressed_trains():
    synchronizer = synchronizers.reconcile(
        optax.sgd(0.7, momentum=0.6, nesterov=True),
        compressor=FORMS["int2"],
        momentum=FORMS["int8"],
    )
    tx = helpers.averaging_dion(axis_name=AXIS, synchronizer=synchronizer)
    trajectory = run(tx, steps=4)
    assert helpers.decisions(trajectory)[0]
    for leaf in jax.tree.leaves(trajectory[-1]):
        if np.issubdtype(leaf.dtype, np.floating):
            assert np.isfinite(leaf).all() or leaf.ndim == 1  # the trigger's value


@pytest.mark.parametrize("name", LOSSY)
def test_one_replica_loses_nothing(name):
    gradients = [
        {key: x[0] for key, x in tree.items()} for tree in helpers.make_gradients(4, 1)
    ]
    ends = [
        helpers.last(helpers.run_alone(tx, helpers.make_params(), gradients))
        for tx in (
            cd.adaptive_sync(
                optax.sgd(0.1),
                triggers.every_k(2),
                synchronizers.reconcile(compressor=form),
            )
            for form in (None, FORMS[name])
        )
    ]
    for key, expected in ends[0][0].items():
        close(ends[1][0][key], expected)
    residual = ends[1][1].sync_state.residual
    assert not any(x.any() for x in jax.tree.leaves(residual))
