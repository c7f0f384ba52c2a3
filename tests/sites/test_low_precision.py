"""Parameters in 16 bits: rounding loses nothing that has counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax import compressors, sites

ROUNDS = 20
# The distance of 1 to the next number of each dtype; all sums of these are exact here.
ULP = {jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-10}
dtypes = pytest.mark.parametrize("dtype", ULP, ids=["bfloat16", "float16"])


def ones(dtype):
    return {"w": jnp.ones((2, 3), dtype)}


def pair(dtype, **options):
    store = MemoryStore()
    return [
        ByHand(store, name, params=ones(dtype), quorum=2, **options) for name in "ab"
    ]


@dtypes
def test_means_below_one_ulp_add_up(dtype):
    a, b = pair(dtype)
    for _ in range(ROUNDS):
        settle(a, b, by=[ULP[dtype], 0.0])
    half = 1 + ROUNDS * ULP[dtype] / 2
    np.testing.assert_array_equal(a.anchor[0], np.float32(half))
    (params,) = a.follower.outer.params
    assert params.dtype == dtype
    np.testing.assert_array_equal(params.astype(np.float32), half)


@dtypes
def test_rounds_in_which_nobody_moves_take_nothing_back(dtype):
    a, b = pair(dtype)
    settle(a, b, by=[ULP[dtype], 0.0])
    for _ in range(3):
        settle(a, b, by=[0.0, 0.0])
    np.testing.assert_array_equal(a.anchor[0], np.float32(1 + ULP[dtype] / 2))


@dtypes
def test_two_bits_and_an_outer_momentum_lose_nothing_either(dtype):
    """The anchor and the residuals hold all that was contributed."""
    form = compressors.quantize(2, block=4)
    outer = optax.sgd(1.0, momentum=0.5)
    a, b = pair(dtype, compressor=form, outer=outer)
    for _ in range(ROUNDS):
        settle(a, b, by=[ULP[dtype], 0.0])
    # What is still to come of the momentum: half of the last step, a quarter, ...
    (momentum,) = a.follower.outer.state
    assert momentum.dtype == np.float32
    residual = sum(site.follower._residual[0] for site in (a, b)) / 2
    found = a.anchor[0] - momentum + residual * 2
    np.testing.assert_allclose(found, 1 + ROUNDS * ULP[dtype], rtol=1e-5)


@dtypes
def test_a_newcomer_has_the_bits_that_rounding_hides(dtype):
    a, b = pair(dtype, snapshot_every=2)
    for _ in range(5):
        settle(a, b, by=[ULP[dtype], 0.0])
    store = a.store._store
    assert ByHand(store, "c", params=ones(dtype), quorum=2).digest == a.digest


@dtypes
def test_a_training_loop_is_given_its_own_dtype(dtype):
    with sites.Site(MemoryStore(), "oslo", every=1, max_lag=0) as site:
        params = site.start(ones(dtype))
        for _ in range(4):
            params = site.sync({"w": params["w"] + jnp.asarray(ULP[dtype], dtype)})
            assert params["w"].dtype == dtype
    np.testing.assert_array_equal(params["w"].astype(jnp.float32), 1 + 4 * ULP[dtype])


def test_a_mean_beyond_float16_changes_nothing(caplog):
    (a,) = [ByHand(MemoryStore(), "a", params=ones(jnp.float16), outer=optax.sgd(1e5))]
    a.step(1.0)
    np.testing.assert_array_equal(a.anchor[0], 1.0)
    assert "The outer step contains NaN or Inf" in caplog.text


def test_whole_parameters_are_kept_once():
    outer = ByHand(MemoryStore(), "a").follower.outer
    assert len(outer.anchor) == len(PARAMS)
    for x, y in zip(outer.anchor, outer.params, strict=True):
        assert np.shares_memory(np.asarray(x), y)


@dtypes
def test_strict_promotion_passes(dtype, tmp_path):
    with (
        jax.numpy_dtype_promotion("strict"),
        sites.Site(tmp_path, "a", every=1) as site,
    ):
        params = site.start(ones(dtype))
        params = {"w": params["w"] + params["w"]}
        params = site.leave(site.sync(params))
    np.testing.assert_array_equal(params["w"].astype(np.float32), 2.0)
