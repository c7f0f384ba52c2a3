"""Dion over replicas: factors are averaged, the momentum stays where it is.

By `adaptive_sync`, and by a `reduce_fn` of the test's own.
"""

import math

import jax
import numpy as np
import pytest
import reference as ref
from dion_replicas import REPLICAS, SHAPES, STEPS, local_gradients, run, sends_factors
from dion_runs import MU, close, rank_of, same_columns, zeros

import curvadion_jax as cd

# Float64 against float64; means are summed in another order. Measured 5e-15.
FLOAT64_ATOL = 1e-13


def kernels(name):
    """Indices of the plain kernels in a leaf."""
    return [np.s_[0], np.s_[1]] if name == "stack" else [np.s_[:]]


CASES = [
    pytest.param(0.25, "sync", id="sync"),
    pytest.param(0.25, "reduce_fn", id="reduce_fn"),
    pytest.param(1.0, "sync", id="whole", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rank", "by"), CASES)
def test_equals_the_reference_and_dion_on_the_mean_gradient(rank, by):
    gradients = local_gradients()
    with jax.enable_x64(True):
        first, updates, states = run(rank, by, gradients)
    for name in SHAPES:
        for array in (updates[name], states.dion_q[name]):  # to the bit
            np.testing.assert_array_equal(array, np.stack([array[0]] * REPLICAS))
        for part in kernels(name):
            index = (slice(None), slice(None), part)
            g, u = gradients[name][index], updates[name][index]
            m, q = states.momentum[name][index], states.dion_q[name][index]
            momenta = [np.zeros(g.shape[2:])] * REPLICAS
            common_q = mean_q = first.dion_q[name][part]
            mean_momentum = momenta[0]
            for t in range(STEPS):
                what = (name, part, t)
                common, momenta, common_q = ref.dion_step_average_factors(
                    list(g[:, t]), momenta, common_q, mu=MU
                )
                direction, mean_momentum, mean_q = ref.dion_step(
                    g[:, t].mean(axis=0), mean_momentum, mean_q, mu=MU
                )
                for k in range(REPLICAS):
                    close(u[k, t], common, FLOAT64_ATOL, what)
                    close(u[k, t], direction, FLOAT64_ATOL, what)
                    same_columns(q[k, t], common_q, FLOAT64_ATOL, what)
                    close(m[k, t], momenta[k], FLOAT64_ATOL, what)
                close(m[:, t].mean(axis=0), mean_momentum, FLOAT64_ATOL, what)


@pytest.mark.parametrize("rank", [2, 1.0])
def test_reduce_fn_is_told_what_arrays_are_made_of(rank):
    """The axes of an array have the sizes of the parameter's, or the rank's."""
    numbers = {"wide": (0, 1), "tall": (0, 1), "stack": (2, 1)}
    numbers = {name: cd.DimensionNumbers(*pair) for name, pair in numbers.items()}
    tx, given = cd.scale_by_dion(rank, dimension_numbers=numbers), []

    def mean(arrays, made_of):
        for name, x in arrays.items():
            shape, axes = SHAPES[name], made_of[name]
            sizes = [math.prod(shape[axis] for axis in of) if of else r for of in axes]
            assert x.shape == tuple(sizes)
        given.append(sorted(arrays))
        return arrays

    params, r = zeros(SHAPES, np.float32), rank_of((5, 9), rank)
    jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, reduce_fn=mean), params)
    assert given == [sorted(SHAPES)] * (2 if sends_factors(rank) else 1)
