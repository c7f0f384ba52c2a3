"""One of two processes with a replica each: trains, and prints what it can read.

python tests/support/two_processes.py PROCESS PORT FOLDER
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvadion_jax as cd

STEPS = 4


def train(folder: Path) -> dict:
    """Four steps on two replicas, saved and restored; what a loop would log."""
    mesh = cd.replicas.make_mesh(2)
    params = {"w": jnp.ones((4, 8)), "b": jnp.ones((1, 8))}
    tx = cd.presets.local_sgd(0.1, k=2, axis_name="replica")
    first = (params, tx.init(params))
    state = cd.replicas.replicate(first, mesh)

    def train_step(state, x):
        params, opt_state = state

        def loss_fn(params):
            return jnp.mean((x @ params["w"] + params["b"]) ** 2)

        _, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), cd.metrics.observe(opt_state)

    step = cd.replicas.step(train_step, mesh)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for _ in range(STEPS):
        state, observed = step(state, x)
    extra = {"process": jax.process_index()}
    cd.checkpoint.save(folder, STEPS, state, extra=extra)
    # As one model's checkpoint is restored, on a device of each process.
    put = jax.device_put(first, jax.local_devices()[0])
    restored = cd.checkpoint.restore(folder, cd.replicas.replicate(put, mesh))
    model = cd.replicas.anchor(state[1])
    spoil = lambda x: x.at[1, 0].set(jnp.nan)
    spoilt = jax.jit(lambda params: jax.tree.map(spoil, params))(state[0])
    mended, replaced = cd.replicas.repair((spoilt, state[1]))
    # One of the processes names it.
    last = jax.process_index() == jax.process_count() - 1
    copied, named = cd.replicas.repair(state, also=[1] if last else ())
    return {
        "replaced": replaced,
        "named": named,
        "divergence of copied": float(cd.replicas.divergence(copied[0])),
        "divergence of mended": float(cd.replicas.divergence(mended[0])),
        "mended": float(jnp.sum(cd.replicas.anchor(mended[1])["w"])),
        "restored": equal(restored, state),
        "extra": cd.checkpoint.read_extra(folder),
        "state": cd.metrics.read(state[1]),
        "observed": cd.metrics.read(observed),
        "divergence": float(cd.replicas.divergence(state[0])),
        "model": float(jnp.sum(model["w"])),
    }


def equal(state, other) -> bool:
    """Whether what this process holds of two states is equal to the bit."""
    parts = [
        [y.data for x in jax.tree.leaves(tree) for y in x.addressable_shards]
        for tree in (state, other)
    ]
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(*parts, strict=True)
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
    print(json.dumps(train(Path(sys.argv[3]))))
