"""A run that another number of replicas goes on with in its middle.

python tests/support/resized_main.py FOLDER REPLICAS

Goes on from the checkpoint in the folder, and prints the loss at the end.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvadion_jax as cd

STEPS, PERIOD = 200, 5
# Not a multiple of the period: in the middle of a round.
MIDDLE = 98


def optimizer(mesh: Any) -> Any:
    rate = optax.linear_schedule(0.1, 0.0, STEPS)
    return cd.presets.muloco(rate, k=PERIOD, mesh=mesh)


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(batch["x"] @ params["kernel"] - batch["y"]))


def batch_of(index: int) -> dict[str, np.ndarray]:
    """[samples, ...] of a linear teacher with noise."""
    rng = np.random.default_rng(7)
    teacher = rng.normal(size=(16, 24), scale=0.25).astype(np.float32)
    rng = np.random.default_rng((8, index))
    x = rng.normal(size=(2048, 16)).astype(np.float32)
    noise = rng.normal(size=(2048, 24)).astype(np.float32)
    return {"x": x, "y": x @ teacher + noise}


def started(number: int) -> Any:
    """(Parameters, optimizer state) of this number of replicas."""
    mesh = cd.replicas.make_mesh(number)
    params = cd.replicas.replicate({"kernel": jnp.zeros((16, 24))}, mesh)
    return params, optimizer(mesh).init(params)


def trained(state: Any, number: int, steps: range) -> Any:
    """The state of this number of replicas after these steps."""
    mesh = cd.replicas.make_mesh(number)
    tx = optimizer(mesh)

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        gradients = cd.replicas.map(jax.grad(loss), mesh)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for index in steps:
        state = step(state, cd.replicas.split(batch_of(index), mesh))
    return state


@functools.cache
def trained_by_eight(steps: int) -> Any:
    return trained(started(8), 8, range(steps))


def restored(folder: str | Path, number: int) -> Any:
    """The checkpoint in the folder, for this number of replicas."""
    return cd.checkpoint.restore(folder, started(number), resize=True)


def final_loss(state: Any) -> float:
    """Of the one model, on samples that no step has seen."""
    return float(loss(cd.replicas.consensus(state[0]), batch_of(10_000)))


def main(folder: str, number: int) -> None:
    """Go on with the run from its middle to its end."""
    jax.config.update("jax_num_cpu_devices", number)
    state = trained(restored(folder, number), number, range(MIDDLE, STEPS))
    print(final_loss(state))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
