"""What a local step costs over a step of the inner optimizer.

    taskset -c 0 python benchmarks/overhead.py                 # of the optimizer's step
    taskset -c 0 python benchmarks/overhead.py --tokens 1024   # of a training step

A step of the optimizer takes given gradients to new parameters; with `--tokens` those
of the example's model are computed in front. A replica is a device. The program is that
of a run, syncs and their collectives included; "local step" is that of a local step
alone. Nothing synchronises while time is taken. State is donated. *Temporary* is memory
that the compiler reserves besides. The host's time of a call is another table:

    taskset -c 0 python benchmarks/overhead.py --host          # at 600 arrays
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measuring
import optax

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


def local_muon_of(mesh: Any) -> Any:
    """Which never synchronises."""
    return cd.local_muon(
        RATE,
        trigger=triggers.evenly(LITTLE),
        dimension_numbers=measuring.matrices,
        mesh=mesh,
    )


def cases(mesh: Any) -> dict[str, Case]:
    """Bare optimizers, which name themselves, and the rows of the table."""
    numbers = measuring.matrices
    dion = cd.dion(RATE, dimension_numbers=numbers)
    change = triggers.relative_momentum_change(NEVER, numbers)

    def of_dion(trigger):
        return cd.adaptive_sync(dion, trigger, synchronizers.reconcile(), mesh)

    lift = cd.replicas.lift
    local_muon = local_muon_of(mesh)
    asking = triggers.budget(LITTLE, change)
    return {
        "dion": Case(lift(dion, mesh), "dion", None),
        "muon": Case(lift(measuring.muon(RATE), mesh), "muon", None),
        "local_muon": Case(local_muon, "muon", None),
        "local_muon, local step": Case(local_muon, "muon", False),
        "every_k": Case(of_dion(triggers.every_k(10**6)), "dion", None),
        "evenly": Case(of_dion(triggers.evenly(LITTLE)), "dion", None),
        "relative_momentum_change": Case(of_dion(change), "dion", None),
        "budget(relative_momentum_change)": Case(of_dion(asking), "dion", None),
    }


def setting(options: argparse.Namespace, mesh: Any) -> tuple[Any, Any, Any]:
    """Parameters, how a replica gets gradients from its batch, and the batches."""
    import model

    gpt = model.GPT(options.vocabulary, options.layers, options.width, 8)
    key = jax.random.key(0)
    params = gpt.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    if options.tokens:
        sequences = options.replicas * (options.tokens // options.length)
        shape = (sequences, options.length + 1)
        batch = jax.random.randint(key, shape, 0, options.vocabulary)
        batch = cd.replicas.split(batch, mesh)
        return params, jax.grad(lambda *x: model.next_token_loss(gpt, *x)), batch
    gradients = cd.replicas.replicate(optax.tree.random_like(key, params), mesh)
    return params, lambda params, batch: batch, gradients


def compiled(case: Case, mesh: Any, params: Any, differentiate: Any, batch: Any) -> Any:
    """The program, and how it starts."""
    tx = measuring.when(case.optimizer, case.due)
    step = measuring.train_step(tx, differentiate, mesh)

    def start():
        rows = cd.replicas.replicate(params, mesh)
        return rows, case.optimizer.init(rows)

    return step.lower(start(), batch).compile(), start


def turn(program: Any, start: Any, batch: Any, name: str, last: dict) -> measuring.Turn:
    """Steps from a new state; the last one stays in `last`."""

    def begin():
        last[name] = start()

        def run():
            last[name] = jax.block_until_ready(program(last[name], batch))

        return run

    return begin


def check_quiet(last: dict[str, Any]) -> None:
    """Refuses times of steps that synchronised."""
    for name, (_, state) in last.items():
        # Momenta that were zero change by an infinite factor, which synchronises: on
        # the first step, and after kernels that start at zero on the next two.
        if isinstance(state, cd.AdaptiveSyncState) and state.counters.syncs > 3:
            raise RuntimeError(f"{name} synchronised: give other --steps.")


def table(options: argparse.Namespace) -> None:
    """Prints the rows."""
    mesh = cd.replicas.make_mesh(options.replicas)
    params, differentiate, batch = setting(options, mesh)
    every = cases(mesh)
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


def host(options: argparse.Namespace) -> None:
    """Prints the processor time that a call of a step takes of its thread.

    The arrays are small and lie on one device per replica. `identity` is a jitted
    function of as many arrays, which returns them.
    """
    mesh = cd.replicas.make_mesh(options.replicas)
    # Of each parameter a local step has the row, its momentum, an anchor, outer
    # momentum and a residual; of the other parameters AdamW has two momenta.
    kernels = {f"layer_{n}": jnp.ones((4, 4)) for n in range(options.arrays // 5)}
    rows = cd.replicas.replicate({"kernel": kernels}, mesh)
    tx = local_muon_of(mesh)
    state = rows, tx.init(rows)
    programs = {"identity": jax.jit(lambda state, batch: state, donate_argnums=0)}
    for name, due in (("local_muon", None), ("local_muon, local step", False)):
        one = measuring.when(tx, due)
        programs[name] = measuring.train_step(one, lambda _, gradient: gradient, mesh)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.rounds):
        for name, program in programs.items():
            carried = jax.block_until_ready(program(copy(state), rows))
            for _ in range(options.steps):
                start = time.thread_time()
                result = program(carried, rows)
                seconds[name].append(time.thread_time() - start)
                carried = jax.block_until_ready(result)
    leaves = len(jax.tree.leaves((state, rows)))
    cells = ((n, f"{1e3 * statistics.median(x):.2f}") for n, x in seconds.items())
    measuring.table(["a call with " + f"{leaves} arrays", "ms of the host"], cells)


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
    parser.add_argument("--host", action="store_true", help="the host's time of a call")
    parser.add_argument("--arrays", type=int, default=600, help="of that call, about")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.replicas)
    (host if options.host else table)(options)
    print(measuring.where(options))


if __name__ == "__main__":
    main()
