"""Reads a program and notes what it does with its parameters.

What a primitive does to its operands is said by a *handler*. Some move a parameter's
axes, some use it. What has no handler is unknown, and so is what it did: a parameter
that went through it is asked about. Nothing goes by names.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from curvadion_jax.dimension_numbers import _values
from curvadion_jax.dimension_numbers._axes import Axes, Dims
from curvadion_jax.dimension_numbers._values import (
    NONE,
    Output,
    Tracked,
    Use,
    Value,
    Weight,
    is_data,
)

Values = Sequence[Value | None]
"""Of the operands or results of an equation. None is a constant."""
Handler = Callable[["Reader", Any, Values, Sequence[bool]], Values]
"""Of a reader, an equation, its operands and which results matter: its results."""

HANDLERS: dict[str, Handler] = {}

CONSTANT = "a product with a constant"
_OWN = [os.path.dirname(__file__), "/jax/_src/", "<"]
# Programs of these libraries are not where a user looks for a parameter's product.
_LIBRARIES = [
    f"site-packages/{x}/" for x in ("jax", "flax", "haiku", "equinox", "optax")
]


def handles(*primitives: str) -> Callable[[Handler], Handler]:
    """Makes a function the handler of these primitives."""

    def register(handler: Handler) -> Handler:
        for name in primitives:
            HANDLERS[name] = handler
        return handler

    return register


@dataclasses.dataclass
class Facts:
    """What has been found so far.

    Attributes:
      uses: of all parameters, in their order.
      followed: products before another product, on some way to the loss.
      perhaps: products before what may be one.
      told: what later equations say of an output axis of a product.
    """

    uses: dict[Use, None] = dataclasses.field(default_factory=dict)
    followed: set[Use] = dataclasses.field(default_factory=set)
    perhaps: set[Use] = dataclasses.field(default_factory=set)
    told: dict[tuple[Use, int], frozenset[str]] = dataclasses.field(
        default_factory=dict
    )

    def copy(self) -> "Facts":
        several = set(self.followed), set(self.perhaps)
        return Facts(dict(self.uses), *several, dict(self.told))


class Reader:
    """Reads programs, and collects `facts`."""

    def __init__(self, program: Any):
        self.facts = Facts()
        # The backward pass of a gradient within the loss multiplies with every matrix
        # once more, turned over. It also leaves values of the forward pass without a
        # use, so that in such a program all equations are read.
        self._has_backward = _has_backward(program)
        self._is_backward = False
        # Constants that are one number everywhere, by their identities.
        self._numbers: set[int] = set()

    def read(
        self, program: Any, inputs: Values, is_needed: Sequence[bool]
    ) -> list[Value | None]:
        """Reads a jaxpr of these inputs, and returns its outputs."""
        known = {
            variable: value
            for variable, value in zip(program.invars, inputs, strict=True)
            if value is not None
        }
        of = lambda atom: None if isinstance(atom, Literal) else known.get(atom)
        for equation, needed in self._live(program, is_needed):
            values = [of(atom) for atom in equation.invars]
            results = self._equation(equation, values, needed)
            for variable, value in zip(equation.outvars, results, strict=True):
                if value is not None:
                    known[variable] = value
        return [of(atom) for atom in program.outvars]

    def _live(self, program: Any, is_needed: Sequence[bool]):
        """The equations before the needed outputs, and which of their results are."""
        outputs = zip(program.outvars, is_needed, strict=True)
        needed = {x for x, n in outputs if n and not isinstance(x, Literal)}
        live = []
        for equation in reversed(program.eqns):
            which = [variable in needed for variable in equation.outvars]
            if any(which) or self._has_backward:
                live.append((equation, which))
                needed |= {x for x in equation.invars if not isinstance(x, Literal)}
        return reversed(live)

    def _equation(
        self, equation: Any, values: Values, needed: Sequence[bool]
    ) -> Values:
        if not any(values):
            is_broadcast = equation.primitive.name == "broadcast_in_dim"
            if is_broadcast and not equation.invars[0].aval.shape:
                self._numbers.update(map(id, equation.outvars))
            return [None] * len(equation.outvars)
        outside = self._is_backward
        self._is_backward = outside or _is_backward(equation)
        handler = HANDLERS.get(equation.primitive.name, unknown)
        results = handler(self, equation, values, needed)
        self._is_backward = outside
        return results

    def shape_of(self, atom: Any) -> tuple[int, ...]:
        """The shape of an operand; none of a number, also where it is broadcast."""
        return () if id(atom) in self._numbers else atom.aval.shape

    def record(
        self,
        equation: Any,
        parameter: int,
        kind: str,
        why: str,
        inputs: Axes = NONE,
        outputs: Axes = NONE,
        stack: Axes = NONE,
        vectors: int = 0,
        is_part: bool = False,
    ) -> Use | None:
        """Notes a use of a parameter; none of a backward pass."""
        if self._is_backward:
            return None
        sides = inputs, outputs, stack
        where = _where(equation)
        use = Use(id(equation), parameter, kind, *sides, vectors, is_part, why, where)
        self.facts.uses[use] = None
        return use

    def ask(self, equation: Any, x: Tracked, why: str) -> Use | None:
        """Notes a use that nobody understands."""
        stack = x.stack if isinstance(x, Weight) else NONE
        return self.record(equation, x.parameter, "unknown", why, stack=stack)

    def meet(self, equation: Any, x: Weight, why: str, is_number: bool = False) -> None:
        """Notes that data meet a parameter, or a number made of it, by elements."""
        if not x.is_lost:
            kind = "elementwise"
        elif is_number:
            kind = "number"
        else:
            kind = "constant" if x.lost == CONSTANT else "unknown"
            why = f"{why} after {x.lost}"
        self.record(equation, x.parameter, kind, why, stack=x.stack)

    def end(self, losses: Values) -> None:
        """Notes the parameters that are in the loss without any data."""
        for value in losses:
            for x in value.weights if value else ():
                why = "only in the loss itself, as in a penalty"
                sides = NONE, NONE, x.stack
                use = Use(0, x.parameter, "number", *sides, 0, False, why, "")
                self.facts.uses[use] = None

    def follow(self, products: frozenset[Use]) -> None:
        """Notes that another product comes after these."""
        if not self._is_backward:
            self.facts.followed |= products

    def follow_rows(self, values: Values) -> None:
        """Notes that products meet rows of a table, which are parameters too."""
        opened = _values.open_of(values)
        kinds = {use.kind for use in opened}
        if "lookup" in kinds:
            self.follow(opened)
        elif "unknown" in kinds:
            self.may_follow(opened)

    def may_follow(self, products: frozenset[Use]) -> None:
        """Notes that what comes after these may be a product."""
        if not self._is_backward:
            self.facts.perhaps |= products

    def tell(self, output: Output, axes: Axes, what: str) -> None:
        """Notes what an equation says of output axes of a product.

        They are ``'joined'`` with the other ones to one side of a matrix, as heads are,
        ``'separate'`` matrices, as experts are, ``'selected'`` from as a table is, or
        summed ``'alone'`` by the next parameter.
        """
        for axis in axes:
            key = output.use, axis
            self.facts.told[key] = self.facts.told.get(key, frozenset()) | {what}

    def select(self, value: Value, places: Sequence[int]) -> None:
        """Notes that no parameter says which places of these axes are taken."""
        for x in value.outputs:
            self.tell(x, x.at(places), "selected")


def unknown(
    reader: Reader, equation: Any, values: Values, needed: Sequence[bool]
) -> Values:
    """Reads any other primitive: what it does to a parameter is not known."""
    name = equation.primitive.name
    weights = [x for value in values if value for x in value.weights]
    if not any(map(is_data, values)):
        result = Value("weight", _values.unique(x.lose(name) for x in weights))
        return [result] * len(equation.outvars)
    asked = {use for x in weights if (use := reader.ask(equation, x, f"enters {name}"))}
    for value in values:
        for x in value.factors if value else ():
            reader.ask(equation, x, f"enters {name} after a product with an activation")
    if weights:
        reader.may_follow(_values.open_of(values))
    result = activation(values)
    result = dataclasses.replace(result, open=result.open | asked)
    # What is made of whole numbers and one-hot vectors alone may be one-hot vectors.
    may_be = not any(
        value and value.is_indicator is False and _is_float(variable)
        for value, variable in zip(values, equation.invars, strict=True)
    )
    maybe = dataclasses.replace(result, is_indicator=None)
    return [maybe if may_be or not _is_float(v) else result for v in equation.outvars]


def look_up(
    reader: Reader,
    equation: Any,
    value: Value,
    move: Callable[[Dims], Dims],
    picked: Sequence[int],
    by_data: bool,
) -> Value:
    """What is taken from parameters at some places of the axes `picked`."""
    if lost := [x for x in value.weights if x.is_lost]:
        for x in lost:
            reader.ask(equation, x, f"a look-up after {x.lost}")
        return Value("activation")
    found = [
        dataclasses.replace(x.moved(move), stack=x.stack | x.at(picked))
        for x in value.weights
    ]
    if not picked or any(len(x.all_axes) > 1 for x in found):
        return Value("weight", tuple(found))  # matrices of a stack, and not rows
    kind, why = "lookup" if by_data else "constant lookup", "rows are looked up"
    uses = [reader.record(equation, x.parameter, kind, why) for x in found]
    return Value("activation", open=frozenset(use for use in uses if use))


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def activation(values: Values, tracked: Iterable[Tracked] = ()) -> Value:
    """The result of an equation that has data among its operands."""
    kinds = {value.kind for value in values if value}
    kind = "data" if kinds == {"data"} else "activation"
    return Value(kind, _values.unique(tracked), _values.open_of(values))


def _is_backward(equation: Any) -> bool:
    """Whether it belongs to a backward pass, which JAX writes into its name."""
    return "transpose(" in str(equation.source_info.name_stack)


def _has_backward(program: Any) -> bool:
    return any(
        _is_backward(equation) or any(map(_has_backward, _inner(equation)))
        for equation in program.eqns
    )


def _inner(equation: Any) -> list[Any]:
    """The programs among the parameters of an equation."""
    given = equation.params.values()
    several = [x for p in given for x in (p if isinstance(p, tuple | list) else [p])]
    programs = [getattr(x, "jaxpr", x) for x in several]
    return [x for x in programs if hasattr(x, "eqns")]


def _where(equation: Any) -> str:
    """The line of the program, of the user's if there is one, such as 'model.py:63'."""
    traceback = equation.source_info.traceback
    frames = list(traceback.frames) if traceback else []
    is_of = lambda frame, libraries: any(x in frame.file_name for x in libraries)
    frames = [x for x in frames if not is_of(x, _OWN)]
    for frame in [x for x in frames if not is_of(x, _LIBRARIES)] or frames:
        return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""
