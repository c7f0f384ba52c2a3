"""NumPy float64 reference of Dion, and of what is measured of replicas.

Written from the equations, no JAX. `reference_replicas` has those that step alone.

Dion (arXiv 2504.05295, as microsoft/dion implements it), for a matrix B seen with
rows >= columns and a right factor Q of shape (columns, r):

    (1) B  = M + G                    (6) M' = B - (1 - mu) P R^T
    (2) Y  = B Q                      (7) Q' = ColumnNormalize(R)
    (3) P  = Orthonormalize(Y)        (8) D  = sqrt(fan_out / fan_in) P Q'^T
    (4) R  = B^T P                    (9) X' = X - lr D
    (5) formula of the CurvaDion paper (arXiv 2512.13728), in place of (1) and (6):
        B = mu M + G and M' = B

Kernels have Flax's layout [fan_in, fan_out]. P lies on the larger side, on fan_out when
the sides are equal; Q and R lie on the other one.
"""

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
Tree = dict[str, np.ndarray]

DEPENDENT = 1e-9
EPSILON = 1e-8


def orthonormal_factor(a: Array) -> Array:
    """Left factor of A = P T with P^T P = I and T upper triangular, T_jj > 0.

    Householder QR. A column that is zero, or whose part orthogonal to the earlier
    columns is below 1e-9 of its own norm, is a zero column of the result and left out
    of the factorisation: Householder QR would put an arbitrary direction there.
    """
    norms = np.linalg.norm(a, axis=0)
    kept = [j for j in range(a.shape[1]) if norms[j] != 0]
    while True:
        p, t = np.linalg.qr(a[:, kept])
        # |T_jj| is the norm of the part of column j orthogonal to columns 0..j-1.
        dependent = np.flatnonzero(np.abs(np.diag(t)) < DEPENDENT * norms[kept])
        if dependent.size == 0:
            break
        del kept[dependent[0]]
    factor = np.zeros_like(a)
    factor[:, kept] = p * np.where(np.diag(t) < 0, -1.0, 1.0)
    return factor


def column_normalize(r: Array, previous_q: Array) -> Array:
    """Q'_j = R_j / (||R_j|| + 1e-8), or the previous Q_j where R_j is exactly zero."""
    unit = r / (np.linalg.norm(r, axis=0, keepdims=True) + EPSILON)
    return np.where((r == 0).all(axis=0, keepdims=True), previous_q, unit)


def rows_view(kernel: Array) -> Array:
    """Kernel [fan_in, fan_out] seen with rows >= columns, rows on fan_out when equal.

    The same transposition leads back: ``kernel_layout`` of the view is the kernel.
    """
    fan_in, fan_out = kernel.shape
    return kernel.T if fan_out >= fan_in else kernel


def kernel_layout(view: Array, shape: tuple[int, ...]) -> Array:
    """Matrix in the rows >= columns view, back in the kernel's layout ``shape``."""
    fan_in, fan_out = shape
    return view.T if fan_out >= fan_in else view


def scaled_direction(p: Array, q: Array, shape: tuple[int, ...]) -> Array:
    """Equation (8) in the kernel's layout: D = sqrt(fan_out / fan_in) P Q^T."""
    fan_in, fan_out = shape
    return np.sqrt(fan_out / fan_in) * kernel_layout(p @ q.T, shape)


def dion_factors(b: Array, q: Array) -> tuple[Array, Array]:
    """P (rows, r) and R (columns, r) of one power iteration of B from Q."""
    p = orthonormal_factor(b @ q)  # (2), (3)  P = Orthonormalize(B Q)
    r = b.T @ p  # (4)  R = B^T P
    return p, r


def dion_step(
    gradient: Array,
    momentum: Array,
    q: Array,
    *,
    mu: float,
    error_feedback: bool = True,
) -> tuple[Array, Array, Array]:
    """D, M' and Q' of one step of a kernel [fan_in, fan_out].

    With error feedback, the momentum of microsoft/dion; without it, the paper's.
    """
    # (1) B = M + G, or (5) B = mu M + G
    b = momentum + gradient if error_feedback else mu * momentum + gradient
    p, r = dion_factors(rows_view(b), q)
    # (6) M' = B - (1 - mu) P R^T, or (5) M' = B
    removed = kernel_layout(p @ r.T, b.shape)
    new_momentum = b - (1 - mu) * removed if error_feedback else b
    new_q = column_normalize(r, q)  # (7)  Q' = ColumnNormalize(R)
    return scaled_direction(p, new_q, b.shape), new_momentum, new_q


def dion_step_average_factors(
    gradients: Sequence[Array],
    momenta: Sequence[Array],
    qs: Sequence[Array],
    *,
    mu: float,
) -> tuple[list[Array], list[Array], list[Array]]:
    """Dion's compressed sync: B Q and R are means over replicas, momentum stays local.

    Lists over replicas of directions (all equal), momenta and right factors.
    """
    shape = gradients[0].shape
    bs = [m + g for m, g in zip(momenta, gradients, strict=True)]  # (1) B_k = M_k + G_k
    views = [rows_view(b) for b in bs]
    # (2), (3)  P = Orthonormalize(mean_k B_k Q_k)
    p = orthonormal_factor(
        np.mean([b @ q for b, q in zip(views, qs, strict=True)], axis=0)
    )
    rs = [b.T @ p for b in views]  # (4)  R_k = B_k^T P
    # (6) with each one's own: M'_k = B_k - (1 - mu) P R_k^T
    new_momenta = [
        b - (1 - mu) * kernel_layout(p @ r.T, shape)
        for b, r in zip(bs, rs, strict=True)
    ]
    r = np.mean(rs, axis=0)
    new_qs = [column_normalize(r, q) for q in qs]  # (7)
    return [scaled_direction(p, q, shape) for q in new_qs], new_momenta, new_qs


def relative_momentum_change(
    new_momentum: Array, old_momentum: Array, floor: float = 0.0
) -> float:
    """RMMC of one matrix: | ||M_new|| - ||M_old|| | / ||M_old||, Frobenius norms.

    0 where ||M_old|| < floor (the matrix is ignored, also when its norm is zero); else,
    where ||M_old|| = 0, infinity, or 0 if both are zero.
    """
    new, old = float(np.linalg.norm(new_momentum)), float(np.linalg.norm(old_momentum))
    if old < floor:
        return 0.0
    if old == 0:
        return 0.0 if new == 0 else float("inf")
    return abs(new - old) / old


def tree_mean(trees: Sequence[Tree]) -> Tree:
    """Mean over replicas of every leaf."""
    return {name: np.mean([tree[name] for tree in trees], axis=0) for name in trees[0]}


def divergence(params: Sequence[Tree]) -> float:
    """sqrt(mean_i ||p_i - mean||^2) / sqrt(mean_i ||p_i||^2), all leaves together."""
    flat = np.stack([np.concatenate([v.ravel() for v in t.values()]) for t in params])
    distance = np.mean(np.sum((flat - flat.mean(axis=0)) ** 2, axis=1))
    return float(np.sqrt(distance) / np.sqrt(np.mean(np.sum(flat**2, axis=1))))
