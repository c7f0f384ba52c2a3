"""Orthonormal bases of tall matrices, one or a stack of them, on every backend.

Cholesky QR, column-scaled, shifted and repeated: matrix products and small (r, r)
factorisations, so it runs in float32 on accelerators, shards along rows and batches.

The basis follows the order of the columns, with the signs of a QR whose triangle has a
positive diagonal: similar matrices on replicas get similar bases. Directions that are
invented for dependent columns come from rounding noise; whether they move anything is
decided in `_power_iteration.unit_columns`. NaN and infinity give NaN.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from curvadion_jax._matrices import matmul

# After three passes an independent column keeps nearly all of its squared length beside
# the others; a copy keeps less than this.
_COPY = 1e-3


def cholesky_qr(a: jax.Array) -> jax.Array:
    r"""Orthonormal basis of the columns, by repeated Cholesky QR.

    Four passes of :math:`A \leftarrow A U^{-1}, U^\top U = A^\top A + s I`, after
    scaling the columns. The shift s of the first three keeps the factorisation from
    failing, and every pass shrinks the condition number by about :math:`\sqrt{s}`.
    Momenta at full rank have condition numbers of up to 1e9.
    (Fukaya et al., `Shifted Cholesky QR for computing the QR factorization of
    ill-conditioned matrices <https://arxiv.org/abs/1809.11085>`_, 2020)

    Takes [..., rows, cols] with rows >= cols, float32 or float64. Columns of the result
    are orthonormal, or zero where the input has a zero column or an exact copy.
    """
    # Above the rounding error of a Gram matrix of unit columns and its factorisation.
    shift = max(20, 2 * a.shape[-1]) * float(jnp.finfo(a.dtype).eps)
    for _ in range(3):
        a = _shifted_pass(a, shift)
    return _final_pass(a, shift)


def _shifted_pass(a: jax.Array, shift: float) -> jax.Array:
    """A -> A U^{-1} with U^T U = A^T A + shift I, for the column-scaled A."""
    a = _unit_columns(a)
    gram = matmul(a.mT, a)
    return matmul(a, _inverse_factors(gram + shift * _identities(gram)))


def _final_pass(a: jax.Array, shift: float) -> jax.Array:
    """A -> A U^{-1} with U^T U = A^T A, with the copies among the columns set to zero.

    A first factorisation, shifted so that it cannot fail, finds the copies: U_jj^2 is
    the squared distance of column j to the columns before it.
    """
    a = _unit_columns(a)
    gram = matmul(a.mT, a)
    eye = _identities(gram)
    shifted = _inverse_factors(gram + shift * eye)
    distance = 1 / jnp.square(jnp.diagonal(shifted, axis1=-2, axis2=-1)) - shift
    copy = distance < _COPY  # False for NaN, which stays
    either = copy[..., :, None] | copy[..., None, :]
    rounding = 2 * jnp.finfo(a.dtype).eps
    exact = _inverse_factors(jnp.where(either, eye, gram + rounding * eye))
    # A matrix can be singular without a column that depends on those before it (Kahan's
    # is): then the exact factorisation may fail, and the shifted one is finite.
    failed = ~jnp.all(jnp.isfinite(exact), axis=(-2, -1), keepdims=True)
    dropped = copy[..., None, :]
    a = jnp.where(dropped & ~failed, 0, a)
    return jnp.where(dropped, 0, matmul(a, jnp.where(failed, shifted, exact)))


def _unit_columns(a: jax.Array) -> jax.Array:
    """Scales every column to unit length; a zero column stays zero."""
    # In two steps, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.abs(a), axis=-2, keepdims=True)
    a = a / jnp.where(largest == 0, 1, largest)
    norm = jnp.linalg.norm(a, axis=-2, keepdims=True)
    return a / jnp.where(norm == 0, 1, norm)


def _identities(gram: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)


def _inverse_factors(gram: jax.Array) -> jax.Array:
    """U^{-1} of the Cholesky factorisation gram = U^T U, for [..., r, r]."""
    over_stack = functools.partial(jnp.vectorize, signature="(r,r)->(r,r)")
    return lax.platform_dependent(
        gram, cpu=over_stack(_inverse_factor_alone), default=over_stack(_inverse_factor)
    )


def _inverse_factor(gram: jax.Array) -> jax.Array:
    lower = jnp.linalg.cholesky(gram, symmetrize_input=False)
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return solve_triangular(lower, identity, lower=True).mT


# On CPU a batched LAPACK call divides its batch over the thread pool that also runs
# other parts of the program, and waits for it: two such calls at a time, or several
# devices, can deadlock. Also under the caller's own vmap, as over replicas.
_inverse_factor_alone = jax.custom_batching.sequential_vmap(_inverse_factor)
