"""How long a training step takes to trace and to compile, on eight replicas.

    python benchmarks/compile_time.py [--layers 10] [--methods muon local_muon]

A model of six matrices a layer and an embedding, under `replicas.step` on 8 CPU
devices. Every kernel is a leaf of its own, or with `--stacked` all layers are one stack
(`nn.scan`). Given are processor seconds to trace and lower, lines of the lowered
program, and processor seconds to compile. `muon` and `adamw` are Optax's, which never
synchronise. Where counters alone decide there are two programs, of a local step, which
is the first, and of a sync, compiled at the first sync. Nothing is run, and no
persistent cache is used.
"""

from typing import Any

import jax
import jax.numpy as jnp
import measuring
import numpy as np
import optax
from measuring import AXIS

import curvadion_jax as cd

WIDTH, ROWS, REPLICAS = 64, 16, 8
METHODS = {
    "adamw": lambda params: optax.adamw(1e-3),
    "muon": lambda params: measuring.muon(0.02, params),
    "dion": lambda params: cd.dion(0.02, 0.25),
    "local_muon": lambda params: cd.local_muon(0.02, axis_name=AXIS),
    "curvadion": lambda params: cd.curvadion(0.02, axis_name=AXIS),
    "diloco": lambda params: cd.presets.diloco(1e-3, 20, axis_name=AXIS),
}
EVERY, BY_COUNTERS = {"step": None}, {"local step": False, "sync": True}
PROGRAMS = dict.fromkeys(("local_muon", "diloco"), BY_COUNTERS)
SHAPES = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
SHAPES |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}


def parameters(layers: int, stacked: bool) -> dict[str, Any]:
    """An embedding, and the layers' kernels."""

    def kernels(*stack: int) -> dict[str, Any]:
        return {
            name: {"kernel": 0.01 * jnp.ones((*stack, *shape))}
            for name, shape in SHAPES.items()
        }

    tree: dict[str, Any] = {"embed": {"embedding": jnp.ones((256, WIDTH))}}
    if stacked:
        norm = {"scale": jnp.ones((layers, WIDTH))}  # says which axis the layers are
        return tree | {"layers": kernels(layers) | {"norm": norm}}
    return tree | {f"layer_{index}": kernels() for index in range(layers)}


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    """Products with all kernels; what it learns does not matter."""

    def layer(x, kernels):
        square = [kernels[name]["kernel"] for name in ("query", "key", "value", "out")]
        x = x + jnp.tanh(jnp.linalg.multi_dot([x, *square]))
        up, down = kernels["up"]["kernel"], kernels["down"]["kernel"]
        return x + jnp.tanh(x @ up) @ down, None

    x = params["embed"]["embedding"][tokens]
    if "layers" in params:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    else:
        for name, kernels in params.items():
            x = x if name == "embed" else layer(x, kernels)[0]
    return jnp.mean(x**2)


def measure(tx: Any, params: Any, due: bool | None) -> tuple[float, float, int]:
    """Seconds to trace and lower, seconds to compile, and lines."""
    mesh, now = cd.replicas.make_mesh(REPLICAS), measuring.clock()

    def train(state, tokens):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    place = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
    tokens = jax.device_put(np.zeros((REPLICAS * ROWS,), np.int32), place)
    step = measuring.on_replicas(tx, train, params, mesh)
    jax.clear_caches()
    start = now()
    lowered = step.lower(state, tokens, **measuring.known(due))
    traced = now()
    lowered.compile()
    return traced - start, now() - traced, lowered.as_text().count("\n")


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[10])
    parser.add_argument("--stacked", action="store_true")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    jax.config.update("jax_enable_compilation_cache", False)

    def rows():
        for layers in options.layers:
            params = parameters(layers, options.stacked)
            for name in options.methods:
                for program, due in PROGRAMS.get(name, EVERY).items():
                    tx = METHODS[name](params)
                    trace, compiling, lines = measure(tx, params, due)
                    yield (
                        *(f"`{name}`", program, str(layers), f"{trace:.1f}"),
                        *(f"{lines:,.0f}", f"{compiling:.1f}"),
                    )

    header = ["method", "program", "layers", "trace and lower, s", "lines"]
    measuring.table([*header, "compile, s"], rows())
    print(measuring.where(options))


if __name__ == "__main__":
    main()
