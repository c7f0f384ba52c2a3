"""Synchronizers with compressors: bytes, dtypes, and what error feedback keeps."""

from typing import Any

import helpers
import jax
import numpy as np
import optax

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

AXIS = helpers.AXIS
# Sums of some dozens of float32 numbers of order one. Measured: 2e-6.
ATOL = 2e-5
INT8, INT4 = compressors.quantize(8, 4), compressors.quantize(4, 4)


def optimizer(synchronizer, inner=None, k=2, axis_name: str | None = AXIS) -> Any:
    inner = optax.sgd(0.1) if inner is None else inner
    return cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, axis_name)


def run(tx, steps=6, replicas=3):
    gradients = helpers.make_gradients(steps, replicas)
    return list(helpers.run_vmap(tx, helpers.make_params(), gradients))


def test_error_feedback_is_kept_in_the_dtype_that_is_asked_for():
    """It loses what rounding of the residual to bfloat16 loses at each of the syncs."""
    synchronizer = synchronizers.reconcile(compressor=INT4, residual_dtype="bfloat16")
    exact, lossy = (
        run(optimizer(synchronizers.reconcile())),
        run(optimizer(synchronizer)),
    )
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


def test_what_is_not_finite_is_excluded():
    """Two replicas, the gradient of one of which is not finite on the first step."""
    tx = optimizer(synchronizers.average_gradients(INT4), k=1)
    gradients = helpers.make_gradients(3, 2)
    poisoned = [{key: x.copy() for key, x in tree.items()} for tree in gradients]
    for x in poisoned[0].values():
        x[1] = np.nan
    first, *_, (params, _) = helpers.run_vmap(tx, helpers.make_params(), poisoned)
    for key, start in helpers.make_params().items():
        own = gradients[0][key][0] - first[1].sync_state.residual[key].mean(0)
        np.testing.assert_allclose(first[0][key][0], start - 0.1 * own, atol=ATOL)
        np.testing.assert_array_equal(params[key][0], params[key][1])
        assert np.isfinite(params[key]).all()


def test_the_anchor_keeps_the_precision_of_its_parameters():
    third = np.full((8,), 1 / 3)
    with jax.enable_x64():
        tx = optimizer(synchronizers.reconcile(compressor=INT8), k=1)
        zeros = [{"w": np.zeros((2, 8))}]
        ((after, state),) = helpers.run_vmap(tx, {"w": third}, zeros)
    assert state.sync_state.anchor["w"].dtype == np.float64
    np.testing.assert_array_equal(state.sync_state.anchor["w"][0], third)
    np.testing.assert_array_equal(after["w"][0], third)


def test_bytes_are_those_of_the_compressed_form():
    # Elements: bias 5, embed 21, tall 24, wide 24, in blocks of 4 of 4 + 4 bytes.
    form = synchronizers.reconcile(compressor=INT8)
    found = form.payload(helpers.make_params(), (), {})
    assert found == compressors.Payload(averaged=8 * (2 + 6 + 6 + 6))


def test_one_replica_rounds_nothing():
    gradients = [
        {key: x[0] for key, x in tree.items()} for tree in helpers.make_gradients(4, 1)
    ]
    (plain, _), (rounded, state) = (
        helpers.last(
            helpers.run_alone(
                optimizer(synchronizers.reconcile(compressor=form), axis_name=None),
                helpers.make_params(),
                gradients,
            )
        )
        for form in (None, INT4)
    )
    for key, expected in plain.items():
        np.testing.assert_allclose(rounded[key], expected, rtol=0, atol=ATOL)
    assert not any(x.any() for x in jax.tree.leaves(state.sync_state.residual))
