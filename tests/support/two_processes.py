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

STEPS = 5
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def train(folder: Path) -> dict:
    """Some steps on two replicas, saved and restored; what a loop would log."""
    mesh = cd.replicas.make_mesh(2)
    params = {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}
    tx = cd.presets.diloco(0.1, k=2, before=optax.clip_by_global_norm(1.0), mesh=mesh)

    def start():
        # As one model's checkpoint is restored, on a device of each process.
        put = jax.device_put(params, jax.local_devices()[0])
        rows = cd.replicas.replicate(put, mesh)
        return cd.replicas.place((rows, tx.init(rows), 0), mesh)

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)

    @jax.jit
    def train_step(state, x):
        rows, opt_state, step = state
        loss, grads = cd.replicas.map(jax.value_and_grad(loss_fn), mesh)(rows, x)
        updates, opt_state = tx.update(grads, opt_state, rows)
        rows = optax.apply_updates(rows, updates)
        return (rows, opt_state, step + 1), (loss, cd.metrics.observe(opt_state))

    state, batch = start(), cd.replicas.split(X, mesh)
    sent = cd.replicas.audit(train_step, mesh, state, batch)
    for _ in range(STEPS):
        state, (_, observed) = train_step(state, batch)
    rows, opt_state, _ = state
    extra = {"process": jax.process_index()}
    cd.checkpoint.save(folder, STEPS, state, extra=extra)
    restored = cd.checkpoint.restore(folder, start())
    anchor = cd.replicas.anchor(opt_state)
    spoil = lambda x: x.at[1, 0].set(jnp.nan)
    spoilt = jax.jit(lambda params: jax.tree.map(spoil, params))(rows)
    repaired = cd.replicas.repair(spoilt, anchor)
    total = lambda tree: float(sum(jnp.sum(x) for x in jax.tree.leaves(tree)))
    again, _ = train_step((repaired, *restored[1:]), batch)
    return {
        "every step": len(sent.every_step),
        "sync": sorted(x.kind for x in sent.sync),
        "step": int(state[2]),
        "compiled": train_step._cache_size(),
        "restored": equal(restored, state),
        "extra": cd.checkpoint.read_extra(folder),
        "state": cd.metrics.read(opt_state),
        "observed": cd.metrics.read(observed),
        "divergence": float(cd.replicas.divergence(rows)),
        "consensus": total(cd.replicas.consensus(rows)),
        "anchor": total(anchor),
        "repaired": total(cd.replicas.consensus(repaired)),
        "goes on": float(cd.replicas.divergence(again[0])),
        "displaced": cd.metrics.read(again[1]).get("displaced"),
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
