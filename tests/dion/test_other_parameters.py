"""What `local_muon` and `curvadion` do with each parameter, by their arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd

pytestmark = pytest.mark.slow  # many programs
RATE = 0.1
RNG = np.random.default_rng(0)
PARAMS = {
    name: jnp.asarray(RNG.normal(size=shape), jnp.float32)
    for name, shape in {"embedding": (7, 4), "kernel": (4, 6), "bias": (6,)}.items()
}
GRADIENTS = jax.tree.map(lambda x: jnp.cos(3 * x), PARAMS)


def updates_of(tx, gradients=GRADIENTS):
    """Those of the second step; what `curvadion` does on the first is a sync.

    Its gradients are others than the first step's: with equal ones Nesterov's Adam is
    Adam.
    """
    update = jax.jit(tx.update)
    first = jax.tree.map(lambda x: -0.3 * x, gradients)
    _, state = update(first, tx.init(PARAMS), PARAMS)
    updates, _ = update(gradients, state, PARAMS)
    return jax.tree.map(np.asarray, updates)


def adamw(rate, nesterov):
    return optax.adamw(rate, b2=0.95, weight_decay=0.0, nesterov=nesterov)


def local_muon(**options):
    return cd.local_muon(RATE, **options)


def curvadion(**options):
    return cd.curvadion(RATE, threshold=1e9, **options)


MAKERS = [
    pytest.param(local_muon, True, id="local_muon"),
    pytest.param(curvadion, False, id="curvadion"),
]


@pytest.mark.parametrize("rate", [None, 0.01])
@pytest.mark.parametrize(("make", "nesterov"), MAKERS)
def test_what_is_no_matrix_is_adamws_at_its_own_rate(make, nesterov, rate):
    found = updates_of(make(adam_learning_rate=rate))
    expected = updates_of(adamw(RATE if rate is None else rate, nesterov))
    for name in ("embedding", "bias"):  # epsilons of 1e-7 and 1e-8 beside moments of 1
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    assert np.linalg.norm(found["kernel"]) > RATE


@pytest.mark.parametrize(("make", "_"), MAKERS)
def test_matrices_and_the_other_optimizer_are_as_given(make, _):
    numbers = {
        "embedding": optax.contrib.MuonDimensionNumbers(),
        "kernel": None,
        "bias": None,
    }
    found = updates_of(make(dimension_numbers=numbers, other_optimizer=optax.sgd(0.5)))
    # Four orthonormal columns are 2 long.
    assert RATE < np.linalg.norm(found["embedding"]) < 2.4 * RATE
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(found[name], -0.5 * GRADIENTS[name], rtol=1e-6)


@pytest.mark.parametrize(("make", "_"), MAKERS)
def test_weights_decay_where_the_mask_says_so(make, _):
    mask = {"embedding": True, "kernel": False, "bias": True}
    nothing = optax.tree.zeros_like(PARAMS)
    found = updates_of(make(weight_decay=0.5), nothing)
    np.testing.assert_allclose(found["kernel"], -RATE * 0.5 * PARAMS["kernel"], 1e-5)
    assert not np.any(found["embedding"])  # of matrices only
    found = updates_of(make(weight_decay=0.5, weight_decay_mask=mask), nothing)
    assert not np.any(found["kernel"])
