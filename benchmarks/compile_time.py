"""How long a step of the optimizer takes to trace and to compile, as the model deepens.

    python benchmarks/compile_time.py

Two forms of one model: every kernel of all layers in one stack (`nn.scan`), and a leaf
of its own for every kernel of every layer, six a layer. Given are seconds to trace and
lower and seconds to compile, and the growth of their sum over the smallest depth,
beside that of Optax's Muon on the same trees with the same dimension numbers. The two
programs of `local_muon` are for 8 replicas on one device, under `vmap`.

Programs take turns in random order; JAX forgets all it has compiled before each, and a
small one of each optimizer goes first, so that nobody pays for what JAX sets up once.
Given are medians over rounds, of which one takes some minutes. On CPU time is that of
the processor, of all threads together. Nothing is run, and no persistent cache is used.
Widths barely matter here, and are small. With `--results` every measurement goes to a
file at once, and what is there is not made again.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import curvadion_jax as cd

RATE, AXIS, REPLICAS = 0.01, cd.replicas.AXIS, 8
MUON = "Muon"
# Of `local_muon`, which the host chooses between.
PROGRAMS: dict[str, dict[str, bool]] = {
    "`local_muon`, local step": {"sync": False},
    "`local_muon`, sync": {"sync": True},
}
NAMES = ("`dion`", MUON, *PROGRAMS)
STACKED, UNSTACKED = "stacked", "a leaf a layer"


def parameters(form: str, layers: int, width: int) -> dict[str, Any]:
    """Shapes of the matrices of a model."""
    square = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes = square | {"up": (width, 4 * width), "down": (4 * width, width)}

    def tree(*stack: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct((*stack, *shape), jnp.float32)
            for name, shape in shapes.items()
        }

    if form == STACKED:
        return tree(layers)
    return {f"layer_{number}": tree() for number in range(layers)}


def optimizers(params: Any, rank: float) -> dict[str, optax.GradientTransformation]:
    numbers = jax.tree.map(lambda _: cd.DimensionNumbers(-2, -1), params)
    return {
        "`dion`": cd.dion(RATE, rank, dimension_numbers=numbers),
        MUON: optax.contrib.muon(RATE, muon_weight_dimension_numbers=numbers),
        **dict.fromkeys(
            PROGRAMS, cd.local_muon(RATE, axis_name=AXIS, dimension_numbers=numbers)
        ),
    }


def measure(name: str, tx: Any, params: Any) -> tuple[float, float, int]:
    """Seconds to trace and lower, seconds to compile, from nothing, and lines of it."""
    clock = time.perf_counter
    if jax.default_backend() == "cpu":
        clock = time.process_time

    def update(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(
            gradients, opt_state, params, **PROGRAMS.get(name, {})
        )
        return optax.apply_updates(params, updates), opt_state

    arguments = (params, jax.eval_shape(tx.init, params)), params
    if name in PROGRAMS:
        update = jax.vmap(update, axis_name=AXIS)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((REPLICAS, *x.shape), x.dtype), arguments
        )
    jax.clear_caches()
    start = clock()
    lowered = jax.jit(update, donate_argnums=0).lower(*arguments)
    traced = clock()
    lowered.compile()
    compiled = clock()
    return traced - start, compiled - traced, lowered.as_text().count("\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rank", type=float, default=0.25)
    parser.add_argument("--stacked", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--unstacked", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--results", type=Path, help="file of JSON lines to go on from")
    options = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    settings = {"width": options.width, "rank": options.rank, "jax": jax.__version__}
    settings["device"] = jax.devices()[0].device_kind
    depths = {STACKED: options.stacked, UNSTACKED: options.unstacked}
    cases = [
        (name, form, layers)
        for name in NAMES
        for form, each in depths.items()
        for layers in each
    ]
    found: dict[tuple, tuple[float, float, int]] = {}
    if options.results and options.results.exists():
        for line in options.results.read_text().splitlines():
            row = json.loads(line)
            if row["settings"] == settings:
                found[row["round"], *row["case"]] = row["found"]
    small = parameters(STACKED, 1, options.width)
    for name, tx in optimizers(small, options.rank).items():
        measure(name, tx, small)
    for number in range(options.rounds):
        for case in random.Random(number).sample(cases, len(cases)):
            if (number, *case) in found:
                continue
            name, form, layers = case
            params = parameters(form, layers, options.width)
            tx = optimizers(params, options.rank)[name]
            found[number, *case] = measure(name, tx, params)
            row = {"round": number, "case": case, "found": found[number, *case]}
            if options.results:
                options.results.parent.mkdir(parents=True, exist_ok=True)
                with options.results.open("a") as file:
                    file.write(json.dumps(row | {"settings": settings}) + "\n")

    def median(case: tuple, part: int) -> float:
        return statistics.median(
            found[number, *case][part] for number in range(options.rounds)
        )

    print("| optimizer | form | layers | lines | trace and lower | compile | growth |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        name, form, layers = case
        first = (name, form, depths[form][0])
        ratios = [
            sum(found[number, *case][:2]) / sum(found[number, *first][:2])
            for number in range(options.rounds)
        ]
        print(
            f"| {name} | {form} | {layers} | {median(case, 2):,.0f} | "
            f"{median(case, 0):.2f} s | {median(case, 1):.2f} s | "
            f"{statistics.median(ratios):.2f} |"
        )
    print(f"\n{options.rounds} rounds; {json.dumps(settings)}")


if __name__ == "__main__":
    main()
