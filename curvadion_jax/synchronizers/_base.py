"""What replicas send at a sync, and how they come together.

A synchronizer takes one step in which replicas communicate, in place of the quiet
step that they take otherwise, or after it. It decides neither when (the trigger) nor
what a local step does (the inner optimizer), and knows the other replicas only through
a :class:`Group`.

There are two kinds. *Within the step*, `average_gradients` and `average_factors`
average what the inner optimizer works on; with `always` they equal training on one
big batch. *After the step*, `reconcile` lets every replica take its own step and then
brings the results together.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _health, _paths
from curvadion_jax._dion import DionState
from curvadion_jax._group import Group
from curvadion_jax._matrices import MatrixView
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._payload import Payload, check_payload
from curvadion_jax.compressors import Compressor


class LocalStep(NamedTuple):
    """One replica's step, for a synchronizer to take.

    Attributes:
      gradients: this replica's gradients, tree of the parameters.
      inner_state: state of the inner optimizer before the step.
      params: this replica's parameters before the step.
      views: path of a parameter -> how Dion sees it as matrices, or None.
      take: ``(gradients, inner_state, **extra_args)`` -> (updates, inner state after
        the step), the inner optimizer's update; communicates nothing by itself. With
        `Synchronizer.after_local_step` it returns what was computed before.

    Example:
      >>> inner, params = optax.sgd(0.5), {"w": jnp.ones(2)}
      >>> state = inner.init(params)
      >>> take = lambda gradients, state: inner.update(gradients, state, params)
      >>> local = LocalStep(params, state, params, {}, take)
      >>> local.take(local.gradients, local.inner_state)[0]["w"].tolist()
      [-0.5, -0.5]
    """

    gradients: optax.Updates
    inner_state: optax.OptState
    params: optax.Params
    views: Mapping[str, MatrixView | None]
    take: Callable[..., tuple[optax.Updates, optax.OptState]]


class Synchronizer(NamedTuple):
    """Functions that say how replicas synchronise.

    Syncs may be of several variants that take turns: one may bring half of the
    parameters together and the next the other half. Then `step`, `payload` and
    `settled` are given the variant, an int, as a last argument.

    Attributes:
      init: (params, inner_state, views) -> synchronizer state, a tree of arrays;
        called once, outside `shard_map` and possibly on abstract values.
      step: (local step, synchronizer state, group) -> (updates, inner state,
        synchronizer state); called in the branch of a sync only.
      payload: (params, inner_state, views) -> the `Payload` of one sync (see
        `curvadion_jax.compressors`), from shapes alone.
      cycle: which variant each sync is, in turn, and from the start again after the
        last. (0, 0, 1) makes every third sync one of variant 1; (0,) is for syncs that
        are all alike.
      after_local_step: whether `step` begins with the plain local step: it calls
        ``local.take(local.gradients, local.inner_state)`` with these very trees, and
        `take` refuses others. The step is then taken before anyone knows whether
        replicas synchronise, and a quiet step leaves the synchronizer state where it
        is. Not used where `adaptive_sync` has a `local_step`. What follows stands in a
        loop, which has no reverse-mode derivative under `jit`;
        ``synchronizer._replace(after_local_step=False)`` has one.
      settled: (params, synchronizer state) -> bool[], whether a replica's parameters
        are where the last sync left them, but for rounding. It is asked on the step
        after a sync, must not communicate, and may find the state in host memory. None
        where a sync leaves them nowhere in particular, or where it is known that
        something moves them, such as a projection that is the same on all replicas:
        ``synchronizer._replace(settled=None)`` looks at nothing.

    Example:
      >>> from curvadion_jax.compressors import exact
      >>> def step(local, state, group):
      ...     signs = jax.tree.map(jnp.sign, local.gradients)
      ...     updates, inner_state = local.take(group.mean(signs), local.inner_state)
      ...     return updates, inner_state, state
      >>> average_signs = Synchronizer(
      ...     init=lambda params, inner_state, views: (),
      ...     step=step,
      ...     payload=lambda params, inner_state, views: exact().payload(params, views),
      ... )
    """

    init: Callable[[optax.Params, optax.OptState, Mapping], Any]
    step: Callable[..., tuple[optax.Updates, optax.OptState, Any]]
    payload: Callable[..., Payload]
    cycle: tuple[int, ...] = (0,)
    after_local_step: bool = False
    settled: Callable[..., jax.Array] | None = None


def check_cycle(cycle: Any) -> None:
    """Refuses what does not number the variants 0, 1, 2, ... without a gap."""
    ints = isinstance(cycle, tuple) and all(type(variant) is int for variant in cycle)
    if not ints or set(cycle) != set(range(max(cycle, default=0) + 1)):
        raise ValueError(
            "cycle must be a tuple of ints that names every variant from 0 on, such as "
            f"(0, 0, 1), got {cycle!r}"
        )


def _variants(synchronizer: Synchronizer) -> list[tuple[int, ...]]:
    """The last arguments of `step`, `payload` and `settled` for each variant."""
    number = max(synchronizer.cycle) + 1
    return [()] if number == 1 else [(variant,) for variant in range(number)]


def steps(synchronizer: Synchronizer) -> list[Callable[[LocalStep, Any, Group], Any]]:
    """The step of every variant."""

    def of(variant):
        return lambda local, state, group: synchronizer.step(
            local, state, group, *variant
        )

    return [of(variant) for variant in _variants(synchronizer)]


def looks(synchronizer: Synchronizer) -> list[Callable[[Any, Any], jax.Array]]:
    """What `settled` says after a sync of each variant; [] where it is None."""
    settled = synchronizer.settled
    if settled is None:
        return []

    def of(variant):
        return lambda params, state: settled(params, state, *variant)

    return [of(variant) for variant in _variants(synchronizer)]


def payloads(
    synchronizer: Synchronizer, params: Any, inner_state: Any, views: Mapping
) -> list[Payload]:
    """The payload of every variant."""
    return [
        check_payload(synchronizer.payload(params, inner_state, views, *variant))
        for variant in _variants(synchronizer)
    ]


def zero_error(params: optax.Params) -> Any:
    """Nothing held back yet: zeros like the parameters, at least float32."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, compute_dtype(x.dtype)), params)


def mean_with_feedback(
    compressor: Compressor | None,
    tree: Any,
    error: Any,
    state: Any,
    group: Group,
    views,
) -> tuple[Any, Any, Any]:
    """Mean in a compressor's form of what there is and what was held back.

    Returns:
      The mean, what is held back now (all of it by a replica that takes no part), and
      the compressor's state. Without a compressor the mean is exact, and the other two
      are as they were.
    """
    if compressor is None:
        return group.mean(tree), error, state
    whole = group.finite(jax.tree.map(jnp.add, error, tree))
    result = compressor.average(whole, state, group, views)
    held = jax.tree.map(lambda x, old: x.astype(old.dtype), result.unsent, error)
    return later_as_well(group, result.mean), held, result.state


def later_as_well(group: Group, mean: Any) -> Any:
    """A mean to which those who hold back will add, next time, what they have now.

    Over all who are expected, and not over those who are there: else the drift of a
    replica that comes every second time, with two at once, would count twice.
    """
    return jax.tree.map(lambda x: x * group.share.astype(x.dtype), mean)


def _is_dion(node: Any) -> bool:
    return isinstance(node, DionState)


def dion_states(inner_state: optax.OptState) -> list[DionState]:
    """The states of Dion in the state of an optimizer."""
    return [x for x in jax.tree.leaves(inner_state, is_leaf=_is_dion) if _is_dion(x)]


def with_q(inner_state: optax.OptState, qs: list[Any]) -> optax.OptState:
    """The state of an optimizer with these Q in its states of Dion, in order."""
    following = iter(qs)
    return jax.tree.map(
        lambda x: x._replace(q=next(following)) if _is_dion(x) else x,
        inner_state,
        is_leaf=_is_dion,
    )


def with_momenta(
    inner_state: optax.OptState, other: optax.OptState, keep: jax.Array
) -> optax.OptState:
    """The state of an optimizer with another's momenta of Dion unless bool[] `keep`."""
    others = iter(dion_states(other))

    def chosen(x):
        if not _is_dion(x):
            return x
        momentum = _health.where(keep, x.momentum, next(others).momentum)
        return x._replace(momentum=momentum)

    return jax.tree.map(chosen, inner_state, is_leaf=_is_dion)


def matrices(
    state: DionState, views: Mapping[str, MatrixView | None]
) -> list[tuple[str, MatrixView, int]]:
    """Path, view and rank of every matrix of a Dion, in the order of its leaves.

    Raises:
      ValueError: if that Dion sees a parameter otherwise than the views say.
    """
    found = []
    for name, q in _paths.leaves_with_path(state.q):
        view = views.get(name)
        if view is None or (*view.batch, view.cols) != q.shape[:-1]:
            raise ValueError(
                f"Dion sees the parameter {name!r} otherwise than adaptive_sync does "
                f"(Q of shape {q.shape}, {view}): pass adaptive_sync the same "
                "dimension_numbers"
            )
        found.append((name, view, q.shape[-1]))
    return found
