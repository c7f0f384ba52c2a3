"""Joins parameters of one shape into stacks, so that one product serves them all.

A product of one matrix keeps a few cores of an accelerator busy, and a program with a
product for every matrix grows with the layers. Stacked parameters are a parameter with
one more batch axis, named after the first of them; `_dion_step` sees no difference.
Joining writes M + G to the stack, which all products then read. Compiled for a TPU v5e
a step of 6 or 12 matrices moves 9% fewer bytes than with each matrix by itself, has
0.5 to 0.6 times as many distinct kernels, and needs 2 to 2.7 times the temporary
memory. A CPU gains nothing but time to compile many matrices. (`benchmarks/step`)
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax import _trees
from curvadion_jax._matrix_view import MadeOf, MatrixView, Named
from curvadion_jax.matrices._power_iteration import ReduceFn

# Elements of a stack, which is a temporary array. Matrices of this size need no others.
_LARGEST = 2**25


class Joined(NamedTuple):
    """Which parameters share a stack: their names, by the name of the first."""

    members: dict[str, list[str]]

    def views(self, views: Mapping[str, MatrixView]) -> dict[str, MatrixView]:
        """How each stack is seen as matrices."""
        return {
            first: views[first].stacked(len(names)) if len(names) > 1 else views[first]
            for first, names in self.members.items()
        }

    def together(self, arrays: Named) -> Named:
        """Stacks the arrays of parameters; some stacks may be left out."""
        return {
            first: jnp.stack([arrays[name] for name in names])
            if len(names) > 1
            else arrays[first]
            for first, names in self.members.items()
            if first in arrays
        }

    def apart(self, stacks: Named) -> Named:
        """The inverse of `together`."""
        found = {}
        for first, stack in stacks.items():
            names = self.members[first]
            parts = jnp.unstack(stack) if len(names) > 1 else [stack]
            found |= dict(zip(names, parts, strict=True))
        return found

    def reduce_fn(self, reduce_fn: ReduceFn | None) -> ReduceFn | None:
        """The same function of stacks: it is still given every parameter by itself."""
        if reduce_fn is None:
            return None

        def of_stacks(stacks: Named, made_of: Mapping[str, MadeOf]) -> Named:
            members = {}
            for first, axes in made_of.items():
                names = self.members[first]
                if len(names) > 1:
                    axes = [tuple(axis - 1 for axis in merged) for merged in axes[1:]]
                members |= dict.fromkeys(names, axes)
            return self.together(reduce_fn(self.apart(stacks), members))

        return of_stacks


def join(views: Mapping[str, MatrixView], total: Named, qs: Named) -> Joined:
    """Joins single matrices of one shape and dtype, whose ranks are then equal too.

    Stacks stay as they are. So does what several devices may share: to stack matrices
    that are sharded differently, the compiler would send them.
    """
    stacks, sizes = defaultdict(list), defaultdict(int)
    for name, view in views.items():
        x, q = total[name], qs[name]
        kind: Hashable = (view, x.dtype, q.dtype)
        if view.batch_axes or _trees.devices(x) > 1:
            kind = name
        stacks[kind, sizes[kind] // _LARGEST].append(name)
        sizes[kind] += x.size
    return Joined({names[0]: names for names in stacks.values()})


def by_shape(
    function: Callable[[jax.Array], jax.Array],
    stacks: list[jax.Array],
    largest: int | None = None,
) -> list[jax.Array]:
    """Calls a function of stacks once for all stacks of one shape of matrices.

    With a call for every parameter the program would grow with the layers. Joining
    copies, so with `largest` a call takes about that many elements, and only single
    matrices are joined: a stack of layers may be sharded along the layers.
    """
    calls, sizes = defaultdict(list), defaultdict(int)
    for index, x in enumerate(stacks):
        kind: Any = (x.shape[1:], x.dtype, jax.typeof(x).sharding.spec)
        if largest is not None and len(x) > 1:
            kind = index
        part = sizes[kind] // largest if largest else 0
        calls[kind, part].append(index)
        sizes[kind] += x.size
    results = {}
    for call in calls.values():
        arrays = [stacks[index] for index in call]
        whole = jnp.concatenate(arrays) if len(call) > 1 else arrays[0]
        ends = np.cumsum([len(x) for x in arrays])
        parts = jnp.split(function(whole), ends[:-1])
        results |= dict(zip(call, parts, strict=True))
    return [results[index] for index in range(len(stacks))]
