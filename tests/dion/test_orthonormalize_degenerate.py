"""Orthonormal bases of matrices without full rank, badly scaled or not finite.

Where columns are dependent a basis has to hold invented directions, or zero columns.
Which, is not specified. What is: it is finite, its columns are orthonormal or zero,
and the first k of them span what the first k columns of the input do.
"""

import jax
import numpy as np
import pytest

import curvadion_jax as cd

BASIS = jax.jit(cd.cholesky_qr)
RANKS = [1, 16, 64, 256]
EPS = float(np.finfo(np.float32).eps)

# |P^T P - I| over the columns that are not zero: measured 6e-7 where the factorisation
# is repeated until it has converged, as for a matrix of full rank.
ORTHONORMAL_ATOL = 4e-6
# Distance of an input column to the span of the basis columns up to it, relative to its
# length: measured 2e-6, from sums of up to 256 rounded products.
SPAN_RTOL = 8e-6
# Excess of the spectral norm of a basis whose last directions the arithmetic cannot
# find, so that they are not orthonormal: measured 5e-5.
EXCESS = 1e-3


def check(a, basis, *, orthonormal=ORTHONORMAL_ATOL):
    """The three properties of the module docstring."""
    assert basis.shape == a.shape
    assert basis.dtype == np.float32
    assert np.isfinite(basis).all()
    basis, a = basis.astype(np.float64), a.astype(np.float64)
    gram = basis.T @ basis
    kept = np.diag(gram) > 0.5
    assert np.abs(gram - np.diag(kept)).max() < orthonormal
    # Triangular: column j of the input in the basis columns 0 ... j only.
    a = a / np.maximum(np.abs(a).max(axis=0), np.finfo(np.float64).tiny)
    a = a / np.maximum(np.linalg.norm(a, axis=0), np.finfo(np.float64).tiny)
    rest = a - basis @ np.triu(basis.T @ a)
    assert np.linalg.norm(rest, axis=0).max() < SPAN_RTOL
    return kept


def products(rows, cols, rank, seed=0):
    """Exact rank `rank` but for the rounding to float32."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, cols))
    return a.astype(np.float32)


@pytest.mark.parametrize("cols", RANKS)
@pytest.mark.parametrize("rank", [1, 2, 8])
def test_low_rank(cols, rank):
    a = products(2 * cols, cols, min(rank, cols))
    check(a, np.asarray(BASIS(a)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cols", [16, 64])
def test_rank_one_square(cols, seed):
    """The hardest: all other directions of the space are invented."""
    a = products(cols, cols, 1, seed)
    basis = np.asarray(BASIS(a))
    assert np.isfinite(basis).all()
    # Never longer than an orthonormal basis: P Q^T scales the update.
    assert np.linalg.norm(basis.astype(np.float64), 2) < 1 + ORTHONORMAL_ATOL
    u = a[:, 0] / np.linalg.norm(a[:, 0])
    assert np.abs(basis[:, 1:].T @ u).max() < ORTHONORMAL_ATOL


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rank", [2, 8, 32])
def test_low_rank_square(rank, seed):
    a = products(64, 64, rank, seed)
    check(a, np.asarray(BASIS(a)))


@pytest.mark.parametrize("cols", RANKS)
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-30, 1e30])
def test_all_equal(cols, value):
    a = np.full((2 * cols, cols), value, np.float32)
    kept = check(a, np.asarray(BASIS(a)))
    assert kept[0]


@pytest.mark.parametrize("cols", RANKS)
def test_all_zero(cols):
    zero = np.zeros((2 * cols, cols), np.float32)
    np.testing.assert_array_equal(BASIS(zero), zero)


@pytest.mark.parametrize("cols", [16, 64])
def test_zero_columns_stay_zero_and_change_nothing_else(cols):
    a = np.random.default_rng(0).normal(size=(2 * cols, cols)).astype(np.float32)
    zero = np.zeros(cols, bool)
    zero[[0, 3, 4, cols - 1]] = True
    a[:, zero] = 0
    basis = np.asarray(BASIS(a))
    np.testing.assert_array_equal(check(a, basis), ~zero)
    np.testing.assert_array_equal(basis[:, zero], 0)
    expected = np.linalg.qr(a[:, ~zero].astype(np.float64))[0]
    signs = np.sign(np.sum(expected * basis[:, ~zero], axis=0))
    # Condition number below 20, see TURN in test_orthonormalize.
    np.testing.assert_allclose(basis[:, ~zero], expected * signs, rtol=0, atol=4e-6)


@pytest.mark.parametrize("cols", [16, 64])
@pytest.mark.parametrize("scale", [1.0, -1.0, 4.0, 0.1], ids="times{}".format)
def test_exact_copies(cols, scale):
    a = np.random.default_rng(0).normal(size=(2 * cols, cols)).astype(np.float32)
    a[:, [2, 5, cols - 1]] = np.float32(scale) * a[:, [0, 0, 3]]
    basis = np.asarray(BASIS(a))
    kept = check(a, basis)
    distinct = np.ones(cols, bool)
    distinct[[2, 5, cols - 1]] = False
    assert kept[distinct].all()


@pytest.mark.parametrize("cols", [1, 16, 64])
@pytest.mark.parametrize("exponent", [15, 30])
def test_badly_scaled_columns(cols, exponent):
    a = np.random.default_rng(0).normal(size=(2 * cols, cols))
    exponents = np.linspace(-exponent, exponent, cols).round()
    scaled = (a * 10.0**exponents).astype(np.float32)
    basis = np.asarray(BASIS(scaled))
    assert check(scaled, basis).all()
    # Powers of ten round each column; condition number below 20.
    np.testing.assert_allclose(
        basis, np.asarray(BASIS(a.astype(np.float32))), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("cols", [1, 16, 64])
def test_one_row_and_identity(cols):
    one_row = np.zeros((2 * cols, cols), np.float32)
    one_row[1] = np.arange(1, cols + 1)
    kept = check(one_row, np.asarray(BASIS(one_row)))
    assert kept[0]
    identity = np.eye(2 * cols, cols, dtype=np.float32)
    np.testing.assert_allclose(BASIS(identity), identity, rtol=0, atol=2 * EPS)


# Along a direction that is not there the columns cannot be orthonormal: measured up to
# 2e-4 above 1.
KAHAN_NORM = 1 + 5e-4


# With 256 columns and 0.5 the exact factorisation of the last pass fails.
@pytest.mark.parametrize("cosine", [0.285, 0.5], ids="cosine{}".format)
@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["kahan", "kahan-tiny"])
@pytest.mark.parametrize("cols", [64, 256])
def test_kahan_matrix_is_finite(cols, scale, cosine):
    """Nearly singular without a small diagonal entry or two similar columns."""
    sines = np.sqrt(1 - cosine**2) ** np.arange(cols)
    upper = np.eye(cols) - cosine * np.triu(np.ones((cols, cols)), 1)
    a = np.zeros((2 * cols, cols), np.float32)
    a[:cols] = scale * sines[:, None] * upper
    basis = np.asarray(BASIS(a))
    assert np.isfinite(basis).all()
    assert np.linalg.norm(basis.astype(np.float64), 2) < KAHAN_NORM


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cols", [16, 64])
def test_badly_scaled_rows_are_finite(cols, seed):
    """A few rows hold all of the length: numerically a matrix of rank two or three."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(cols, cols)) * 10.0 ** rng.integers(-30, 30, size=(cols, 1))
    basis = np.asarray(BASIS(a.astype(np.float32)))
    assert np.isfinite(basis).all()
    assert np.linalg.norm(basis.astype(np.float64), 2) < 1 + EXCESS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("where", [(0, 0), (5, 2), (31, 15)], ids=str)
def test_not_finite_gives_nan(bad, where):
    a = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    a[where] = bad
    assert np.isnan(np.asarray(BASIS(a))).any(axis=0).all()


def test_nan_beside_dependent_columns_is_not_hidden():
    a = np.ones((32, 16), np.float32)
    a[:, 3] = 0
    a[7, 4] = np.nan
    assert np.isnan(np.asarray(BASIS(a))).any()
