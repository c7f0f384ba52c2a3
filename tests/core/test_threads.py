"""Two threads may share one compiled step: it keeps nothing between calls."""

import threading

import helpers
import jax
import numpy as np
import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

STEPS, AHEAD, K = 30, 4, 3


def test_two_threads_with_one_step_have_the_bits_and_syncs_of_each_alone():
    """One of them is ahead, so that its syncs are on other calls."""
    mesh = cd.replicas.simulated(2)
    tx = cd.adaptive_sync(
        optax.sgd(0.05), triggers.every_k(K), synchronizers.reconcile(), mesh
    )
    step = jax.jit(helpers.train_step(tx))
    gradients = [
        {"w": np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32)}
        for seed in range(STEPS + AHEAD)
    ]

    def train(state, first, last):
        for tree in gradients[first:last]:
            state, _ = step(state, tree)
        return state

    start = helpers.start(tx, {"w": np.ones(3, np.float32)}, mesh)
    ahead = train(start, 0, AHEAD)
    runs = [(start, 0, STEPS), (ahead, AHEAD, STEPS + AHEAD)]
    alone = [train(*run) for run in runs]
    together = [None, None]

    def one(index):
        together[index] = train(*runs[index])

    threads = [threading.Thread(target=one, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    helpers.assert_bitwise(jax.device_get(together), jax.device_get(alone))
    syncs = [int(state.counters.syncs) for _, state in together]
    assert syncs == [STEPS // K, (STEPS + AHEAD) // K]
