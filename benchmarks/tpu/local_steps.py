"""What a local step moves through memory, over its inner optimizer, from programs.

    python -m pip install libtpu
    python benchmarks/tpu/local_steps.py                # compiled for a v5e, never run
    python benchmarks/tpu/local_steps.py --place cpu

counts what the kernels of the compiled step read and write, in units of the float32
parameters of a device (P). Slices count as slices, and what a TPU keeps in its fast
memory not at all. Loops and branches of syncs do not run in a local step. *decides
itself* is the program in which the step number decides; *local* is that of a step of
which the host knows that it is local (`measuring.when`). *under `lax.cond`* is what
local steps cost that are written by hand, without any check (`by_hand`): updates that a
conditional may replace are written to memory, and read again by `apply_updates`.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measuring
import memory_traffic
import optax
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from curvadion_jax.matrices import _adamw_for_the_rest, _muon, _two_optimizers

RATE = 0.01


def parameters(layers: int, width: int, vocabulary: int) -> Any:
    """Shapes of a GPT's parameters: ten arrays a layer and two more."""
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)
    square = {name: shape(width, width) for name in ("query", "key", "value", "out")}
    wide = {"up": shape(width, 4 * width), "down": shape(4 * width, width)}
    kernels = {name: {"kernel": x} for name, x in (square | wide).items()}
    scales = {name: {"scale": shape(width)} for name in ("norm1", "norm2")}
    layer = kernels | scales
    layer["up"] = layer["up"] | {"bias": shape(4 * width)}
    layer["down"] = layer["down"] | {"bias": shape(width)}
    ends = {
        "embed": {"embedding": shape(vocabulary, width)},
        "final_norm": {"scale": shape(width)},
    }
    return ends | {f"layer_{index}": layer for index in range(layers)}


def by_hand(inner: Any, mesh: Any) -> Any:
    """Local steps, and on every seventh a mean of the replicas, in one program."""

    def init(params):
        return inner.init(params), jnp.zeros([], jnp.int32)

    def update(gradients, state, params):
        inner_state, count = state
        updates, inner_state = inner.update(gradients, inner_state, params)

        def to_mean(updates):
            moved = optax.apply_updates(params, updates)
            mean = moved if mesh is None else lax.pmean(moved, "replica")
            return jax.tree.map(jnp.subtract, mean, params)

        updates = lax.cond(count % 7 == 6, to_mean, lambda updates: updates, updates)
        return updates, (inner_state, count + 1)

    return optax.GradientTransformation(init, update)


def cases(mesh: Any) -> dict[str, tuple[str, Any, bool | None]]:
    """Name -> the bare optimizer beside it, the optimizer, whether a sync is due."""

    def rows(tx):
        return tx if mesh is None else cd.replicas.lift(tx, mesh)

    def synced(inner):
        reconcile = synchronizers.reconcile()
        return cd.adaptive_sync(inner, triggers.evenly(0.01), reconcile, mesh)

    sgd, adamw = optax.sgd(RATE), optax.adamw(RATE)
    rest = _adamw_for_the_rest.choose(None, RATE, None, nesterov=True)
    muon = _two_optimizers.optimizer(
        lambda numbers: _muon.muon(RATE, numbers, beta=0.9),
        rest,
        measuring.matrices,
        RATE,
    )
    local_muon = cd.local_muon(RATE, dimension_numbers=measuring.matrices, mesh=mesh)
    local, decides = False, None
    return {
        "SGD": ("SGD", rows(sgd), decides),
        "SGD, under `lax.cond`": ("SGD", rows(by_hand(sgd, mesh)), decides),
        "SGD, local": ("SGD", synced(sgd), local),
        "SGD, decides itself": ("SGD", synced(sgd), decides),
        "AdamW": ("AdamW", rows(adamw), decides),
        "AdamW, under `lax.cond`": ("AdamW", rows(by_hand(adamw, mesh)), decides),
        "AdamW, local": ("AdamW", synced(adamw), local),
        "AdamW, decides itself": ("AdamW", synced(adamw), decides),
        "Muon": ("Muon", rows(muon), decides),
        "Muon, under `lax.cond`": ("Muon", rows(by_hand(muon, mesh)), decides),
        "`local_muon`, local": ("Muon", local_muon, local),
        "`local_muon`, decides itself": ("Muon", local_muon, decides),
    }


def compiled(tx: Any, shapes: Any, mesh: Any, due: bool | None) -> Any:
    """The program of one step, whose parameters and state are donated."""
    tx = measuring.when(tx, due)

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, shapes)
    if mesh is not None:
        places = jax.jit(tx.init).lower(shapes).compile().output_shardings

        def placed(x, place):
            # A constant of `init` lies on no device of the mesh.
            on_mesh = place.device_set == {*mesh.devices.flat}
            sharding = place if on_mesh else NamedSharding(mesh, P())
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = jax.tree.map(placed, state, places)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, state, shapes)
    return lowered.compile()


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--place", default="v5e:2x2", help="a TPU topology, or cpu")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    shapes = parameters(options.layers, options.width, options.vocabulary)
    unit = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    mesh = None
    if options.place != "cpu":
        place = topologies.get_topology_desc(options.place, platform="tpu")
        mesh = cd.replicas.make_mesh(len(place.devices), devices=place.devices)
        sharding = NamedSharding(mesh, P("replica"))
        row = lambda x: (mesh.size, *x.shape)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(row(x), x.dtype, sharding=sharding), shapes
        )

    def rows():
        bare: dict[str, float] = {}
        for name, (inner, tx, due) in cases(mesh).items():
            if not any(options.only in each for each in (name, inner)):
                continue
            program = compiled(tx, shapes, mesh, due)
            found = memory_traffic.traffic(program.as_text())
            total = (found.read + found.written) / unit
            bare.setdefault(inner, total)
            temporary = program.memory_analysis().temp_size_in_bytes / unit
            yield [
                name,
                f"{found.read / unit:.2f} + {found.written / unit:.2f}",
                f"{total:.2f}",
                f"{total / bare[inner]:.2f}",
                f"{temporary:.2f}",
            ]

    head = ["step", "read + written, P", "together", "over bare", "temporary, P"]
    measuring.table(head, rows())
    print(measuring.where(options))


if __name__ == "__main__":
    main()
