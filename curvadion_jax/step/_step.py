"""One step of all replicas: their own, with a sync after it, or one with their means.

`_AdaptiveSync._update` has the order of a step, and says whether a sync fires; what is
sent is the synchronizer's. Here stands what holds for every synchronizer: who takes
part (`_group`), what an absent replica keeps, that nothing moves where nobody takes
part, and what of an update was not finite (`_adaptive_sync` sets it to zero).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from curvadion_jax import _checksum, _dtypes, _finite, _memory
from curvadion_jax.matrices import _dion
from curvadion_jax.mesh import _group, _rows
from curvadion_jax.mesh._group import Group, Part
from curvadion_jax.mesh._layout import Layout
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.step._sync_state import Common
from curvadion_jax.synchronizers import Synchronizer

# The names of conditions in programs, for `replicas.audit`.
SYNC, VOTE = "curvadion_sync", "curvadion_vote"


class Given(NamedTuple):
    """What one replica brings to a step.

    Attributes:
      gradients: zeros where they are not finite, and after `before`.
      finite: bool[], whether the gradients were finite.
      weight: float32[], how much this replica counts in a sync; 0 if it has no weight
        on this step.
    """

    params: Any
    gradients: Any
    finite: jax.Array
    weight: jax.Array
    inner_state: Any


class Checksums(NamedTuple):
    """What one replica had at a sync, uint32[] each.

    Attributes:
      moved: its parameters before the sync, after local steps.
      params: its parameters plus the updates that the sync returns.
      anchor: its copy of the anchor.
    """

    moved: jax.Array
    params: jax.Array
    anchor: jax.Array


class Outcome(NamedTuple):
    """One replica's step: its own, or what a sync made of it.

    Attributes:
      updates: not always finite; `_update` sees to that.
      zeroed: bool[], whether a sync, or the step before it, was not finite.
      excluded, absent: bool[], whether this replica took no part in a sync.
      restarted: bool[], whether its inner state began again.
      met: bool[], whether any replica took part in a sync.
      checksums: of a sync; zeros without one.
    """

    updates: Any
    inner_state: Any
    residual: Any
    zeroed: jax.Array
    excluded: jax.Array
    absent: jax.Array
    restarted: jax.Array
    met: jax.Array
    checksums: Checksums


class _AtSync(NamedTuple):
    """What a sync changes, as one replica sees it.

    Attributes:
      updates: the replica's own, or its way to the anchor.
      checksum: uint32[], of its parameters plus the updates.
    """

    updates: Any
    checksum: jax.Array
    residual: Any
    anchor: Any
    sync_state: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """The steps of an inner optimizer under a synchronizer."""

    inner: optax.GradientTransformationExtraArgs
    synchronizer: Synchronizer
    mesh: Replicas
    layout: Layout

    @property
    def group(self) -> Group:
        return Group(_rows.axis_name(self.mesh), self.layout)

    def take(self, params, extra_args) -> Callable[..., Any]:
        """The inner optimizer's update, in the dtypes of parameters and state."""
        for_all = dict(extra_args)
        if self.layout.is_divided:
            for_all["layout"] = self.layout

        def inner_step(gradients, inner_state, **more):
            updates, new = self.inner.update(
                gradients, inner_state, params, **for_all, **more
            )
            updates = self.layout.place(_dtypes.cast_like(updates, params))
            return updates, _dtypes.cast_like(new, inner_state)

        return inner_step

    def own(self, given: Given, residual, extra_args) -> Outcome:
        """Every replica's step of its own inner optimizer; nothing is sent."""

        def of_one(row, extra_args):
            given, residual = row
            take = self.take(given.params, extra_args)
            updates, inner_state = take(given.gradients, given.inner_state)
            return _outcome(updates, inner_state, residual), ()

        return _rows.over(of_one, self.mesh)((given, residual), extra_args)[0]

    def sync_after(
        self, given: Given, after_own: tuple[Outcome, Common]
    ) -> tuple[Outcome, Common]:
        """A sync that follows the replicas' own steps.

        A replica is *healthy* if its parameters after its step, its residual and its
        inner state are finite, and *present* if it is healthy and has a weight.
        *Someone* says whether any replica is present; if nobody is, nothing moves.

        ======= ======= ======= ============== =========== ======== ==========
        someone healthy present parameters     inner state residual anchor
        ======= ======= ======= ============== =========== ======== ==========
        yes     yes     yes     anchor         stays       new      new
        yes     yes     no      anchor + drift stays       new      new
        yes     no      no      anchor         new         new      new
        no      yes     no      own step       stays       stays    stays
        no      no      no      own step       new         zeros    stays
        ======= ======= ======= ============== =========== ======== ==========

        An inner state that is finite stays in all cases. The residual that goes into a
        sync is zeros if the replica is not healthy.
        """

        def of_one(row, common: Common):
            given, outcome = row
            residual = outcome.residual
            moved = _moved(given.params, outcome.updates)
            inner_sound = _finite.is_sound(outcome.inner_state)
            healthy = inner_sound & _finite.all_finite([moved, residual])
            part = _group.take_part(self.group, given.weight, healthy)
            inner_state = _sound_or_new(
                outcome.inner_state, inner_sound, self.inner, common.anchor
            )
            own_finite = _finite.all_finite(outcome.updates)
            # The step ends here: else the compiler finishes the inner state after the
            # sync, and keeps the gradients until then. (Only memory shows it.)
            updates, inner_state, own_finite, moved_checksum = lax.optimization_barrier(
                (outcome.updates, inner_state, own_finite, _checksum.of(moved))
            )
            old = _AtSync(
                updates=updates,
                checksum=moved_checksum,
                residual=residual,
                anchor=common.anchor,
                sync_state=common.sync_state,
            )
            sync = functools.partial(
                self._synced, given.params, part=part, healthy=healthy
            )
            new = once(part.someone, sync, old)
            finite = own_finite & (_finite.all_finite(new.updates) | ~healthy)
            residual = _finite.or_zeros(part.someone | healthy, new.residual)
            outcome = _outcome(
                new.updates,
                inner_state,
                residual,
                part=part,
                excluded=~healthy,
                restarted=~inner_sound,
                zeroed=~finite,
                checksums=Checksums(
                    moved=moved_checksum,
                    params=new.checksum,
                    anchor=_checksum.of(new.anchor),
                ),
            )
            common = common._replace(anchor=new.anchor, sync_state=new.sync_state)
            return outcome, common

        # What syncs alone touch, residuals and what is common, may lie in host memory:
        # it goes to the device and back.
        outcome, common = _memory.to_device(after_own)
        synced = _rows.over(of_one, self.mesh)((given, outcome), common)
        return _memory.to_memory_of(synced, after_own)

    def _synced(
        self, params, old: "_AtSync", *, part: Part, healthy: jax.Array
    ) -> "_AtSync":
        """Calls the synchronizer: the new anchor, and this replica's way to it.

        This runs under a condition, whose operands stay in memory until it ends. So it
        takes what lies there anyway, and makes the rest in here: the parameters after
        the replica's own step once more.
        """
        sync: Callable[..., Any] = self.synchronizer.sync
        # Rounded as stored parameters are: XLA may keep more digits of a 16-bit sum.
        moved = _dtypes.rounded(_moved(params, old.updates))
        residual = _finite.or_zeros(healthy, old.residual)
        target, anchor, sync_state, residual = _dtypes.cast_like(
            sync(moved, old.anchor, old.sync_state, residual, part),
            (moved, old.anchor, old.sync_state, residual),
        )
        # An absent replica keeps its drift on top of the new anchor, for a later sync.
        drift = _dtypes.difference(moved, old.anchor)
        ahead = jax.tree.map(_dtypes.add_cast, anchor, drift)
        target = optax.tree.where(healthy & ~part.present, ahead, target)
        updates = jax.tree.map(jnp.subtract, target, params)
        checksum = _checksum.of(_moved(params, lax.optimization_barrier(updates)))
        return _AtSync(
            updates=updates,
            checksum=checksum,
            residual=residual,
            anchor=anchor,
            sync_state=sync_state,
        )

    def with_mean_if(
        self, fire, given: Given, residual, common: Common, extra_args
    ) -> tuple[Outcome, Common]:
        """A step with means over the replicas if `fire` says so, else their own."""
        sync: Callable[..., Any] = self.synchronizer.sync

        def of_one(row, of_all):
            given, residual = row
            common, extra_args = of_all
            inner_sound = _finite.is_sound(given.inner_state)
            healthy = inner_sound & _finite.all_finite([given.params, residual])
            able = healthy & given.finite
            part = _group.take_part(self.group, given.weight, able)
            inner_state = _sound_or_new(
                given.inner_state, inner_sound, self.inner, given.params
            )
            residual = _finite.or_zeros(healthy, residual)
            old = inner_state, common.sync_state, residual
            take = self.take(given.params, extra_args)
            updates, *new = sync(take, given.gradients, *old, part)
            # Nothing moves if no replica takes part. (Where all states were not finite,
            # all have begun again, and take part in the next sync.)
            updates = _finite.or_zeros(part.someone, updates)
            inner_state, sync_state, residual = optax.tree.where(
                part.someone, tuple(new), old
            )
            sound = _finite.all_finite(updates) | ~healthy
            # Finite, and not fused with the sum below, whose bits count.
            updates = lax.optimization_barrier(_finite.finite_elements(updates))
            synced = _outcome(
                updates,
                inner_state,
                residual,
                part=part,
                excluded=~able,
                restarted=~inner_sound,
                zeroed=~sound,
                checksums=Checksums(
                    moved=_checksum.of(given.params),
                    params=_checksum.of(optax.apply_updates(given.params, updates)),
                    anchor=_checksum.of(common.anchor),
                ),
            )
            return synced, common._replace(sync_state=sync_state)

        def synchronise(given, residual, common):
            on_device, common_there = _memory.to_device((residual, common))
            synced, new = _rows.over(of_one, self.mesh)(
                (given, on_device), (common_there, extra_args)
            )
            residual = _memory.to_memory_of(synced.residual, residual)
            return synced._replace(residual=residual), _memory.to_memory_of(new, common)

        def alone(given, residual, common):
            return self.own(given, residual, extra_args), common

        return _if(fire, synchronise, alone, given, residual, common)


def _outcome(
    updates,
    inner_state,
    residual,
    *,
    part: Part | None = None,
    excluded: jax.Array | bool = False,
    restarted: jax.Array | bool = False,
    zeroed: jax.Array | bool = False,
    checksums: Checksums | None = None,
) -> Outcome:
    none = jnp.zeros([], jnp.uint32)
    excluded = jnp.asarray(excluded)
    absent = jnp.array(False) if part is None else ~excluded & ~part.present
    return Outcome(
        updates=updates,
        inner_state=inner_state,
        residual=residual,
        zeroed=jnp.asarray(zeroed),
        excluded=excluded,
        absent=absent,
        restarted=jnp.asarray(restarted),
        met=jnp.asarray(part is not None and part.someone),
        checksums=checksums or Checksums(none, none, none),
    )


def _moved(params: Any, updates: Any) -> Any:
    """Parameters after an update, without its elements that are not finite."""
    return optax.apply_updates(params, _finite.finite_elements(updates))


def _sound_or_new(
    state: Any, is_sound: jax.Array, inner: optax.GradientTransformation, params: Any
) -> Any:
    """The inner optimizer's state, which begins again at `params` if it is not finite.

    Integers and single numbers stay, such as counts of steps and hyperparameters.
    """
    fresh = _dion.with_cosine_qs(inner.init(params))

    def choose(x, new):
        if not _finite.is_float(x):
            return x
        keep = is_sound if jnp.ndim(x) else _finite.is_kept(x)
        return jnp.where(keep, x, jnp.asarray(new, x.dtype))

    return jax.tree.map(choose, state, fresh)


def _if(fire, synchronise, otherwise, *operands):
    """The condition of a sync, by the name that `replicas.audit` looks for."""
    if isinstance(fire, bool):
        return (synchronise if fire else otherwise)(*operands)
    with jax.named_scope(SYNC):
        return lax.cond(fire, synchronise, otherwise, *operands)


def once(condition, function, operands, name: str | None = None):
    """What a function makes of a tree if the condition is true, or the tree as it is.

    The conditional is inside a loop that runs once or not at all. A bare conditional
    copies what it passes through (https://github.com/jax-ml/jax/issues/39449); a loop
    that does not run copies nothing. A bare loop would not do either: XLA hoists
    loop-invariant work out of it, and would then do that work on every step.

    In the program both have `name`. A condition that the host knows is not in it.
    """
    if isinstance(condition, bool):
        return function(operands) if condition else operands
    keep = lambda carried: carried
    body = lambda _, carried: lax.cond(condition, function, keep, carried)
    with jax.named_scope(name) if name else contextlib.nullcontext():
        return lax.fori_loop(0, condition.astype(jnp.int32), body, operands)
