"""A look, after the first syncs, at what a sync should have made equal."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _counters, _paths
from curvadion_jax._adaptive_sync import AdaptiveSyncState
from curvadion_jax.replicas._placed import look

_LOOKS = 8


class Look:
    """Warns, once, of arrays in which replicas still differ after a sync.

    Something changes them after the optimizer, such as a transformation behind it in
    `optax.chain` or a clamp of a parameter, or no sync reaches them, such as parameters
    of another optimizer or batch statistics. To look waits for the step, so it is done
    after steps 1, 2, 4, 8, ... that may have synchronised.

    Args:
      local: names in the paths of arrays that are meant to differ.
    """

    def __init__(self, local: Sequence[str]):
        self._local, self._calls, self._left = set(local), 0, _LOOKS

    def after(self, state: Any, due: bool | None) -> None:
        """Looks at the state that a step returned.

        Args:
          state: with a leading replica axis.
          due: whether a decision was due, None if on every step.
        """
        if due is False or not self._left:
            return
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        self._left -= 1
        if apart := names_apart(state, self._local):
            self._left = 0
            some = ", ".join(apart[:4]) + (" ..." if len(apart) > 4 else "")
            warnings.warn(
                f"After a sync the replicas still differ in {len(apart)} arrays: "
                f"{some}. Move what changes them before or into the optimizer, average "
                "them with replicas.step(average=...), or name them in "
                "replicas.step(local=...) if they are meant to differ.",
                stacklevel=4,
            )


def names_apart(state: Any, local: set[str]) -> list[str]:
    """Names of arrays that differ between replicas right after a sync with an anchor.

    None if the last step did not synchronise, or a replica has missed a sync.
    """
    leaves = dict(_paths.leaves_with_names(state))
    optimizers = _counters.optimizers(leaves)
    anchored = {names[:-1] for names in _anchors(leaves)}
    if not optimizers or len(anchored) < len(optimizers):
        return []
    counters = [
        [leaves[*way, "metrics", each] for each in ("synced", "excluded", "absent")]
        for way in optimizers
    ]
    compared = {
        "/".join(names): x
        for names, x in leaves.items()
        if jnp.issubdtype(x.dtype, jnp.inexact)
        and local.isdisjoint(names)
        and not _counters.is_within(names, optimizers, AdaptiveSyncState._fields)
    }
    synced, apart = look(_apart, counters, list(compared.values()))
    names = zip(compared, apart, strict=True)
    return [name or "the state" for name, differs in names if synced and differs]


def _anchors(leaves: dict[_paths.Names, Any]) -> set[_paths.Names]:
    """The ways to the sync states that hold an anchor."""
    pairs = (
        (names, names.index("sync_state")) for names in leaves if "sync_state" in names
    )
    return {
        names[: at + 2] for names, at in pairs if names[at + 1 : at + 2] == ("anchor",)
    }


def _apart(counters: Any, arrays: list[jax.Array]) -> Any:
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
