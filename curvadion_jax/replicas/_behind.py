"""A look, after the first syncs, at what moves parameters behind the optimizer."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _paths
from curvadion_jax.replicas import _anchor

_LOOKS = 8


class Look:
    """Warns, once, where a sync does not leave the replicas at their anchor.

    A transformation after the optimizer in `optax.chain` changes what a sync returns,
    and no type tells. To look waits for the step, so that it is done on a few of the
    first calls only.
    """

    def __init__(self):
        self._calls, self._left = 0, _LOOKS

    def after(self, state: Any, due: Any) -> None:
        """Looks at what a step returned, if it may have synchronised.

        Args:
          state: with a leading replica axis.
          due: what the host knew to be due, None if the program decided it.
        """
        self._calls += 1
        power_of_two = self._calls & (self._calls - 1) == 0
        if self._left and (power_of_two if due is None else _syncs(due)):
            # Under a warmup the first updates may be zero, as they are.
            self._left = 0 if _is_settled(state) else self._left - 1


def _syncs(due: Any) -> bool:
    return any(jax.tree.leaves(due))


def _is_settled(state: Any) -> bool:
    """Warns, or tells that there never will be something to see."""
    found = _anchor.with_params(state)
    if len(found) != 1 or found[0].params is None:
        return True
    (each,) = found
    leaves = dict(_paths.leaves_with_names(state))
    own = (*each.place[:-1], "own")
    if any(names[: len(own)] == own for names in leaves):
        return True  # a sync with a delay leaves replicas apart
    counters = (*each.optimizer, "metrics")
    synced = leaves[*counters, "synced"], leaves[*counters, "empty"]
    synced, moved = _anchor.read(_compared, synced, each.params, each.anchor)
    # Of fragments the one that was synchronised is where its anchor is.
    found_out = bool(synced) and all(moved)
    if found_out:
        warnings.warn(
            "after a sync no replica is where the sync has put it: something changes "
            "the updates behind the optimizer, such as a transformation after it in "
            "optax.chain, or the parameters. Replicas then may never meet again. Put "
            "that in front of the optimizer, or use its own learning_rate (a number "
            "or a schedule) and weight_decay",
            stacklevel=4,
        )
    return found_out


def _compared(synced: Any, pairs: Any) -> Any:
    """Whether the last step synchronised, and by parameter if all replicas moved."""
    last, empty = synced
    return jnp.any(last) & ~jnp.any(empty > 0), [_moved(x, a) for x, a in pairs]


def _moved(x: jax.Array, anchor: jax.Array) -> jax.Array:
    distance, size = _anchor.squares([x], [anchor])
    # `params + update` misses the anchor by a rounding at most. A wider bound would
    # hide what parameters in bfloat16 move between syncs, some percent.
    rounding = float(jnp.finfo(x.dtype).eps)
    return jnp.all(jnp.sqrt(distance) > rounding * jnp.sqrt(size))
