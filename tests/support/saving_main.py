"""Saves one checkpoint after the other until somebody kills it.

python tests/support/saving_main.py FOLDER FIRST

Tells on its output when a save begins, `saving STEP`, and when it has returned,
`saved STEP`. What a step holds depends on nothing but its number.
"""

import itertools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import curvadion_jax as cd

REPLICAS, KEEP = 4, 2


def contents(step: int) -> dict[str, jax.Array]:
    """Some megabytes that cannot be compressed away, in leaves of several kinds."""
    random = np.random.default_rng(step)
    arrays = {
        f"layers/{index}/kernel": random.random((REPLICAS, 256, 256), np.float32)
        for index in range(6)
    }
    arrays["momentum"] = random.random((REPLICAS, 300), np.float32).astype("bfloat16")
    arrays["step"] = np.full(REPLICAS, step, np.int32)
    mesh = cd.replicas.make_mesh(REPLICAS)
    spec = jax.sharding.PartitionSpec(cd.replicas.AXIS)
    return jax.device_put(arrays, jax.sharding.NamedSharding(mesh, spec))


def main(folder: str, first: int) -> None:
    """Save `first` and all that follow; returns never."""
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    for step in itertools.count(first):
        state = contents(step)
        print("saving", step, flush=True)
        cd.checkpoint.save(folder, step, state, keep=KEEP, extra={"step": step})
        print("saved", step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
