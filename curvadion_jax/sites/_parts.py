"""Which arrays of a model can take their outer steps apart from the others.

Optax updates a whole tree at once, with several arrays of its size between. Most outer
optimizers treat every array alone. Which do is read from the program of a step: arrays
whose results depend on each other, as with a global norm, stay together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

# Parts of a model's bytes that arrays are gathered to: each part costs a call.
_PARTS = 16


def parts(
    step: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    anchor: Sequence[Any],
    outer: Sequence[Any],
) -> tuple[list[list[int]], list[int]]:
    """Places of arrays that go together, and those of the state that all need.

    `step` takes gradients, and anchor and state, and returns anchor and state, in whose
    order places are numbered. What all need, such as a count, depends on no gradient.
    """
    needs, count = _needs(step, anchor, outer), len(anchor)
    common = set(range(count, len(needs)))
    while own := {x for x in common if not needs[x] <= common}:
        common -= own
    first = [*range(len(needs))]  # of those that are known to go together

    def root(x: int) -> int:
        while first[x] != x:
            x = first[x]
        return x

    for place, need in enumerate(needs):
        if place not in common:
            roots = {root(x) for x in {place, *need} - common}
            for x in roots:
                first[x] = min(roots)
    together: dict[int, list[int]] = {}
    for place in range(len(needs)):
        if place not in common:
            together.setdefault(root(place), []).append(place)
    sizes = [x.size * x.dtype.itemsize for x in outer]
    most, found, size = sum(sizes) / _PARTS, [], 0.0
    for places in together.values():
        own = sum(sizes[x] for x in places)
        if not found or size + own > most:
            found.append([])
            size = 0.0
        found[-1] += places
        size += own
    return found, sorted(common)


def _needs(
    step: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    anchor: Sequence[Any],
    outer: Sequence[Any],
) -> list[set[int]]:
    """For each result, the places of what it depends on."""
    with jax.disable_jit():
        program = jax.make_jaxpr(step)(anchor, outer).jaxpr
    places = [*range(len(anchor)), *range(len(outer))]
    found = {x: {place} for x, place in zip(program.invars, places, strict=True)}
    none: set[int] = set()
    need = lambda x: none if isinstance(x, Literal) else found.get(x, none)
    for equation in program.eqns:
        whole = none.union(*map(need, equation.invars))
        found |= dict.fromkeys(equation.outvars, whole)
    return [need(x) for x in program.outvars]
