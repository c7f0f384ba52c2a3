"""NumPy float64 reference of the steps of one replica, of RMMC, and of codes.

Written from docs/algorithm.md, no JAX. `reference_replicas` has N replicas of it.

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

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
Tree = dict[str, np.ndarray]

DEPENDENT = 1e-9
EPSILON = 1e-8  # of the columns of R
PRESENT = 100 * np.finfo(np.float64).eps
MUON_EPSILON = ADAM_EPSILON = 1e-7


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


def column_normalize(r: Array, previous_q: Array) -> tuple[Array, Array]:
    """Q'_j = R_j / (||R_j|| + 1e-8), and which columns are present, bool[r].

    One is present where ||R_j|| > 100 eps ||R||; else Q' keeps Q_j. NaN is present.
    """
    lengths = np.linalg.norm(r, axis=0)
    present = ~(lengths <= PRESENT * np.linalg.norm(lengths))
    return np.where(present, r / (lengths + EPSILON), previous_q), present


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


def weighted_mean(arrays: Sequence[Array], shares: Sequence[float]) -> Array:
    """Mean of share times array; whose share is 0 may hold NaN."""
    pairs = zip(arrays, shares, strict=True)
    return np.mean([s * x if s else np.zeros_like(x) for x, s in pairs], axis=0)


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
    new_q, present = column_normalize(r, q)  # (7)  Q' = ColumnNormalize(R)
    return scaled_direction(present * p, new_q, b.shape), new_momentum, new_q


def dion_step_average_factors(
    gradients: Sequence[Array],
    momenta: Sequence[Array],
    q: Array,
    *,
    mu: float,
    shares: Sequence[float] | None = None,
) -> tuple[Array, list[Array], Array]:
    """Dion's compressed sync: B Q and R are means over replicas, momentum stays local.

    Returns the direction of all, each replica's momentum, and the next Q of all, from
    the Q of all. `shares` are the replicas' weights in means, of mean 1; whose share is
    0 keeps its momentum. If factors would be no smaller than the matrix, the mean of B
    takes the place of every B.
    """
    shape = gradients[0].shape
    shares = [1.0] * len(gradients) if shares is None else shares
    mean = lambda arrays: weighted_mean(arrays, shares)
    bs = [m + g for m, g in zip(momenta, gradients, strict=True)]  # (1) B_k = M_k + G_k
    is_local = sum(shape) * q.shape[1] < np.prod(shape)
    if not is_local:
        bs = [mean(bs)] * len(bs)
    views = [rows_view(b) for b in bs]
    # (2), (3)  P = Orthonormalize(mean_k B_k Q)
    p = orthonormal_factor(mean([b @ q for b in views]))
    rs = [b.T @ p for b in views]  # (4)  R_k = B_k^T P
    # (6) with each one's own: M'_k = B_k - (1 - mu) P R_k^T
    new_momenta = [
        b - (1 - mu) * kernel_layout(p @ r.T, shape) if s or not is_local else m
        for b, r, s, m in zip(bs, rs, shares, momenta, strict=True)
    ]
    new_q, present = column_normalize(mean(rs), q)  # (7)
    return scaled_direction(present * p, new_q, shape), new_momenta, new_q


def muon_step(
    gradient: Array, momentum: Array, count: int, *, mu: float
) -> tuple[Array, Array]:
    """D and M' of Muon's step number ``count``, from 1, of a kernel [fan_in, fan_out].

    M' = mu M + (1 - mu) G, Nesterov's momentum with both bias corrections, and five
    Newton-Schulz iterations.
    """
    new_momentum = mu * momentum + (1 - mu) * gradient
    ahead = new_momentum / (1 - mu ** (count + 1))
    x = mu * ahead + (1 - mu) * gradient / (1 - mu**count)
    fan_in, fan_out = x.shape
    x = x.T if fan_in > fan_out else x
    x = x / (np.linalg.norm(x) + MUON_EPSILON)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.T if fan_in > fan_out else x
    return np.sqrt(max(1, fan_out / fan_in)) * x, new_momentum


def adam_step(
    gradient: Array, m: Array, v: Array, count: int, *, nesterov: bool
) -> tuple[Array, Array, Array]:
    """Adam's direction of step number ``count``, from 1, and both new moments."""
    m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
    mean = m / (1 - 0.9**count)
    if nesterov:
        ahead = m / (1 - 0.9 ** (count + 1))
        mean = 0.9 * ahead + 0.1 * gradient / (1 - 0.9**count)
    return mean / (np.sqrt(v / (1 - 0.95**count)) + ADAM_EPSILON), m, v


def decoded(blocks: Array, bits: int) -> Array:
    """What becomes of blocks [..., block] in codes of 8, 4, 2 or 1 bits.

    Scales are float32.
    """
    size = np.abs(blocks)
    if bits in (8, 4):
        unit = size.max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
        codes = np.rint(blocks / np.where(unit == 0, 1, unit))
        return codes * np.float32(unit)
    mean = size.mean(-1, keepdims=True)
    if bits == 2:
        large = size > mean
        of = lambda some: np.float32(
            np.sum(size * some, -1, keepdims=True)
            / np.maximum(np.sum(some, -1, keepdims=True), 1)
        )
        magnitude = np.where(large, of(large), of(~large))
    else:
        magnitude = np.broadcast_to(np.float32(mean), size.shape)
    return np.where(blocks < 0, -magnitude, magnitude).astype(np.float64)


def in_blocks(x: Array, block: int) -> Array:
    """Blocks [n, block] of an array; the last one repeats its own elements in order."""
    rows = np.split(x.ravel(), range(block, x.size, block))
    return np.stack([np.resize(row, block) for row in rows])


def compressed_mean(
    contributions: Sequence[Tree], bits: int, block: int
) -> tuple[Tree, list[Tree]]:
    """The mean of the replicas' trees in codes, and what each did not contribute.

    More than two replicas round twice: each, of N, the mean of an N-th of all blocks.
    """
    replicas, names = len(contributions), sorted(contributions[0])
    if replicas == 1:
        return contributions[0], [tree_map(np.zeros_like, contributions[0])]
    given = np.stack(
        [
            np.concatenate([in_blocks(tree[name], block) for name in names])
            for tree in contributions
        ]
    )  # [replicas, blocks, block]
    sent = decoded(given, bits)
    mean, unsent = sent.mean(0), given - sent
    if replicas > 2:
        rounded = decoded(mean, bits)
        share = -(-len(mean) // replicas)  # blocks of each replica, with padding
        for index in range(len(mean)):
            rounds = index // share
            unsent[rounds, index] += replicas * (mean - rounded)[index]
        mean = rounded
    like = contributions[0]
    return _cut(mean, like, names), [_cut(each, like, names) for each in unsent]


def _cut(blocks: Array, like: Tree, names: Sequence[str]) -> Tree:
    """The arrays that blocks are made of."""
    found, size = {}, blocks.shape[1]
    for name in names:
        count = -(-like[name].size // size)
        own, blocks = blocks[:count], blocks[count:]
        found[name] = own.ravel()[: like[name].size].reshape(like[name].shape)
    return found


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


def tree_map(function: Callable[..., Array], *trees: Tree) -> Tree:
    """A function of the arrays of one name, for every name."""
    return {name: function(*[tree[name] for tree in trees]) for name in trees[0]}


def tree_mean(trees: Sequence[Tree]) -> Tree:
    """Mean over replicas of every leaf."""
    return tree_map(lambda *arrays: np.mean(arrays, axis=0), *trees)
