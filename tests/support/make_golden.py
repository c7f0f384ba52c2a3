"""Make ``tests/support/golden/*.json``: what every preset does in 20 steps.

    python tests/support/make_golden.py [PRESET ...]

Run it where numerics were changed on purpose, and say in CHANGELOG.md what changed and
why. Each file holds the versions it was made with, the syncs, the mean loss of the
replicas before every step, and of their last parameters the norms and a few elements.
"""

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import curvadion_jax as cd

FOLDER = Path(__file__).parent / "golden"
REPLICAS, STEPS = 4, 20
MESH = cd.replicas.simulated(REPLICAS)


def dion_evenly() -> Any:
    """Dion's local steps between even syncs, which are `curvadion`'s."""
    outer, form = optax.sgd(1.0, 0.4, nesterov=True), cd.compressors.quantize(2)
    sync = cd.synchronizers.reconcile(outer, compressor=form)
    inner = cd.dion(0.1, rank=0.5, momentum=0.9)
    return cd.adaptive_sync(inner, cd.triggers.evenly(0.25), sync, MESH)


# Several syncs each, and local steps; no momentum's change is within 3% of a threshold.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "curvadion": lambda: cd.curvadion(
        0.1, threshold=optax.linear_schedule(0.25, 0.0, 20), mesh=MESH
    ),
    "curvadion-budget": lambda: cd.curvadion(0.1, rank=0.5, budget=0.5, mesh=MESH),
    "dion-evenly": dion_evenly,
    "local_muon": lambda: cd.local_muon(0.1, budget=0.25, bits=2, mesh=MESH),
    "synchronous_adamw": lambda: cd.presets.synchronous_adamw(0.1, mesh=MESH),
    "synchronous_muon": lambda: cd.presets.synchronous_muon(0.05, mesh=MESH),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.1, rank=0.5, mesh=MESH),
    "paper": lambda: cd.presets.paper(0.1, threshold=0.1, rank=0.5, mesh=MESH),
    "authors_code": lambda: cd.presets.authors_code(
        0.05, threshold=7.5, rank=0.5, mesh=MESH
    ),
    "local_sgd": lambda: cd.presets.local_sgd(0.05, k=3, mesh=MESH),
    "diloco": lambda: cd.presets.diloco(0.1, k=6, weight_decay=0.1, mesh=MESH),
    "muloco": lambda: cd.presets.muloco(0.1, k=6, weight_decay=0.1, mesh=MESH),
}


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")}


def quadratic(seed: int = 3):
    """(Curvatures, targets): every replica pulls to its own point, with noise."""
    rng = np.random.default_rng(seed)
    shapes = helpers.SHAPES
    curvatures = {
        k: rng.uniform(0.1, 2, s).astype(np.float32) for k, s in shapes.items()
    }
    targets = {}
    for name, shape in shapes.items():
        own = rng.normal(size=(REPLICAS, 1, *shape))
        noise = rng.normal(size=(REPLICAS, STEPS, *shape))
        targets[name] = (2 + own + noise).astype(np.float32)
    return curvatures, targets


def run(name: str) -> dict[str, Any]:
    """What the optimizer does, on replicas that share a device."""
    tx, start = OPTIMIZERS[name](), helpers.make_params()
    curvatures, targets = quadratic()

    def loss(params, target):
        def one(x, curvature, target):
            return 0.5 * jnp.sum(curvature * jnp.square(x - target))

        return sum(jax.tree.leaves(jax.tree.map(one, params, curvatures, target)))

    @jax.jit
    def train(state, target):
        params, opt_state = state
        run = cd.replicas.map(jax.value_and_grad(loss), MESH)
        value, gradients = run(params, target)
        updates, opt_state = tx.update(gradients, opt_state, params)
        synced = opt_state.counters.since == 0
        return (optax.apply_updates(params, updates), opt_state), (value, synced)

    params = cd.replicas.replicate(start, MESH)
    by_step = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), targets)
    run = jax.jit(lambda state, targets: lax.scan(train, state, targets))
    state = params, tx.init(params)
    (params, _), (losses, synced) = jax.device_get(
        helpers.quick(run, state, by_step)(state, by_step)
    )
    rows = {key: x.reshape(REPLICAS, -1) for key, x in params.items()}
    return {
        "synced": synced.astype(int).tolist(),
        "losses": losses.mean(1).tolist(),
        "norms": {key: np.linalg.norm(x, axis=1).tolist() for key, x in rows.items()},
        "elements": {key: x[:, :3].tolist() for key, x in rows.items()},
    }


def write(name: str) -> None:
    """Makes a file: JSON with one line for each entry."""
    golden = {"versions": versions(), **run(name)}
    lines = [f" {json.dumps(key)}: {json.dumps(x)}" for key, x in golden.items()]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{name}: {sum(golden['synced'])} syncs in {STEPS} steps")


if __name__ == "__main__":
    for name in sys.argv[1:] or OPTIMIZERS:
        write(name)
