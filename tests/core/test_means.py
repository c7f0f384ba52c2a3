"""Means over replicas, of arrays of any shape and dtype."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax.mesh import _rows
from curvadion_jax.synchronizers import Group

REPLICAS = 4
# Sums of four float32 of size one; their mean in bfloat16.
TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-2}


def tree():
    rng = np.random.default_rng(0)
    shapes = {"matrix": (5, 3), **helpers.NOTHING, "scalar": (), "vector": (7,)}
    found = {
        name: jnp.asarray(rng.normal(size=(REPLICAS, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }
    half = jnp.asarray(rng.normal(size=(REPLICAS, 3, 2)), jnp.bfloat16)
    return found | {"half": half, "other_half": half[:, 0]}


@functools.cache
def together(kind):
    """Rows -> (the mean, all of them, what each got from each) of every replica."""

    def of_one(x, _):
        group = Group(helpers.AXIS)
        parts = jax.tree.map(lambda x: jnp.stack([x + 10 * k for k in range(4)]), x)
        return (group.mean(x), group.all_gather(x), group.all_to_all(parts)), ()

    mesh = helpers.mesh_of(kind, REPLICAS)
    return jax.jit(lambda rows: _rows.over(of_one, mesh)(rows, ())[0])


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
def test_every_array_comes_back(kind):
    given = tree()
    mean, gathered, exchanged = jax.device_get(together(kind)(given))
    for name, x in given.items():
        expected = np.asarray(x, np.float64)
        assert (mean[name].shape, mean[name].dtype) == (x.shape, x.dtype)
        limit = TOLERANCES[x.dtype.name]
        for replica in range(REPLICAS):
            np.testing.assert_allclose(
                np.float64(mean[name][replica]),
                expected.mean(0),
                rtol=limit,
                atol=limit,
            )
            np.testing.assert_array_equal(gathered[name][replica], x)
            np.testing.assert_array_equal(exchanged[name][replica], x + 10 * replica)


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mean_in_16_bits_is_rounded_once(kind, dtype):
    large = 8 / jnp.finfo(dtype).eps  # Its neighbours are 8 apart: it plus 3 is itself.
    given = np.float32([[large], [3], [3], [3]])
    mean, *_ = together(kind)({"w": jnp.asarray(given, dtype)})
    expected = jnp.asarray(given.mean(0), dtype)
    assert expected != large / REPLICAS
    np.testing.assert_array_equal(mean["w"], [expected] * REPLICAS)


def test_one_replica_alone_is_its_own_mean():
    group, given = Group(), {"w": jnp.arange(3.0)}
    assert group.mean(given) is given
    assert group.all_gather(given)["w"].tolist() == [[0, 1, 2]]
    assert (group.size, group.replica) == (1, 0)
