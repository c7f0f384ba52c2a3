"""Orthonormal bases of tall matrices, one or a stack of them, on every backend.

The default is Cholesky QR, column-scaled, shifted and repeated: matrix products and
one small (r, r) factorisation, so that it runs in float32 on accelerators, shards
along the rows and batches. Householder QR is the reference.

Both give an orthonormal basis of the columns, in the order of the columns, with the
signs of a QR whose triangle has a positive diagonal. Where the columns are dependent,
QR has to invent directions: Householder QR always does, Cholesky QR takes them from
the rounding noise or, where there is too little of it (always for zero columns),
returns zero columns. Whether an invented direction matters is for the caller to say,
who knows the matrix. NaN or infinity in the input gives NaN in the
output: a poisoned input is never silently repaired.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from curvadion_jax._matrices import matmul

Orthonormalize = Callable[[jax.Array], jax.Array]
"""Takes [..., rows, cols] with rows >= cols, float32 or float64; returns the same."""

# After three passes a column that is really there keeps nearly all of its squared
# length beside the others; a copy keeps less than this.
_COPY = 1e-3


def compute_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which the algebra is done: float32, or float64 for float64.

    Example:
      >>> compute_dtype("bfloat16")
      dtype('float32')
    """
    return jnp.promote_types(jnp.float32, dtype)


def _unit_columns(a: jax.Array) -> jax.Array:
    """Scales every column to unit length; a zero column stays zero."""
    # In two steps, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.abs(a), axis=-2, keepdims=True)
    a = a / jnp.where(largest == 0, 1, largest)
    norm = jnp.linalg.norm(a, axis=-2, keepdims=True)
    return a / jnp.where(norm == 0, 1, norm)


# A batched LAPACK call divides its batch over the thread pool that also runs other
# parts of the program, on CPU, and waits for it: two such calls at a time, or several
# devices, can wait for ever. Also under the caller's own vmap, as over replicas.
_one_at_a_time = jax.custom_batching.sequential_vmap


def _over_stack(function: Callable[[jax.Array], jax.Array], a: jax.Array) -> jax.Array:
    """A function of one matrix, of [..., rows, cols]."""
    for _ in range(a.ndim - 2):
        function = jax.vmap(function)
    return function(a)


def _inverse_factor(gram: jax.Array) -> jax.Array:
    """U^{-1} of the Cholesky factorisation gram = U^T U, for one (r, r) matrix."""
    lower = jnp.linalg.cholesky(gram, symmetrize_input=False)
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return solve_triangular(lower, identity, lower=True).mT


_inverse_factor_alone = jax.custom_jvp(_one_at_a_time(_inverse_factor))


@_inverse_factor_alone.defjvp
def _(primals, tangents):
    """With X = U^{-1} and M = X^T dG X: dX = -X (half of M's diagonal, all above)."""
    inverse = _inverse_factor_alone(*primals)
    inner = matmul(matmul(inverse.mT, tangents[0]), inverse)
    half = jnp.triu(inner, 1) + jnp.diag(jnp.diagonal(inner)) / 2
    return inverse, -matmul(inverse, half)


def _inverse_factors(gram: jax.Array) -> jax.Array:
    """`_inverse_factor` of one matrix or of a stack."""
    return lax.platform_dependent(
        gram,
        cpu=functools.partial(_over_stack, _inverse_factor_alone),
        default=functools.partial(_over_stack, _inverse_factor),
    )


def _identities(gram: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)


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
    copy = distance < _COPY  # False for NaN, which goes on
    either = copy[..., :, None] | copy[..., None, :]
    rounding = 2 * jnp.finfo(a.dtype).eps
    exact = _inverse_factors(jnp.where(either, eye, gram + rounding * eye))
    # A matrix can be singular without a column that depends on those before it (Kahan's
    # is): then the exact factorisation may fail, and the shifted one is finite.
    failed = ~jnp.all(jnp.isfinite(exact), axis=(-2, -1), keepdims=True)
    dropped = copy[..., None, :]
    a = jnp.where(dropped & ~failed, 0, a)
    return jnp.where(dropped, 0, matmul(a, jnp.where(failed, shifted, exact)))


def cholesky_qr(a: jax.Array) -> jax.Array:
    r"""Orthonormal basis of the columns, by repeated Cholesky QR.

    Four passes of :math:`A \leftarrow A U^{-1}, U^\top U = A^\top A + s I`. Each
    scales the columns first; the shift s of the first three keeps the factorisation
    from failing on an ill-conditioned A, and every one shrinks the condition number by
    about :math:`\sqrt{s}`. (Two would do up to condition numbers of 1e6 in float32;
    momenta seen at full rank have 1e9.)

    Args:
      a: [..., rows, cols] with rows >= cols, float32 or float64.

    Returns:
      [..., rows, cols] of the same dtype. Columns are orthonormal, or zero where the
      input has a zero column or an exact copy.

    Example:
      >>> basis = cholesky_qr(jnp.array([[3.0, 1.0], [4.0, 1.0], [0.0, 1.0]]))
      >>> bool(jnp.allclose(basis.T @ basis, jnp.eye(2), atol=1e-6))
      True

    References:
      Fukaya et al., `Shifted Cholesky QR for computing the QR factorization of
      ill-conditioned matrices <https://arxiv.org/abs/1809.11085>`_, 2020
    """
    # Above the rounding error of a Gram matrix of unit columns and its factorisation.
    shift = max(20, 2 * a.shape[-1]) * float(jnp.finfo(a.dtype).eps)
    for _ in range(3):
        a = _shifted_pass(a, shift)
    return _final_pass(a, shift)


def householder_qr(a: jax.Array) -> jax.Array:
    """Orthonormal basis of the columns, by Householder QR (LAPACK or cuSOLVER).

    The reference: as accurate as float arithmetic allows for every input, and slow on
    accelerators, where a stack of matrices is a loop. Unlike :func:`cholesky_qr` it
    gives arbitrary columns where those of the input are dependent.

    Args:
      a: [..., rows, cols] with rows >= cols, float32 or float64.

    Returns:
      [..., rows, cols] of the same dtype, with orthonormal columns.

    Example:
      >>> basis = householder_qr(jnp.array([[3.0], [4.0]]))
      >>> [round(abs(float(x)), 3) for x in basis[:, 0]]
      [0.6, 0.8]
    """
    return _over_stack(_positive_qr, a)


OWN: tuple[Orthonormalize, ...] = (cholesky_qr, householder_qr)
"""Those of which each matrix of a stack is worked on by itself, wherever it lies."""


@jax.custom_jvp
@_one_at_a_time
def _positive_qr(a: jax.Array) -> jax.Array:
    # With a positive diagonal of the triangle, as Cholesky QR has it, replicas with
    # similar matrices get similar bases, and not some of opposite sign.
    basis, triangle = jnp.linalg.qr(a)
    return basis * jnp.where(jnp.diagonal(triangle) < 0, -1, 1)[None, :]


@_positive_qr.defjvp
def _(primals, tangents):
    """With M = dA R^{-1} and K the part of Q^T M below the diagonal:

    dQ = M - Q Q^T M + Q (K - K^T).
    """
    basis = _positive_qr(*primals)
    inverse = _inverse_triangle(matmul(basis.mT, primals[0]))
    moved = matmul(tangents[0], inverse)
    inner = matmul(basis.mT, moved)
    below = jnp.tril(inner, -1)
    return basis, moved + matmul(basis, below - below.mT - inner)


@_one_at_a_time
def _inverse_triangle(triangle: jax.Array) -> jax.Array:
    return solve_triangular(triangle, jnp.eye(len(triangle), dtype=triangle.dtype))
