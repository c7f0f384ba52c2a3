"""Means over replicas, of arrays of any shape and dtype."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import _collectives

AXIS = cd.replicas.AXIS
REPLICAS = 4
# Sums of four float32 of size one; their mean in bfloat16.
RTOL, RTOL_BF16 = 1e-6, 1e-2


def tree():
    rng = np.random.default_rng(0)
    shapes = {
        "matrix": (5, 3),
        **helpers.NOTHING,
        "scalar": (),
        "vector": (7,),
        "wide": (2, 40),
    }
    found = {
        name: jnp.asarray(rng.normal(size=(REPLICAS, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }
    half = jnp.asarray(rng.normal(size=(REPLICAS, 3, 2)), jnp.bfloat16)
    return found | {"half": half, "other_half": half[:, 0]}


def test_every_array_comes_back():
    given, mesh = tree(), cd.replicas.make_mesh(REPLICAS)
    mean = helpers.in_shard_map(lambda x, _: _collectives.Group(AXIS).mean(x), mesh)
    found = jax.jit(mean)(given, ())
    for name, x in given.items():
        expected = np.asarray(x, np.float64).mean(0)
        assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)
        rtol = RTOL_BF16 if x.dtype == jnp.bfloat16 else RTOL
        for one in np.asarray(found[name], np.float64):
            np.testing.assert_allclose(one, expected, rtol=rtol, atol=rtol)


def test_an_array_stays_the_same_over_another_axis():
    """One that devices of a second manual axis have alike, beside one that differs."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=auto)
    whole, divided = P(AXIS), P(AXIS, "model")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=((whole, divided),),
        out_specs=(whole, divided),
    )
    def mean(tree):
        return _collectives.Group(AXIS).mean(tree)

    given = jnp.arange(8.0).reshape(2, 4), jnp.arange(8.0).reshape(2, 4)
    for x in mean(given):
        np.testing.assert_array_equal(x, [[2, 3, 4, 5]] * 2)
