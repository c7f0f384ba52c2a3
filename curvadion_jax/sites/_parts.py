"""Which arrays of a model can take their outer steps apart from the others.

Optax updates a whole tree at once, and several arrays of its size exist meanwhile. Most
outer optimizers treat every array alone. Which do is read from the program of a step:
arrays whose results depend on each other, as with a global norm, stay together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

# Parts of a model's bytes that small arrays are gathered to: each part costs a call.
_PARTS = 32


def parts(
    step: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    anchor: Sequence[Any],
    outer: Sequence[Any],
) -> tuple[list[list[int]], list[int]]:
    """Places of arrays that go together, and those of the state that all need.

    `step` takes gradients, and anchor and state, and returns anchor and state, in whose
    order places are numbered. What all need, such as a count, depends on no gradient.
    """
    needs = _needs(step, anchor, outer)
    common = {*range(len(anchor), len(needs))}
    while own := {x for x in common if not needs[x] <= common}:
        common -= own
    group_of: dict[int, set[int]] = {}
    for place in sorted({*range(len(needs))} - common):
        group = {place, *needs[place]} - common
        known = {id(group_of[x]): group_of[x] for x in group if x in group_of}
        group = group.union(*known.values())
        group_of |= dict.fromkeys(group, group)
    groups = {id(group): group for group in group_of.values()}.values()

    sizes = [x.size * x.dtype.itemsize for x in outer]
    most = sum(sizes) / _PARTS
    found: list[list[int]] = [[]]
    size = 0  # of the last part
    for group in groups:
        more = sum(sizes[place] for place in group)
        if size + more > most:
            found.append([])
            size = 0
        found[-1] += sorted(group)
        size += more
    return [x for x in found if x], sorted(common)


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
