"""Synchronizers with compressors: the dtypes of what they keep."""

from typing import Any

import helpers
import jax
import numpy as np
import optax

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

# Sums of some dozens of float32 numbers of order one. Measured: 2e-6.
ATOL = 2e-5
INT8, INT4 = compressors.quantize(8, 4), compressors.quantize(4, 4)


def optimizer(synchronizer, k=2) -> Any:
    trigger = triggers.every_k(k)
    return lambda mesh: cd.adaptive_sync(optax.sgd(0.1), trigger, synchronizer, mesh)


def run(make):
    gradients = helpers.make_gradients(6, 3)
    return list(helpers.run_simulated(make, helpers.make_params(), gradients))


def test_error_feedback_is_kept_in_the_dtype_that_is_asked_for():
    """It loses what rounding of the residual to bfloat16 loses at each of the syncs."""
    synchronizer = synchronizers.reconcile(compressor=INT4, residual_dtype="bfloat16")
    exact, lossy = (
        run(optimizer(synchronizers.reconcile())),
        run(optimizer(synchronizer)),
    )
    largest = 0.0
    for step, ((_, expected), (_, state)) in enumerate(zip(exact, lossy, strict=True)):
        for key, anchor in state.common.anchor.items():
            residual = state.rows.residual[key]
            assert residual.dtype == "bfloat16"
            residual = residual.astype(np.float32)
            largest = max(largest, np.abs(residual).max())
            error = anchor + residual.mean(0) - expected.common.anchor[key]
            syncs = (step + 1) // 2
            assert np.abs(error).max() <= syncs * largest * 2.0**-8 + ATOL
    assert largest > 1e-4


def test_the_anchor_keeps_the_precision_of_its_parameters():
    third = np.full((8,), 1 / 3)
    with jax.enable_x64():
        make = optimizer(synchronizers.reconcile(compressor=INT8), k=1)
        zeros = [{"w": np.zeros((2, 8))}]
        ((after, state),) = helpers.run_simulated(make, {"w": third}, zeros)
    assert state.common.anchor["w"].dtype == np.float64
    np.testing.assert_array_equal(state.common.anchor["w"], third)
    np.testing.assert_array_equal(after["w"][0], third)
