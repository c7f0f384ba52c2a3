"""Orthonormal bases of tall matrices, one or a stack of them, for Dion.

(Muon's Newton-Schulz iterations are in `_muon`.)

Cholesky QR, column-scaled, shifted and repeated: matrix products and small (r, r)
factorisations, so it runs in float32 on accelerators, shards along rows and batches.
On a CPU Householder QR of LAPACK makes the bases of matrices that are nearly square.

The basis follows the order of the columns, with the signs of a QR whose triangle has a
positive diagonal: similar matrices on replicas get similar bases. Directions that are
invented for dependent columns come from rounding noise; whether they move anything is
decided in `_power_iteration.unit_columns`. NaN and infinity give NaN. Where the devices
of a replica share matrices, `_whole_matrices` gives each of them some whole ones first.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from curvadion_jax._matrix_view import matmul

_SHIFTED_PASSES = 3
# Squared length of a unit column beside the others, above which none is nearly
# dependent: what the last pass makes of such columns is orthonormal to rounding.
_INDEPENDENT = 0.3
# After three passes an independent column keeps nearly all of its squared length beside
# those before it; a copy keeps less than this.
_COPY = 1e-3


@functools.partial(jnp.vectorize, signature="(m,r)->(m,r)")
def orthonormal(a: jax.Array) -> jax.Array:
    """Orthonormal basis of the columns.

    Takes [..., rows, cols] with rows >= cols, float32 or float64.
    """
    # Of a square matrix Householder QR needs half as many operations as one pass of
    # Cholesky QR, and momenta at full rank take three or four. LAPACK does them at a
    # third of the speed of a product, so that tall matrices gain nothing.
    if a.shape[0] < 2 * a.shape[1]:
        return lax.platform_dependent(a, cpu=_householder_qr, default=cholesky_qr)
    return cholesky_qr(a)


@functools.partial(jnp.vectorize, signature="(m,r)->(m,r)")
def cholesky_qr(a: jax.Array) -> jax.Array:
    r"""Orthonormal basis of the columns, by repeated Cholesky QR.

    Passes of :math:`A \leftarrow A U^{-1}, U^\top U = A^\top A + s I`, after scaling
    the columns. Of the first three each matrix of a stack takes as many as it needs;
    their shift s keeps the factorisation from failing, and every pass shrinks the
    condition number by about :math:`\sqrt{s}`. The last pass has none. Momenta at full
    rank have condition numbers of up to 1e9.
    (Fukaya et al., `Shifted Cholesky QR for computing the QR factorization of
    ill-conditioned matrices <https://arxiv.org/abs/1809.11085>`_, 2020)

    Takes [..., rows, cols] with rows >= cols, float32 or float64. Columns of the result
    are orthonormal. A column of zeros gives zeros; so may one that depends on others,
    or it gives a column that rounding invents.
    """
    # Above the rounding error of a Gram matrix of unit columns and its factorisation.
    shift = max(20, 2 * a.shape[-1]) * float(jnp.finfo(a.dtype).eps)

    def factorised(a):
        """A with unit columns, its Gram matrix, and U^{-1}."""
        a = _scaled(a)
        gram = matmul(a.mT, a)
        return (
            a,
            gram,
            _inverse_factor(gram + shift * jnp.eye(len(gram), dtype=a.dtype)),
        )

    def needs_a_pass(carry):
        passes, (_, gram, inverse) = carry
        # The diagonal of the inverse of A^T A; 0 for a column of zeros.
        independent = jnp.diagonal(gram) * jnp.sum(jnp.square(inverse), axis=1)
        return (passes < _SHIFTED_PASSES) & (jnp.max(independent) > 1 / _INDEPENDENT)

    def shifted_pass(carry):
        passes, (a, _, inverse) = carry
        return passes + 1, factorised(matmul(a, inverse))

    # Zero, of the type that its sums have: in `shard_map` it varies like the matrix.
    none = jnp.where(jnp.isnan(a[0, 0]), 0, 0)
    start = none, factorised(a)
    _, (a, gram, inverse) = lax.while_loop(needs_a_pass, shifted_pass, start)
    return _final_pass(a, gram, inverse, shift)


def _final_pass(
    a: jax.Array, gram: jax.Array, shifted: jax.Array, shift: float
) -> jax.Array:
    """A -> A U^{-1} with U^T U = A^T A, with zeros for columns that depend on others.

    The shifted factorisation, which cannot fail, finds them: U_jj^2 is the squared
    distance of column j to the columns before it. One within rounding passes.
    """
    distance = 1 / jnp.square(jnp.diagonal(shifted)) - shift
    copy = distance < _COPY  # False for NaN, which stays
    either = copy[:, None] | copy[None, :]
    eye, rounding = jnp.eye(len(gram), dtype=a.dtype), 2 * jnp.finfo(a.dtype).eps
    exact = _inverse_factor(jnp.where(either, eye, gram + rounding * eye))
    # A matrix can be singular without a column that depends on those before it (Kahan's
    # is): then the exact factorisation may fail, and the shifted one is finite.
    failed = ~jnp.all(jnp.isfinite(exact))
    dropped = copy[None, :]
    a = jnp.where(dropped & ~failed, 0, a)
    return jnp.where(dropped, 0, matmul(a, jnp.where(failed, shifted, exact)))


def _scaled(a: jax.Array) -> jax.Array:
    """Scales every column to unit length; a zero column stays zero."""
    # In two steps, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.abs(a), axis=0, keepdims=True)
    a = a / jnp.where(largest == 0, 1, largest)
    norm = jnp.linalg.norm(a, axis=0, keepdims=True)
    return a / jnp.where(norm == 0, 1, norm)


def _inverse_factor(gram: jax.Array) -> jax.Array:
    """U^{-1} of the Cholesky factorisation gram = U^T U."""
    return lax.platform_dependent(gram, cpu=_factorised_alone, default=_factorised)


def _factorised(gram: jax.Array) -> jax.Array:
    lower = jnp.linalg.cholesky(gram, symmetrize_input=False)
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    return solve_triangular(lower, identity, lower=True).mT


# On CPU a batched LAPACK call divides its batch over the thread pool that also runs
# other parts of the program, and waits for it: two such calls at a time, or several
# devices, can deadlock. Also under the caller's own vmap, as over replicas.
_factorised_alone = jax.custom_batching.sequential_vmap(_factorised)


@jax.custom_batching.sequential_vmap
def _householder_qr(a: jax.Array) -> jax.Array:
    """The same basis; where columns are dependent it has an invented column, not 0."""
    basis, triangle = jnp.linalg.qr(_scaled(a))
    diagonal = jnp.diagonal(triangle)
    # NaN in the last column of a square matrix is seen here alone.
    signs = jnp.where(diagonal == 0, 1, jnp.sign(diagonal))
    return basis * signs[None, :]
