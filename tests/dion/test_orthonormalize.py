"""Bases: accuracy, column order, scaling, rank, stacks, dtypes, eight devices."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax.matrices._orthonormalize import _final_pass, cholesky_qr, orthonormal

# |P^T P - I|, largest entry. Measured over the inputs below, float32: 2e-6, whatever
# the condition number; float64: 4e-15.
ORTHONORMAL_ATOL = {"float32": 6e-6, "float64": 2e-14}
# Column j of the basis turns by (rounding of the input) x (condition number). Measured
# over the inputs below, as a multiple of eps x condition: 0.11 in float32, 0.04 in
# float64. For orthogonal columns the rounding of the sums is left, measured 1.5e-7 and
# 6e-16.
TURN = 0.4
TURN_ATOL = {"float32": 1e-6, "float64": 2e-15}
# Where columns are dependent, over those that are not zero: measured 6e-7.
DEPENDENT_ATOL = 4e-6
# 2 eps are added to a Gram matrix, whose inverse has elements of up to 500: measured
# 1.3e-4.
LAST_PASS_ATOL = 5e-4
# Distance of an input column to the span of the basis columns up to it, relative to its
# length: measured 2e-6, from sums of up to 256 rounded products.
SPAN_RTOL = 8e-6
# Along directions that the arithmetic cannot find the columns cannot be orthonormal:
# the spectral norm exceeds 1 by up to 2e-4 (Kahan's matrix) and 5e-5, measured.
EXCESS = 1e-3

BASIS = jax.jit(cholesky_qr)
CHOSEN = jax.jit(orthonormal)  # Householder QR here, where the matrix is square


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def with_condition(rows, cols, condition, seed=0):
    """Float64 matrix with singular values from 1 down to 1 / condition."""
    u = np.linalg.qr(normal(rows, cols, seed=seed))[0]
    v = np.linalg.qr(normal(cols, cols, seed=seed + 1))[0]
    return (u * np.geomspace(1, 1 / condition, cols)) @ v.T


def assert_basis(a, basis, condition=1.0):
    """Orthonormal, and column by column the one of a Householder QR in float64."""
    dtype = basis.dtype.name
    gram = basis.astype(np.float64).T @ basis
    assert np.abs(gram - np.eye(len(gram))).max() < ORTHONORMAL_ATOL[dtype]
    exact = np.linalg.qr(np.asarray(a, np.float64))[0]
    exact = exact * np.sign(np.sum(exact * basis, axis=0))
    limit = TURN_ATOL[dtype] + TURN * np.finfo(dtype).eps * condition
    assert np.abs(basis - exact).max() < limit


@pytest.mark.parametrize("condition", [1e0, 1e3, 1e6])
@pytest.mark.parametrize("shape", [(256, 64), (40, 40), (9, 1)], ids=str)
def test_basis_against_float64_householder(shape, condition):
    a = with_condition(*shape, condition).astype(np.float32)
    for basis in map(np.asarray, (BASIS(a), CHOSEN(a))):
        assert basis.dtype == np.float32
        assert_basis(a, basis, condition)


def test_stack_equals_one_by_one():
    conditions = [[1e0, 1e2, 1e4], [1e6, 1e1, 1e3]]
    stack = np.stack([[with_condition(32, 8, c) for c in row] for row in conditions])
    for basis in (BASIS(np.float32(stack)), jax.vmap(BASIS)(np.float32(stack))):
        for index in np.ndindex(2, 3):
            condition = conditions[index[0]][index[1]]
            assert_basis(stack[index], np.asarray(basis[index]), condition)


def shifted_passes(a):
    """How many the loop takes."""
    taken = []

    def while_loop(condition, body, carry):
        while condition(carry):
            carry = body(carry)
        taken.append(carry[0])
        return carry

    with mock.patch.object(jax.lax, "while_loop", while_loop):
        cholesky_qr(np.float32(a))
    return taken


@pytest.mark.parametrize(
    ("condition", "passes"), [(2.0, 0), (100.0, 1), (1e6, 2), (1e12, 3)]
)
def test_as_many_passes_as_a_matrix_needs(condition, passes):
    assert shifted_passes(with_condition(128, 64, condition)) == [passes]


def test_bad_matrix_of_a_stack_leaves_the_others_alone():
    stack = normal(2, 3, 32, 8).astype(np.float32)
    alone = np.asarray(BASIS(stack))
    stack[0, 1, 3, 2], stack[1, 2, 0, 0] = np.nan, np.inf
    basis = np.asarray(BASIS(stack))
    bad = np.array([[False, True, False], [False, False, True]])
    assert np.isnan(basis[bad]).any(axis=(1, 2)).all()
    np.testing.assert_array_equal(basis[~bad], alone[~bad])


def test_lapack_is_given_one_matrix_at_a_time():
    """Batched calls on several devices of one CPU deadlock."""
    over_replicas = jax.jit(jax.vmap(orthonormal))
    for n, routine in ((8, "potrf"), (4, "geqrf")):  # tall, and square
        text = over_replicas.lower(jnp.ones((3, 2, n, 4))).as_text()
        calls = [line for line in text.splitlines() if "@lapack_" in line]
        assert len(calls) >= 2
        assert any(routine in call for call in calls)
        assert all('num_batch_dims = "0"' in call for call in calls)


# Dependent columns: which directions are invented is not specified. The basis is
# finite, its columns are orthonormal or zero, and the first k of them span what the
# first k columns of the input do.


def products(rows, cols, rank, seed=0):
    """Exact rank `rank` but for the rounding to float32."""
    return normal(rows, rank, seed=seed) @ normal(rank, cols, seed=seed + 1)


def copies(cols, scale):
    a = normal(2 * cols, cols).astype(np.float32)
    a[:, [2, 5, cols - 1]] = np.float32(scale) * a[:, [0, 0, 3]]
    return a


DEPENDENT = {
    **{f"rank {r} of 256": products(512, 256, r) for r in (1, 8)},
    **{f"rank {r} square": products(64, 64, r, r) for r in (2, 32)},
    **{f"all {x}": np.full((128, 64), x) for x in (1e-30, 3)},
    **{f"copies times {x}": copies(64, x) for x in (1.0, -0.1)},
    "one row": np.eye(32)[:, :1] * np.arange(1, 17.0),
    "badly scaled": normal(128, 64) * 10.0 ** np.linspace(-30, 30, 64).round(),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_columns(name):
    a = DEPENDENT[name].astype(np.float32)
    basis = np.asarray(BASIS(a)).astype(np.float64)
    assert np.isfinite(basis).all()
    gram = basis.T @ basis
    kept = np.diag(gram) > 0.5
    assert kept[0]
    assert np.abs(gram - np.diag(kept)).max() < DEPENDENT_ATOL
    # Triangular: column j of the input in the basis columns 0 ... j only.
    a = a.astype(np.float64) / np.abs(a).max(axis=0)
    a = a / np.linalg.norm(a, axis=0)
    rest = a - basis @ np.triu(basis.T @ a)
    assert np.linalg.norm(rest, axis=0).max() < SPAN_RTOL


def test_columns_that_are_nearly_dependent_are_not_copies():
    """After three passes one of 64 keeps less than a tenth of its squared length."""
    basis = np.asarray(BASIS(np.float32(with_condition(64, 64, 1e12))))
    assert (np.linalg.norm(basis, axis=0) > 0.5).all()


@pytest.mark.parametrize(("distance", "is_copy"), [(5e-4, True), (2e-3, False)])
def test_a_copy_keeps_less_than_a_thousandth_in_the_last_pass(distance, is_copy):
    """`distance` is a unit column's squared distance to the columns before it."""
    a = np.float32([[1, np.sqrt(1 - distance)], [0, np.sqrt(distance)], [0, 0]])
    gram, shift = a.T @ a, 20 * np.finfo(np.float32).eps
    inverse = np.linalg.inv(np.linalg.cholesky(gram + shift * np.eye(2))).T
    basis = np.asarray(_final_pass(a, gram, np.float32(inverse), shift))
    expected = [[1, 0], [0, not is_copy], [0, 0]]
    np.testing.assert_allclose(basis, expected, rtol=0, atol=LAST_PASS_ATOL)


def test_zero_columns_stay_zero_and_change_nothing_else():
    cols = 64
    a = normal(2 * cols, cols).astype(np.float32)
    zero = np.zeros(cols, bool)
    zero[[0, 3, 4, cols - 1]] = True
    a[:, zero] = 0
    basis = np.asarray(BASIS(a))
    np.testing.assert_array_equal(basis[:, zero], 0)
    # Condition number below 20.
    assert_basis(a[:, ~zero], basis[:, ~zero], condition=20)
    np.testing.assert_array_equal(BASIS(np.zeros_like(a)), 0)


def kahan(cols, cosine, scale):
    """Nearly singular without a small diagonal entry or two similar columns."""
    sines = np.sqrt(1 - cosine**2) ** np.arange(cols)
    upper = np.eye(cols) - cosine * np.triu(np.ones((cols, cols)), 1)
    return np.pad(scale * sines[:, None] * upper, [(0, cols), (0, 0)])


SINGULAR = {
    "rank one square": products(64, 64, 1),
    # Here the exact factorisation of the last pass fails.
    "kahan": kahan(256, 0.5, 1.0),
    "tiny kahan": kahan(64, 0.285, 1e-6),
    # A few rows hold all of the length.
    "rows": normal(64, 64) * 10.0 ** np.linspace(-30, 30, 64).round()[:, None],
}


@pytest.mark.parametrize("name", SINGULAR)
def test_never_longer_than_an_orthonormal_basis(name):
    basis = np.asarray(BASIS(SINGULAR[name].astype(np.float32)))
    assert np.isfinite(basis).all()
    # P Q^T scales the update.
    assert np.linalg.norm(basis.astype(np.float64), 2) < 1 + EXCESS


def test_square_on_a_cpu_is_always_orthonormal():
    stack = np.stack(
        [
            *(products(64, 64, 1), products(64, 64, 32), SINGULAR["rows"]),
            *(np.zeros((64, 64)), np.ones((64, 64)), 1e37 * np.tri(64)),
        ]
    )
    basis = np.asarray(CHOSEN(np.float32(stack))).astype(np.float64)
    assert np.abs(basis.mT @ basis - np.eye(64)).max() < ORTHONORMAL_ATOL["float32"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_not_finite_gives_nan(bad):
    for where in ((0, 0), (31, 15)):
        for a in (normal(32, 16), np.ones((32, 16)) * (np.arange(16) != 3)):
            a = a.astype(np.float32)
            a[where] = bad
            assert np.isnan(np.asarray(BASIS(a))).any()
            assert np.isnan(np.asarray(CHOSEN(a[:16] + a[16:]))).any()
