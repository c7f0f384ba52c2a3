"""What is finite."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import _finite, _nan_policy

# More than a vector of the processor holds, and some more.
SIZE = 131
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)


@pytest.fixture(scope="module", params=[0, 3], ids="O{}".format)
def all_finite(request):
    """Of every row."""

    @functools.cache
    def compiled(shape, dtype):
        rows = jax.ShapeDtypeStruct(shape, dtype)
        lowered = jax.jit(jax.vmap(_finite.all_finite)).lower(rows)
        return lowered.compile({"xla_backend_optimization_level": request.param})

    return lambda rows: compiled(rows.shape, rows.dtype)(rows)


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_a_number_that_is_not_finite_is_found_everywhere(all_finite, dtype, number):
    spoilt = np.full((SIZE, SIZE), jnp.finfo(dtype).max, np.float32)
    np.fill_diagonal(spoilt, number)
    assert not np.any(all_finite(jnp.asarray(spoilt, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_extreme_numbers_are_finite(all_finite, dtype):
    """The largest of one sign, whose sum is infinite, and the smallest."""
    limits = jnp.finfo(dtype)
    numbers = [limits.max, limits.min, limits.smallest_subnormal, -0.0]
    rows = np.repeat(np.array(numbers, np.float32)[:, None], SIZE, axis=1)
    assert np.all(all_finite(jnp.asarray(rows, dtype)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_what_overflows_on_the_way_is_seen(dtype):
    """The compiler must not put the constants of both together."""
    x = jnp.full((2, SIZE), jnp.finfo(dtype).max / 2, dtype)
    assert not jax.jit(lambda x: _finite.all_finite(x * 1024.0))(x)
    assert not jax.jit(lambda x: _finite.all_finite(x / 1e-3))(x)


def test_what_there_is_not_is_finite():
    """Integers, arrays without elements, and nothing at all."""
    tree = [jnp.arange(3), jnp.zeros((0, 3)), jnp.ones(2), 1.0, np.ones(2)]
    assert _finite.all_finite(tree)
    assert _finite.all_finite(())
    assert not _finite.all_finite([*tree, jnp.array(jnp.nan)])
    assert _nan_policy.is_finite([*tree, jnp.array(jnp.inf)], params={})


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["bias", "gain", "scale"])
def test_arrays_of_a_state_count_and_scalars_of_scalar_parameters(name, number):
    layer = {"bias": jnp.ones(2), "gain": jnp.ones([])}
    params = {"layer": layer, "scale": jnp.ones([])}
    tx = optax.chain(optax.scale_by_adam(), optax.contrib.reduce_on_plateau())
    adam, plateau = tx.init(params)
    assert np.isinf(plateau.best_value)  # of no parameter
    assert _nan_policy.is_finite((adam, plateau), params)
    spoilt_plateau = plateau._replace(best_value=jnp.array(jnp.nan))
    assert not _nan_policy.is_finite((adam, spoilt_plateau), params)

    def spoilt(path, x):
        return jnp.full_like(x, number) if path[-1].key == name else x

    adam = adam._replace(nu=jax.tree.map_with_path(spoilt, adam.nu))
    assert not _nan_policy.is_finite((adam, plateau), params)


@pytest.mark.parametrize("build", [cd.local_muon, cd.curvadion])
def test_a_gradient_without_a_norm_is_that_of_a_zero_gradient(build):
    """Else `local_muon` would take no step, and `curvadion` synchronise, uncounted."""
    tx, params = build(0.1), {"kernel": jnp.ones((4, 6))}
    state, runs = tx.init(params), []
    for size in (1e20, 0.0):
        gradients = jax.tree.map(lambda x, size=size: size * x, params)
        runs.append(jax.jit(tx.update)(gradients, state, params))
    (huge, state), (zero, _) = runs
    chex.assert_trees_all_equal(huge, zero)
    assert int(state.metrics.nonfinite) == 1
