"""What a local step costs over a step of the inner optimizer, in time and in memory.

    python benchmarks/overhead.py                 # of the optimizer's step
    python benchmarks/overhead.py --tokens 1024   # of a training step

A step of the optimizer takes given gradients to new parameters; with `--tokens`
those of the example's model are computed in front. Replicas are simulated on one
device by `vmap`, or with `--mesh` are devices each. The program is that of a run, syncs
and their collectives included, or where a trigger looks at counters alone that of a
local step, which the host knows it to be; nothing synchronises while time is taken.
State is donated.

Programs take turns in random order, and start every round from new arrays: where these
lie moves a time by some percent. A round's ratio is that of medians; given are the
median over the rounds and the quartiles. On CPU time is that of the processor, which
other work on the machine disturbs least (give the program one core, as by
`taskset -c 0`, so that no threads wait for each other); elsewhere it is a clock's.
Memory is what the compiler says: temporary arrays, and what of the state is not
overwritten in place.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from overhead_cases import AXIS, cases, local_optimizers

# The example's model.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "char_lm"))
import model

import curvadion_jax as cd


class Program(NamedTuple):
    """A compiled step, and what it starts from."""

    step: Callable[[Any, Any], Any]
    start: Callable[[], Any]
    temporary: float
    copied: float


def program(
    tx: Any,
    params: dict,
    differentiate: Any,
    batch: Any,
    replicas: int,
    mesh: bool,
    **known: bool,
) -> Program:
    """(state, batch) -> state for all replicas, compiled; memory in MiB.

    With ``sync=False`` of a local step alone.
    """

    def train(state, batch):
        params, opt_state = state
        gradients = differentiate(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params, **known)
        return (optax.apply_updates(params, updates), opt_state), ()

    def start():
        each = lambda x: jnp.broadcast_to(x, (replicas, *jnp.shape(x)))  # noqa: E731
        return jax.jit(lambda p: jax.tree.map(each, (p, tx.init(p))))(params)

    step = jax.jit(jax.vmap(train, axis_name=AXIS), donate_argnums=0)
    if mesh:
        devices = cd.replicas.make_mesh(replicas)
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
        step = cd.replicas.step(
            lambda state, batch: train(state, first(batch)), devices
        )

        def start():
            return cd.replicas.replicate((params, tx.init(params)), devices)

    compiled = step.lower(start(), batch).compile()
    memory = compiled.memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Program(
        lambda state, batch: compiled(state, batch)[0],
        start,
        memory.temp_size_in_bytes / 2**20,
        kept / 2**20,
    )


def syncs(state: Any) -> int | None:
    """Syncs so far; None of a bare optimizer."""
    opt_state = state[1]
    found = isinstance(opt_state, cd.AdaptiveSyncState)
    return int(opt_state.metrics.syncs.max()) if found else None


def seconds(
    programs: dict[str, Program],
    batch: Any,
    steps: int,
    order: random.Random,
    synced: bool = False,
) -> dict[str, float]:
    """Median time of a step of each, from new arrays on.

    Args:
      programs: of bare optimizers, and of others that are to do the same on every step.
      batch: for all of them.
      steps: number of steps of each.
      order: in which they take turns.
      synced: whether others synchronise on every step, else on none.

    Raises:
      RuntimeError: if one of the steps was another than that.
    """
    clock = time.perf_counter
    if jax.default_backend() == "cpu":
        clock = time.process_time
    states, before = {}, {}
    for name in order.sample(list(programs), len(programs)):
        states[name] = programs[name].start()
        # Momenta that were zero change by an infinite factor, which synchronises: on
        # the first step, and behind kernels that start at zero on the second and third.
        for _ in range(3):
            states[name] = programs[name].step(states[name], batch)
        before[name] = syncs(states[name])
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(steps):
        for name in order.sample(list(programs), len(programs)):
            jax.block_until_ready(states[name])
            start = clock()
            states[name] = programs[name].step(states[name], batch)
            jax.block_until_ready(states[name])
            taken[name].append(clock() - start)
    for name, state in states.items():
        if (count := syncs(state)) is None:
            continue
        found = count - before[name]
        if found != (steps if synced else 0):
            raise RuntimeError(f"{name} synchronised {found} times in {steps} steps")
    return {name: statistics.median(times) for name, times in taken.items()}


def longer(rounds: list[dict[str, float]], name: str, against: str) -> str:
    """How much longer one takes than another, with quartiles over the rounds."""
    ratios = [each[name] / each[against] - 1 for each in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


def gradients(gpt: Any, params: dict, options: argparse.Namespace):
    """How a replica gets its gradients from its part of a batch, and the batch."""
    key = jax.random.key(1)
    if options.tokens:
        rows = options.tokens // options.length
        shape = (options.replicas, rows, options.length + 1)
        batch = jax.random.randint(key, shape, 0, options.vocabulary)
        loss = lambda params, batch: model.next_token_loss(gpt, params, batch)  # noqa: E731
        return jax.grad(loss), batch
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    pairs = zip(keys, leaves, strict=True)
    given = [jax.random.normal(k, (options.replicas, *x.shape)) for k, x in pairs]
    return lambda params, batch: batch, jax.tree.unflatten(structure, given)


def setting(options: argparse.Namespace) -> tuple[dict, Any, Any, int, bool]:
    """What `program` is given beside the optimizer; the third is the batch."""
    gpt = model.GPT(options.vocabulary, options.layers, options.width, 8)
    key = jax.random.key(0)
    params = gpt.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    differentiate, batch = gradients(gpt, params, options)
    return params, differentiate, batch, options.replicas, options.mesh


def table(options: argparse.Namespace) -> list[str]:
    """The lines of a Markdown table."""
    where = setting(options)
    params, _, batch, *_ = where
    local = local_optimizers(params)
    rows = {name: case for name, case in cases(local).items() if options.only in name}
    compared = {case.local for case in rows.values()}
    local = {name: tx for name, tx in local.items() if name in compared}
    programs = {name: program(tx, *where) for name, tx in local.items()}
    for name, case in rows.items():
        known = {"sync": False} if case.scheduled else {}
        programs[name] = program(case.optimizer, *where, **known)
    order = random.Random(0)
    rounds = [
        seconds(programs, batch, options.steps, order) for _ in range(options.rounds)
    ]

    def line(name: str, against: str) -> str:
        more = programs[name].temporary - programs[against].temporary
        return (
            f"| {name} | {against} | {longer(rounds, name, against)} | "
            f"{more:+.0f} | {programs[name].copied:.0f} |"
        )

    bare = ", ".join(
        f"{name} {statistics.median([each[name] for each in rounds]):.3f} s, "
        f"{programs[name].temporary:.0f} MiB"
        for name in local
    )
    return [
        "| trigger or optimizer | over | time (quartiles) | temporary MiB more | "
        "MiB not in place |",
        "|---|---|---|---|---|",
        *(line(name, case.local) for name, case in rows.items()),
        "",
        f"A step of the bare optimizers: {bare}.",
    ]


def parse(description: str) -> argparse.Namespace:
    """The options of this program, and of `health.py`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="a replica; 0: none")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=8, help="each from new arrays")
    parser.add_argument("--steps", type=int, default=5, help="of each in a round")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--mesh", action="store_true", help="a device for each replica")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, for quartiles")
    if options.tokens % options.length:
        parser.error(f"--tokens must be a multiple of --length, {options.length}")
    if options.mesh:
        jax.config.update("jax_num_cpu_devices", options.replicas)
    return options


def main() -> None:
    options = parse(__doc__.splitlines()[0])
    print("\n".join(table(options)))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {vars(options)}")


if __name__ == "__main__":
    main()
