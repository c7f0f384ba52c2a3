"""A replica's part alone: the same loss, and the bytes that the payload says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax import compressors

FORMS = {
    "exact": compressors.exact(),
    "8 bits": compressors.quantize(8),
    "2 bits": compressors.quantize(2, block=64),
}


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
