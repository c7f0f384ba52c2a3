"""What is finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax import _finite

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


@pytest.mark.parametrize(
    ("number", "single", "array"),
    [(np.nan, False, False), (np.inf, True, False), (-np.inf, True, False)],
)
def test_a_single_number_of_a_state_may_be_infinite(number, single, array):
    """As the best loss so far, or a loss scale."""
    assert _finite.is_sound([jnp.ones(2), jnp.array(number)]) == single
    assert _finite.is_sound([jnp.ones(()), jnp.array([1, number])]) == array


@pytest.mark.parametrize(("size", "norm"), [(1e18, True), (1e20, False)])
def test_a_gradient_whose_square_overflows_has_no_norm(size, norm):
    tree = {"a": jnp.full(3, size), "b": jnp.ones(2), "n": jnp.arange(3)}
    assert _finite.norms_finite(tree) == norm
    assert _finite.all_finite(tree)


def test_what_is_not_finite_is_put_back_and_a_single_number_may_be_infinite():
    before = [jnp.ones(2), jnp.ones([]), jnp.ones([])]
    state = [jnp.array([np.inf, 3]), jnp.array(np.inf), jnp.array(np.nan)]
    found = _finite.repaired([*state, jnp.array(3)], [*before, jnp.array(2)])
    assert [x.tolist() for x in found] == [[1, 3], np.inf, 1, 3]
