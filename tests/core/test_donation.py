"""A state as `init` returns it can be given away, as that of any Optax optimizer."""

import helpers
import jax
import pytest

import curvadion_jax as cd
from curvadion_jax import triggers

MAKE = {
    "local_muon": lambda: cd.local_muon(0.1),
    "curvadion": lambda: cd.curvadion(0.1),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.1),
    "at_intervals": lambda: cd.curvadion(0.1, threshold=0.3, decision_interval=2),
    "combined": lambda: cd.local_muon(
        0.1, trigger=triggers.at_least_every(triggers.relative_momentum_change(1.0), 3)
    ),
}


@pytest.mark.parametrize("name", helpers.slow_but(["local_muon"], MAKE))
def test_a_fresh_state_can_be_donated(name):
    tx = MAKE[name]()
    params = jax.tree.map(jax.numpy.asarray, helpers.make_params())
    arrays = jax.tree.leaves((params, tx.init(params)))
    places = [x.unsafe_buffer_pointer() for x in arrays if x.size]
    assert len(set(places)) == len(places)
    update = lambda params, state: tx.update(params, state, params)
    jax.jit(update, donate_argnums=(0, 1))(params, tx.init(params))
