"""Checks that replicas agree where they should: at the start, and after syncs."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _counters, _finite, _paths, _trees
from curvadion_jax._mapped import MappedStep
from curvadion_jax._paths import Names
from curvadion_jax.replicas._arrays import differ, on_host

Arrays = dict[Names, Any]
_ANCHOR = ("sync_state", "anchor")
_SPACE = 101  # of looks for a sync, after as many misses; a prime meets most periods


class ConsistencyCheck:
    """Compares replicas in the arrays outside of optimizers that synchronise.

    A comparison waits for the step, so it is made at the start, and at the first sync
    found after 1, 2, 4, 8, ... steps that may have synchronised. Arrays with a name of
    `local` in their path are meant to differ.
    """

    def __init__(self, local: Sequence[str]):
        self._local = tuple(local)
        self._sync_steps, self._next_look, self._misses = 0, 1.0, 0

    def at_start(self, state: Any, step: MappedStep) -> None:
        """Rejects a run that would start from several models, or not from its anchor.

        The first sync would undo what was loaded after ``tx.init``. Later states pass.
        """
        counters, anchors, common, inner = self._split(state)
        if not counters:
            return
        # An anchor with arrays that may be its parameter: they end with its name. Of
        # parameters that the step computes, such as casts, nothing else is known.
        known = {names: x for names, x in common.items() if names in step.params}
        updated = {names[:-2] for names in step.counters}
        pairs = {
            (*path, *_ANCHOR, *names): (x, found, counters[path][0])
            for path, anchor in anchors.items()
            if path in updated
            for names, x in anchor.items()
            if (found := _candidates(names, x.shape, known, common))
        }
        started, differs, moved, nonfinite = on_host(
            _compare_at_start, counters, common, pairs, inner
        )
        if (names := _named(differs)) and not started:
            raise ValueError(
                f"Replicas start from different values ({names[0]!r}), and would never "
                "meet. Give replicas.replicate the state of one replica, and name what "
                "is meant to differ in replicas.step(local=...)."
            )
        if names := _named(moved):
            raise ValueError(
                f"The parameters are not those of {names[0]!r}, which tx.init was "
                "given and the first sync would return to. Call tx.init with them, or "
                "replicas.reanchor(params, opt_state)."
            )
        if (names := _named(nonfinite)) and not started:
            raise ValueError(
                f"{names[0]!r} holds NaN or Inf, so syncs would exclude every replica. "
                "Keep such arrays, as masks are, out of the parameters and of the "
                "inner optimizer's state."
            )

    def after_step(self, state: Any, due: bool | None) -> None:
        """Warns, once, of arrays in which replicas still differ after a sync.

        Something changes them after the optimizer, or no sync reaches them. Rejects
        replicas that have counted different steps. `due` says whether a decision was
        due, None if on every step.
        """
        if due is False:
            return
        self._sync_steps += 1
        if self._sync_steps < self._next_look:
            return
        names = self._differing(state)
        if names is None:
            self._misses += 1
            self._next_look += 1 if self._misses < _SPACE else _SPACE
        else:
            self._misses = 0
            self._next_look = math.inf if names else 2 * self._sync_steps
        if names:
            some = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
            warnings.warn(
                f"After a sync the replicas still differ in {len(names)} arrays: "
                f"{some}. Move what changes them before or into the optimizer, average "
                "them with replicas.step(average=...), or name them in "
                "replicas.step(local=...) if they are meant to differ.",
                stacklevel=3,
            )

    def _differing(self, state: Any) -> list[str] | None:
        """None unless all replicas have just synchronised."""
        counters, _, common, _ = self._split(state)
        if not counters:
            return []
        counted_apart, lost, all_synced = on_host(_compare_counters, counters)
        if counted_apart:
            raise ValueError(
                "Replicas counted different steps: some kept an old optimizer state. "
                "Keep the new one always, which takes non-finite gradients as zeros."
            )
        if lost:  # No later sync makes them equal.
            return []
        # A comparison sends a whole model.
        return _named(on_host(_differ_after_sync, common)) if all_synced else None

    def _split(self, state: Any) -> tuple[Any, dict[Names, Arrays], Arrays, Arrays]:
        """Counters and anchors of optimizers, what should be equal, inner arrays."""
        leaves = dict(_paths.leaves_with_names(state))
        optimizers = _counters.optimizer_paths(state)
        anchors = {path: _below((*path, *_ANCHOR), leaves) for path in optimizers}
        fields = ("steps", "synced", "excluded", "absent")
        # Without an anchor a sync makes replicas equal that always synchronised.
        counters = {
            p: [leaves[*p, "metrics", f] for f in (*fields, "steps" if x else "syncs")]
            for p, x in anchors.items()
        }
        floats = {n: x for n, x in leaves.items() if _finite.is_float(x)}
        common = {
            names: x
            for names, x in floats.items()
            if not _paths.lies_in(names, self._local)
            and not _counters.inside(names, optimizers)
        }
        inner = {
            names: x
            for names, x in floats.items()
            if x.ndim > 1 and _counters.is_within(names, optimizers, "inner_state")
        }
        return counters, anchors, common, inner


def _below(path: Names, arrays: Arrays) -> Arrays:
    size = len(path)
    return {names[size:]: x for names, x in arrays.items() if names[:size] == path}


def _candidates(names: Names, shape: Any, known: Arrays, common: Arrays) -> list[Any]:
    """Arrays whose paths end so; else, of what is known, in fewer of these names."""
    fewer = [(names[start:], known) for start in range(1, len(names))]  # of a tuple
    for end, arrays in [(names, known), (names, common), *fewer]:
        pairs = ((path[len(path) - len(end) :], x) for path, x in arrays.items())
        if found := [x for path, x in pairs if path == end and x.shape == shape]:
            return found
    return []


def _named(flags: dict[Names, bool]) -> list[str]:
    return ["/".join(names) for names, yes in flags.items() if yes]


def _compare_at_start(counters, common, pairs, inner) -> Any:
    """Whether a step was taken, and which arrays differ, moved or are not finite."""
    steps = jnp.stack([steps for steps, *_ in counters.values()])
    between = {names: differ(x, x[:1]) for names, x in common.items()}
    moved = {
        names: jnp.all(steps == 0)
        & (differ(x, x[:1]) | jnp.all(jnp.stack([differ(x, y) for y in found])))
        for names, (x, found, steps) in pairs.items()
    }
    looked_at = inner | {names: x for names, (x, *_) in pairs.items()}
    nonfinite = {n: ~jnp.all(jnp.isfinite(x)) for n, x in looked_at.items()}
    return jnp.any(steps > 0), between, moved, nonfinite


def _compare_counters(counters: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether steps differ, replicas may differ for good, and all just synchronised."""
    steps, synced, *faults, syncs = map(jnp.stack, zip(*counters.values(), strict=True))
    lost = jnp.any(syncs != steps) | jnp.any(jnp.stack(faults) > 0)
    return jnp.any(steps != steps[:, :1]), lost, jnp.all(synced)


def _differ_after_sync(arrays: Arrays) -> dict[Names, jax.Array]:
    """Which arrays differ between replicas by more than rounding."""

    def norm(x):
        squares = jnp.abs(_trees.wide(x)) ** 2
        return jnp.sqrt(jnp.sum(squares, axis=tuple(range(1, x.ndim))))

    def differs(x):
        # A sync rounds what the replicas had before it: where these are far apart, as
        # biases that began at zero, that is larger than their mean. In 16 bits as many
        # roundings would hide what moves between syncs.
        roundings = 32 if x.dtype.itemsize > 2 else 1
        bound = roundings * float(jnp.finfo(x.dtype).eps)
        return jnp.any(norm(x - x[:1]) > bound * norm(x[:1]))

    return {names: differs(x) for names, x in arrays.items()}
