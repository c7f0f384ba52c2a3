"""Orthonormal bases: accuracy, column order, scaling, stacks, dtypes, eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import _orthonormalize

# |P^T P - I|, largest entry. Measured over the inputs below, float32: 7e-7 for either
# method, whatever the condition number; float64: 2e-15.
ORTHONORMAL_ATOL = {"float32": 2e-6, "float64": 1e-14}
# Column j of the basis turns by (rounding of the input) x (condition number). Measured
# over the inputs below, as a multiple of eps x condition: 0.11 for Cholesky QR, 0.19
# for Householder QR in float32; 0.04 and 0.07 in float64. For orthogonal columns the
# rounding of the sums is left, measured 1.5e-7 and 6e-16.
TURN = 0.4
TURN_ATOL = {"float32": 1e-6, "float64": 2e-15}

METHODS = {"cholesky": cd.cholesky_qr, "householder": cd.householder_qr}
JITTED = {name: jax.jit(method) for name, method in METHODS.items()}


def with_condition(rows, cols, condition, seed=0):
    """Float64 matrix with singular values from 1 down to 1 / condition."""
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.normal(size=(rows, cols)))[0]
    v = np.linalg.qr(rng.normal(size=(cols, cols)))[0]
    return (u * np.geomspace(1, 1 / condition, cols)) @ v.T


def exact_basis(a, like):
    """Float64 Householder basis of `a` with the column signs of `like`."""
    basis = np.linalg.qr(np.asarray(a, np.float64))[0]
    return basis * np.sign(np.sum(basis * like, axis=-2, keepdims=True))


def orthonormality_error(basis):
    basis = np.asarray(basis, np.float64)
    gram = np.swapaxes(basis, -1, -2) @ basis
    return np.abs(gram - np.eye(basis.shape[-1])).max()


@pytest.mark.parametrize("condition", [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        pytest.param("cholesky", (256, 64), id="cholesky-256x64"),
        pytest.param("cholesky", (40, 40), id="cholesky-40x40"),
        pytest.param("cholesky", (9, 1), id="cholesky-9x1"),
        pytest.param("householder", (40, 40), id="householder-40x40"),
    ],
)
def test_basis_against_float64_householder(method, shape, condition):
    rows, cols = shape
    a = with_condition(rows, cols, condition).astype(np.float32)
    basis = np.asarray(JITTED[method](a))
    assert basis.dtype == np.float32
    assert basis.shape == shape
    assert orthonormality_error(basis) < ORTHONORMAL_ATOL["float32"]
    # Column by column, so that the first k columns span what the first k of `a` span.
    turn = np.abs(basis - exact_basis(a, basis)).max()
    eps = np.finfo(np.float32).eps
    assert turn < TURN_ATOL["float32"] + TURN * eps * condition


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("condition", [1e0, 1e3, 1e6, 1e12])
def test_float64_stays_float64(method, condition):
    a = with_condition(48, 12, condition)
    with jax.enable_x64(True):
        basis = np.asarray(JITTED[method](jnp.asarray(a)))
    assert basis.dtype == np.float64
    assert orthonormality_error(basis) < ORTHONORMAL_ATOL["float64"]
    turn = np.abs(basis - exact_basis(a, basis)).max()
    eps = np.finfo(np.float64).eps
    assert turn < TURN_ATOL["float64"] + TURN * eps * condition


@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]], ids=["given", "shuffled"]
)
def test_basis_follows_the_order_of_the_columns(order):
    # Column j is e_0 + ... + e_j: its part beyond the earlier columns is e_j alone.
    a = np.triu(np.ones((7, 5), np.float32))
    q = np.linalg.qr(np.random.default_rng(1).normal(size=(7, 7)))[0]
    a = (q @ a)[:, order].astype(np.float32)
    basis = np.asarray(JITTED["cholesky"](a), np.float64)
    for k in range(1, 6):
        first = np.asarray(a[:, :k], np.float64)
        outside = first - basis[:, :k] @ (basis[:, :k].T @ first)
        # Rounding of sums of seven numbers of order one.
        assert np.abs(outside).max() < 1e-6, k


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_stack_equals_one_by_one(method):
    conditions = [[1e0, 1e2, 1e4], [1e6, 1e1, 1e3]]
    stack = np.stack(
        [[with_condition(32, 8, c, seed=int(c)) for c in row] for row in conditions]
    ).astype(np.float32)
    basis = np.asarray(JITTED[method](stack))
    assert basis.shape == (2, 3, 32, 8)
    for index in np.ndindex(2, 3):
        one = np.asarray(JITTED[method](stack[index]))
        # The two programs may sum in another order; columns turn as above.
        condition = conditions[index[0]][index[1]]
        limit = TURN_ATOL["float32"] + TURN * np.finfo(np.float32).eps * condition
        assert np.abs(basis[index] - one).max() < limit, index


@pytest.mark.parametrize("method", METHODS)
def test_bad_matrix_of_a_stack_leaves_the_others_alone(method):
    stack = np.random.default_rng(0).normal(size=(2, 3, 32, 8)).astype(np.float32)
    alone = np.asarray(JITTED[method](stack))
    stack[0, 1, 3, 2], stack[1, 2, 0, 0] = np.nan, np.inf
    basis = np.asarray(JITTED[method](stack))
    bad = np.array([[False, True, False], [False, False, True]])
    assert np.isnan(basis[bad]).any(axis=(1, 2)).all()
    np.testing.assert_array_equal(basis[~bad], alone[~bad])


@pytest.mark.slow
def test_vmap_equals_a_stack():
    stack = np.random.default_rng(3).normal(size=(3, 10, 4)).astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(cd.cholesky_qr))(stack),
        JITTED["cholesky"](stack),
        rtol=0,
        atol=TURN_ATOL["float32"],
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_compute_dtype(dtype, expected):
    assert _orthonormalize.compute_dtype(dtype) == expected


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", METHODS)
def test_stacks_on_eight_devices_end(method):
    """With batched LAPACK calls this waits for ever (both cholesky and qr, tried)."""
    mesh = jax.make_mesh((8,), ("replica",), axis_types=(AxisType.Auto,))
    stacks = np.random.default_rng(0).normal(size=(8, 24, 256, 64)).astype(np.float32)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("replica"), out_specs=P("replica")
    )
    def worst_error(stack):
        a, worst = stack[0], jnp.zeros([])
        for _ in range(3):
            basis = METHODS[method](a)
            gram = jnp.matmul(basis.mT, basis, precision="highest")
            worst = jnp.maximum(worst, jnp.max(jnp.abs(gram - jnp.eye(64)[None])))
            a = a + jax.lax.pmean(basis, "replica")  # here the devices meet
        return worst[None]

    for _ in range(2):
        assert np.asarray(worst_error(stacks)).max() < ORTHONORMAL_ATOL["float32"]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_lapack_is_given_one_matrix_at_a_time(method):
    """It divides a batch over threads that may all be waiting for it."""
    over_replicas = jax.jit(jax.vmap(method))
    text = over_replicas.lower(jnp.ones((3, 2, 8, 4))).as_text()
    calls = [line for line in text.splitlines() if "@lapack_" in line]
    assert len(calls) >= 2
    assert all('num_batch_dims = "0"' in call for call in calls)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_derivatives_are_those_of_differences(method):
    with jax.enable_x64(True):
        a, direction, weight = np.random.default_rng(0).normal(size=(3, 2, 6, 3))
        loss = jax.jit(lambda a: jnp.sum(method(a) * weight))
        slope = jnp.sum(jax.grad(loss)(a) * direction)
        step = 1e-5
        difference = loss(a + step * direction) - loss(a - step * direction)
        # The error of a central difference is of order step^2 = 1e-10.
        np.testing.assert_allclose(slope, difference / (2 * step), rtol=1e-7)
