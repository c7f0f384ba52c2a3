"""The sync that keeps replicas together: parameters, and momentum with Q if wanted."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _finite,
    _momentum,
    _orthonormalize,
    _paths,
    _power_iteration,
    _within_replica,
    compressors,
)
from curvadion_jax._dion import DionState
from curvadion_jax._interfaces import Group, LocalStep, Synchronizer, SyncState
from curvadion_jax.synchronizers import _anchor_step, _feedback


class ReconcileCommon(NamedTuple):
    """What `reconcile` keeps with the anchor, the same on all replicas.

    Attributes:
      q: Q of every state of Dion after the last sync, in order; from it Q is recomputed
        at the next. Empty when momenta stay local.
      outer_state: state of the outer optimizer.
      compressor_state: state of the compressor.

    Example:
      >>> from curvadion_jax import synchronizers
      >>> parts = synchronizers.reconcile()
      >>> state = parts.init({"w": jnp.ones(2)}, inner_state=(), views={})
      >>> state.anchor["w"].tolist(), state.common.q
      ([1.0, 1.0], [])
    """

    q: Any
    outer_state: optax.OptState
    compressor_state: Any


def reconcile(
    outer: optax.GradientTransformation | None = None,
    *,
    compressor: compressors.Compressor | None = None,
    momentum: bool = True,
    residual_dtype: jax.typing.DTypeLike | None = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
) -> Synchronizer:
    r"""At a sync replicas take their own step, and then continue from a common anchor.

    With :math:`\theta_i` the parameters of replica i after its local step and
    :math:`a` the anchor, the parameters all had after the last sync, the outer
    optimizer is given the mean pseudo-gradient:

    .. math::
      d = \tfrac1N \textstyle\sum_i (a - \theta_i), \qquad
      a \leftarrow a + \mathrm{outer}(d), \qquad \theta_i \leftarrow a

    Afterwards the anchors of the replicas agree to the bit, and the parameters do but
    for the rounding of `params + update`, which does not add up: pseudo-gradients are
    measured from the anchor.

    Args:
      outer: Optax transformation for the outer step. It is given the pseudo-gradient
        with the anchor as parameters; for DiLoCo
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. None takes a - d, the plain
        average.
      compressor: form in which pseudo-gradients are sent, with error feedback: what a
        replica sent less than it had is added to its next one. None sends them as they
        are, in at least float32.
      momentum: whether momenta are averaged too: the field `momentum` (Dion), else
        `trace`, else `mu`, of the inner optimizer's state. Q is not averaged, since
        columns of different signs would cancel: it is recomputed by a step of power
        iteration on the common momentum, from the Q of the last sync. Momenta are sent
        in float32, whatever the compressor. Pass False with
        `triggers.relative_momentum_change`: a mean momentum is shorter than a replica's
        own, and growing back reads as a change.
      residual_dtype: dtype in which error feedback is kept from sync to sync; None is
        float32. (For the outer step `optax.sgd` has `accumulator_dtype`.)
      orthonormalize: as for :func:`scale_by_dion`, for Q.

    Returns:
      A synchronizer for any inner optimizer. It keeps a copy of the parameters and of
      Q, with a compressor another of the parameters, and the outer optimizer's state.
      The copy has the parameters' dtype: in bfloat16 a mean move of less than half of a
      last digit (1/512 of the parameter) is rounded away at every sync, so keep
      parameters in float32 and compute in bfloat16.

    Raises:
      ValueError: at `init`, if momenta should be averaged and the inner optimizer keeps
        arrays of parameters' shapes, but under none of these names.

    Example:
      >>> import jax.numpy as jnp
      >>> plain = reconcile()
      >>> diloco = reconcile(
      ...     optax.sgd(0.7, momentum=0.9, nesterov=True), momentum=False
      ... )
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> inner_state = optax.sgd(0.1, momentum=0.9).init(params)
      >>> [each.payload(params, inner_state, {}).averaged for each in (plain, diloco)]
      [256, 128]

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    outer_step = optax.with_extra_args_support(
        optax.scale(-1) if outer is None else outer
    )
    form = compressors.exact()
    if compressor is not None:
        form = compressors.check_compressor(compressor)
    basis = orthonormalize or _orthonormalize.cholesky_qr

    def init(params, inner_state, views) -> SyncState:
        states = []
        if momentum:
            _check_momentum_known(params, inner_state)
            states = _momentum.dion_states(inner_state)
        anchor = jax.tree.map(jnp.copy, params)  # so that both can be donated
        common = ReconcileCommon(
            q=[jax.tree.map(jnp.copy, state.q) for state in states],
            outer_state=outer_step.init(anchor),
            compressor_state=form.init(params, views),
        )
        residual = ()
        if compressor is not None:
            residual = _feedback.zero_residual(params, residual_dtype)
        return SyncState(anchor=anchor, common=common, residual=residual)

    def sync(local: LocalStep, state: SyncState, group: Group):
        updates, inner_state = local.take()
        common: ReconcileCommon = state.common
        anchor, params = state.anchor, local.params
        moved = optax.apply_updates(params, updates)
        drift = jax.tree.map(_anchor_step.difference, moved, anchor)

        # 1. The mean drift, and what of its own each replica has not sent.
        if compressor is None:
            # An absent replica contributes its drift later.
            mean = jax.tree.map(
                lambda x: x * jnp.asarray(local.expected, x.dtype),
                local.mean(drift, group),
            )
            residual, form_state = state.residual, common.compressor_state
        else:
            mean, residual, form_state = _feedback.mean_with_feedback(
                compressor, drift, state.residual, common.compressor_state, local, group
            )

        # 2. The outer step. Where it is not finite the anchor stays, and the next sync
        # sends what this one would have sent.
        new, outer_state = _anchor_step.outer_step(
            outer_step, mean, anchor, common.outer_state, group.layout
        )
        if compressor is not None:
            unsent = local.if_healthy(state.residual)
            residual = _finite.where_finite(new, residual, unsent)

        # 3. Parameters go to the new anchor; an absent replica keeps its drift on top.
        kept = _finite.or_zeros(~local.joins, drift)
        target = jax.tree.map(lambda a, d: (a + d).astype(a.dtype), new, kept)
        updates = jax.tree.map(_anchor_step.move_to, target, params)

        # 4. The momentum, and Q for it.
        q = common.q
        if momentum:
            own = _momenta(inner_state)
            averaged = local.mean(own, group)
            averaged = _paths.map_with_path(averaged.get, inner_state)
            if group.size > 1:  # one replica is plain Dion
                # Of the mean momenta, also where an absent replica keeps its own.
                averaged, q = _common_q(averaged, q, local.views, basis, group.layout)
            inner_state = _finite.where(local.joins, averaged, inner_state)
        state = SyncState(
            anchor=_finite.where_finite(new, new, anchor),
            common=ReconcileCommon(q, outer_state, form_state),
            residual=residual,
        )
        return updates, inner_state, state

    def payload(params, inner_state, views):
        total = form.payload(params, views)
        if momentum:
            total += compressors.exact().payload(_momenta(inner_state), views)
        return total

    return Synchronizer(init, sync, payload, after_local_step=True)


def _momenta(inner_state: optax.OptState) -> dict[str, jax.Array]:
    """The momentum's leaves of the inner state: path -> array."""
    inside = _momentum.in_field(inner_state, _momentum.find_field(inner_state))
    leaves = zip(_paths.leaves_with_path(inner_state), inside, strict=True)
    return {
        path: leaf
        for (path, leaf), is_in in leaves
        if is_in and jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def _check_momentum_known(params, inner_state) -> None:
    if _momentum.find_field(inner_state) is not None:
        return
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim}
    for path, leaf in jax.tree.leaves_with_path(inner_state):
        if leaf.shape in shapes and jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                "reconcile averages momenta and finds none by its name (momentum, "
                "trace, mu), but the inner optimizer keeps "
                f"{jax.tree_util.keystr(path)} of a parameter's shape. Pass "
                "momentum=False to leave it local."
            )


def _common_q(inner_state, starts, views, orthonormalize, layout):
    """The inner state with Q for common momenta, and these Q.

    By a step of power iteration from common starts.
    """
    common, following = [], iter(starts)

    def with_new_q(state: DionState) -> DionState:
        start = next(following)
        new = _iterated(state, start, views, orthonormalize, layout)
        q = _paths.map_with_path(lambda name, x: new[name], start)
        common.append(q)
        return state._replace(q=q)

    return _momentum.with_dion(inner_state, with_new_q), common


def _iterated(
    state: DionState, start: Any, views, orthonormalize, layout
) -> dict[str, jax.Array]:
    """Path -> Q after one step."""
    seen = {name: view for name, (view, _) in _feedback.matrices(state, views).items()}
    pairs = zip(seen.items(), jax.tree.leaves(state.momentum), strict=True)
    momenta = {
        name: view.to_matrix(m.astype(_orthonormalize.compute_dtype(m.dtype)))
        for (name, view), m in pairs
    }
    qs = dict(zip(seen, jax.tree.leaves(start), strict=True))
    _, right = _power_iteration.power_iteration(
        momenta,
        {name: layout.keep_whole(q) for name, q in qs.items()},
        functools.partial(
            _within_replica.bases,
            views=seen,
            orthonormalize=orthonormalize,
            layout=layout,
        ),
    )
    return {
        name: layout.keep_whole(_power_iteration.unit_columns(r, qs[name])[0]).astype(
            qs[name].dtype
        )
        for name, r in right.items()
    }
