"""What is finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax import _health

# More than a vector of the processor holds, and a rest.
SIZE = 131


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("optimized", [False, True])
def test_a_number_that_is_not_finite_is_found_everywhere(dtype, number, optimized):
    spoilt = np.full((SIZE, SIZE), jnp.finfo(dtype).max, np.float32)
    np.fill_diagonal(spoilt, number)
    rows = jnp.asarray(spoilt, dtype)
    found = jax.jit(jax.vmap(_health.all_finite)).lower(rows)
    found = found.compile({"xla_backend_optimization_level": 3 * optimized})(rows)
    assert not np.any(found)


def test_what_there_is_not_is_finite():
    """Integers, arrays without elements, the largest numbers, and nothing at all."""
    largest = jnp.finfo(jnp.float32)
    tree = [jnp.arange(3), jnp.zeros((0, 3)), jnp.array([largest.max, largest.min])]
    assert _health.all_finite(tree)
    assert _health.all_finite(())
    assert not _health.all_finite([*tree, jnp.array(jnp.nan)])
    assert _health.sound([*tree, jnp.array(jnp.inf)])
