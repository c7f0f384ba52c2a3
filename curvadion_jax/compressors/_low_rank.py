"""Two thin factors in place of a matrix."""

import functools

import jax
import jax.numpy as jnp

from curvadion_jax import (
    _arguments,
    _bases,
    _health,
    _low_rank,
    _matrices,
    _orthonormalize,
    _paths,
    _payload,
    _sharding,
)
from curvadion_jax._orthonormalize import compute_dtype
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
            name: _sharding.place_like(
                _low_rank.initial_q(name, view, r, seed=0, dtype=jnp.float32),
                leaves[name],
                view.q_axes,
            )
            for name, (view, r) in _factored(params, views, rank).items()
        }

    def average(tree, state, group, views):
        if group.size == 1:
            return _base.alone(group, tree, state)
        factored = _factored(tree, views, rank)
        leaves = [(name, _base.wide(x)) for name, x in _paths.leaves_with_path(tree)]
        matrices = {
            name: factored[name][0].to_matrix(x)
            for name, x in leaves
            if name in factored
        }

        def send(arrays):
            result = channel.average(arrays, (), group, {})
            return result.mean, result.unsent

        def send_factors(factors, axes):
            views = [factored[name][0] for name in factors]
            made_of = [(view.shape, axes(view)) for view in views]
            with _sharding.noting_made_of([*factors], [*factors.values()], made_of):
                return send(factors)

        q = {name: state[name].astype(matrices[name].dtype) for name in matrices}
        seen = [factored[name][0] for name in matrices]
        bases = functools.partial(_bases.of_factors, [*matrices], seen, orthonormalize)
        p, own, common = _iterate(matrices, q, send_factors, bases)
        for _ in range(power_iterations - 1):
            q = _next_q(common, q)
            p, own, common = _iterate(matrices, q, send_factors, bases)
        q = _next_q(common, q)
        whole_mean, unsent = send({n: x for n, x in leaves if n not in factored})

        def product(name, factors):
            return factored[name][0].product(p[name], factors[name])

        mean = {name: product(name, common) for name in factored} | whole_mean
        left = {n: x - product(n, own) for n, x in leaves if n in factored}

        def rebuild(parts):
            in_order = [parts[name] for name, _ in leaves]
            return jax.tree.unflatten(jax.tree.structure(tree), in_order)

        state = {name: q[name].astype(state[name].dtype) for name in state}
        unsent = _health.finite_elements(left | unsent)
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


def _iterate(matrices, q, send, bases):
    """P, what this replica put into R, and R, for matrices and Q by name."""
    names = list(matrices)

    def reduce(products):
        products = dict(zip(names, products, strict=True))
        mean, _ = send(products, lambda view: view.p_axes)
        return [mean[name] for name in names]

    left, right = _low_rank.power_iteration(
        [matrices[name] for name in names],
        [q[name] for name in names],
        bases,
        reduce,
    )
    right = dict(zip(names, right, strict=True))
    common, unsent = send(right, lambda view: view.q_axes)
    own = {name: right[name] - unsent[name] for name in names}
    return dict(zip(names, left, strict=True)), own, common


def _next_q(common, q):
    """Unit columns of R; of a matrix that is not finite its Q stays, else for ever."""
    following = {}
    for name, old in q.items():
        new, _ = _low_rank.unit_columns(common[name], old)
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
        if _low_rank.reduces_factors(view, r):
            found[name] = (view, r)
    return found
