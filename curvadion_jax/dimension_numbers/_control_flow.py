"""Calls, branches and loops: programs within programs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import BESIDE, Atom
from curvadion_jax.dimension_numbers._reader import (
    Reader,
    Values,
    activation,
    handles,
    unknown,
)
from curvadion_jax.dimension_numbers._values import (
    Value,
    Weight,
    is_data,
)

_CALLS = """jit pjit closed_call core_call checkpoint remat2 custom_jvp_call
custom_vjp_call custom_vjp_call_jaxpr shard_map""".split()
_FIRST_STATE = "is the first state of a loop, or of one branch"


@handles(*_CALLS)
def _call(reader, equation, values, needed):
    given = [equation.params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")]
    programs = [getattr(x, "jaxpr", x) for x in given if x is not None]
    if not programs or len(programs[0].invars) != len(values):
        return unknown(reader, equation, values, needed)
    # Inside of a shard_map an axis may be shorter.
    inner = _between(values, equation.invars, programs[0].invars)
    results = reader.read(programs[0], inner, needed)
    return _between(results, programs[0].outvars, equation.outvars)


def _between(values: Values, old: Sequence[Any], new: Sequence[Any]) -> Values:
    """Values under the shapes of other variables."""

    def resize(value, a, b):
        if value is None or a.aval.shape == b.aval.shape:
            return value
        return value.moved(lambda dims: _axes.resized(dims, a.aval.shape, b.aval.shape))

    return [resize(*each) for each in zip(values, old, new, strict=True)]


# Loops and branches


@handles("cond")
def _cond(reader, equation, values, needed):
    branches = equation.params["branches"]
    every = [reader.read(branch.jaxpr, values[1:], needed) for branch in branches]
    return [_either(reader, equation, each) for each in zip(*every, strict=True)]


@handles("scan")
def _scan(reader, equation, values, needed):
    body = equation.params["jaxpr"].jaxpr
    # By the ranks: JAX 0.10 and 0.12 have other names for how many there are of each.
    rank = lambda variable: len(variable.aval.shape)
    same = lambda pair: rank(pair[0]) == rank(pair[1])
    carries = sum(map(same, zip(equation.outvars, body.outvars, strict=True)))
    fixed = sum(map(same, zip(equation.invars, body.invars, strict=True))) - carries
    constants, carry = values[:fixed], values[fixed : fixed + carries]
    scanned = [_peeled(reader, equation, x) for x in values[fixed + carries :]]
    wanted = [True] * carries + [*needed[carries:]]
    read_body = lambda carry: reader.read(body, [*constants, *carry, *scanned], wanted)
    carry, stacked = _repeat(reader, equation, read_body, carry)
    beside = lambda dims: ((Atom(BESIDE, None),), *dims)
    return [*carry, *(x and x.moved(beside) for x in stacked)]


@handles("while")
def _while(reader, equation, values, needed):
    tested, fixed = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    constants, carry = values[tested:][:fixed], values[tested + fixed :]
    body = equation.params["body_jaxpr"].jaxpr
    wanted = [True] * len(carry)
    read_body = lambda carry: reader.read(body, [*constants, *carry], wanted)
    return _repeat(reader, equation, read_body, carry)[0]


def _repeat(reader: Reader, equation: Any, body: Callable, carry: Values):
    """Reads the body of a loop until what it carries stays what it is.

    Only the last reading counts: before it, the body was read of other values. What is
    carried can only grow, and soon has all that it can have.
    """
    first, carry = reader.facts, list(carry)
    while True:
        reader.facts = first.copy()
        results = body(carry)
        pairs = zip(carry, results[: len(carry)], strict=True)
        joined = [_either(reader, equation, pair, is_loop=True) for pair in pairs]
        if joined == carry:
            return joined, results[len(carry) :]
        first.uses |= {x: None for x in reader.facts.uses if x.why == _FIRST_STATE}
        carry = joined


def _either(
    reader: Reader, equation: Any, several: Values, is_loop: bool = False
) -> Value | None:
    """A value that is one of several: of a branch, or of a step of a loop."""
    given = list(dict.fromkeys(value for value in several if value))
    if len(given) < 2 and (not given or None not in several or is_data(given[0])):
        return given[0] if given else None
    tracked = _values.unique(x for value in given for x in value.tracked)
    if not is_loop and not any(map(is_data, given)):
        return Value(
            "weight", _values.merged(x for value in given for x in value.weights)
        )
    for x in tracked:
        if isinstance(x, Weight):
            is_vector = not x.is_lost and len(x.all_axes) < 2
            kind = "elementwise" if is_vector else "unknown"
            reader.record(equation, x.parameter, kind, _FIRST_STATE)
    return activation(given, [x for x in tracked if not isinstance(x, Weight)])


def _peeled(reader: Reader, equation: Any, value: Value | None) -> Value | None:
    """What a loop is given at each step: a place of the first axis."""
    if value is None:
        return None
    for x in value.factors:
        if x.at([0]):
            reader.ask(equation, x, "times an activation, in the steps of a loop")

    def take(x):
        if isinstance(x, Weight):
            x = dataclasses.replace(x, stack=x.stack | x.at([0]))
        return x.moved(lambda dims: dims[1:])

    return dataclasses.replace(value, tracked=_values.unique(map(take, value.tracked)))
