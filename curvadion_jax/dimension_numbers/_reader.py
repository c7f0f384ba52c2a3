"""Reads a program and notes what it does with its parameters.

What a primitive does is said by its *handler*: a function that is given an equation and
what is known of its operands, and returns what is then known of its results. Some
handlers move a parameter's axes, others note a use of it. A primitive without a handler
is unknown: a parameter that goes through it is asked about. Names are never looked at.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from curvadion_jax.dimension_numbers import _backward, _values
from curvadion_jax.dimension_numbers._axes import NONE, Axes
from curvadion_jax.dimension_numbers._uses import Facts, Use
from curvadion_jax.dimension_numbers._values import (
    Output,
    Tracked,
    Value,
    Values,
    Weight,
    activation,
    is_data,
)
from curvadion_jax.dimension_numbers._where import where

Handler = Callable[["Reader", Any, Values, Sequence[bool]], Values]
"""From the reader, an equation (a `jax.extend.core.JaxprEqn`), its operands, and which
of its results the loss needs, to its results."""

CONSTANT = "a product with a constant"


class Reader:
    """Reads one program, and collects what it finds in `facts`.

    Args:
      program: the jaxpr of the loss.
      handlers: by the name of the primitive.
    """

    def __init__(self, program: Jaxpr, handlers: Mapping[str, Handler]):
        self.facts = Facts()
        self._handlers = handlers
        self._is_marked = _backward.is_marked_by_jax()
        # A gradient within the loss leaves values of the forward pass without a use, so
        # that every equation of such a program is read.
        self._reads_all = _backward.has_backward(program) or not self._is_marked
        # Constants that are one number everywhere, such as zeros, by their `id`.
        self._numbers: set[int] = set()
        # The equation that is read, after the calls and loops that it is within.
        self._path: list[Any] = []

    def read(
        self, program: Jaxpr, inputs: Values, needed: Sequence[bool]
    ) -> list[Value | None]:
        """Reads a jaxpr, and returns its outputs.

        Args:
          program: of the loss, or of an equation that calls another program.
          inputs: one for each of its variables.
          needed: for each output whether the loss needs it.
        """
        known = dict(zip(program.invars, inputs, strict=True))
        of = lambda atom: None if isinstance(atom, Literal) else known.get(atom)
        for equation, of_results in self._live(program, needed):
            operands = [of(atom) for atom in equation.invars]
            results = self._read_equation(equation, operands, of_results)
            known.update(zip(equation.outvars, results, strict=True))
        return [of(atom) for atom in program.outvars]

    def _live(
        self, program: Jaxpr, needed: Sequence[bool]
    ) -> Iterator[tuple[Any, list[bool]]]:
        """The equations that needed outputs depend on, and which results these use."""
        outputs = zip(program.outvars, needed, strict=True)
        used = {x for x, is_used in outputs if is_used and not isinstance(x, Literal)}
        live = []
        for equation in reversed(program.eqns):
            of_results = [variable in used for variable in equation.outvars]
            if any(of_results) or self._reads_all:
                live.append((equation, of_results))
                used |= {x for x in equation.invars if not isinstance(x, Literal)}
        return reversed(live)

    def _read_equation(
        self, equation: Any, operands: Values, needed: Sequence[bool]
    ) -> Values:
        if not any(operands):
            is_broadcast = equation.primitive.name == "broadcast_in_dim"
            if is_broadcast and not equation.invars[0].aval.shape:
                self._numbers.update(map(id, equation.outvars))
            return [None] * len(equation.outvars)
        handler = self._handlers.get(equation.primitive.name, unknown)
        self._path.append(equation)
        results = handler(self, equation, operands, needed)
        if not self._has_own_derivative:
            results = list(map(_without_gradient, results, equation.outvars))
        self._path.pop()
        return results

    def shape_of(self, atom: Any) -> tuple[int, ...]:
        """The shape of an operand. That of one number is () wherever it is repeated."""
        return () if id(atom) in self._numbers else atom.aval.shape

    @property
    def _is_backward(self) -> bool:
        return any(map(_backward.is_backward, self._path))

    @property
    def _has_own_derivative(self) -> bool:
        """Whether the user gives a derivative, which may pass through whole numbers."""
        return any(x.primitive.name.startswith("custom_") for x in self._path)

    # What handlers note

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
        """Notes a use, with the fields of `Use`; None if it is of a backward pass."""
        is_backward = self._is_backward
        if is_backward:
            kind, why = "backward", f"{why}, in the backward pass of a gradient"
        elif kind in ("product", "convolution") and not self._is_marked:
            kind, why = "unknown", f"{why}, perhaps in the backward pass of a gradient"
        sides, line = (inputs, outputs, stack), where(self._path)
        use = Use(id(equation), parameter, kind, *sides, vectors, is_part, why, line)
        self.facts.uses[use] = None
        return None if is_backward else use

    def ask(self, equation: Any, x: Tracked, why: str) -> Use | None:
        """Notes a use that is not understood."""
        stack = x.stack if isinstance(x, Weight) else NONE
        return self.record(equation, x.parameter, "unknown", why, stack=stack)

    def meet(self, equation: Any, x: Weight, why: str, is_number: bool = False) -> None:
        """Notes that a parameter, or a number made of it, is joined to data."""
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
        why = "meets no data, as in a penalty, or with a batch that is no argument"
        for x in _values.weights_of(losses):
            sides = NONE, NONE, x.stack
            use = Use(0, x.parameter, "number", *sides, 0, False, why, "")
            self.facts.uses[use] = None

    def follow(self, products: frozenset[Use]) -> None:
        """Notes that another product comes after these."""
        if not self._is_backward:
            self.facts.followed |= products

    def may_follow(self, products: frozenset[Use]) -> None:
        """Notes that what comes after these may be a product."""
        if not self._is_backward:
            self.facts.maybe_followed |= products

    def follow_rows(self, values: Values) -> None:
        """Notes a product of activations, if rows of a table are in one of them.

        The rows are parameters, so a product with them follows the other activations;
        but a square, or the rest of one, is no product with what is in both.
        """
        for i, value in enumerate(values):
            own = _values.open_of([value])
            others = [other for j, other in enumerate(values) if j != i]
            kinds = {use.kind for use in _values.open_of(others) - own}
            if "lookup" in kinds:
                self.follow(own)
            elif "unknown" in kinds:
                self.may_follow(own)

    def tell(self, output: Output, axes: Axes, what: str) -> None:
        """Notes what an equation tells of some output axes of an earlier product.

        Args:
          output: of the product.
          axes: of its parameter.
          what: ``'joined'`` if they form one side of a matrix with its other outputs,
            as heads do; ``'separate'`` if they count matrices, as experts do;
            ``'selected'`` if single places are chosen, as rows of a table are;
            ``'alone'`` if the next parameter sums over them and over nothing else.
        """
        for axis in axes:
            key = output.use, axis
            self.facts.told[key] = self.facts.told.get(key, frozenset()) | {what}

    def select(self, value: Value, places: Sequence[int]) -> None:
        """Notes that single places of these axes of a value are chosen."""
        for x in value.outputs:
            self.tell(x, x.at(places), "selected")


def unknown(
    reader: Reader, equation: Any, operands: Values, needed: Sequence[bool]
) -> Values:
    """The handler of all other primitives, which asks about the parameters in them."""
    name = equation.primitive.name
    weights = _values.weights_of(operands)
    if not any(map(is_data, operands)):
        lost = _values.unique(x.lose(name) for x in weights)
        return [Value("weight", lost)] * len(equation.outvars)
    asked = {use for x in weights if (use := reader.ask(equation, x, f"enters {name}"))}
    for operand in operands:
        for x in operand.factors if operand else ():
            reader.ask(equation, x, f"enters {name} after a product with an activation")
    if weights:
        reader.may_follow(_values.open_of(operands))
    result = activation(operands)
    result = dataclasses.replace(result, open=result.open | asked)
    # What is made of whole numbers and one-hot vectors alone may be one-hot vectors.
    may_be = not any(
        x and x.is_indicator is False and _is_float(variable)
        for x, variable in zip(operands, equation.invars, strict=True)
    )
    maybe = dataclasses.replace(result, is_indicator=None)
    return [maybe if may_be or not _is_float(v) else result for v in equation.outvars]


def _without_gradient(value: Value | None, variable: Any) -> Value | None:
    """The value of a variable. A product follows no other through whole numbers.

    So a head whose drawn choices are inputs of the next step stays a head.
    """
    if value is None or _is_float(variable):
        return value
    return dataclasses.replace(value, open=frozenset())


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)
