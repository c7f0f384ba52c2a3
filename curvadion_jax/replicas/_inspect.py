"""What a training step does with the optimizer, read from its program.

The program is that of one replica. Every value in it is followed for two questions:
may it differ between replicas, and did it go through an update that synchronises?
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from curvadion_jax import _counters, _guards, _jaxprs, _mapped
from curvadion_jax._schedule import COUNTERS

# Collectives that give all replicas the same.
_REDUCTIONS = ("psum", "psum_invariant", "pmax", "pmin", "all_gather")
# What makes something else of the arrays that it is given, of their size or not.
_CONTRACTIONS = ("dot_general", "conv_general_dilated", "gather")


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value.

    Attributes:
      varies: whether it may differ between replicas.
      synced: whether it depends on what an update of the optimizer returned.
      reduced: whether it depends on a sum, or the like, over the replicas.
      averaged: whether an update that it depends on was given gradients that are the
        same on all replicas, because they were reduced.
      name: of the array of the state that it is, unchanged; with "updated" before it,
        that which an update made of that array.
    """

    varies: bool = False
    synced: bool = False
    reduced: bool = False
    averaged: bool = False
    name: tuple[str, ...] = ()

    def __or__(self, other: "Value") -> "Value":
        return Value(
            self.varies or other.varies,
            self.synced or other.synced,
            self.reduced or other.reduced,
            self.averaged or other.averaged,
            self.name if self.name == other.name else (),
        )


def follow(jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    """What is known of the results of a program.

    Raises:
      ValueError: if an update stands in a condition that a replica decides alone, or
        in a while loop.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def look(x) -> Value:
        return Value() if isinstance(x, Literal) else known.get(x, Value())

    for equation in jaxpr.eqns:
        given = [look(x) for x in equation.invars]
        known.update(zip(equation.outvars, _results(equation, given), strict=True))
    return [look(x) for x in jaxpr.outvars]


def updates_in(jaxpr: Jaxpr) -> float:
    """How many updates of optimizers that synchronise a program makes.

    Infinity where that depends on values.
    """
    found = 0.0
    for equation in jaxpr.eqns:
        inside = sum(map(updates_in, _jaxprs.inner_jaxprs(equation)))
        if _is_update(equation):
            found += 1
        elif inside:
            depends = equation.primitive.name in ("cond", "while")
            times = math.inf if depends else equation.params.get("length", 1)
            found += inside * times
    return found


def _is_update(equation: JaxprEqn) -> bool:
    scope = str(equation.source_info.name_stack)
    return equation.primitive.name == "custom_vmap_call" and _guards.SCOPE in scope


def _results(equation: JaxprEqn, given: list[Value]) -> list[Value]:
    name, number = equation.primitive.name, len(equation.outvars)
    programs = _jaxprs.inner_jaxprs(equation)
    every = _any(given)
    if _is_update(equation):
        _, (gradients, state, *_) = equation.params["in_tree"].unflatten(given)
        averaged = any(x.reduced and not x.varies for x in jax.tree.leaves(gradients))
        made = Value(varies=True, synced=True, averaged=averaged)
        before = jax.tree.leaves(state)
        names = [("updated", *x.name) if x.name else () for x in before]
        # Updates come first, and then the state, like the one that was given.
        names = [()] * (number - len(names)) + names
        return [dataclasses.replace(made, name=name) for name in names]
    if _jaxprs.named_axes(equation) & _axes():
        if name == "axis_index":
            return [Value(varies=True)]
        if name in _REDUCTIONS:
            every = dataclasses.replace(every, varies=False)
        every = dataclasses.replace(every, reduced=True)
    if name == "cond":
        _check_condition(programs, given[0])
        branches = [follow(program, given[1:]) for program in programs]
        return [_any([*each, given[0]]) for each in zip(*branches, strict=True)]
    if name == "while":
        _check_condition(programs, Value(varies=True))
    if name == "scan":
        (program,) = programs
        return _scan(equation, program, given)
    if len(programs) == 1 and name != "while":
        (program,) = programs  # jit, remat, custom derivatives
        if len(program.invars) == len(given) and len(program.outvars) == number:
            return follow(program, given)
    return [
        dataclasses.replace(every, synced=_adds_up(equation, given, x))
        for x in equation.outvars
    ]


def _adds_up(equation: JaxprEqn, given: list[Value], result: Any) -> bool:
    """Whether a result is one of a sync still: elements of it, cast, scaled or added.

    A loss of parameters that a sync reaches is not, nor are its gradients.
    """
    if equation.primitive.name in _CONTRACTIONS:
        return False
    size = math.prod(result.aval.shape)
    return any(
        value.synced and math.prod(getattr(x.aval, "shape", ())) == size
        for x, value in zip(equation.invars, given, strict=True)
    )


def _scan(equation: JaxprEqn, program: Jaxpr, given: list[Value]) -> list[Value]:
    if "ft_in" in equation.params:  # JAX 0.12
        fixed, carried = map(len, equation.params["ft_in"].unpack()[:2])
    else:
        fixed, carried = equation.params["num_consts"], equation.params["num_carry"]
    constants, carry = given[:fixed], given[fixed : fixed + carried]
    rows = given[fixed + carried :]
    results = follow(program, [*constants, *carry, *rows])
    # What is carried goes round again, until nothing new is learnt of it.
    while (after := [a | b for a, b in zip(carry, results[:carried], strict=True)]) != (
        carry
    ):
        carry = after
        results = follow(program, [*constants, *carry, *rows])
    return [*carry, *results[carried:]]


def _any(values: Sequence[Value]) -> Value:
    found = Value()
    for value in values:
        found = found | value
    return found


def _check_condition(programs: Sequence[Jaxpr], decided_by: Value) -> None:
    if decided_by.varies and any(map(updates_in, programs)):
        raise ValueError(
            "the optimizer's update stands inside a condition or a while loop that a "
            "replica decides alone: under replicas.step every step would run it, and "
            "send what a sync sends. What decides by a replica's own values, such as "
            "optax.apply_if_finite or lax.cond on a loss, goes around the inner "
            "optimizer, adaptive_sync(apply_if_finite(inner), ...), and not around the "
            "optimizer that synchronises. (The number of a step, by which all decide "
            "alike, comes as a further argument, train(state, batch, step), and not "
            "from the state.)"
        )


def counts_along(jaxpr: Jaxpr, before: Sequence[str], after: Sequence[str]) -> bool:
    """Whether the counters of a step's only update go from the state into it and back.

    Then the next step begins where this one ended, and the host can count along.

    Args:
      jaxpr, before, after: as for :func:`moved_alone`.
    """
    if updates_in(jaxpr) != 1:
        return False
    inputs = [Value(name=(name,)) for name in before]
    inputs += [Value()] * (len(jaxpr.invars) - len(inputs))
    results = dict(zip(after, follow(jaxpr, inputs), strict=False))
    paths = {tuple(name.split("/")): name for name in before}
    optimizers = _counters.optimizers(paths)
    kept = {(*way, "metrics", counter) for way in optimizers for counter in COUNTERS}
    counted = [
        name
        for path, name in paths.items()
        if path in kept or _counters.is_within(path, optimizers, {"trigger_state"})
    ]
    return all(
        name in results and results[name].name == ("updated", name) for name in counted
    )


def _axes() -> set[str]:
    step = _mapped.current()
    return {step.axis_name} if step else set()


def moved_alone(
    jaxpr: Jaxpr, before: Sequence[str], after: Sequence[str], own: int
) -> tuple[list[str], bool]:
    """What of the state no sync reaches, and whether gradients were averaged.

    Args:
      jaxpr: the step's program. The state comes first in what it is given, and in what
        it returns.
      before: names of the arrays of the state that it is given.
      after: those of the state that it returns.
      own: how many of the arrays that it is given belong to state and batch; the others
        are shared.

    Returns:
      Names of floating-point arrays that come to differ between replicas, and that no
      sync reaches; and whether an update is given gradients that were reduced over the
      replicas.
    """
    index = {name: number for number, name in enumerate(before)}
    # Replicas start equal, and only what differs after a step does so before the next.
    differs = [len(before) <= i < own for i in range(len(jaxpr.invars))]
    while True:
        results = follow(jaxpr, [Value(varies=x) for x in differs])
        of_state = dict(zip(after, results, strict=False))
        more = [n for n, x in of_state.items() if x.varies and n in index]
        if all(differs[index[name]] for name in more):
            break
        for name in more:
            differs[index[name]] = True
    kinds: dict[str, Any] = {
        name: x.aval for name, x in zip(after, jaxpr.outvars, strict=False)
    }
    floats = {n for n, x in kinds.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    alone = [n for n in more if n in floats and not of_state[n].synced]
    return alone, any(value.averaged for value in results)
