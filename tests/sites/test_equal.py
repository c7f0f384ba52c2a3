"""Sites that wait for each other end where one program ends.

In one program an optimizer returns updates, and `params + update` misses the anchor by
a rounding in some elements (5% here), from which replicas go on. Sites are given
the anchor itself. So the program's replicas are set to it here after every sync; as it
is, it ends within that rounding.
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

SITES = 4
DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)
OUTER = {
    "average": None,
    # Products with these are exact, so that it is all one whether XLA rounds them.
    "nesterov": optax.sgd(0.5, momentum=0.25, nesterov=True),
}


# Of float32, relative to parameters of about 1 that have come together three times.
ROUNDING = 2e-6
# Half a step of 8 bits for the largest drift here, of three syncs.
HALF_A_CODE = 3 * 0.5 / 127


def in_one_program(inner, outer, compressor=None, fragments=1, to_anchor=True):
    tx = cd.adaptive_sync(
        inner,
        cd.triggers.every_k(EVERY),
        cd.synchronizers.reconcile(
            outer, compressor=compressor, momentum=False, fragments=fragments
        ),
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
        if to_anchor and (index + 1) % EVERY == 0:
            state = at_the_anchor(state, index // EVERY % fragments, fragments)
    return cd.replicas.consensus(*state)


def at_the_anchor(state, fragment, fragments):
    params, opt_state = state
    anchor = opt_state.sync_state.anchor
    one = jax.tree.map(lambda x: x[0], params)
    names = cd.synchronizers.fragment_paths(one, fragments)[fragment]
    return params | {name: jnp.copy(anchor[name]) for name in names}, opt_state


def as_sites(inner, outer, compressor=None, fragments=1):
    store = MemoryStore()

    def run(number):
        with sites.join(
            store,
            f"site{number}",
            every=EVERY,
            outer=outer,
            compressor=compressor,
            fragments=fragments,
            quorum=SITES,
            max_lag=0,
            poll=0.005,
        ) as site:
            found = train(site, number, inner)
            assert site.metrics.counted == STEPS // EVERY
            assert site.metrics.late == site.metrics.rejected == 0
            return found

    runs = {f"site{n}": lambda n=n: run(n) for n in range(SITES)}
    return list(together(runs).values())


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("outer", OUTER)
def test_to_the_bit_where_all_is_sent(outer, fragments):
    inner = optax.adam(0.1)
    one = in_one_program(inner, OUTER[outer], None, fragments)
    last = cd.synchronizers.fragment_paths(one, fragments)[0]  # of rounds 0, 1, 2
    for found in as_sites(inner, OUTER[outer], None, fragments):
        for name in one if fragments == 1 else last:
            np.testing.assert_array_equal(found[name], one[name], strict=True)


def test_within_the_rounding_of_codes():
    """One program rounds the mean as well, sites do not."""
    inner, form = optax.adam(0.1), compressors.quantize(8, block=64)
    one = in_one_program(inner, None, form)
    for found in as_sites(inner, None, form):
        for name in one:
            np.testing.assert_allclose(found[name], one[name], atol=HALF_A_CODE)


def test_within_rounding_as_the_program_is():
    """Of updates, and of multiplications that XLA fuses with additions or does not."""
    inner = optax.adam(0.1)
    one = in_one_program(inner, DILOCO, to_anchor=False)
    for found in as_sites(inner, DILOCO):
        for name in one:
            np.testing.assert_allclose(found[name], one[name], atol=ROUNDING)
