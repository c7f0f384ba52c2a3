"""Memory that a step of the optimizer takes, as the compiler says; nothing is run.

    python benchmarks/step_memory.py
    python -m pip install libtpu && python benchmarks/step_memory.py --platform tpu

The model is that of `memory.py`, a GPT of 160 million float32 parameters with embedding
and head; `--matrices` leaves out embedding, head and norms, which all but AdamW give to
AdamW. A step takes given gradients, parameters and state to new parameters and state,
and overwrites the latter two (they are donated). `local_muon` and the like run under
`replicas.step`, one replica on each of four devices. Where the host knows which steps
synchronise these are two programs and two rows; else one, in which what its conditional
copies and what a sync needs are counted.

* arguments: parameters, gradients and state.
* kept: what of the results is not written over an argument.
* temporary: all else that the compiler reserves.
* peak: the three together, and its ratio to AdamW's.

For a TPU the step is compiled ahead of time for the four chips of a v5e host, without
one.
"""

import argparse
import functools
import os

# Without it libtpu asks a cloud's metadata server where it is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# And refuses a second process, or one after another that was killed.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import memory
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd

RATE, AXIS = 0.01, cd.replicas.AXIS
ADAMW = "`optax.adamw`"


# Their triggers look at counters alone.
SCHEDULED = "`local_muon`", "plain average by `reconcile`, Muon's steps"
PROGRAMS = {", local step": {"sync": False}, ", sync": {"sync": True}}


def optimizers(numbers) -> dict[str, optax.GradientTransformation]:
    """Name in the table -> optimizer; those that synchronise come last."""
    muon, dion = optax.contrib.muon, functools.partial(cd.dion, RATE)
    ours = {"axis_name": AXIS, "dimension_numbers": numbers}
    plain = cd.synchronizers.reconcile(momentum=False)
    half = {"dimension_numbers": numbers, "mu_dtype": jnp.bfloat16}
    return {
        ADAMW: optax.adamw(RATE),
        "`optax.contrib.muon`": muon(RATE, muon_weight_dimension_numbers=numbers),
        "`dion`, rank 1/4": dion(0.25, dimension_numbers=numbers),
        "`dion`, rank 1/4, bfloat16 momentum": dion(0.25, **half),
        "`dion`, rank 1/16": dion(1 / 16, dimension_numbers=numbers),
        "`dion`, full rank": dion(1.0, dimension_numbers=numbers),
        "plain average by `reconcile`, Muon's steps": cd.local_muon(
            RATE, synchronizer=plain, **ours
        ),
        "`local_muon`": cd.local_muon(RATE, **ours),
        "`curvadion`": cd.curvadion(RATE, **ours),
        "`curvadion`, rank 1/4": cd.curvadion(RATE, rank=0.25, **ours),
    }


def sizes(tx, params, mesh, **known: bool) -> tuple[int, int, int]:
    """Bytes on a device of arguments, results not written over them, temporaries.

    With ``sync=True`` or ``sync=False`` of a step with a sync or without one, alone.
    """

    def update(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def replica(state, gradients):
        return update(state, jax.tree.map(lambda x: x[0], gradients)), ()

    state = (params, jax.eval_shape(tx.init, params))
    replicated = isinstance(state[1], cd.AdaptiveSyncState)
    size, axes = (mesh.size, PartitionSpec(AXIS)) if replicated else (1, None)
    place = NamedSharding(mesh, axes or PartitionSpec())

    def placed(x):
        shape = (size, *x.shape) if replicated else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)

    step = jax.jit(update, donate_argnums=0)
    if replicated:
        step = cd.replicas.step(replica, mesh)
    arguments = jax.tree.map(placed, (state, params))
    memory = step.lower(*arguments, **known).compile().memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes, kept, memory.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=["cpu", "tpu"], default="cpu")
    parser.add_argument("--matrices", action="store_true")
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    if options.platform == "tpu":
        devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        devices = jax.devices()
    mesh = cd.replicas.make_mesh(len(devices), devices=devices)
    params = memory.parameters()
    numbers = cd.default_dimension_numbers(params)
    if options.matrices:
        params = {
            "blocks": {n: params["blocks"][n] for n in ("attention", "up", "down")}
        }
        numbers = jax.tree.map(lambda _: cd.DimensionNumbers(-2, -1), params)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(f"MiB, {count / 1e6:.0f} million parameters ({count * 4 / 2**20:.0f} MiB)\n")
    print("| optimizer | arguments | kept | temporary | peak | over AdamW's |")
    print("|---|---|---|---|---|---|")
    compared = None
    for name, tx in optimizers(numbers).items():
        if name != ADAMW and options.only not in name:
            continue
        for what, known in PROGRAMS.items() if name in SCHEDULED else [("", {})]:
            each = [size / 2**20 for size in sizes(tx, params, mesh, **known)]
            compared = compared or sum(each)
            cells = " | ".join(f"{size:.0f}" for size in (*each, sum(each)))
            ratio = sum(each) / compared
            print(f"| {name}{what} | {cells} | {ratio:.2f} |", flush=True)
    print(f"\n{devices[0].device_kind}, JAX {jax.__version__}")


if __name__ == "__main__":
    main()
