"""Reads from the program of a loss which parameters are matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr

from curvadion_jax import _trees
from curvadion_jax.dimension_numbers import _axes, _partition, _verdict
from curvadion_jax.dimension_numbers._partition import DimensionNumbers, Partition
from curvadion_jax.dimension_numbers._primitives import HANDLERS
from curvadion_jax.dimension_numbers._reader import Reader
from curvadion_jax.dimension_numbers._uses import Use
from curvadion_jax.dimension_numbers._values import Value, Weight
from curvadion_jax.mesh import _rows


def from_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    answers: Mapping[str, DimensionNumbers | None] | None = None,
    **kwargs: Any,
) -> Partition:
    """Reads from a loss which of its parameters are matrices, and along which axes.

    The loss is traced once with `jax.make_jaxpr`, and nothing is computed. Each
    parameter is followed to the operations that use it; its name does not matter.

    A parameter that is multiplied with data is a matrix. The axes that the product sums
    over are its inputs, the others its outputs, heads included. Scanned layers and
    experts are stacks of matrices. The other optimizer trains embeddings, output heads,
    convolutions, vectors, and parameters that are only added or multiplied by elements.
    It also trains parameters that the program does not decide: a warning names them,
    and `answers` decides about them.

    Args:
      loss_fn: the training loss of one replica, called as ``loss_fn(params, *args,
        **kwargs)``. It returns a scalar, or a tuple that begins with one, as for
        `jax.value_and_grad` with ``has_aux=True``.
      params: the parameters that the optimizer trains, of one replica: any tree of
        arrays or `jax.ShapeDtypeStruct`.
      *args: other arguments of the loss, such as a batch of at least two examples.
        Arrays may be abstract, too; other objects are given to the loss as they are.
      answers: decisions that replace what is read: a dictionary from a parameter's
        path, or a part of paths such as ``'mlp/gate'``, to its dimension numbers, or to
        None for the other optimizer.
      **kwargs: for the loss, like `args`.

    Returns:
      A :class:`Partition`, for the optimizer's ``dimension_numbers=``. Printed, it
      lists the kind of each parameter, and the line of the program that decides it.

    Raises:
      ValueError: if `loss_fn` returns a gradient or new parameters, if no parameter
        reaches the loss, if parameters have a row for each replica, if the loss
        communicates over a mesh axis, or if an answer fits no parameter.
      TypeError: if `loss_fn` is no function, a parameter no array, or an answer no
        dimension numbers.

    Warns:
      PartitionWarning: if the program does not decide about some parameters.

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
    _check(loss_fn, params)
    named = _trees.leaves_with_path(params)
    shapes = [tuple(leaf.shape) for _, leaf in named]
    program, is_loss = _trace(loss_fn, params, args, kwargs)
    weights = [
        Value("weight", (Weight(_axes.of_parameter(shape), number),))
        for number, shape in enumerate(shapes)
    ]
    data = [Value("data")] * (len(program.invars) - len(weights))
    reader = Reader(program, HANDLERS)
    reader.end(reader.read(program, [*weights, *data], is_loss))
    uses: list[list[Use]] = [[] for _ in named]
    for use in reader.facts.uses:
        uses[use.parameter].append(use)
    if not any(uses):
        raise ValueError(
            "No parameter reaches the loss, the first result of loss_fn. Compute it "
            "from the first argument, and not from parameters that loss_fn holds."
        )
    findings = [
        _verdict.finding(path, shape, uses[number], reader.facts)
        for number, ((path, _), shape) in enumerate(zip(named, shapes, strict=True))
    ]
    findings = _partition.with_answers(findings, answers)
    _partition.warn(findings)
    return Partition(findings)


def _check(loss_fn: Any, params: Any) -> None:
    """Rejects what is no function, and parameters that are not those of one replica."""
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is of type {type(loss_fn).__name__}, and no function. Call "
            "from_loss(loss_fn, params, batch)."
        )
    _trees.check_arrays(params)
    if any(_rows.has_rows(leaf) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "The parameters have a row for each replica. Give from_loss those of one "
            "replica, as before replicas.replicate."
        )


def _trace(loss_fn, params, args, kwargs) -> tuple[Jaxpr, list[bool]]:
    """The loss's jaxpr, and which of its results are the loss.

    Its variables are the parameters, then all other arrays. After a scalar the further
    results of a tuple have no gradient.
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
        closed, results = jax.make_jaxpr(loss, return_shape=True)(leaves, arrays)
    except NameError as error:
        _, unbound, axis = str(error).partition("unbound axis name: ")
        if not unbound:
            raise
        raise ValueError(
            f"The loss communicates over a mesh axis, {axis.split('.')[0]!r}, that is "
            "not there. Give from_loss the loss without it, or map it: jax.vmap("
            "loss_fn, (None, 0), axis_name=...), with a batch that has one axis more."
        ) from error
    first = results[0] if isinstance(results, tuple) and results else results
    shapes = [x.shape for x in jax.tree.leaves(first)]
    is_scalar = all(shape == () for shape in shapes)
    if not is_scalar and shapes == [leaf.shape for leaf in leaves]:
        raise ValueError(
            "loss_fn returns arrays like the parameters. Give the loss, and not its "
            "gradient, nor a step of training."
        )
    number = len(jax.tree.leaves(results))
    is_tuple = isinstance(results, tuple) and is_scalar and len(shapes) == 1
    return closed.jaxpr, [not is_tuple or i == 0 for i in range(number)]
