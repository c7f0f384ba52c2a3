"""What `reconcile` does at a sync, and keeps from one to the next."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _finite, _momentum, _orthonormalize, compressors
from curvadion_jax._local_step import LocalStep
from curvadion_jax._protocols import Group, Measured, SyncState
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
      >>> from curvadion_jax import synchronizers
      >>> parts = synchronizers.reconcile()
      >>> state = parts.init({"w": jnp.ones(2)}, inner_state=(), views={})
      >>> state.anchor["w"].tolist(), state.common.q
      ([1.0, 1.0], [])
    """

    q: Any
    outer_state: optax.OptState
    compressor_state: Any


@dataclasses.dataclass(frozen=True)
class Reconciler:
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
    delay: int

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
        own = Measured.initial(params) if self.delay else ()
        return SyncState(anchor=anchor, common=common, residual=residual, own=own)

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
        then = pick(state.own.params) if self.delay else moved
        drift = jax.tree.map(_anchor_step.difference, then, anchor)
        owed = pick(state.residual)
        mean, residual, form_state = _anchor_step.mean_drift(
            self.compressor, drift, owed, form_state, local, group
        )
        new, outer_state = _anchor_step.outer_step(
            self.outer, mean, anchor, of_fragment(common.outer_state), group.layout
        )
        q = common.q
        if self._averages_state(variant):
            inner_state, momentum_state, q = self._average_state(
                local, inner_state, momentum_state, q, group, fragment
            )
        # An absent replica keeps its drift, on top of the common model.
        kept = _finite.or_zeros(~local.joins, drift)
        if self.delay:
            since = jax.tree.map(_anchor_step.difference, moved, then)
            kept = jax.tree.map(jnp.add, kept, local.finite(since))
        # Where it is not finite the update is contained, the anchor stays, and the next
        # sync brings what this one would have brought.
        if self.compressor:
            residual = _finite.where_finite(new, residual, local.finite(owed))
        target = jax.tree.map(lambda a, d: (a + d).astype(a.dtype), new, kept)
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
            anchor=put(state.anchor, _finite.where_finite(new, new, anchor)),
            common=common,
            residual=put(state.residual, residual),
            own=state.own,
        )
        return updates, inner_state, state

    def _average_state(
        self, local: LocalStep, inner_state, momentum_state, q, group, fragment
    ):
        """Inner state, state of the momentum's compressor and common Q afterwards."""
        own = self._exact(local.params, inner_state, fragment)
        common = _inner_state.replaced(inner_state, local.mean(own, group))
        if self.whole and group.size > 1:  # one replica is plain Dion
            # Of the mean momenta, also where an absent replica keeps its own.
            common, q = _inner_state.common_q(
                common, q, local.views, self.orthonormalize, group.layout, fragment
            )
        inner_state = _finite.where(local.joins, common, inner_state)
        if self.momentum_form:
            inner_state, momentum_state = _inner_state.average_momentum(
                inner_state, self.momentum_form, momentum_state, local, group, fragment
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
