"""Two thin factors in place of a matrix."""

import functools

import jax
import jax.numpy as jnp

from curvadion_jax import (
    _arguments,
    _finite,
    _matrices,
    _orthonormalize,
    _paths,
    _payload,
    _placement,
    _power_iteration,
)
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._within_replica import Devices
from curvadion_jax.compressors import _base


def low_rank(
    rank: int | float = 0.25,
    *,
    power_iterations: int = 1,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
) -> _base.Compressor:
    r"""Sends the factors of a low-rank approximation of the mean.

    For every matrix B (momentum, drift, gradient), with Q from the last time:

    .. math::
      P = \mathrm{orth}(\mathrm{mean}(B Q)), \quad R = \mathrm{mean}(B^\top P), \quad
      \text{mean} = P R^\top

    in two messages, one after the other. A replica put in :math:`P P^\top B`; under
    error feedback it keeps the rest. Matrices are those that Dion sees, and of other
    parameters with two axes or more (embeddings, heads) the last two. What has fewer
    axes, or would not be smaller as factors, is sent whole. :func:`chain` sends the
    factors and the rest in another form.

    Args:
      rank: an int is a rank, clipped to each matrix; a float in (0, 1] is a fraction of
        the smaller side, rounded up.
      power_iterations: how often P and R are computed in turn; each costs the factors
        once more.
      orthonormalize: as for :func:`scale_by_dion`.

    Returns:
      The compressor. Its state is Q.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: for a rank out of range, or fewer than one iteration.

    Example:
      >>> low_rank(2).payload({"w": jnp.ones((32, 16))}, {})  # 2 (32 + 16) float32
      Payload(averaged=384, gathered=0)

    References:
      Vogels et al., `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019
    """
    _matrices.check_rank(rank)
    if isinstance(power_iterations, bool) or not isinstance(power_iterations, int):
        raise TypeError(f"power_iterations must be an int, got {power_iterations!r}")
    if power_iterations < 1:
        raise ValueError(f"power_iterations must be at least 1, got {power_iterations}")
    _arguments.check_orthonormalize(orthonormalize)
    settings = (rank, power_iterations, orthonormalize or _orthonormalize.cholesky_qr)
    plain = _through(_base.exact(), *settings)
    return plain._replace(through=lambda form: _through(form, *settings))


def _through(
    channel: _base.Compressor,
    rank: int | float,
    power_iterations: int,
    orthonormalize: _orthonormalize.Orthonormalize,
) -> _base.Compressor:
    """Factors, and what is sent whole, in the form of the channel."""

    def init(params, views):
        leaves = dict(_paths.leaves_with_path(params))
        return {
            name: _placement.place_like(
                _power_iteration.initial_q(name, view, r, seed=0, dtype=jnp.float32),
                leaves[name],
                view.q_axes,
            )
            for name, (view, r) in _factored(params, views, rank).items()
        }

    def average(tree, state, group, views):
        if group.size == 1:
            return _base.Averaged(tree, _base.nothing(tree), state)
        seen = {n: view for n, (view, _) in _factored(tree, views, rank).items()}
        leaves = {name: _base.wide(x) for name, x in _paths.leaves_with_path(tree)}
        matrices = {name: view.to_matrix(leaves[name]) for name, view in seen.items()}
        q = {name: state[name].astype(x.dtype) for name, x in matrices.items()}
        p = own = common = q
        for _ in range(power_iterations):
            p, own, common = _iterate(matrices, q, seen, channel, group, orthonormalize)
            q = _next_q(common, q)
        rest = {name: x for name, x in leaves.items() if name not in seen}
        sent = channel.average(rest, (), group, {})

        def product(name, factors):
            return seen[name].product(p[name], factors[name])

        mean = {name: product(name, common) for name in seen} | sent.mean
        unsent = {name: leaves[name] - product(name, own) for name in seen}
        unsent = _finite.finite_elements(unsent | sent.unsent)

        def rebuild(parts):
            in_order = [parts[name] for name in leaves]
            return jax.tree.unflatten(jax.tree.structure(tree), in_order)

        state = {name: q[name].astype(state[name].dtype) for name in state}
        return _base.Averaged(rebuild(mean), rebuild(unsent), state)

    def payload(tree, views):
        factored = _factored(tree, views, rank)
        whole, factors = {}, []
        for name, x in _paths.leaves_with_path(tree):
            if name not in factored:
                whole[name] = jax.ShapeDtypeStruct(x.shape, x.dtype)
                continue
            view, r = factored[name]
            for side in (view.rows, view.cols):
                dtype = compute_dtype(x.dtype)
                shape = jax.ShapeDtypeStruct((*view.batch, side, r), dtype)
                factors.append(channel.payload({name: shape}, {}))
        return _payload.total([*factors * power_iterations, channel.payload(whole, {})])

    return _base.Compressor(init, average, payload)


def _iterate(matrices, q, views, channel, group, orthonormalize):
    """P, what this replica put into R, and R, for matrices and Q by name."""

    def send(factors, axes):
        made_of = {name: (view.shape, axes(view)) for name, view in views.items()}
        there = group.laid_out(group.layout.of_factors(factors, made_of))
        return channel.average(factors, (), there, {})

    devices = Devices(group.layout)
    left, right = _power_iteration.power_iteration(
        matrices,
        {name: devices.whole(x) for name, x in q.items()},
        functools.partial(devices.bases, views=views, orthonormalize=orthonormalize),
        lambda factors: send(factors, lambda view: view.p_axes).mean,
    )
    sent = send(right, lambda view: view.q_axes)
    own = {name: x - sent.unsent[name] for name, x in right.items()}
    return left, own, sent.mean


def _next_q(common, q):
    """Unit columns of R; of a matrix that is not finite its Q stays, else for ever."""
    following = {}
    for name, old in q.items():
        new, _ = _power_iteration.unit_columns(common[name], old)
        finite = jnp.all(jnp.isfinite(new), axis=(-2, -1), keepdims=True)
        following[name] = jnp.where(finite, new, old)
    return following


def _factored(tree, views, rank) -> dict[str, tuple[_matrices.MatrixView, int]]:
    """Path -> view and rank of the arrays whose factors are smaller than they are."""
    found = {}
    for name, x in _paths.leaves_with_path(tree):
        view = views.get(name)
        if view is None and x.ndim >= 2 and x.size:
            view = _matrices.make_view(x.shape, -2, -1)
        if view is None:
            continue
        r = _matrices.resolve_rank(view.cols, rank)
        if _power_iteration.reduces_factors(view, r):
            found[name] = (view, r)
    return found
