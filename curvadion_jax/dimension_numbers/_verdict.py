"""Judges a parameter by its uses: is it a matrix, a table, a head, ...?"""

import math
from collections.abc import Sequence

from curvadion_jax.dimension_numbers._axes import NONE, Axes
from curvadion_jax.dimension_numbers._partition import (
    DimensionNumbers,
    Finding,
    axes_of,
)
from curvadion_jax.dimension_numbers._uses import Facts, Use

Verdict = tuple[str, DimensionNumbers | None, str]
"""The kind of a finding, its dimension numbers, and why."""


def finding(path: str, shape: Sequence[int], uses: list[Use], facts: Facts) -> Finding:
    """What a parameter is.

    Args:
      path: of the parameter.
      shape: of the parameter.
      uses: of the parameter, in the order of the program.
      facts: what is known of the products among them.
    """
    return Finding(path, tuple(shape), *_judge(tuple(shape), uses, facts))


def _judge(shape: tuple[int, ...], uses: list[Use], facts: Facts) -> Verdict:
    long = frozenset(axis for axis, n in enumerate(shape) if n > 1)
    # The backward pass of a gradient says no more than the forward pass before it.
    uses = [use for use in uses if use.kind != "backward"] or uses
    if not uses:
        return "unused", None, "never reaches the loss"
    if both := [use for use in uses if use.inputs & use.outputs & long]:
        return "asked", None, f"an axis holds both sides of a matrix: {_said(both[0])}"
    # Vectors, also of a stack.
    if all(len(long - (use.stack - use.inputs - use.outputs)) < 2 for use in uses):
        return "vector", None, _said(uses[0])
    kinds = {use.kind for use in uses}
    if "lookup" in kinds:
        if kinds <= {"lookup", "constant lookup", "elementwise"}:
            return "table", None, _said(_first(uses, "lookup"))
        rest = [use for use in uses if use.kind != "lookup"]
        return "tied", None, f"rows are looked up; {_said(rest[0])}"
    # Two kinds decide only if there is no other: a product with a constant, such as the
    # zeros that a recurrence starts from, and a number, such as a norm or a penalty.
    if kinds - {"constant", "number"}:
        kinds -= {"constant", "number"}
    if doubtful := kinds & {"unknown", "backward", "number", "constant"}:
        return "asked", None, _said(_first(uses, *doubtful))
    if kinds == {"product"}:
        return _judge_products(shape, long, uses, facts)
    if kinds == {"convolution"}:
        return "convolution", None, _said(_first(uses, "convolution"))
    if kinds == {"elementwise"}:
        return "elementwise", None, f"no product: {_said(_first(uses, 'elementwise'))}"
    if kinds <= {"elementwise", "constant lookup"}:
        return "table", None, _said(_first(uses, "constant lookup"))
    several = "; ".join(_said(_first(uses, kind)) for kind in sorted(kinds))
    return "asked", None, f"several uses: {several}"


def _judge_products(
    shape: tuple[int, ...], long: Axes, uses: list[Use], facts: Facts
) -> Verdict:
    """A head if no product follows; else a matrix, if all products agree."""
    products = [use for use in uses if use.kind == "product"]
    # A power iteration, as of spectral norms, multiplies one vector from either side.
    products = [use for use in products if use.vectors > 1] or products
    if facts.followed.isdisjoint(products):
        if facts.maybe_followed.isdisjoint(products):
            return "head", None, f"no product follows {_said(products[0])}"
        return "asked", None, f"an output head, or not: {_said(products[0])}"
    size = lambda axes: math.prod(shape[axis] for axis in axes)
    sides: dict[tuple[Axes, Axes], Use] = {}
    for use in products:
        stack = _stack_among_outputs(use, facts)
        if stack is None:
            axes = ", ".join(map(str, sorted(use.outputs)))
            why = f"whether axes {axes} are one side, as heads, or a stack, as experts"
            return "asked", None, f"{why}: {_said(use)}"
        inputs, outputs = use.inputs & long, (use.outputs - stack) & long
        if any("selected" in facts.told.get((use, axis), NONE) for axis in outputs):
            return "asked", None, f"rows of its outputs are looked up: {_said(use)}"
        if (inputs & outputs) or (use.stack | stack) & (inputs | outputs):
            return "asked", None, f"an axis is on both sides: {_said(use)}"
        if size(inputs) > 1 and size(outputs) > 1:
            sides.setdefault((inputs, outputs), use)
    if not sides:
        return "vector", None, f"no inputs or no outputs: {_said(products[0])}"
    # Of both directions the first one counts, as of an autoencoder with tied weights.
    (inputs, outputs), use = next(iter(sides.items()))
    if any({*other} != {inputs, outputs} for other in sides):
        return "asked", None, f"products along several axes: {_said(use)}"
    if len(sides) > 1 and any(use.is_part for use in products):
        return "asked", None, f"parts of it are transposed: {_said(use)}"
    numbers = DimensionNumbers(axes_of(inputs), axes_of(outputs))
    both = ", also transposed" if len(sides) > 1 else ""
    return "matrix", numbers, _said(use) + both


def _stack_among_outputs(use: Use, facts: Facts) -> Axes | None:
    """The output axes of a product that count its matrices; None if nothing tells.

    Heads, [D, heads, size], are outputs of one matrix. Experts, [experts, D, F], have a
    matrix each. The product itself is the same; later equations tell them apart.
    """
    if len(use.outputs) < 2:
        return NONE
    told = {axis: facts.told.get((use, axis), NONE) for axis in use.outputs}
    stack = frozenset(
        axis
        for axis, words in told.items()
        if "separate" in words and "joined" not in words
    )
    rest = use.outputs - stack
    if not rest:  # Nothing would be left of the matrices but columns.
        return None
    joined = {axis for axis in rest if "joined" in told[axis]}
    # If data sum over one output axis, and the next parameter over another one alone,
    # the first may be an input, as in tensor products.
    is_alone = any("alone" in told[axis] for axis in rest - joined)
    return stack if len(rest) < 2 or (joined and not is_alone) else None


def _first(uses: list[Use], *kinds: str) -> Use:
    return next(use for use in uses if use.kind in kinds)


def _said(use: Use) -> str:
    return f"{use.why} at {use.where}" if use.where else use.why
