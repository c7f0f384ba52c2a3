"""A state can be given away, as that of any Optax optimizer."""

import helpers
import jax
import pytest

import curvadion_jax as cd
from curvadion_jax import triggers

TWO = cd.replicas.simulated(2)
MAKE = {
    "local_muon": lambda mesh: cd.local_muon(0.1, mesh=mesh),
    "curvadion": lambda mesh: cd.curvadion(0.1, mesh=mesh),
    "synchronous_dion": lambda mesh: cd.presets.synchronous_dion(0.1, mesh=mesh),
    "diloco": lambda mesh: cd.presets.diloco(0.1, k=2, mesh=mesh),
    "at_intervals": lambda mesh: cd.curvadion(
        0.1, threshold=0.3, decision_interval=2, mesh=mesh
    ),
    "combined": lambda mesh: cd.local_muon(
        0.1,
        trigger=triggers.at_least_every(triggers.relative_momentum_change(1.0), 3),
        mesh=mesh,
    ),
}


@pytest.mark.parametrize("kind", ["simulated", "mesh", "alone"])
@pytest.mark.parametrize("name", helpers.slow_but(["diloco"], MAKE))
def test_states_can_be_donated_from_the_first_on(name, kind):
    mesh = None if kind == "alone" else helpers.mesh_of(kind, 2)
    tx = MAKE[name](mesh)
    params = cd.replicas.replicate(helpers.make_params(), mesh)
    state = tx.init(params)
    if kind != "mesh":
        arrays = [x for x in jax.tree.leaves((params, state)) if x.size]
        places = [x.unsafe_buffer_pointer() for x in arrays]
        assert len(set(places)) == len(places)
    step = jax.jit(helpers.train_step(tx), donate_argnums=0)
    given = params, state
    for _ in range(3):
        gradients = jax.tree.map(jax.numpy.ones_like, given[0])
        taken = jax.tree.leaves(given)
        given, _ = step(given, gradients)
        assert all(x.is_deleted() for x in taken if x.size > 40)
