"""A replica's part alone: the same loss, and the bytes that the payload says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax import compressors
from curvadion_jax._collectives import Replicas

FORMS = {
    "exact": compressors.exact(),
    "8 bits": compressors.quantize(8),
    "2 bits": compressors.quantize(2, block=64),
    "top_k": compressors.top_k(1 / 16),
    "top_k, 2 bits": compressors.top_k(1 / 16, bits=2, block=64),
}
REPLICAS = 4


def tree_of(number: int):
    key = jax.random.key(number)
    return {
        "matrix": jax.random.normal(key, (40, 24)),
        "bias": jax.random.normal(key, (7,)).astype(jnp.bfloat16),
        "nothing": jnp.zeros((0, 3)),
    }


@pytest.mark.parametrize("name", FORMS)
def test_it_costs_what_the_payload_says(name):
    form = FORMS[name]
    message = form.posted.encode(tree_of(0))
    payload = form.payload(tree_of(0), {})
    sent = sum(x.nbytes for x in jax.tree.leaves(message))
    assert sent == payload.averaged + payload.gathered


@pytest.mark.parametrize("name", FORMS)
def test_it_stands_for_the_tree_but_for_what_error_feedback_keeps(name):
    """As much as `average` among several: the unsent part is no larger than it was."""
    form, tree = FORMS[name], tree_of(1)
    found = form.posted.decode(form.posted.encode(tree), tree)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, tree)
    for given, sent in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        assert sent.dtype == jnp.float32
        if given.size:
            left = np.linalg.norm(np.float32(given) - sent)
            assert left < np.linalg.norm(np.float32(given))
    if name == "exact":
        np.testing.assert_array_equal(found["matrix"], tree["matrix"])


def test_the_mean_of_posts_is_the_mean_of_one_program_where_all_is_gathered():
    form = FORMS["top_k, 2 bits"]
    trees = [tree_of(number) for number in range(REPLICAS)]
    posts = [form.posted.decode(form.posted.encode(x), x) for x in trees]
    total = posts[0]
    for post in posts[1:]:
        total = jax.tree.map(jnp.add, total, post)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *trees)
    together = jax.vmap(
        lambda x: form.average(x, (), Replicas("replica"), {}), axis_name="replica"
    )(stacked)
    for one, all_ in zip(
        jax.tree.leaves(total), jax.tree.leaves(together.mean), strict=True
    ):
        np.testing.assert_array_equal(one / REPLICAS, all_[0])


def test_what_needs_all_at_work_together_has_none():
    assert compressors.low_rank(2).posted is None
    both = compressors.chain(compressors.low_rank(2), compressors.quantize(8))
    assert both.posted is None
