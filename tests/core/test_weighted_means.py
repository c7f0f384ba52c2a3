"""Means in which replicas count unequally, or not at all, in every form."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weighted_runs import FORMS

import curvadion_jax as cd
from curvadion_jax import _collectives, _nan_policy
from curvadion_jax.synchronizers import LocalStep, SyncState

AXIS = cd.replicas.AXIS
REPLICAS = 4
WEIGHTS = {
    "all": (1, 1, 1, 1),
    "three": (1, 0, 1, 1),
    "one": (0, 0, 1, 0),
    "nobody": (0, 0, 0, 0),
    "unequal": (512, 0.1, 30, 0),
}
# Sums of a few float32 of size one.
ATOL = 3e-6


def tree(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"tall": (24, 8), "wide": (6, 20), "vector": (37,)}
    return {
        name: rng.normal(size=(REPLICAS, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def part_in_sync(params, weight):
    """A replica's part in a sync that everybody expects it to take, inside a `vmap`."""
    part = LocalStep((), params, {}), params, SyncState(), weight, jnp.array(True)
    return _nan_policy.participation(*part, AXIS)[0]


@functools.cache
def averaged(name):
    """(tree, weights) -> what each contributes, the mean, and what was not sent."""
    form = FORMS[name]

    def body(tree, weight):
        contributed = part_in_sync(tree, weight).weighted(tree)
        result = form.average(contributed, _collectives.Group(AXIS))
        return contributed, result.mean, result.unsent

    mapped = jax.jit(jax.vmap(body, axis_name=AXIS))
    compiled = helpers.quick(mapped, tree(), np.ones(REPLICAS, np.float32))
    return lambda *given: jax.device_get(compiled(*given))


QUICK = ("exact", "int8")
NAMES = helpers.slow_but(QUICK, FORMS)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_what_was_put_in_adds_up_to_the_mean(name, weights):
    """Over all replicas, so that what each keeps, its own less this, loses nothing."""
    given = tree()
    contributed, mean, unsent = averaged(name)(given, np.float32(weights))
    shares = np.float64(weights) / max(np.mean(weights), 1e-30)
    for key in given:
        np.testing.assert_array_equal(mean[key], np.stack([mean[key][0]] * REPLICAS))
        own = np.einsum("n,n...->n...", shares, given[key])
        np.testing.assert_allclose(contributed[key], own, rtol=1e-6)
        total = np.sum(contributed[key] - unsent[key], 0, np.float64)
        np.testing.assert_allclose(total, REPLICAS * mean[key][0], atol=ATOL)
        if name == "exact":  # as a mean over batches of unequal size weighs them
            np.testing.assert_allclose(mean[key][0], own.mean(0), rtol=0, atol=ATOL)
            assert not np.any(unsent[key][np.float32(weights) == 0])
        if not any(weights):
            assert not np.any(mean[key])


@pytest.mark.parametrize("weight", [0, 1], ids=["absent", "excluded"])
@pytest.mark.parametrize("name", NAMES)
def test_what_others_have_does_not_matter(name, weight):
    """Of one without weight, or that is not finite; it owes nothing but rounding."""
    given, weights = tree(), np.float32([1, weight, 1, 1])
    spoilt = {key: x.copy() for key, x in given.items()}
    for x in spoilt.values():
        x[1] = np.nan
    _, mean, unsent = averaged(name)(given, np.float32([1, 0, 1, 1]))
    _, mean_beside, unsent_beside = averaged(name)(spoilt, weights)
    for key in given:
        np.testing.assert_array_equal(mean[key], mean_beside[key])
        np.testing.assert_array_equal(unsent[key], unsent_beside[key])
        assert np.isfinite(unsent[key]).all()


@pytest.mark.parametrize("size", [1e-30, 1e30, 1e38])
def test_weights_of_any_size(size):
    """Such as 3e38, the sum of two of which float32 does not hold."""
    given, shares = tree(), np.float32([3, 0, 1, 2])
    contributed, mean, _ = averaged("exact")(given, shares)
    for key, x in averaged("exact")(given, shares * np.float32(size))[1].items():
        np.testing.assert_allclose(x, mean[key], rtol=0, atol=ATOL)
        assert np.any(contributed[key][3] != 0)


@pytest.mark.parametrize("kind", [int, np.int64])
def test_a_weight_that_int32_does_not_hold(kind):
    """It would wrap around to 0, and every replica be absent from every sync."""
    assert float(_nan_policy.checked_weight(kind(2**40))) == 2.0**40
