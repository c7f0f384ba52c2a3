"""Memory of the optimizers: bytes of state per parameter, and the peak of a step.

    python benchmarks/step/memory.py
    python benchmarks/step/memory.py --peak

The model is a GPT of 160 million parameters: 12 layers of width 768 in one stack, and
a vocabulary of 50304 with an output head of its own. Nothing is run. State is what
`jax.eval_shape` says of `init`; parameters are float32, not counted, and 4 bytes more.
What only a sync touches are the anchor, the outer optimizer's state and the residual of
`AdaptiveSyncState`; every step reads and writes the rest. It is the state of one
replica, `mesh=cd.replicas.simulated(1)`.

`--peak` is what the compiler says of a step from given gradients, parameters and state
to new parameters and state, which are donated; one replica on each of four devices.
*kept* is what of the results is not written over an argument, *temporary* all else that
is reserved. Where counters alone decide, a local step and a sync are two programs.
(`tpu/compile_steps.py` has training steps on TPUs.)
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measuring
import optax
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import presets, synchronizers

LAYERS, WIDTH, VOCABULARY = 12, 768, 50304
RATE = 0.01  # changes no shape
ADAMW = "`optax.adamw`"


def parameters() -> dict:
    """The parameter tree of the model, shapes and dtypes only."""

    def leaf(name: str, *shape: int) -> dict:
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32)}

    square = {
        name: leaf("kernel", LAYERS, WIDTH, WIDTH)
        for name in ("query", "key", "value", "out")
    }
    return {
        "embed": leaf("embedding", VOCABULARY, WIDTH),
        "blocks": {
            "attention": square,
            "attention_norm": leaf("scale", LAYERS, WIDTH),
            "mlp_norm": leaf("scale", LAYERS, WIDTH),
            "up": leaf("kernel", LAYERS, WIDTH, 4 * WIDTH),
            "down": leaf("kernel", LAYERS, 4 * WIDTH, WIDTH),
        },
        "final_norm": leaf("scale", WIDTH),
        "lm_head": leaf("kernel", WIDTH, VOCABULARY),
    }


def optimizers(mesh: Any) -> dict[str, optax.GradientTransformation]:
    """What the tables have a row for, by its name there."""
    half, lift = jnp.bfloat16, cd.replicas.lift
    numbers = measuring.matrices
    ours: dict[str, Any] = {"dimension_numbers": numbers, "mesh": mesh}
    plain = synchronizers.reconcile()
    muon = measuring.muon(RATE)
    return {
        ADAMW: lift(optax.adamw(RATE), mesh),
        "`optax.contrib.muon`, AdamW for the rest": lift(muon, mesh),
        "`dion`, rank 1/4": lift(
            cd.dion(RATE, rank=0.25, dimension_numbers=numbers), mesh
        ),
        "`dion`, full rank": lift(
            cd.dion(RATE, rank=1.0, dimension_numbers=numbers), mesh
        ),
        "`curvadion`": cd.curvadion(RATE, **ours),
        "`local_muon`": cd.local_muon(RATE, **ours),
        "`local_muon`, bfloat16 momenta": cd.local_muon(RATE, mu_dtype=half, **ours),
        "`local_muon`, plain average": cd.local_muon(RATE, synchronizer=plain, **ours),
        "`presets.synchronous_dion`": presets.synchronous_dion(RATE, **ours),
        "`presets.diloco`": presets.diloco(RATE, mesh=mesh),
        "`presets.muloco`": presets.muloco(RATE, **ours),
    }


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shapes(mesh: Any, place: Any = None) -> Any:
    """Shapes of the rows of the model's parameters."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (_replicas(mesh), *x.shape), x.dtype, sharding=place
        ),
        parameters(),
    )


def _replicas(mesh: Any) -> int:
    return mesh.size if isinstance(mesh, jax.sharding.Mesh) else mesh.replicas


def rows() -> Iterator[tuple[str, float, float]]:
    """Name, and bytes a parameter that every step and that only a sync touches."""
    mesh = cd.replicas.simulated(1)
    params = _shapes(mesh)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    for name, tx in optimizers(mesh).items():
        state = jax.eval_shape(tx.init, params)
        at_syncs = 0
        if isinstance(state, cd.AdaptiveSyncState):
            at_syncs = _bytes(
                (state.common.anchor, state.common.sync_state, state.rows.residual)
            )
        yield name, (_bytes(state) - at_syncs) / count, at_syncs / count


def compiled(tx: Any, mesh: jax.sharding.Mesh, due: bool | None) -> Any:
    """A step of the optimizer on every device, as it is compiled."""
    params = _shapes(mesh, NamedSharding(mesh, PartitionSpec(cd.replicas.AXIS)))
    state = params, jax.eval_shape(tx.init, params)
    tx = measuring.when(tx, due)
    step = measuring.train_step(tx, lambda _, gradients: gradients, mesh)
    return step.lower(state, params).compile()


def peaks(only: str) -> Iterator[list[str]]:
    """The cells of the other table."""
    mesh = cd.replicas.make_mesh(len(jax.devices()))
    compared = None
    for name, tx in optimizers(mesh).items():
        if name != ADAMW and only not in name:
            continue
        by_step_number = "local_muon" in name or "loco" in name
        programs: dict[str, bool | None] = {"": None}
        if by_step_number:
            programs |= {", local step": False, ", sync": True}
        for program, due in programs.items():
            sizes = measuring.in_mebibytes(compiled(tx, mesh, due))
            compared = compared or sum(sizes)
            cells = (f"{size:.0f}" for size in (*sizes, sum(sizes)))
            yield [name + program, *cells, f"{sum(sizes) / compared:.2f}"]


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    if options.peak:
        header = ["optimizer", "arguments, MiB", "kept", "temporary", "peak"]
        header.append("over AdamW's")
        measuring.table(header, peaks(options.only))
        print(measuring.where(options))
    else:
        header = ["optimizer", "every step", "syncs only", "together"]
        cells = ((n, f"{x:.2f}", f"{y:.2f}", f"{x + y:.2f}") for n, x, y in rows())
        measuring.table(header, cells)


if __name__ == "__main__":
    main()
