"""The sync that keeps replicas together: parameters, momentum and Q."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _finite, _momentum, _orthonormalize, compressors
from curvadion_jax._local_step import LocalStep
from curvadion_jax._protocols import Group, Synchronizer, SyncState
from curvadion_jax.compressors._base import check_compressor
from curvadion_jax.synchronizers import _anchor_step, _base, _fragments, _inner_state
from curvadion_jax.synchronizers._fragments import Fragment


class ReconcileCommon(NamedTuple):
    """What `reconcile` keeps beside the anchor, the same on all replicas.

    Attributes:
      q: Q of every state of Dion after the last sync, in order; from it Q is recomputed
        at the next. Empty when momenta stay local.
      outer_state: state of the outer optimizer; a list with that of every fragment,
        if there are several.
      compressor_state: states of the compressors of pseudo-gradients and momenta; a
        list of these for several fragments.

    Example:
      >>> state = reconcile().init({"w": jnp.ones(2)}, inner_state=(), views={})
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
    momentum: bool | compressors.Compressor = True,
    momentum_every: int = 1,
    fragments: int = 1,
    other_state: bool = False,
    residual_dtype: jax.typing.DTypeLike | None = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
) -> Synchronizer:
    r"""At a sync replicas take their own step and then come together.

    With :math:`\theta_i` the parameters of replica i after its local step and
    :math:`a` the anchor, the parameters all had after the last sync, the outer
    optimizer is given the mean pseudo-gradient:

    .. math::
      d = \tfrac1N \textstyle\sum_i (a - \theta_i), \qquad
      a \leftarrow a + \mathrm{outer}(d), \qquad \theta_i \leftarrow a

    Afterwards the anchors of the replicas agree to the bit, and the parameters do but
    for the rounding of `params + update`, which does not add up: pseudo-gradients are
    measured from the anchor.

    The momentum of the replicas is averaged too. Q is not, since columns of different
    signs would cancel: it is recomputed by a step of power iteration on the common
    momentum, from the Q of the last sync.

    Args:
      outer: Optax transformation for the outer step. It is given the pseudo-gradient
        with the anchor as parameters; for DiLoCo
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. None takes a - d, the plain
        average.
      compressor: form in which pseudo-gradients are sent, with error feedback: what a
        replica sent less than it had is added to its next one. None sends them as they
        are, in at least float32.
      momentum: whether momenta are averaged: the field `momentum` (Dion), else
        `trace`, else `mu`, of the inner optimizer's state. A compressor sends them in
        its form, and what was not sent stays in the replica's own momentum; Q then
        stays its own too.
      momentum_every: k, for momenta (and the other state) to be averaged at every k-th
        sync only, or of every fragment at its own every k-th.
      fragments: n, for a sync to bring one n-th of the parameters together, in turn:
        pseudo-gradient, residual, outer step, anchor, momentum and Q of these alone,
        and the others stay as the local step left them. This is streaming: a sync sends
        1/n, and for as many bytes it comes n times as often, ``every_k(h // n)``.
        Fragments are of whole parameters (a stack of layers is one), of about equal
        size; :func:`fragment_paths` lists them. The program holds a sync for each.
      other_state: whether the rest of the inner optimizer's floating-point state is
        averaged, such as AdamW's moments of embeddings: arrays of a parameter's shape.
      residual_dtype: dtype in which error feedback is kept from sync to sync; None is
        float32. (For the outer step `optax.sgd` has `accumulator_dtype`.)
      orthonormalize: as for :func:`scale_by_dion`, for Q.

    Returns:
      A synchronizer for any inner optimizer. It keeps a copy of the parameters and of
      Q, with a compressor another of the parameters, and the outer optimizer's state.

    Raises:
      TypeError: if `outer` is not an Optax transformation, a compressor is not a
        Compressor, a number is not an int, or another argument of the wrong kind.
      ValueError: if a number is below 1, or `momentum_every` is given and nothing is
        averaged; at `init`, if there are more fragments than parameters, or momenta
        are to be averaged and the inner optimizer keeps arrays of parameters' shapes,
        but under none of these names.

    Example:
      >>> plain = reconcile()
      >>> diloco = reconcile(
      ...     optax.sgd(0.7, momentum=0.9, nesterov=True), momentum=False
      ... )
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> inner_state = optax.sgd(0.1, momentum=0.9).init(params)
      >>> [each.payload(params, inner_state, {}).averaged for each in (plain, diloco)]
      [256, 128]

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, and
      `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025
    """
    if outer is not None:
        what = "optax.sgd(0.7), or None for the plain average"
        _arguments.check_transformation(outer, "outer", what)
    if compressor is not None:
        compressor = check_compressor(compressor)
    if not isinstance(momentum, bool):
        what = "momentum that is neither True nor False"
        momentum = check_compressor(momentum, what)
    _arguments.check_switch(other_state, "other_state")
    _arguments.check_dtype(residual_dtype, "residual_dtype")
    if residual_dtype is not None and compressor is None:
        raise ValueError(f"{residual_dtype=} without a compressor: leave it out")
    _arguments.check_orthonormalize(orthonormalize)
    for what, number in (("fragments", fragments), ("momentum_every", momentum_every)):
        _fragments.check_number(what, number)
    if momentum_every > 1 and not momentum and not other_state:
        raise ValueError(
            f"momentum_every={momentum_every} says how often momenta are averaged, and "
            "momentum=False that they never are: leave one of them out"
        )
    parts = _Reconcile(
        outer=optax.with_extra_args_support(
            optax.scale(-1) if outer is None else outer
        ),
        compressor=compressor,
        whole=momentum is True,
        momentum_form=None if isinstance(momentum, bool) else momentum,
        other_state=other_state,
        residual_dtype=residual_dtype,
        orthonormalize=orthonormalize or _orthonormalize.cholesky_qr,
        fragments=fragments,
        momentum_every=momentum_every,
    )
    return Synchronizer(
        *(parts.init, parts.sync, parts.payload, parts.cycle()), after_local_step=True
    )


@dataclasses.dataclass(frozen=True)
class _Reconcile:
    """The settings of `reconcile`, and the functions of its synchronizer.

    Of n fragments, variant v brings fragment v mod n together; where momenta are not
    averaged at every sync, it is variants n and up that average them.
    """

    outer: optax.GradientTransformationExtraArgs
    compressor: compressors.Compressor | None
    whole: bool
    momentum_form: compressors.Compressor | None
    other_state: bool
    residual_dtype: Any
    orthonormalize: _orthonormalize.Orthonormalize
    fragments: int
    momentum_every: int

    def cycle(self) -> tuple[int, ...]:
        """Rounds through all fragments, the last of which averages momenta."""
        number, rounds = self.fragments, self.momentum_every
        first = tuple(range(number)) * (rounds - 1)
        last = tuple(range(number)) if rounds == 1 else range(number, 2 * number)
        return (*first, *last)

    def _averages_state(self, variant: int) -> bool:
        return self.momentum_every == 1 or variant >= self.fragments

    def _part(self, params, variant: int) -> tuple[int, Fragment]:
        """Number and paths of the fragment that a sync brings together."""
        index = variant % self.fragments
        return index, _fragments.split(params, self.fragments)[index]

    @property
    def _form(self) -> compressors.Compressor:
        return compressors.exact() if self.compressor is None else self.compressor

    def _exact(self, params, inner_state, fragment: Fragment):
        """Leaves of the inner state to average as they are: path -> array."""
        return _inner_state.exact(
            params, inner_state, self.whole, self.other_state, fragment
        )

    def init(self, params, inner_state, views) -> SyncState:
        if self.whole:
            _inner_state.check_momentum_known(params, inner_state)
        anchor = jax.tree.map(jnp.copy, params)  # so that both can be donated
        states = _momentum.dion_states(inner_state) if self.whole else []
        fragments = _fragments.split(params, self.fragments)
        form, momentum_form = self._form, self.momentum_form
        compressor_states = [
            (
                form.init(_fragments.pick(params, each), views),
                momentum_form.init(_inner_state.momenta(inner_state, each), views)
                if momentum_form
                else (),
            )
            for each in fragments
        ]
        common = ReconcileCommon(
            [jax.tree.map(jnp.copy, state.q) for state in states],
            _fragments.of_each(
                self.outer.init(_fragments.pick(anchor, each)) for each in fragments
            ),
            _fragments.of_each(compressor_states),
        )
        residual = ()
        if self.compressor:
            residual = _base.zero_residual(params, self.residual_dtype)
        return SyncState(anchor=anchor, common=common, residual=residual)

    def sync(self, local: LocalStep, state: SyncState, group: Group, variant: int = 0):
        updates, inner_state = local.take()
        index, fragment = self._part(local.params, variant)
        pick = functools.partial(_fragments.pick, fragment=fragment)
        put = functools.partial(_fragments.put, fragment=fragment)
        of_fragment = functools.partial(
            _fragments.state_of, index=index, fragment=fragment
        )
        common: ReconcileCommon = state.common
        form_state, momentum_state = of_fragment(common.compressor_state)
        anchor, params = pick(state.anchor), pick(local.params)
        moved = optax.apply_updates(params, pick(updates))
        drift = jax.tree.map(_anchor_step.difference, moved, anchor)
        mean, residual, form_state = _anchor_step.mean_drift(
            self.compressor, drift, pick(state.residual), form_state, local, group
        )
        anchor, outer_state = _anchor_step.outer_step(
            self.outer, mean, anchor, of_fragment(common.outer_state), group.layout
        )
        q = common.q
        if self._averages_state(variant):
            inner_state, momentum_state, q = self._average_state(
                local, inner_state, momentum_state, q, group, fragment
            )
        # An absent replica keeps its drift, on top of the common model.
        kept = _finite.or_zeros(~local.joins, drift)
        target = jax.tree.map(lambda a, d: (a + d).astype(a.dtype), anchor, kept)
        updates = put(updates, jax.tree.map(_anchor_step.move_to, target, params))
        replace = functools.partial(
            _fragments.with_state, index=index, fragment=fragment
        )
        common = ReconcileCommon(
            q,
            replace(common.outer_state, new=outer_state),
            replace(common.compressor_state, new=(form_state, momentum_state)),
        )
        state = SyncState(
            anchor=put(state.anchor, anchor),
            common=common,
            residual=put(state.residual, residual),
        )
        return updates, inner_state, state

    def _average_state(
        self, local: LocalStep, inner_state, momentum_state, q, group, fragment
    ):
        """Inner state, state of the momentum's compressor and common Q afterwards."""
        own = self._exact(local.params, inner_state, fragment)
        averaged = _finite.where(local.joins, local.mean(own, group), own)
        inner_state = _inner_state.replaced(inner_state, averaged)
        if self.momentum_form:
            inner_state, momentum_state = _inner_state.average_momentum(
                inner_state, self.momentum_form, momentum_state, local, group, fragment
            )
        if self.whole and group.size > 1:  # one replica is plain Dion
            inner_state, q = _inner_state.common_q(
                inner_state, q, local.views, self.orthonormalize, group.layout, fragment
            )
        return inner_state, momentum_state, q

    def payload(self, params, inner_state, views, variant: int = 0):
        _, fragment = self._part(params, variant)
        total = self._form.payload(_fragments.pick(params, fragment), views)
        if self._averages_state(variant):
            exact = self._exact(params, inner_state, fragment)
            total += compressors.exact().payload(exact, views)
            if self.momentum_form:
                own = _inner_state.momenta(inner_state, fragment)
                total += self.momentum_form.payload(own, views)
        return total
