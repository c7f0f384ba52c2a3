"""Sites that wait for each other end where one program ends.

In one program an optimizer returns updates, and `params + update` misses the anchor by
a rounding in some elements, from which replicas continue. Sites are given the anchor
itself. So the program's replicas are set to it here after every sync.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from obstore.store import MemoryStore
from site_runs import EVERY, STEPS, start_params, target, together, train

import curvadion_jax as cd
from curvadion_jax import compressors, sites

pytestmark = pytest.mark.slow  # many programs
SITES = 4
INNER = optax.adam(0.1)
# Products with these are exact, so that it is all one whether XLA rounds them.
NESTEROV = optax.sgd(0.5, momentum=0.25, nesterov=True)
# Half a step of 8 bits for the largest drift here: one program rounds the mean, too.
HALF_A_CODE = 3 * 0.5 / 127


def in_one_program(outer, compressor):
    tx = cd.adaptive_sync(
        INNER,
        cd.triggers.every_k(EVERY),
        cd.synchronizers.reconcile(outer, compressor=compressor),
        cd.replicas.AXIS,
    )
    mesh = cd.replicas.make_mesh(SITES)

    def step(state, target):
        params, opt_state = state
        gradients = jax.tree.map(lambda x, y: x - y[0], params, target)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    run = cd.replicas.step(step, mesh)
    params = start_params()
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    for index in range(STEPS):
        targets = [target(number, index) for number in range(SITES)]
        state, _ = run(state, jax.tree.map(lambda *x: jnp.stack(x), *targets))
        if (index + 1) % EVERY == 0:
            anchor = cd.replicas.anchor(state[1])
            state = cd.replicas.replicate(anchor, mesh), state[1]
    return cd.replicas.anchor(state[1])


@pytest.mark.parametrize(
    ("outer", "compressor", "tolerance"),
    [(NESTEROV, None, 0), (None, compressors.quantize(8, block=64), HALF_A_CODE)],
    ids=["nesterov", "8 bits"],
)
def test_sites_end_where_one_program_ends(outer, compressor, tolerance):
    one, store = in_one_program(outer, compressor), MemoryStore()
    options = {"every": EVERY, "quorum": SITES, "max_lag": 0, "poll": 0.005}
    options |= {"outer": outer, "compressor": compressor}

    def run(number):
        with sites.Site(store, f"site{number}", **options) as site:
            found = train(site, number, INNER)
            assert site.metrics.counted == STEPS // EVERY
            assert site.metrics.late == site.metrics.rejected == 0
            return found

    found = together({f"site{n}": lambda n=n: run(n) for n in range(SITES)})
    for params in found.values():
        for name in one:
            np.testing.assert_allclose(params[name], one[name], rtol=0, atol=tolerance)
