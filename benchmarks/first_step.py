"""How long the first training step takes on eight replicas, by what takes the time.

    python benchmarks/first_step.py [--layers 10] [--methods muon,local_muon]

A model of six matrices a layer and an embedding, each a leaf of its own (no `nn.scan`),
under `replicas.step` on 8 CPU devices. Given are processor seconds to trace and lower,
lines of the lowered program, processor seconds to compile, and to write the compiled
program as text, which `replicas.step` reads once. `muon` and `adamw` are Optax's, which
never synchronise. Where the trigger looks at counters alone there are two programs, of
a local step, which is the first, and of a sync step, compiled at the first sync. No
persistent cache is used.
"""

import argparse
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvadion_jax as cd

AXIS, WIDTH, ROWS = cd.replicas.AXIS, 64, 16
METHODS = {
    "adamw": lambda: optax.adamw(1e-3),
    "muon": lambda: optax.contrib.muon(0.02),
    "local_muon": lambda: cd.local_muon(0.02, axis_name=AXIS),
    "curvadion": lambda: cd.curvadion(0.02, axis_name=AXIS),
    "diloco": lambda: cd.presets.diloco(1e-3, 20, axis_name=AXIS),
}
PROGRAMS: dict[str, dict[str, bool | None]] = {
    name: {"local step": False, "sync step": True} for name in ("local_muon", "diloco")
}
SHAPES = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
SHAPES |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}


def parameters(layers: int) -> dict:
    tree: dict = {"embed": {"embedding": jnp.ones((256, WIDTH))}}
    for index in range(layers):
        tree[f"layer_{index}"] = {
            name: {"kernel": 0.01 * jnp.ones(shape)} for name, shape in SHAPES.items()
        }
    return tree


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    x = params["embed"]["embedding"][tokens]
    for name, layer in params.items():
        if name != "embed":
            square = [layer[key]["kernel"] for key in ("query", "key", "value", "out")]
            x = x + jnp.tanh(jnp.linalg.multi_dot([x.reshape(-1, WIDTH), *square]))
            x = x + jnp.tanh(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]
    return jnp.mean(x**2)


def measure(tx: optax.GradientTransformation, layers: int, sync: bool | None) -> str:
    mesh, params = cd.replicas.make_mesh(8), parameters(layers)

    def train(state, tokens):
        params, opt_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    place = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
    tokens = jax.device_put(np.zeros((8 * ROWS,), np.int32), place)
    step = cd.replicas.step(train, mesh)
    jax.clear_caches()
    times = [time.process_time()]
    lowered = step.lower(state, tokens, sync=sync)
    times.append(time.process_time())
    lines = lowered.as_text().count("\n")
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    compiled.as_text()
    times.append(time.process_time())
    trace, _, compile_, text = np.diff(times)
    return f"{trace:.1f} | {lines:,} | {compile_:.1f} | {text:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--methods", default=",".join(METHODS))
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")  # of methods that never synchronise
    print("| method | program | trace and lower, s | lines | compile, s | text, s |")
    print("|---|---|---|---|---|---|")
    for name in arguments.methods.split(","):
        for program, sync in PROGRAMS.get(name, {"step": None}).items():
            row = measure(METHODS[name](), arguments.layers, sync)
            print(f"| `{name}` | {program} | {row}", flush=True)


if __name__ == "__main__":
    main()
