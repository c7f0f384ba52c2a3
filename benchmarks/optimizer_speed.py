"""How long a step of the optimizer takes: Dion at several ranks, Muon, AdamW, PyTorch.

    taskset -c 0 python benchmarks/optimizer_speed.py                # GPT 160M
    taskset -c 0 python benchmarks/optimizer_speed.py --model 1b     # one layer
    taskset -c 0 python benchmarks/optimizer_speed.py --model 8b     # of a layer

A step takes given gradients to new parameters, with weight decay, and its state is
donated. The parameters are the matrices of the model, float32; `--embeddings` adds an
embedding and a head, which all but AdamW give to AdamW. Dion and Muon have the same
dimension numbers. `8b` is three shapes of a layer, each once, so its seconds are not
those of a layer: a step of Muon on all of that takes minutes on one core, and on these
a minute (`--rounds 2 --ranks 0.5 0.25 0.125 0.0625` makes it short).

Beside them runs the authors' PyTorch code (how, `torch_dion.py` says), with torch
installed and a clone given:

    git clone https://github.com/microsoft/dion DION
    python -m pip install torch --index-url https://download.pytorch.org/whl/cpu
    taskset -c 0 python benchmarks/optimizer_speed.py --dion DION

Programs take turns in random order, each from new arrays, and a turn takes as many
steps as fit in `--seconds`, one at least; the turn's time is their median. Given are
the median over rounds, and of a round's ratios the median and quartiles. On CPU time is
that of the processor, of all threads together, which other work on the machine disturbs
least; one core, as by `taskset -c 0`, keeps threads from waiting for each other, and
gives torch as many of them as JAX. Elsewhere it is a clock's. With `--results` every
turn goes to a file at once, and what is there is not run again.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from torch_dion import Turn, torch_names, torch_turns

import curvadion_jax as cd

RATE, DECAY, MOMENTUM = 0.01, 0.01, 0.95
MUON, ADAMW = "Muon", "AdamW"
VOCABULARY = 50304
WIDTH = {"tiny": 64, "160m": 768, "1b": 2048, "8b": 4096}


def matrices(model: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name, (fan_in, fan_out) behind the axis of the layers."""
    width = WIDTH[model]
    if model == "8b":
        return {"query": (width, width), "key": (width, 1024), "up": (width, 14336)}
    stack = () if model == "1b" else (layers,)
    square = dict.fromkeys(("query", "key", "value", "out"), (*stack, width, width))
    return square | {
        "up": (*stack, width, 4 * width),
        "down": (*stack, 4 * width, width),
    }


def vectors(model: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the embedding and the head."""
    width = WIDTH[model]
    return {"embed": (VOCABULARY, width), "head": (width, VOCABULARY)}


def normal(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    draw = jax.jit(jax.random.normal, static_argnums=1)
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: 0.02 * draw(key, shape) for key, (name, shape) in pairs}


def optimizers(
    numbers: dict[str, cd.DimensionNumbers | None], ranks: list[float]
) -> dict[str, optax.GradientTransformation]:
    """What JAX runs, by the name in the table."""
    settings: dict[str, Any] = {"momentum": MOMENTUM, "weight_decay": DECAY}
    rows = {
        dion_name(rank): cd.dion(RATE, rank, dimension_numbers=numbers, **settings)
        for rank in ranks
    }
    rows[MUON] = optax.contrib.muon(
        RATE,
        beta=MOMENTUM,
        weight_decay=DECAY,
        muon_weight_dimension_numbers=numbers,
    )
    return rows | {ADAMW: optax.adamw(RATE, weight_decay=DECAY)}


def dion_name(rank: float) -> str:
    return f"`dion`, rank {'1' if rank == 1 else f'1/{1 / rank:g}'}"


def jax_turn(tx: Any, params: dict, gradients: dict) -> Turn:
    """Compiles a step."""

    def update(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    copy = jax.jit(lambda params: jax.tree.map(jnp.copy, (params, tx.init(params))))
    shapes = jax.eval_shape(copy, params)
    step = jax.jit(update, donate_argnums=0).lower(shapes, gradients).compile()

    def begin():
        state = jax.block_until_ready(copy(params))

        def run():
            nonlocal state
            state = jax.block_until_ready(step(state, gradients))

        return run

    return begin


def measure(begin: Turn, clock: Callable[[], float], enough: float) -> float:
    """Median time of the steps of one turn."""
    run, taken = begin(), []
    while not taken or sum(taken) < enough:
        start = clock()
        run()
        taken.append(clock() - start)
    return statistics.median(taken)


def table(rounds: list[dict[str, float]], torch_ranks: list[float]) -> list[str]:
    """The lines of a Markdown table, from the seconds by name of every round."""

    def ratio(name: str, against: str) -> str:
        ratios = [each[name] / each[against] for each in rounds]
        if len(ratios) < 2:
            return f"{ratios[0]:.3g}"
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return f"{middle:.3g} ({low:.3g} to {high:.3g})"

    lines = [
        "| optimizer | seconds a step | over Muon | over AdamW |",
        "|---|---|---|---|",
    ]
    for name in rounds[0]:
        seconds = statistics.median([each[name] for each in rounds])
        lines.append(
            f"| {name} | {seconds:.3g} | {ratio(name, MUON)} | {ratio(name, ADAMW)} |"
        )
    compared = [
        f"{dion_name(rank)} over {name}: {ratio(dion_name(rank), name)}"
        for rank in torch_ranks
        for name in torch_names(dion_name(rank))
    ]
    return lines + (["", *compared] if compared else [])


def prepared(options: argparse.Namespace, names: list[str]) -> dict[str, Turn]:
    """Compiles what of these has still to run."""
    shapes = matrices(options.model, options.layers)
    numbers: dict[str, Any] = dict.fromkeys(shapes, cd.DimensionNumbers(-2, -1))
    if options.embeddings:
        shapes |= vectors(options.model)
        numbers |= dict.fromkeys(vectors(options.model))
    params, gradients = normal(shapes, 0), normal(shapes, 1)
    turns = {}
    for name, tx in optimizers(numbers, options.ranks).items():
        if name in names:
            turns[name] = jax_turn(tx, params, gradients)
    if options.torch_ranks and set(names) - set(turns):
        turns |= torch_turns(
            options.dion,
            params,
            gradients,
            {dion_name(rank): rank for rank in options.torch_ranks},
            options.threads,
            lr=RATE,
            mu=MOMENTUM,
            weight_decay=DECAY,
        )
    return turns


def cores() -> int:
    """That the process may use, as taskset says where there is one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse() -> argparse.Namespace:
    """The options, with the cores, and the ranks at which PyTorch can run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["160m", "1b", "8b"], default="160m")
    parser.add_argument("--layers", type=int, default=12, help="of the 160M model")
    parser.add_argument("--embeddings", action="store_true")
    ranks = [1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    parser.add_argument("--ranks", type=float, nargs="+", default=ranks)
    parser.add_argument("--dion", type=Path, help="a clone of microsoft/dion")
    parser.add_argument("--torch-ranks", type=float, nargs="+", default=[1 / 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--results", type=Path, help="file of JSON lines to go on from")
    options = parser.parse_args()
    options.threads = cores()
    options.torch_ranks = [r for r in options.torch_ranks if r in options.ranks]
    if options.dion is None or importlib.util.find_spec("torch") is None:
        print("Without PyTorch: give --dion, and install torch (see --help).")
        options.torch_ranks = []
    return options


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """What seconds depend on; those of others in the file are not taken."""
    kept = ("model", "layers", "embeddings", "threads", "seconds")
    settings = {name: getattr(options, name) for name in kept}
    settings |= {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    if options.torch_ranks:
        settings["torch"] = importlib.metadata.version("torch")
    return settings


def stored(
    options: argparse.Namespace, settings: dict[str, Any]
) -> list[dict[str, float]]:
    """The seconds by name of every round, those that the file has."""
    rounds: list[dict[str, float]] = [{} for _ in range(options.rounds)]
    if options.results and options.results.exists():
        for line in options.results.read_text().splitlines():
            row = json.loads(line)
            if row["settings"] == settings and row["round"] < options.rounds:
                rounds[row["round"]][row["optimizer"]] = row["step_seconds"]
    return rounds


def complete(
    rounds: list[dict[str, float]],
    names: list[str],
    options: argparse.Namespace,
    settings: dict[str, Any],
    clock: Callable[[], float],
) -> None:
    """Measures what the rounds lack of these names, and notes it in the file."""
    missing = [n for n in names if any(n not in each for each in rounds)]
    turns = prepared(options, missing) if missing else {}
    for number, each in enumerate(rounds):
        for name in random.Random(number).sample(names, len(names)):
            if name in each:
                continue
            each[name] = measure(turns[name], clock, options.seconds)
            row = {"optimizer": name, "round": number, "step_seconds": each[name]}
            if options.results:
                options.results.parent.mkdir(parents=True, exist_ok=True)
                with options.results.open("a") as file:
                    file.write(json.dumps(row | {"settings": settings}) + "\n")


def main() -> None:
    options = parse()
    clock, what = time.perf_counter, "a clock's"
    if jax.default_backend() == "cpu":
        clock, what = time.process_time, "the processor's"
    names = [*optimizers({}, options.ranks)]
    for rank in options.torch_ranks:
        names += torch_names(dion_name(rank))
    settings = circumstances(options)
    rounds = stored(options, settings)
    complete(rounds, names, options, settings, clock)
    ordered = [{name: each[name] for name in names} for each in rounds]
    print("\n".join(table(ordered, options.torch_ranks)))
    print(f"\nSeconds are {what}; {options.rounds} rounds; {json.dumps(settings)}")


if __name__ == "__main__":
    main()
