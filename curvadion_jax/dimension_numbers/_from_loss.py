"""Reads from the program of a loss which parameters are matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from curvadion_jax import _trees

# What each primitive does is said in these.
from curvadion_jax.dimension_numbers import (
    _arithmetic,  # noqa: F401
    _axes,
    _control_flow,  # noqa: F401
    _moves,  # noqa: F401
    _partition,
    _products,  # noqa: F401
    _verdict,
)
from curvadion_jax.dimension_numbers._partition import DimensionNumbers, Partition
from curvadion_jax.dimension_numbers._reader import Reader
from curvadion_jax.dimension_numbers._values import Use, Value, Weight
from curvadion_jax.mesh import _rows


def from_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    answers: Mapping[str, DimensionNumbers | None] | None = None,
    **kwargs: Any,
) -> Partition:
    """Reads from a loss which of its parameters are matrices, and along which axes.

    The loss is traced once with `jax.make_jaxpr`, and every parameter is followed to
    the equations that use it; nothing is computed, and no name is looked at. A product
    with data makes a matrix: the axes that it sums over are its inputs, the others its
    outputs, heads included; scanned axes and experts count matrices. Embeddings, output
    heads, convolutions, vectors and what is only added or multiplied are left to the
    other optimizer. What the program does not tell is *asked about*: the other
    optimizer trains it, and a warning names it.

    Args:
      loss_fn: the training loss of one replica, called as ``loss_fn(params, *args,
        **kwargs)``. It returns a scalar, or a tuple that begins with one, as for
        `jax.value_and_grad` with ``has_aux=True``.
      params: any tree of arrays or `jax.ShapeDtypeStruct`, without rows: those that the
        optimizer trains.
      *args: such as a batch of two examples or more, as arrays or abstract values. What
        is no array is given to the loss as it is.
      answers: dimension numbers, or None for the other optimizer, by a parameter's path
        or a part of paths such as ``'mlp/gate'``. They replace what is read.
      **kwargs: for the loss, like `args`.

    Returns:
      A :class:`Partition`, to be passed as ``dimension_numbers=``. Print it to see what
      each parameter is, and the line that says so.

    Raises:
      ValueError: if `loss_fn` is a gradient, if no parameter reaches the loss, if
        parameters have rows, if the loss names a mesh axis that is not there, or if no
        parameter has the path of an answer.

    Warns:
      PartitionWarning: of the parameters that are asked about.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"table": jnp.ones((9, 4)), "up": jnp.ones((4, 8)),
      ...           "head": jnp.ones((8, 9))}
      >>> def loss_fn(params, tokens):
      ...     hidden = jnp.tanh(params["table"][tokens] @ params["up"])
      ...     return jnp.mean(hidden @ params["head"])
      >>> partition = from_loss(loss_fn, params, jnp.zeros((2, 3), int))
      >>> [(each.path, each.kind) for each in partition.findings]
      [('head', 'head'), ('table', 'table'), ('up', 'matrix')]
      >>> partition(params)["up"]
      MuonDimensionNumbers(reduction_axis=0, output_axis=1)
    """
    named = _trees.leaves_with_path(params)
    if any(_rows.has_rows(leaf) for _, leaf in named):
        raise ValueError(
            "The parameters have a row for each replica. Give from_loss those of one "
            "replica, as before replicas.replicate."
        )
    program, given, is_loss = _trace(loss_fn, params, args, kwargs)
    reader = Reader(program)
    shapes = [tuple(leaf.shape) for _, leaf in named]
    inputs = [
        Value("weight", (Weight(_axes.of_parameter(shape), number),))
        for number, shape in enumerate(shapes)
    ]
    inputs += [Value("data")] * given
    reader.end(reader.read(program, inputs, is_loss))
    uses: list[list[Use]] = [[] for _ in named]
    for use in reader.facts.uses:
        uses[use.parameter].append(use)
    if not any(uses):
        raise ValueError(
            "No parameter reaches the loss. loss_fn must compute it from its first "
            "argument, and not from parameters that it holds."
        )
    findings = [
        _verdict.finding(path, shape, uses[number], reader.facts)
        for number, ((path, _), shape) in enumerate(zip(named, shapes, strict=True))
    ]
    findings = _partition.with_answers(findings, answers)
    _partition.warn(findings)
    return Partition(findings)


def _trace(loss_fn, params, args, kwargs) -> tuple[Any, int, list[bool]]:
    """The loss's jaxpr, how many arrays it has besides parameters, and its results.

    Of a tuple that begins with a scalar the rest does not matter: it has no gradient.
    """
    leaves, tree = jax.tree.flatten(params)
    others, rest = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in others]

    def loss(leaves, arrays):
        arrays = iter(arrays)
        filled = [
            next(arrays) if is_one else x
            for is_one, x in zip(is_array, others, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(rest, filled)
        return loss_fn(jax.tree.unflatten(tree, leaves), *args, **kwargs)

    arrays = [x for is_one, x in zip(is_array, others, strict=True) if is_one]
    try:
        closed, shapes = jax.make_jaxpr(loss, return_shape=True)(leaves, arrays)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            f"The loss communicates over a mesh axis that is not there: {error}. Give "
            "from_loss the loss without it, or map it: jax.vmap(loss_fn, (None, 0), "
            "axis_name=...), with a batch that has one axis more."
        ) from error
    results = jax.tree.leaves(shapes)
    if len(leaves) > 1 and jax.tree.structure(shapes) == tree:
        raise ValueError(
            "loss_fn returns a tree like the parameters. Give the loss, and not its "
            "gradient."
        )
    is_tuple = isinstance(shapes, tuple) and results and results[0].shape == ()
    is_loss = [not is_tuple or i == 0 for i in range(len(results))]
    return closed.jaxpr, len(arrays), is_loss
