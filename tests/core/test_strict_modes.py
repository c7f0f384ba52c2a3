"""JAX's strict modes pass over a healthy run of every method."""

import functools

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

PARAMS = {
    "kernel": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4),
    "b": np.float32([0.5, -0.5, 1]),
}
K = triggers.every_k(2)
# Optax adds up in bfloat16 by promotion, unless it is told a dtype.
NESTEROV = optax.sgd(1.0, 0.4, nesterov=True, accumulator_dtype="float32")
IN_CODES = synchronizers.reconcile(NESTEROV, compressor=cd.compressors.quantize(2))
MAKE = {
    "sgd": lambda mesh: cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        triggers.at_intervals(
            triggers.at_least_every(triggers.relative_momentum_change(0.3), 4), 2
        ),
        IN_CODES,
        mesh,
    ),
    "local_muon": lambda mesh: cd.local_muon(
        0.02, trigger=K, mesh=mesh, other_optimizer=optax.sgd(0.02)
    ),
    "curvadion": lambda mesh: cd.curvadion(
        0.02,
        threshold=0.3,
        mesh=mesh,
        other_optimizer=optax.sgd(0.02),
        synchronizer=IN_CODES,
    ),
    "curvadion-budget": lambda mesh: cd.curvadion(
        0.02,
        budget=0.3,
        mesh=mesh,
        other_optimizer=optax.sgd(0.02),
        synchronizer=IN_CODES,
    ),
    "average_factors": lambda mesh: helpers.synced_dion(
        *(0.02, 0.5, K, synchronizers.average_factors()),
        mesh=mesh,
        other_optimizer=optax.sgd(0.02),
    ),
    "average_gradients": lambda mesh: cd.adaptive_sync(
        optax.sgd(0.02, 0.9), triggers.budget(0.3), GRADIENTS, mesh
    ),
}
GRADIENTS = synchronizers.average_gradients()
MODES = {
    "jax_debug_infs": True,
    "jax_debug_nans": True,
    "jax_numpy_dtype_promotion": "strict",
}


@functools.cache
def run(name, dtype, mode=None):
    """The parameters of two replicas after four steps."""
    mesh = cd.replicas.simulated(2)
    rng = np.random.default_rng(0)
    old = getattr(jax.config, mode) if mode else None
    if mode:
        jax.config.update(mode, MODES[mode])
    try:
        tx = MAKE[name](mesh)
        params = jax.tree.map(lambda x: jax.numpy.asarray(x, dtype), PARAMS)
        state, step = helpers.start(tx, params, mesh), jax.jit(helpers.train_step(tx))
        for _ in range(4):
            noise = lambda x: jax.numpy.asarray(rng.normal(size=x.shape), dtype)
            state, _ = step(state, jax.tree.map(noise, state[0]))
        cd.metrics.read(state[1])
        return jax.device_get(state[0])
    finally:
        if mode:
            jax.config.update(mode, old)


# Optax's own bias correction and Adam do not pass "strict".
NOT_STRICT = ("local_muon",)
CASES = [
    pytest.param(name, mode, marks=[] if name == "sgd" else [pytest.mark.slow])
    for name in MAKE
    for mode in MODES
    if name not in NOT_STRICT or mode != "jax_numpy_dtype_promotion"
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_healthy_run_passes_and_is_the_same(name, mode):
    helpers.assert_bitwise(run(name, "float32", mode), run(name, "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MAKE if name not in NOT_STRICT])
def test_parameters_of_few_bits_pass_strict_promotion(name):
    run(name, "bfloat16", "jax_numpy_dtype_promotion")
