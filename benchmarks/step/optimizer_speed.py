"""How long a step of the optimizer takes: Dion at several ranks, Muon, AdamW, PyTorch.

    taskset -c 0 python benchmarks/step/optimizer_speed.py                # GPT 160M
    taskset -c 0 python benchmarks/step/optimizer_speed.py --model 1b     # one layer
    taskset -c 0 python benchmarks/step/optimizer_speed.py --model 8b     # of a layer

A step takes given gradients to new parameters, with weight decay, and its state is
donated. It is the second: the first warms up both sides. The parameters are the
matrices of the model, float32; `--embeddings` adds an embedding and a head, which all
but AdamW give to AdamW. Dion and Muon have the same dimension numbers. `8b` is three
shapes of a layer, each once, so its seconds are not those of a layer (`--rounds 2
--ranks 0.5 0.25 0.125 0.0625` makes it short).

Beside them runs the authors' PyTorch code (how, `torch_dion.py` says), with torch
installed and a clone given:

    git clone https://github.com/microsoft/dion DION
    python -m pip install torch --index-url https://download.pytorch.org/whl/cpu
    taskset -c 0 python benchmarks/step/optimizer_speed.py --dion DION
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measuring
import optax
from measuring import Turn

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
    """Random arrays of these shapes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    draw = jax.jit(jax.random.normal, static_argnums=1)
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: 0.02 * draw(key, shape) for key, (name, shape) in pairs}


def optimizers(numbers: Any, ranks: list[float]) -> dict[str, Any]:
    """What JAX runs, by the name in the table."""
    settings: dict[str, Any] = {"momentum": MOMENTUM, "weight_decay": DECAY}
    rows = {
        dion_name(rank): cd.dion(RATE, rank=rank, dimension_numbers=numbers, **settings)
        for rank in ranks
    }
    muon = {"beta": MOMENTUM, "muon_weight_dimension_numbers": numbers}
    rows[MUON] = optax.contrib.muon(RATE, weight_decay=DECAY, **muon)
    return rows | {ADAMW: optax.adamw(RATE, weight_decay=DECAY)}


def dion_name(rank: float) -> str:
    """As in the tables."""
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


def torch_turns(options: Any, params: dict, gradients: dict) -> dict[str, Turn]:
    """Those of the authors' code, where a clone is given."""
    import torch_dion

    settings = {"lr": RATE, "mu": MOMENTUM, "weight_decay": DECAY}
    threads = len(os.sched_getaffinity(0))
    names = {rank: dion_name(rank) for rank in options.torch_ranks}
    return torch_dion.turns(options.dion, params, gradients, names, threads, **settings)


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--model", choices=WIDTH, default="160m")
    parser.add_argument("--layers", type=int, default=12, help="but of 1b and 8b")
    parser.add_argument("--embeddings", action="store_true")
    ranks = [1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    parser.add_argument("--ranks", type=float, nargs="+", default=ranks)
    parser.add_argument("--dion", type=Path, help="a clone of microsoft/dion")
    parser.add_argument("--torch-ranks", type=float, nargs="+", default=[1 / 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="in a round")
    options = parser.parse_args()
    shapes = matrices(options.model, options.layers)
    numbers: dict[str, Any] = dict.fromkeys(shapes, cd.DimensionNumbers(-2, -1))
    if options.embeddings:
        shapes |= vectors(options.model)
        numbers |= dict.fromkeys(vectors(options.model))
    params, gradients = normal(shapes, 0), normal(shapes, 1)
    turns = {
        name: jax_turn(tx, params, gradients)
        for name, tx in optimizers(numbers, options.ranks).items()
    }
    if options.dion is not None:
        turns |= torch_turns(options, params, gradients)
    # A step first that does not count: torch makes its state in it.
    rounds = measuring.take_turns(
        turns, options.rounds, options.steps, warmup=1, apart=True
    )
    compared = [name for name in (dion_name(1 / 4), MUON, ADAMW) if name in turns]
    header = ["optimizer", "seconds a step", *(f"over {name}" for name in compared)]
    measuring.table(
        header,
        (
            (
                *(name, f"{measuring.seconds(rounds, name):.3g}"),
                *(measuring.ratio(rounds, name, against) for against in compared),
            )
            for name in turns
        ),
    )
    print(measuring.where(options))


if __name__ == "__main__":
    main()
