"""Gives a replica whose numbers are spoilt another one's."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from curvadion_jax import _counters, _memory, _paths
from curvadion_jax.replicas import _placed
from curvadion_jax.replicas._anchor import with_params
from curvadion_jax.replicas._checks import check_leading, count_leading
from curvadion_jax.replicas._resize import distinct

_COUNTED = {"trigger_state", "metrics"}


def mend(state: Any, also: Iterable[int] = ()) -> tuple[Any, list[int]]:
    """Replaces replicas that are not finite by copies of the first one that is.

    A sync excludes such a replica, and starts its momenta and residual afresh. But an
    optimizer adds to the parameters, and NaN plus anything is NaN: parameters that were
    spoilt, by memory or by a step that went past the optimizer, stay so until they are
    replaced. That costs what one state costs to send, and waits for the devices; call
    it, in all processes, when `curvadion_jax.metrics.read` shows a replica as excluded
    again and again.

    Where syncs average gradients or factors, a replica whose momentum was spoilt is
    finite again after the next sync, and from then on another one than the others: name
    it in `also`. What a named replica has alone, such as its drift, is lost.

    A copy owes nothing (its `SyncState.residual` is zero), its random
    keys (`jax.random.key`, not arrays of `uint32`) are folded with its number, and its
    counters stay its own; what they count in a row starts again.

    Args:
      state: parameters and optimizer state, in any tree, with a leading replica axis.
        Of what is a scalar on one replica NaN alone is looked at, and not in triggers
        and counters. What is infinite on all replicas is taken for meant, as in a mask,
        except in parameters that have an anchor and in an optimizer's state.
      also: numbers of replicas to replace, whether they are finite or not. Of several
        processes each may give others.

    Returns:
      The state, and the numbers of the replicas that were replaced. Without any it is
      the state as it was.

    Raises:
      TypeError: if a leaf is not on devices, or a number of a replica not an int.
      ValueError: if leaves have no common leading axis, there is no replica of a given
        number, or none that is finite is left to copy.

    Example:
      >>> state = {"w": jnp.array([[1.0], [jnp.nan], [3.0]])}
      >>> state, replaced = mend(state)
      >>> state["w"].ravel().tolist(), replaced
      ([1.0, 1.0, 3.0], [1])
    """
    leaves = jax.tree.leaves(state)
    if not leaves:
        return state, []
    number = count_leading(state, "state")
    check_leading(state, number, "state", "replicas; see replicas.replicate")
    for name, leaf in _paths.leaves_with_path(state):
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"{name!r} is a {type(leaf).__name__}, not a jax.Array on devices: "
                "mend what replicas.replicate or a step returned"
            )
    named = _checked(also, number)
    stays = np.array(jax.device_get(_finite(state)))
    if not stays.any():
        raise ValueError(
            f"none of the {number} replicas is finite: restore a checkpoint"
        )
    stays &= ~named
    if not stays.any():
        raise ValueError(
            f"also={np.flatnonzero(named).tolist()} leaves none of the {number} "
            "replicas that is finite, to copy: leave one of them out, or restore a "
            "checkpoint"
        )
    if stays.all():
        return state, []
    source = np.where(stays, np.arange(number), np.flatnonzero(stays)[0])
    return _replaced(state, source), np.flatnonzero(~stays).tolist()


def _checked(also: Any, number: int) -> np.ndarray:
    """Which replicas any process names, bool[N]."""
    if isinstance(also, str) or not isinstance(also, Iterable):
        also = [also]
    named = np.zeros(number, bool)
    for each in also:
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise TypeError(
                f"also must hold numbers of replicas such as [3], got {each!r}"
            )
        if not 0 <= each < number:
            raise ValueError(
                f"there is no replica {each}: give numbers from 0 to {number - 1}"
            )
        named[each] = True
    if jax.process_count() == 1:
        return named
    return np.any(multihost_utils.process_allgather(named), axis=0)


def _looked_at(state: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """What must be finite, and what may be infinite on all replicas."""
    leaves = _paths.leaves_with_names(state)
    optimizers = _counters.optimizers(names for names, _ in leaves)
    trained = {
        (*way, *names)
        for each in with_params(state)
        for way, copy in each.copies.items()
        if each.params is None or copy is each.params
        for names in copy
    }
    strict, others = [], []
    for names, x in leaves:
        own = _counters.is_within(names, optimizers, {"inner_state", "sync_state"})
        counted = _counters.is_within(names, optimizers, _COUNTED)
        if jnp.issubdtype(x.dtype, jnp.inexact) and (x.ndim > 1 or not counted):
            must_be = x.ndim > 1 and (own or names in trained)
            (strict if must_be else others).append(x)
    return strict, others


def _finite(state: Any) -> jax.Array:
    """Which replicas have no number that is spoilt, bool[N], in every process."""
    leaves = _looked_at(state)
    check = _checking(_placed.everywhere(jax.tree.leaves(leaves)))
    return check(leaves, count_leading(state, "state"))


@functools.cache
def _checking(everywhere: NamedSharding | None) -> Callable[..., jax.Array]:
    """A program that is compiled once for every kind of state."""

    def check(leaves, number):
        found, (strict, others) = jnp.ones(number, bool), _memory.to_device(leaves)
        spoilt = [~jnp.isfinite(x) for x in strict]
        for x in others:
            # What is infinite everywhere may be meant, as in a mask; and of one
            # replica a scalar may be, as the best loss so far.
            infinite = jnp.isinf(x) & (x.ndim > 1)
            alone = infinite & ~jnp.all(infinite, 0, keepdims=True)
            spoilt.append(jnp.isnan(x) | alone)
        for each in spoilt:
            found &= ~jnp.any(each, axis=tuple(range(1, each.ndim)))
        return found

    return jax.jit(check, static_argnums=1, out_shardings=everywhere)


def _replaced(state: Any, source: np.ndarray) -> Any:
    """The state with every replica's row taken from another's, placed as it was."""
    copied = source != np.arange(len(source))
    names = [names for names, _ in _paths.leaves_with_names(state)]
    optimizers = _counters.optimizers(names)

    def take(leaves):
        return [
            row(x, n) for x, n in zip(_memory.to_device(leaves), names, strict=True)
        ]

    def row(x, names):
        if _counters.is_within(names, optimizers, {"metrics"}):
            return jnp.where(copied, 0, x) if names[-1] == "in_a_row" else x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return distinct(x, source, copied)
        taken = x[source]
        if ("sync_state", "residual") in itertools.pairwise(names):
            mask = copied.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(mask, 0, taken)
        return taken

    leaves, structure = jax.tree.flatten(state)
    placements = [x.sharding for x in leaves]
    return structure.unflatten(jax.jit(take, out_shardings=placements)(leaves))
