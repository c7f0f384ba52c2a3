"""Products and convolutions: where parameters meet data, and become matrices."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import Dim, Dims
from curvadion_jax.dimension_numbers._reader import CONSTANT, Reader, unknown
from curvadion_jax.dimension_numbers._values import (
    Mixed,
    Output,
    Tracked,
    Value,
    Values,
    activation,
    is_data,
    is_weight,
)

_NUMBERS, _DATA = Value("constant"), Value("data")


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand of a product, and what happens to each of its axes.

    Attributes:
      value: what is known of it; `_NUMBERS` for a constant.
      shape: of the operand.
      summed, batch, kept, groups: its axes that the product sums over, that it pairs
        with axes of the other operand, that the result has as well, and that count the
        matrices of a ragged product.
      is_left: whether it is the first operand.
    """

    value: Value
    shape: tuple[int, ...]
    summed: tuple[int, ...]
    batch: tuple[int, ...]
    kept: tuple[int, ...]
    groups: tuple[int, ...]
    is_left: bool

    def moved(self, other: "_Side") -> Callable[[Dims], Dims]:
        """From this side's axes to the result's: batch, left's kept, right's kept."""

        def move(dims):
            beside = [_axes.repeated(other.shape[d]) for d in other.kept]
            own = [dims[d] for d in self.kept]
            return (
                *(dims[d] for d in self.batch),
                *(own + beside if self.is_left else beside + own),
            )

        return move


def dot_general(reader, equation, operands, needed):
    """A product. That of a parameter with data is a layer."""
    summed, batch = equation.params["dimension_numbers"]
    return [_product(reader, equation, operands, summed, batch)]


def ragged_dot(reader, equation, operands, needed):
    """A product of runs of vectors with one matrix each, as of experts."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    summed, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    if len(numbers.lhs_ragged_dimensions) != 1 or not groups:
        return unknown(reader, equation, operands, needed)
    return [_product(reader, equation, operands[:2], summed, batch, groups)]


def _product(
    reader: Reader,
    equation: Any,
    operands: Values,
    summed: Sequence[Sequence[int]],
    batch: Sequence[Sequence[int]],
    groups: Sequence[int] = (),
) -> Value:
    sides = []
    for i, value in enumerate(operands):
        shape = equation.invars[i].aval.shape
        grouped = tuple(groups) if i else ()
        gone = {*summed[i], *batch[i], *grouped}
        kept = tuple(d for d in range(len(shape)) if d not in gone)
        axes = tuple(summed[i]), tuple(batch[i]), kept, grouped
        sides.append(_Side(value or _NUMBERS, shape, *axes, is_left=not i))
    if all(map(is_weight, operands)):
        _learned_input(reader, equation, sides)
    left, right = sides
    matrix = next((side for side in sides if is_weight(side.value)), None)
    if matrix is None:
        return _product_of_activations(reader, equation, left, right)
    data = right if matrix is left else left
    if not is_data(data.value):
        # Of two parameters neither is known to be the input; nor is a constant.
        weights = [x for side in sides for x in side.value.weights]
        why = "a product of two parameters" if is_weight(data.value) else CONSTANT
        return Value("weight", _values.unique(x.lose(why) for x in weights))
    return _layer(reader, equation, matrix, data)


def _layer(reader: Reader, equation: Any, matrix: _Side, data: _Side) -> Value:
    """A product of parameters with data."""
    if not matrix.summed:
        return _outer(reader, equation, matrix, data)
    reader.follow(data.value.open)
    if data.value.is_indicator and _has_matrices(matrix):
        return _chosen(matrix, data)
    _tell_of_layer(reader, data, matrix)
    vectors = math.prod(data.shape[d] for d in (*data.kept, *data.batch))
    kind, why = "product", "a product"
    if data.value.is_indicator:
        kind, why = "lookup", "a product with one-hot vectors"
    elif data.value.is_indicator is None:
        kind, why = "unknown", "a product with what may be one-hot vectors"
    elif data.value.kind == "data":
        why = "a product with raw inputs"
    uses, outputs = set(), []
    for x in matrix.value.weights:
        if x.is_lost:
            reader.ask(equation, x, f"a product after {x.lost}")
            continue
        stack = x.stack | x.at(matrix.batch) | x.at(matrix.groups)
        sides = x.at(matrix.summed), x.at(matrix.kept), stack
        is_part = bool(x.stack) or x.is_cut
        use = reader.record(equation, x.parameter, kind, why, *sides, vectors, is_part)
        if use:
            uses.add(use)
            outputs.append(Output(matrix.moved(data)(x.dims), x.parameter, use))
    if not uses:  # All are lost, or this is a backward pass.
        uses = data.value.open
    return Value("activation", _values.unique(outputs), frozenset(uses))


def _outer(reader: Reader, equation: Any, matrix: _Side, data: _Side) -> Value:
    """A product that sums over nothing: a multiplication by elements."""
    tracked = [x.moved(data.moved(matrix)) for x in data.value.tracked]
    for x in matrix.value.weights:
        reader.meet(equation, x, "an outer product", math.prod(matrix.shape) == 1)
        if len(x.all_axes) > 1:  # A sum may follow.
            dims = matrix.moved(data)(x.dims)
            tracked.append(Mixed(dims, x.parameter, is_factor=True))
    result = activation([data.value], tracked)
    return _values.with_indicators(result, [data.value])


def _has_matrices(matrix: _Side) -> bool:
    """Whether one place of what is summed over has more than one axis."""
    return any(len(x.at(matrix.kept)) > 1 for x in matrix.value.weights)


def _chosen(matrix: _Side, data: _Side) -> Value:
    """Matrices that one-hot vectors choose from a stack, as a look-up does."""
    move = matrix.moved(data)
    chosen = (x.picked(matrix.summed).moved(move) for x in matrix.value.weights)
    return Value("weight", _values.unique(chosen))


def _product_of_activations(
    reader: Reader, equation: Any, left: _Side, right: _Side
) -> Value:
    """A product of what is made of data, such as queries and keys."""
    values, tracked = [left.value, right.value], []
    reader.follow_rows(values)
    for side, other in ((left, right), (right, left)):
        _tell_of_attention(reader, side, other)
        has_outputs = any(other.shape[d] > 1 for d in other.kept)
        if any(x.at(side.summed) for x in side.value.outputs):
            if other.value.open and not left.kept and not right.kept:
                # As a sum of squares, or what is expected of values by probabilities.
                reader.may_follow(side.value.open)
            elif other.value.open:  # x A (y B)^T: A and B come before one another
                reader.follow(_values.open_of(values))
            elif has_outputs and other.value == _DATA:  # a layer that is not trained
                reader.follow(side.value.open)
            elif has_outputs and other.value == _NUMBERS:
                reader.may_follow(side.value.open)
        if has_outputs:  # It may sum over outputs that are not tracked any more.
            tracked_uses = {x.use for x in side.value.outputs}
            reader.may_follow(side.value.open - tracked_uses)
        for x in side.value.tracked:
            if _is_matrix(x, side, other):
                reader.ask(equation, x, "a matrix that data have a part in")
            tracked.append(x.moved(side.moved(other)))
    known = [x for x in values if x != _NUMBERS]
    result = activation(known, [x for x in tracked if x.all_axes])
    is_numbers = left.summed or all(x.is_indicator is False for x in values)
    return dataclasses.replace(result, is_indicator=False if is_numbers else None)


def _is_matrix(x: Tracked, side: _Side, other: _Side) -> bool:
    """Whether an activation that is made of a parameter is a matrix in a product.

    As in ``(w + change) @ x``, and where data mix the matrices of experts. Queries are
    none: they have an axis of time in addition to their kernel's.
    """
    if isinstance(x, Output):
        is_alone = all(side.shape[d] == 1 or x.at([d]) for d in side.kept)
        is_product = any(other.shape[d] > 1 for d in other.kept)
        sides = [x.at(places) & x.use.outputs for places in (side.summed, side.kept)]
        return is_alone and is_product and all(sides) and sides[0] != sides[1]
    return isinstance(x, Mixed) and bool(x.at(side.summed) and x.at(side.kept))


def _learned_input(reader: Reader, equation: Any, sides: list[_Side]) -> None:
    """Makes one of two parameters the input of the other, where that is clear.

    If one alone is a vector, it is; or else if one alone is repeated, as latents are
    for each example of a batch.
    """

    def is_vector(side):
        return all(not x.is_lost and len(x.covered) < 2 for x in side.value.weights)

    def is_repeated(side):
        weights = side.value.weights
        return not any(x.is_lost for x in weights) and any(
            all(_axes.is_repeated(x.dims[d]) for x in weights)
            for d in range(len(side.shape))
        )

    for is_input in (is_vector, is_repeated):
        inputs = [i for i, side in enumerate(sides) if is_input(side)]
        if len(inputs) == 1:
            (i,) = inputs
            for x in sides[i].value.weights:
                reader.record(equation, x.parameter, "elementwise", "a learned input")
            sides[i] = dataclasses.replace(sides[i], value=Value("activation"))
            return


def _tell_of_layer(reader: Reader, data: _Side, matrix: _Side) -> None:
    """Notes what a layer tells of the output axes of the layer before it."""
    for x in data.value.outputs:
        for own, others in zip(data.batch, matrix.batch, strict=True):
            # Paired with an axis of the parameter: each expert has its own matrix. An
            # axis that is paired in part, and summed or kept in part, is no stack: it
            # was one side before it was split.
            if not any(w.is_lost for w in matrix.value.weights):
                is_stack = any(w.at([others]) for w in matrix.value.weights)
                is_stack &= not x.at([own]) & x.at({*data.summed, *data.kept})
                reader.tell(x, x.at([own]), "separate" if is_stack else "joined")
        summed = x.at(data.summed)
        if len(summed) > 1:  # The output projection of attention sums over heads.
            reader.tell(x, summed, "joined")
        elif all(data.shape[d] == 1 or x.dims[d] in _whole(x) for d in data.summed):
            reader.tell(x, summed, "alone")


def _tell_of_attention(reader: Reader, side: _Side, partner: _Side) -> None:
    """Notes what a product of activations tells of the output axes of layers."""
    for x in side.value.outputs:
        reader.tell(x, x.at(side.batch), "joined")  # Queries meet keys of their head.
        summed = x.at(side.summed)
        # (Shares of one-hot vectors, as in a loss that balances experts, choose none.)
        is_indicator = partner.value.is_indicator
        if is_indicator or (is_indicator is None and partner.kept):
            reader.tell(x, summed, "selected")
        # Queries are summed with several keys, experts' outputs with one gate.
        elif any(partner.shape[d] > 1 for d in partner.kept):
            reader.tell(x, summed, "joined")


def _whole(x: Output) -> list[Dim]:
    """The axes of a value that are one axis of the parameter and nothing else."""
    axes = [atom.axis for dim in x.dims for atom in dim]
    alone = [dim for dim in x.dims if len(dim) == 1 and dim[0].axis >= 0]
    return [dim for dim in alone if axes.count(dim[0].axis) == 1]


def convolution(reader, equation, operands, needed):
    """A convolution. A parameter is its kernel, or else is asked about."""
    data, kernel = operands
    if not is_weight(kernel) or is_weight(data):
        for x in kernel.outputs if is_data(kernel) else ():
            reader.ask(equation, x, "a kernel that data have a part in")
        if is_data(data) and is_data(kernel):  # a kernel that is not trained
            reader.follow(data.open)
        elif is_data(data):  # of numbers, as of an output head's loss
            reader.may_follow(data.open)
        return unknown(reader, equation, operands, needed)
    if data is None:
        lost = (x.lose(CONSTANT) for x in kernel.weights)
        return [Value("weight", _values.unique(lost))]
    reader.follow(data.open)
    out, into, *window = equation.params["dimension_numbers"].rhs_spec
    uses = set()
    for x in kernel.weights:
        if x.is_lost:
            reader.ask(equation, x, f"a convolution after {x.lost}")
            continue
        sides = x.at([into, *window]), x.at([out]), x.stack
        use = reader.record(equation, x.parameter, "convolution", "kernel", *sides)
        uses |= {use} - {None}
    return [Value("activation", (), frozenset(uses) or data.open)]
