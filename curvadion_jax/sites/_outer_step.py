"""The outer step, and what it is taken from: the outer side of a run.

It is taken on the host's CPU, one operation at a time, so all sites get the same bits.
Where the outer optimizer allows it, it is taken in parts of the model (`_parts`).
"""

import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax.sites import _parts
from curvadion_jax.sites._arrays import Arrays, cast, on_cpu, to_host, wide
from curvadion_jax.sites._store import as_bytes

log = logging.getLogger(__package__)

# Of anchor and outer state, places that take a step together, and those that all need.
Parts = tuple[list[list[int]], list[int]]
# The longest axis of arrays whose outer steps sites compare when they join.
_FEW = 4


class Outer(NamedTuple):
    """The outer side of a run before a round, the same at all sites.

    The anchor has at least float32: a mean of many sites is often smaller than what
    bfloat16 can add to a parameter, and would be lost round after round.
    """

    anchor: Arrays
    state: Arrays  # the leaves of the outer optimizer's state
    digest: str  # of both
    params: Arrays  # the anchor, rounded to the dtypes that are trained


class OuterStep:
    """An outer optimizer's step, for parameters of these shapes."""

    def __init__(self, params: Any, outer: optax.GradientTransformation) -> None:
        leaves, self._structure = jax.tree.flatten(params)
        self._outer = outer
        self._shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        # Shapes of the anchor, and of what is subtracted from it.
        self.wide = [jax.ShapeDtypeStruct(x.shape, wide(x.dtype)) for x in leaves]
        with on_cpu():
            state = jax.tree.leaves(jax.eval_shape(self._initial, self.wide))
        for x in state:
            if jnp.issubdtype(x.dtype, jax.dtypes.extended):
                raise ValueError(
                    f"outer has an array of {x.dtype} in its state, such as a random "
                    "key, which sites do not store. Give an outer optimizer without it."
                )
        # Shapes of a snapshot: anchor and outer state.
        self.snapshot = [*self.wide, *state]

    @functools.cached_property
    def fingerprint(self) -> str:
        """What two outer steps make of an anchor that all sites know.

        Its arrays have as many axes as the model's, and few elements.
        """
        return self._small._two_steps(self._small._whole)

    @functools.cached_property
    def _small(self) -> "OuterStep":
        shapes = [
            jax.ShapeDtypeStruct([min(n, _FEW) for n in x.shape], x.dtype)
            for x in self._shapes
        ]
        return OuterStep(self._tree(shapes), self._outer)

    def _two_steps(self, parts: Parts) -> str:
        line = np.linspace(-1, 1, 251)
        params = [np.resize(line, x.shape).astype(x.dtype) for x in self._shapes]
        gradients = [np.resize(line + 0.5, x.shape).astype(x.dtype) for x in self.wide]
        outer = self.initial(params)
        for _ in range(2):
            outer = self.take(outer, [-x for x in gradients], parts)
        return outer.digest

    @functools.cached_property
    def parts(self) -> Parts:
        """Arrays that take the outer step together; all, if parts do not do the same.

        A program does not show what an optimizer makes of the number of all elements,
        so two steps of few elements have to agree as well.
        """
        try:
            found, small = self._found_parts(), self._small
            if small._two_steps(small._found_parts()) == self.fingerprint:
                return found
        # At a part of a tree an optimizer may raise anything.
        except Exception as error:
            log.debug("The outer step is taken for all arrays at once: %r", error)
        return self._whole

    @property
    def _whole(self) -> Parts:
        return [[*range(len(self.snapshot))]], []

    def _found_parts(self) -> Parts:
        def step(gradients: Sequence[Any], old: Sequence[Any]) -> list[Any]:
            found = self._step_of(dict(enumerate(gradients)), dict(enumerate(old)))
            return [found[place] for place in range(len(old))]

        return _parts.parts(step, self.wide, self.snapshot)

    def initial(self, params: Arrays) -> Outer:
        """The outer side of a run that begins at these parameters."""
        anchor = cast(params, self.wide)
        with on_cpu():
            state = self._initial([jnp.asarray(x) for x in anchor])
        return self.from_snapshot([*anchor, *to_host(state)])

    def from_snapshot(self, arrays: Arrays) -> Outer:
        """The outer side of an anchor and the outer state, in this order."""
        digest, count = hashlib.sha256(), len(self._shapes)
        for x in arrays:
            digest.update(as_bytes(x))
        anchor, state = arrays[:count], arrays[count:]
        params = cast(anchor, self._shapes)
        return Outer(anchor, state, digest.hexdigest()[:32], params)

    def take(self, outer: Outer, gradients: Arrays, parts: Parts) -> Outer:
        """The outer side after a step, for which it uses up the gradients.

        In parts it needs 28 bytes per parameter at most, and 43 in one (90 million
        parameters in float32, 2 bits, a Nesterov step): Optax makes several arrays of
        all that it is given.
        """
        apart, common = parts
        rest: list[Any] = gradients
        old = [*outer.anchor, *outer.state]
        after = [*old]
        for places in apart:
            inside = sorted({*places, *common})
            with on_cpu(), jax.disable_jit():
                found = self._step_of(
                    {x: jnp.asarray(rest[x]) for x in inside if x < len(rest)},
                    {x: jnp.asarray(old[x]) for x in inside},
                )
            for place in inside:
                x = after[place] = np.asarray(found.pop(place))
                if not self._is_finite(place, x):
                    log.error(
                        "The outer step contains NaN or Inf, so the model stays, and "
                        "what sites contributed to this round is lost. Look at the "
                        "outer optimizer."
                    )
                    return outer
                if place < len(rest):
                    rest[place] = None  # frees as much as the new anchor takes
        return self.from_snapshot(after)

    def _step_of(
        self, gradients: Mapping[int, Any], old: Mapping[int, Any]
    ) -> dict[int, Any]:
        """Anchor and state after a step, by their places; some arrays or all.

        As in `optax.masked`, where there is no array there is an empty node.
        """
        count, none = len(self.wide), optax.MaskedNode()
        anchor = self._tree([old.get(x, none) for x in range(count)])
        updates = self._tree([gradients.get(x, none) for x in range(count)])
        state = jax.tree.structure(jax.eval_shape(self._outer.init, anchor))
        leaves = [old[x] for x in sorted(old) if x >= count]
        updates, new = self._outer.update(updates, state.unflatten(leaves), anchor)
        moved: Any = optax.apply_updates(anchor, updates)
        new = optax.tree.cast_like(jax.tree.leaves(new), leaves)
        return dict(zip(sorted(old), [*jax.tree.leaves(moved), *new], strict=True))

    def _is_finite(self, place: int, x: np.ndarray) -> bool:
        """Whether all of a result is; anchors as training gets them."""
        if place < len(self._shapes):
            (x,) = cast([x], [self._shapes[place]])
        elif x.ndim == 0:  # which may be infinite on purpose: a minimum begins so
            return True
        return bool(np.isfinite(x).all())

    def _tree(self, leaves: Any) -> Any:
        return jax.tree.unflatten(self._structure, leaves)

    def _initial(self, leaves: Any) -> Any:
        return self._outer.init(self._tree(leaves))
