"""A look at what replicas should have in common: at the start, and after syncs."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _counters, _paths
from curvadion_jax._adaptive_sync import AdaptiveSyncState
from curvadion_jax._paths import Names
from curvadion_jax.replicas._placed import look

_LOOKS = 8


class Look:
    """Looks at the arrays of a state outside of its optimizers that synchronise.

    To look waits for the step, so that it is done at the start, and after steps 1, 2,
    4, 8, ... that may have synchronised.

    Args:
      local: names in the paths of arrays that are meant to differ.
    """

    def __init__(self, local: Sequence[str]):
        self._local, self._calls, self._left = set(local), 0, _LOOKS

    def start(self, state: Any) -> None:
        """Rejects a run that would start from another model than its anchor.

        Replicas that start from different parameters never meet, and the first sync
        would undo parameters that were loaded after ``tx.init``. Only looks at
        optimizers that have taken no step.
        """
        leaves = dict(_paths.leaves_with_names(state))
        optimizers = _counters.optimizers(leaves)
        if not optimizers:
            return
        steps = [leaves[*way, "metrics", "steps"] for way in optimizers]
        shared = self._shared(leaves, optimizers)
        pairs = {
            names: (anchor, copies)
            for way in optimizers
            for names, anchor in _anchor_of(leaves, way).items()
            if (copies := _copies(shared, names, anchor))
        }
        began, apart, moved = look(
            _compared, steps, list(shared.values()), list(pairs.values())
        )
        if began:
            return
        names = ["/".join(each) for each in (*shared, *pairs)]
        if any(apart):
            raise ValueError(
                f"Replicas start from different values ({names[apart.index(True)]!r}), "
                "and would never meet. Give replicas.replicate the state of one "
                "replica, and name what is meant to differ in replicas.step(local=...)."
            )
        if any(moved):
            which = "/".join(list(pairs)[moved.index(True)])
            raise ValueError(
                f"The parameters ({which!r}) are not those given to tx.init, to which "
                "the first sync would return. Call tx.init with them, or "
                "replicas.reanchor(params, opt_state)."
            )

    def after(self, state: Any, due: bool | None) -> None:
        """Warns, once, of arrays in which replicas still differ after a sync.

        Something changes them after the optimizer, such as a transformation behind it
        in `optax.chain` or a clamp of a parameter, or no sync reaches them, such as
        parameters of another optimizer or batch statistics.

        Args:
          state: what a step returned, with a leading replica axis.
          due: whether a decision was due, None if on every step.
        """
        if due is False or not self._left:
            return
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        self._left -= 1
        if apart := self._names_apart(state):
            self._left = 0
            some = ", ".join(apart[:4]) + (" ..." if len(apart) > 4 else "")
            warnings.warn(
                f"After a sync the replicas still differ in {len(apart)} arrays: "
                f"{some}. Move what changes them before or into the optimizer, average "
                "them with replicas.step(average=...), or name them in "
                "replicas.step(local=...) if they are meant to differ.",
                stacklevel=4,
            )

    def _names_apart(self, state: Any) -> list[str]:
        """None unless all replicas have just synchronised, to an anchor."""
        leaves = dict(_paths.leaves_with_names(state))
        optimizers = _counters.optimizers(leaves)
        if not optimizers or not all(_anchor_of(leaves, way) for way in optimizers):
            return []
        counters = [
            [leaves[*way, "metrics", each] for each in ("synced", "excluded", "absent")]
            for way in optimizers
        ]
        shared = self._shared(leaves, optimizers)
        synced, apart = look(_after_sync, counters, list(shared.values()))
        names = zip(shared, apart, strict=True)
        return ["/".join(each) for each, differs in names if synced and differs]

    def _shared(self, leaves: dict[Names, Any], optimizers: Any) -> dict[Names, Any]:
        return {
            names: x
            for names, x in leaves.items()
            if jnp.issubdtype(x.dtype, jnp.inexact)
            and self._local.isdisjoint(names)
            and not _counters.is_within(names, optimizers, AdaptiveSyncState._fields)
        }


def _anchor_of(leaves: dict[Names, Any], way: Names) -> dict[Names, Any]:
    before = (*way, "sync_state", "anchor")
    size = len(before)
    return {names[size:]: x for names, x in leaves.items() if names[:size] == before}


def _copies(shared: dict[Names, Any], names: Names, anchor: Any) -> list[Any]:
    """Arrays that may be the parameter: of the same name at the end of their path."""
    return [
        x
        for path, x in shared.items()
        if path[len(path) - len(names) :] == names and x.shape == anchor.shape
    ]


def _compared(steps: Any, shared: list[jax.Array], pairs: Any) -> Any:
    """Whether a step was taken, what differs between replicas, and from the anchor."""
    began = jnp.any(jnp.stack([jnp.any(each > 0) for each in steps]))
    alike = [*shared, *(anchor for anchor, _ in pairs)]
    apart = [jnp.any(_unlike(x, x[:1])) for x in alike]
    moved = [
        jnp.all(jnp.stack([jnp.any(_unlike(x, anchor)) for x in copies]))
        for anchor, copies in pairs
    ]
    return began, apart, moved


def _unlike(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x != y) & ~(jnp.isnan(x) & jnp.isnan(y))


def _after_sync(counters: Any, arrays: list[jax.Array]) -> Any:
    """Whether all synchronised, and for every array whether a replica differs."""
    synced = [
        jnp.all(synced) & ~jnp.any(excluded + absent > 0)
        for synced, excluded, absent in counters
    ]
    return jnp.all(jnp.stack(synced)), [_differs(x) for x in arrays]


def _differs(x: jax.Array) -> jax.Array:
    """Whether a replica's array is another one, but for the rounding of one sum."""

    def norm(x):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.sqrt(jnp.sum(jnp.abs(wide) ** 2, axis=tuple(range(1, x.ndim))))

    # A wider bound would hide what bfloat16 parameters move between syncs.
    return jnp.any(norm(x - x[:1]) > float(jnp.finfo(x.dtype).eps) * norm(x[:1]))
