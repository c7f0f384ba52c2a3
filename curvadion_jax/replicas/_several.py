"""Several training steps in one program, behind which a sync can hide."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvadion_jax import _mapped
from curvadion_jax._schedule import LOCAL, Due
from curvadion_jax.replicas._compiled import CompiledStep


class CompiledSteps(CompiledStep):
    """Several training steps on all replicas, compiled when they are called.

    A program for every pattern of what is due on the steps. Made by
    `curvadion_jax.replicas.steps`.

    Attributes:
      sent_outside: as for `CompiledStep`.

    Args:
      function: the training step of one replica.
      run: several steps, for the state of all replicas.
      mesh: mesh with the replica axis.
      axis_name: name of the replica axis.
      donate: whether the state's buffers are reused.

    Example:
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.make_mesh(1)
      >>> steps = replicas.steps(lambda state, batch: (state + 1, {}), mesh)
      >>> state = replicas.replicate(jnp.zeros(2), mesh)
      >>> steps.lower(state, jnp.ones((3, 1))).compile().memory_analysis() is None
      False
    """

    def trace(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state: Any,
        batch: Any,
        *shared: Any,
        begins: Sequence[int] | None = None,
        ends: Sequence[int] = (),
    ) -> jax.stages.Traced:
        """The program, to look at: ``trace(...).jaxpr``, ``trace(...).lower()``.

        Args:
          state: as for `CompiledStep.trace`.
          batch: as for a call.
          *shared: as for a call.
          begins: for a trigger that looks at counters alone, on which steps, from 0, a
            sync begins. None is the one program with a condition, of other triggers.
          ends: for a synchronizer with a delay, on which of the steps a sync (of the
            first fragment) ends.

        Raises:
          ValueError: if `begins` is given, and the host cannot know it.
        """
        number, due = self._steps((batch, shared)), None
        for name, places in (("begins", begins or ()), ("ends", ends)):
            if not all(0 <= place < number for place in places):
                raise ValueError(
                    f"{name} are steps of this program, from 0 to {number - 1}, got "
                    f"{list(places)}"
                )
        if begins is not None:
            due = tuple(Due(i in begins, int(i in ends)) for i in range(number))
        return self._traced(state, batch, shared, due)

    def lower(
        self, state: Any, batch: Any, *shared: Any, **known: Any
    ) -> jax.stages.Lowered:
        """The program before it is compiled; with the arguments of `trace`."""
        return self.trace(state, batch, *shared, **known).lower()

    def _steps(self, batches: Any) -> int:
        return _number(batches)

    def _known(self, due: tuple[Due, ...]) -> Any:
        return due

    def _told(self, due: Any) -> str:
        if due is None:
            return "steps"
        syncs = [str(1 + index) for index, each in enumerate(due) if any(each)]
        return f"{len(due)} steps, " + (
            f"sync {', '.join(syncs)}" if syncs else "local"
        )

    def _divided(self, leaf: Any, axis: int = 1) -> Any:
        return super()._divided(leaf, axis)


def run_several(run: Callable[..., Any]) -> Callable[..., Any]:
    """A step for stacked state and the global batch, made a program of several.

    Local steps one after another are one loop. A step on which a sync begins or ends
    stands in the program itself: what is sent there depends on nothing that the loop
    before it computes, so that the compiler can start it in front of the loop.
    """

    def several(state, batches, *shared):
        outer = cast(_mapped.Mapped, _mapped.current())
        due = outer.due or [None] * _number((batches, shared))
        found, stacked = [], []
        for first, last, each in _parts(due):
            mapped = dataclasses.replace(outer, due=each, is_another=bool(found))
            rows = jax.tree.map(lambda x: x[first:last], (batches, *shared))  # noqa: B023

            def one(state, row):
                with _mapped.mapping(mapped):  # noqa: B023
                    return run(state, *row)

            state, metrics = lax.scan(one, state, rows, unroll=last - first == 1)
            found.append(mapped)
            stacked.append(metrics)
        outer.schedule = found[0].schedule
        at_once = outer.schedule is not None and not outer.schedule.delay
        if at_once and any(each and each.ends for each in due):
            raise ValueError(
                "ends= is for a synchronizer with a delay, reconcile(delay=k), and "
                "this one has none: leave it out"
            )
        outer.counts_along = all(x.counts_along for x in found)
        outer.sent_outside = max(x.sent_outside for x in found)
        return state, jax.tree.map(lambda *x: jnp.concatenate(x), *stacked)

    return several


def _number(batches: Any) -> int:
    """How many steps arrays are for.

    Raises:
      ValueError: if they do not say, or not the same.
    """
    leaves = jax.tree.leaves_with_path(batches)
    found = {np.shape(x)[:1]: jax.tree_util.keystr(path) for path, x in leaves}
    if len(found) != 1 or () in found or (0,) in found:
        shapes = {path: shape for shape, path in found.items()}
        raise ValueError(
            "arrays of the batches, and those that are shared, need one leading axis "
            f"of steps, [steps, global batch, ...], got {shapes}: stack the batches"
        )
    ((number,),) = found
    return number


def _parts(due: Sequence[Due | None]) -> Iterator[tuple[int, int, Due | None]]:
    """First step, the one behind the last, and what is due on each."""
    first = 0
    for each, group in itertools.groupby(due):
        last = first + len(list(group))
        if each in (None, LOCAL):
            yield first, last, each
        else:
            yield from ((i, i + 1, each) for i in range(first, last))
        first = last
