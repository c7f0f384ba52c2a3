"""Matrices of one shape share their products, and differ in nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dion_runs import close, normal, random_state, run, zeros
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvadion_jax as cd

RANK = 2
# Two of one shape, one that is a stack of two already, and one by itself.
SHAPES = {"first": (5, 9), "other": (9, 5), "second": (5, 9), "stack": (2, 5, 9)}
NUMBERS = dict.fromkeys(SHAPES, cd.DimensionNumbers(-2, -1))
Q_SHAPES = {name: (*shape[:-2], 5, RANK) for name, shape in SHAPES.items()}
# Both in float64 in three steps, sums in another order: measured 2e-15.
FLOAT64_ATOL = 1e-13


def dion(names):
    numbers = {name: NUMBERS[name] for name in names}
    return cd.scale_by_dion(RANK, dimension_numbers=numbers)


def only(tree, name):
    return jax.tree.map(
        lambda x: {name: x[name]}, tree, is_leaf=lambda x: isinstance(x, dict)
    )


def layers(number, **placed) -> Any:
    shapes = {"query": (8, 8), "key": (8, 8), "up": (8, 16), "down": (16, 8)}
    return {
        f"layer_{index}": {
            f"{name}/kernel": jax.ShapeDtypeStruct(shape, jnp.float32, **placed)
            for name, shape in shapes.items()
        }
        for index in range(number)
    }


def products(params):
    """How many there are in the program of a step."""
    tx = cd.dion(0.01)
    state = jax.eval_shape(tx.init, params)
    text = jax.jit(tx.update).lower(params, state, params).as_text()
    return text.count("stablehlo.dot_general")


def test_products_do_not_grow_with_the_layers():
    few = products(layers(2))
    # B Q, B^T P and two outer products for each of three shapes.
    assert products(layers(1)) == few == products(layers(6))
    assert 12 < few


def test_as_if_alone():
    gradients, params = normal(SHAPES, 3), zeros(SHAPES)
    first = random_state(params, Q_SHAPES)
    with jax.enable_x64(True):
        together = run(dion(SHAPES), params, gradients, first)
        for name in SHAPES:
            arguments = only((params, gradients, first), name)
            alone = run(dion([name]), *arguments)
            got = jax.tree.leaves(only(together, name))
            for x, expected in zip(got, jax.tree.leaves(alone), strict=True):
                close(x, expected, FLOAT64_ATOL, name)


def test_what_is_reduced_is_each_parameter_alone():
    seen = []

    def reduce_fn(arrays, made_of):
        shapes = {name: x.shape for name, x in arrays.items()}
        seen.append((shapes, {name: made_of[name] for name in arrays}))
        return {name: 2.0 * x for name, x in arrays.items()}

    gradients = {name: g[0] for name, g in normal(SHAPES, 1).items()}
    params = zeros(SHAPES)
    first = random_state(params, Q_SHAPES)
    with jax.enable_x64(True):
        dion(SHAPES).update(gradients, first, params, reduce_fn=reduce_fn)
    of_p, of_q = seen
    for name, shape in SHAPES.items():
        batch, axes = shape[:-2], [(axis,) for axis in range(len(shape) - 2)]
        rows, cols = np.argsort(shape[-2:])[::-1] + len(batch)
        assert of_p[0][name] == (*batch, 9, RANK)
        assert of_q[0][name] == (*batch, 5, RANK)
        assert of_p[1][name] == [*axes, (rows,), ()]
        assert of_q[1][name] == [*axes, (cols,), ()]


def test_what_several_devices_share_is_not_joined():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    by_matrix = [products(layers(number, sharding=sharding)) for number in (1, 2)]
    assert by_matrix[1] - by_matrix[0] == 16
