"""What a local step costs over a step of the inner optimizer.

    taskset -c 0 python benchmarks/overhead.py                 # of the optimizer's step
    taskset -c 0 python benchmarks/overhead.py --tokens 1024   # of a training step

A step of the optimizer takes given gradients to new parameters; with `--tokens` those
of the example's model are computed in front. A replica is a device under
`replicas.step`. The program is that of a run, syncs and their collectives included, or
where counters alone decide that of a local step; nothing synchronises while time is
taken. State is donated. *Temporary* is memory that the compiler reserves besides.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measuring
import optax
from measuring import AXIS

# The example's model.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_lm"))

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

RATE = 0.01
# More than any value; a budget for less than one sync in all steps.
NEVER, LITTLE = 1e9, 1e-9


class Case(NamedTuple):
    """An optimizer, the bare one that it is compared with, and what the host knows."""

    optimizer: Any
    local: str
    due: bool | None


def cases(params: Any) -> dict[str, Case]:
    """Bare optimizers, which name themselves, and the rows of the table."""
    dion, muon = cd.dion(RATE), measuring.muon(RATE, params)
    change = triggers.relative_momentum_change(NEVER)

    def of_dion(trigger):
        return cd.adaptive_sync(dion, trigger, synchronizers.reconcile(), AXIS)

    local_muon = cd.local_muon(RATE, axis_name=AXIS, budget=LITTLE)
    asking = triggers.budget(LITTLE, change)
    return {
        "dion": Case(dion, "dion", None),
        "muon": Case(muon, "muon", None),
        "local_muon": Case(local_muon, "muon", False),
        "every_k": Case(of_dion(triggers.every_k(10**6)), "dion", False),
        "evenly": Case(of_dion(triggers.evenly(LITTLE)), "dion", False),
        "relative_momentum_change": Case(of_dion(change), "dion", None),
        "budget(relative_momentum_change)": Case(of_dion(asking), "dion", None),
    }


def setting(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Parameters, how a replica gets gradients from its batch, and the batches."""
    import model

    gpt = model.GPT(options.vocabulary, options.layers, options.width, 8)
    key = jax.random.key(0)
    params = gpt.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    if options.tokens:
        shape = (options.replicas, options.tokens // options.length, options.length + 1)
        batch = jax.random.randint(key, shape, 0, options.vocabulary)
        return params, jax.grad(lambda *x: model.next_token_loss(gpt, *x)), batch
    stacked = jax.tree.map(lambda x: jnp.stack([x] * options.replicas), params)
    return params, lambda params, batch: batch, optax.tree.random_like(key, stacked)


def compiled(case: Case, mesh: Any, params: Any, differentiate: Any, batch: Any) -> Any:
    """The program, and how it starts."""
    tx = case.optimizer
    known = measuring.known(case.due)

    def train(state, batch):
        params, opt_state = state
        gradients = differentiate(params, jax.tree.map(lambda x: x[0], batch))
        updates, opt_state = tx.update(gradients, opt_state, params, **known)
        return (optax.apply_updates(params, updates), opt_state), ()

    def start():
        return cd.replicas.replicate((params, tx.init(params)), mesh)

    step = measuring.on_replicas(tx, train, params, mesh)
    return step.lower(start(), batch).compile(), start


def turn(program: Any, start: Any, batch: Any, name: str, last: dict) -> measuring.Turn:
    """Steps from a new state; the last one stays in `last`."""

    def begin():
        last[name] = start()

        def run():
            last[name], _ = jax.block_until_ready(program(last[name], batch))

        return run

    return begin


def check_quiet(last: dict[str, Any]) -> None:
    """Refuses times of steps that synchronised."""
    for name, (_, state) in last.items():
        # Momenta that were zero change by an infinite factor, which synchronises: on
        # the first step, and after kernels that start at zero on the next two.
        if (metrics := getattr(state, "metrics", None)) and metrics.syncs.max() > 3:
            raise RuntimeError(f"{name} synchronised: give other --steps.")


def table(options: argparse.Namespace) -> None:
    """Prints the rows."""
    mesh = cd.replicas.make_mesh(options.replicas)
    params, differentiate, batch = setting(options)
    every = cases(params)
    wanted = {name for name in every if options.only in name}
    wanted |= {every[name].local for name in wanted}
    turns, temporary, last = {}, {}, {}
    for name in wanted:
        program, start = compiled(every[name], mesh, params, differentiate, batch)
        turns[name] = turn(program, start, batch, name, last)
        temporary[name] = measuring.in_mebibytes(program)[2]
    rounds = measuring.take_turns(turns, options.rounds, options.steps, warmup=3)
    check_quiet(last)
    measuring.table(
        ["trigger or optimizer", "s a step", "over", "ratio", "temporary, MiB more"],
        (
            (
                *(f"`{name}`", f"{measuring.seconds(rounds, name):.3g}"),
                *(f"`{local}`", measuring.ratio(rounds, name, local)),
                f"{temporary[name] - temporary[local]:+.0f}",
            )
            for name, (_, local, _) in every.items()
            if name in wanted
        ),
    )


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="a replica; 0: none")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=8, help="each from new arrays")
    parser.add_argument("--steps", type=int, default=5, help="of each in a round")
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.replicas)
    table(options)
    print(measuring.where(options))


if __name__ == "__main__":
    main()
