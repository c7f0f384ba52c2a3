"""Temporary memory that a step with a sync takes on a TPU, without one.

    python -m pip install libtpu && python benchmarks/sync_memory.py

Compiles the optimizer's step ahead of time for the four chips of a TPU v5e host, one
replica on each, and prints what the compiler reserves beside arguments and results.
The parameters are stacks of layers. Let them be larger than the 128 MiB of memory on
the chip itself, where small ones find room that is not counted.
"""

import argparse
import os

# Without it libtpu asks a cloud's metadata server where it is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# And refuses a second process, or one after another that was killed.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers

AXIS = cd.replicas.AXIS


def cases() -> dict[str, optax.GradientTransformation]:
    """Name -> optimizer: Muon's steps alone, and syncs in different forms."""

    def with_sync(**options):
        synchronizer = synchronizers.reconcile(momentum=False, **options)
        return cd.local_muon(0.01, axis_name=AXIS, synchronizer=synchronizer)

    forms = {
        "in float32": {},
        "in 8 bits": {"compressor": compressors.quantize(8)},
        "in 4 bits": {"compressor": compressors.quantize(4)},
        "in 2 bits": {"compressor": compressors.quantize(2)},
        "in 2 bits, 4 fragments": {
            "compressor": compressors.quantize(2),
            "fragments": 4,
        },
    }
    rows = {f"plain average {form}": with_sync(**o) for form, o in forms.items()}
    alone = {"`optax.contrib.muon`, no sync": optax.contrib.muon(0.01)}
    return alone | rows | {"`local_muon`": cd.local_muon(0.01, axis_name=AXIS)}


def mebibytes(tx, params, mesh) -> tuple[float, float]:
    """Of arguments and of temporary arrays on a device."""

    def train(state, gradients):
        params, opt_state = state
        gradients = jax.tree.map(lambda x: x[0], gradients)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    each = NamedSharding(mesh, PartitionSpec(AXIS))

    def stacked(x):
        shape = (mesh.size, *x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=each)

    state = jax.tree.map(stacked, (params, jax.eval_shape(tx.init, params)))
    step, gradients = cd.replicas.step(train, mesh), jax.tree.map(stacked, params)
    lowered = step.lower(state, gradients, sync=True)
    memory = lowered.compile().memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return sizes[0] / 2**20, sizes[1] / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--stacks", type=int, default=4)
    options = parser.parse_args()
    topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    mesh = cd.replicas.make_mesh(len(topology.devices), devices=topology.devices)
    shape = (options.layers, options.width, 4 * options.width)
    stack = jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {f"w{number}": stack for number in range(options.stacks)}
    size = options.stacks * stack.size * 4 / 2**20
    print(f"of {size:.0f} MiB of parameters a replica, JAX {jax.__version__}")
    columns = ("optimizer", "parameters, gradients and state", "temporary", "together")
    print(f"| {' | '.join(columns)} |\n|---|---|---|---|")
    for name, tx in cases().items():
        arguments, temporary = mebibytes(tx, params, mesh)
        shown = (arguments, temporary, arguments + temporary)
        parts = [f"{x:.0f} MiB ({x / size:.2f})" for x in shown]
        print(f"| {name} | {' | '.join(parts)} |", flush=True)


if __name__ == "__main__":
    main()
