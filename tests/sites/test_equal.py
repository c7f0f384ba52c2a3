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
    mesh = cd.replicas.make_mesh(SITES)
    tx = cd.adaptive_sync(
        INNER,
        cd.triggers.every_k(EVERY),
        cd.synchronizers.reconcile(outer, compressor=compressor),
        mesh,
    )

    @jax.jit
    def step(params, opt_state, target):
        gradients = jax.tree.map(jnp.subtract, params, target)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = cd.replicas.replicate(start_params(), mesh)
    opt_state = tx.init(params)
    for index in range(STEPS):
        targets = [target(number, index) for number in range(SITES)]
        targets = jax.tree.map(lambda *x: jnp.stack(x), *targets)
        params, opt_state = step(params, opt_state, targets)
        if (index + 1) % EVERY == 0:
            params = cd.replicas.replicate(cd.replicas.anchor(opt_state), mesh)
    return cd.replicas.anchor(opt_state)


@pytest.mark.parametrize(
    ("outer", "compressor", "tolerance"),
    [(NESTEROV, None, 0), (None, compressors.quantize(8, block=64), HALF_A_CODE)],
    ids=["nesterov", "8 bits"],
)
# Being set to the anchor is what the optimizer counts as displaced.
@pytest.mark.filterwarnings("ignore:Parameters were changed after")
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
