"""Memory of the optimizers: bytes of state per parameter, and the peak of a step.

    python benchmarks/memory.py
    python benchmarks/memory.py --peak

The model is a GPT of 160 million parameters: 12 layers of width 768 in one stack, and
a vocabulary of 50304 with an output head of its own. Nothing is run. State is what
`jax.eval_shape` says of `init`; parameters are float32, not counted, and 4 bytes more.
What only a sync touches is the `sync_state` of `adaptive_sync`; every step reads and
writes the rest.

`--peak` is what the compiler says of a step from given gradients, parameters and state
to new parameters and state, which are donated; one replica on each of four devices.
*kept* is what of the results is not written over an argument, *temporary* all else that
is reserved. Where counters alone decide, a local step and a sync are two programs.
(`tpu/compile_steps.py` has training steps on TPUs.)
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measuring
import optax
from jax.sharding import NamedSharding, PartitionSpec
from measuring import AXIS

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


def optimizers() -> dict[str, optax.GradientTransformation]:
    """What the tables have a row for, by its name there."""
    half, ours = jnp.bfloat16, {"axis_name": AXIS}
    plain = synchronizers.reconcile()
    return {
        ADAMW: optax.adamw(RATE),
        "`optax.contrib.muon`, AdamW for the rest": measuring.muon(RATE, parameters()),
        "`dion`, rank 1/4": cd.dion(RATE, 0.25),
        "`dion`, full rank": cd.dion(RATE, 1.0),
        "`curvadion`": cd.curvadion(RATE, **ours),
        "`local_muon`": cd.local_muon(RATE, **ours),
        "`local_muon`, bfloat16 momenta": cd.local_muon(RATE, mu_dtype=half, **ours),
        "`local_muon`, plain average": cd.local_muon(RATE, synchronizer=plain, **ours),
        "`presets.synchronous_dion`": presets.synchronous_dion(RATE, **ours),
        "`presets.diloco`": presets.diloco(RATE, **ours),
        "`presets.muloco`": presets.muloco(RATE, **ours),
    }


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rows() -> Iterator[tuple[str, float, float]]:
    """Name, and bytes a parameter that every step and that only a sync touches."""
    params = parameters()
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    for name, tx in optimizers().items():
        state = jax.eval_shape(tx.init, params)
        replicated = isinstance(state, cd.AdaptiveSyncState)
        at_syncs = _bytes(state.sync_state) if replicated else 0
        yield name, (_bytes(state) - at_syncs) / count, at_syncs / count


def compiled(tx: Any, params: Any, mesh: jax.sharding.Mesh, due: bool | None) -> Any:
    """A step of the optimizer on every device, as it is compiled."""

    def update(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def replica(state, gradients):
        return update(state, jax.tree.map(lambda x: x[0], gradients)), ()

    state = (params, jax.eval_shape(tx.init, params))
    replicated = isinstance(state[1], cd.AdaptiveSyncState)
    place = NamedSharding(mesh, PartitionSpec(AXIS) if replicated else PartitionSpec())

    def placed(x):
        shape = (mesh.size, *x.shape) if replicated else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)

    step = jax.jit(update, donate_argnums=0)
    if replicated:
        step = cd.replicas.step(replica, mesh)
    arguments = jax.tree.map(placed, (state, params))
    return step.lower(*arguments, **measuring.known(due)).compile()


def peaks(only: str) -> Iterator[list[str]]:
    """The cells of the other table."""
    mesh = cd.replicas.make_mesh(len(jax.devices()))
    compared = None
    for name, tx in optimizers().items():
        if name != ADAMW and only not in name:
            continue
        by_counters = "local_muon" in name or "loco" in name
        programs = (
            {", local step": False, ", sync": True} if by_counters else {"": None}
        )
        for program, due in programs.items():
            sizes = measuring.in_mebibytes(compiled(tx, parameters(), mesh, due))
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
