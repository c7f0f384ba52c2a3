"""Calls, branches and loops: programs within programs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import BESIDE, Atom
from curvadion_jax.dimension_numbers._reader import Reader, unknown
from curvadion_jax.dimension_numbers._values import (
    Value,
    Values,
    Weight,
    activation,
    is_data,
)

_PROGRAMS = "jaxpr", "call_jaxpr", "fun_jaxpr", "call"
_FIRST_STATE = "is the first state of a loop, or of one branch"


def call(reader, equation, operands, needed):
    """Reads what `jit`, `remat`, custom derivatives and `shard_map` call."""
    given = [equation.params.get(key) for key in _PROGRAMS]
    programs = [getattr(x, "jaxpr", x) for x in given if x is not None]
    if not programs or len(programs[0].invars) != len(operands):
        return unknown(reader, equation, operands, needed)
    # Axes that a shard_map divides are shorter inside of it.
    inner = _resized(operands, equation.invars, programs[0].invars)
    results = reader.read(programs[0], inner, needed)
    return _resized(results, programs[0].outvars, equation.outvars)


def _resized(values: Values, old: Sequence[Any], new: Sequence[Any]) -> Values:
    """Values of variables, as values of others that may be divided among devices."""

    def resize(value, old, new):
        shapes = old.aval.shape, new.aval.shape
        if value is None or shapes[0] == shapes[1]:
            return value
        return value.moved(lambda dims: _axes.resized(dims, *shapes))

    return list(map(resize, values, old, new))


def cond(reader, equation, operands, needed):
    """Reads every branch; a result is one of theirs."""
    branches = equation.params["branches"]
    every = [reader.read(branch.jaxpr, operands[1:], needed) for branch in branches]
    return [_either(reader, equation, each) for each in zip(*every, strict=True)]


def scan(reader, equation, operands, needed):
    """Reads the body, to which a scanned axis is a stack."""
    body = equation.params["jaxpr"].jaxpr
    # JAX 0.10 and 0.12 name the numbers of constants and carried values differently.
    # Their ranks tell: what is scanned has one axis more outside than inside.
    rank = lambda variable: len(variable.aval.shape)
    same = lambda pair: rank(pair[0]) == rank(pair[1])
    carries = sum(map(same, zip(equation.outvars, body.outvars, strict=True)))
    fixed = sum(map(same, zip(equation.invars, body.invars, strict=True))) - carries
    constants, carry = operands[:fixed], operands[fixed : fixed + carries]
    scanned = [_one_place(reader, equation, x) for x in operands[fixed + carries :]]
    wanted = [True] * carries + [*needed[carries:]]
    read_body = lambda carry: reader.read(body, [*constants, *carry, *scanned], wanted)
    carry, stacked = _repeat(reader, equation, read_body, carry)
    beside = lambda dims: ((Atom(BESIDE, None),), *dims)
    return [*carry, *(x and x.moved(beside) for x in stacked)]


def while_loop(reader, equation, operands, needed):
    """Reads the body; the condition has no gradient."""
    tested, fixed = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    constants, carry = operands[tested:][:fixed], operands[tested + fixed :]
    body = equation.params["body_jaxpr"].jaxpr
    wanted = [True] * len(carry)
    read_body = lambda carry: reader.read(body, [*constants, *carry], wanted)
    return _repeat(reader, equation, read_body, carry)[0]


def _repeat(reader: Reader, equation: Any, read_body: Callable, carry: Values):
    """Reads the body of a loop until the carried values do not change any more.

    What is noted before the last reading does not count, but for first states: the
    later readings do not see these. It ends, because a value only gains what it may
    have been, and there are finitely many uses and axes.
    """
    first, carry = reader.facts, list(carry)
    while True:
        reader.facts = first.copy()
        results = read_body(carry)
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
    if not given:
        return None
    if len(given) == 1 and (None not in several or is_data(given[0])):
        return given[0]
    if not is_loop and not any(map(is_data, given)):
        return Value("weight", _values.merged(_values.weights_of(given)))
    # A parameter here and data there: only a vector cannot be a matrix.
    for x in _values.unique(_values.weights_of(given)):
        is_vector = not x.is_lost and len(x.all_axes) < 2
        kind = "elementwise" if is_vector else "unknown"
        reader.record(equation, x.parameter, kind, _FIRST_STATE)
    tracked = (x for value in given for x in value.tracked)
    kept = [x for x in tracked if not isinstance(x, Weight)]
    return _values.with_indicators(activation(given, kept), given)


def _one_place(reader: Reader, equation: Any, value: Value | None) -> Value | None:
    """What each step of a loop is given: one place of the first axis."""
    if value is None:
        return None
    for x in value.factors:
        if x.at([0]):
            reader.ask(equation, x, "times an activation, in the steps of a loop")

    def take(x):
        if isinstance(x, Weight):
            x = x.picked([0])
        return x.moved(lambda dims: dims[1:])

    return dataclasses.replace(value, tracked=_values.unique(map(take, value.tracked)))
