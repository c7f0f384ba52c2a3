"""Means of low rank, and forms in which factors are sent."""

import re

import helpers
import numpy as np
import pytest
import reference
from compressor_runs import (
    ATOL,
    REPLICAS,
    average,
    collectives,
    sent,
    sent_bytes,
    trees,
)

from curvadion_jax import compressors

KINDS = re.compile(r"\b([a-z]+\d+)\[")


@pytest.mark.parametrize("iterations", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_low_rank_means_are_the_references(iterations):
    stacked = {"tall": trees(5)["tall"]}
    compressor = compressors.low_rank(2, power_iterations=iterations)
    q = np.asarray(compressor.init({"tall": stacked["tall"][0]}, {})["tall"], float)
    result = average(compressor, stacked)
    wide = stacked["tall"].astype(float)
    for _ in range(iterations):
        p = reference.orthonormal_factor(np.mean([b @ q for b in wide], axis=0))
        own = [b.T @ p for b in wide]
        r = np.mean(own, axis=0)
        q = reference.column_normalize(r, q)
    np.testing.assert_allclose(result.mean["tall"][0], p @ r.T, atol=ATOL)
    for replica in range(REPLICAS):
        put_in = sent(result, stacked, "tall")[replica]
        np.testing.assert_allclose(put_in, p @ own[replica].T, atol=ATOL)
    np.testing.assert_allclose(result.state["tall"][0], q, atol=ATOL)


def test_a_mean_that_is_not_finite_spoils_no_later_one():
    """Its Q stays as it was; numbers that overflow come from one bad sync."""
    compressor = compressors.low_rank(2)
    sound = {"tall": trees(5)["tall"]}
    start = {"tall": compressor.init({"tall": sound["tall"][0]}, {})["tall"]}
    huge = {"tall": np.full_like(sound["tall"], 3e38)}
    bad = average(compressor, huge)
    assert not np.isfinite(bad.mean["tall"]).all()
    for replica in range(REPLICAS):
        np.testing.assert_array_equal(bad.state["tall"][replica], start["tall"])


def test_a_low_rank_mean_is_kept_exactly():
    rng = np.random.default_rng(7)
    left, right = rng.normal(size=(REPLICAS, 30, 2)), rng.normal(size=(2, 10))
    stacked = {"tall": (left @ right).astype(np.float32)}
    result = average(compressors.low_rank(2), stacked)
    np.testing.assert_allclose(
        result.mean["tall"][0], stacked["tall"].mean(0), atol=ATOL
    )


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(compressors.exact(), id="exact"),
        pytest.param(compressors.top_k(0.1), id="top_k"),
        pytest.param(
            compressors.chain(compressors.low_rank(1), compressors.quantize()),
            id="a-chain",
        ),
    ],
)
def test_what_has_no_parts_is_no_first_of_a_chain(first):
    with pytest.raises(ValueError, match="argument 0 of chain has no parts"):
        compressors.chain(first, compressors.quantize())


def test_a_chain_of_one_is_that_one():
    alone = compressors.low_rank(2)
    assert compressors.chain(alone) is alone


def test_a_chain_with_exact_is_the_first_alone():
    first, stacked = compressors.low_rank(2), {"tall": trees()["tall"]}
    both = compressors.chain(first, compressors.exact())
    helpers.assert_bitwise(average(both, stacked), average(first, stacked))


def test_factors_are_what_a_chain_sends_in_small_numbers():
    # Factors of 32 x 2 and 16 x 2: 4 + 2 blocks of 16, each way and in two stages.
    stacked = {"w": trees()["stack"][:, 0].repeat(2, axis=1)}
    form = compressors.chain(compressors.low_rank(2), compressors.quantize(8, 16))
    moved = collectives(form, stacked)
    assert {each.opcode for each in moved} == {"all-to-all", "all-gather"}
    assert {kind for each in moved for kind in KINDS.findall(each.shape)} == {"u8"}
    # Padded to four parts of whole blocks: 4 + 4 blocks instead.
    assert sent_bytes(moved) == 2 * 3 / 4 * 8 * (16 + 4)
