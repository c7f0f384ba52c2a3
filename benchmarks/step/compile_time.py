"""How long a training step takes to trace and to compile, on eight replicas.

    python benchmarks/step/compile_time.py [--layers 10] [--methods muon local_muon]

A model of six matrices a layer and an embedding, on 8 CPU devices. Every kernel is a
leaf of its own, or with `--stacked` all layers are one stack (`nn.scan`). Given are
processor seconds to trace and lower, lines of the lowered program, and processor
seconds to compile. `muon` and `adamw` are Optax's, `dion` is bare; these never
synchronise. Where the step number decides, `step` has a local step and a sync in one
program, as in a run, and "local step" and "sync" are programs of one of them alone.
Nothing is run, and no persistent cache is used.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measuring
import numpy as np
import optax

import curvadion_jax as cd

WIDTH, ROWS, REPLICAS = 64, 16, 8
NUMBERS: Any = {"dimension_numbers": measuring.matrices}
METHODS = {
    "adamw": lambda mesh: cd.replicas.lift(optax.adamw(1e-3), mesh),
    "muon": lambda mesh: cd.replicas.lift(measuring.muon(0.02), mesh),
    "dion": lambda mesh: cd.replicas.lift(cd.dion(0.02, rank=0.25, **NUMBERS), mesh),
    "local_muon": lambda mesh: cd.local_muon(0.02, mesh=mesh, **NUMBERS),
    "curvadion": lambda mesh: cd.curvadion(0.02, mesh=mesh, **NUMBERS),
    "diloco": lambda mesh: cd.presets.diloco(1e-3, k=20, mesh=mesh),
}
EVERY: dict[str, bool | None] = {"step": None}
BY_STEP_NUMBER = EVERY | {"local step": False, "sync": True}
PROGRAMS = dict.fromkeys(("local_muon", "diloco"), BY_STEP_NUMBER)
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
        return tree | {"layers": kernels(layers)}
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


def measure(method: str, params: Any, due: bool | None) -> tuple[float, float, int]:
    """Seconds to trace and lower, seconds to compile, and lines."""
    mesh, now = cd.replicas.make_mesh(REPLICAS), measuring.clock()
    tx = measuring.when(METHODS[method](mesh), due)
    differentiate = jax.value_and_grad(loss_fn)

    def train_step(state, batch):
        params, opt_state = state
        loss, gradients = cd.replicas.map(differentiate, mesh)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    rows = cd.replicas.replicate(params, mesh)
    state = rows, tx.init(rows)
    tokens = cd.replicas.split(np.zeros((REPLICAS * ROWS,), np.int32), mesh)
    jax.clear_caches()
    start = now()
    lowered = jax.jit(train_step, donate_argnums=0).lower(state, tokens)
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
                    trace, compiling, lines = measure(name, params, due)
                    yield (
                        *(f"`{name}`", program, str(layers), f"{trace:.1f}"),
                        *(f"{lines:,.0f}", f"{compiling:.1f}"),
                    )

    header = ["method", "program", "layers", "trace and lower, s", "lines"]
    measuring.table([*header, "compile, s"], rows())
    print(measuring.where(options))


if __name__ == "__main__":
    main()
