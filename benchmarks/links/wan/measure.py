"""Seconds to a loss over a slow link, measured.

    # As root; the same command goes on. Then losses alone, and a rehearsal.
    python benchmarks/links/wan/measure.py --limit 3600
    python benchmarks/links/wan/measure.py --methods local_muon --steps 330
    python benchmarks/links/wan/measure.py --tiny --links "100 Mbit/s"
    python benchmarks/links/wan/wan_table.py    # the table and the picture

Two processes of one CPU device each, a replica each, talk through `jax.distributed` and
gloo over Linux's TCP, each in a network namespace of its own (`link.py`; it needs root
and /dev/net/tun). The model is the study's, its text the study's, with
half of the study's sequences per replica and step.

1. *loss*: every method trains `--steps` steps in one process, replicas simulated, and
   its held-out loss is noted every 10 steps. The learning rate's schedule has that
   length, so each length is a run of its own.
2. *time*: every method takes a few steps over each link, at least one more sync than
   the first, which compiles. From the times of steps and of syncs, and the numbers of
   both until a loss, follow the seconds to it. Computation is that of these cores.
3. *message*: all-reduces of some sizes over each link, from which `cost_model.py`'s
   constants for gloo follow.

A row is written to `results/rows.jsonl` the moment it exists, and is not measured
again.
"""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]
sys.path[1:1] = [
    str(_ROOT / place)
    for place in (".", "examples/char_lm", "benchmarks", "benchmarks/study")
]

import corpus  # noqa: E402
import link  # noqa: E402
import study  # noqa: E402
from line import Conditions  # noqa: E402

ROWS = Path(__file__).with_name("results") / "rows.jsonl"
REPLICAS, STEPS, EVALUATE_EVERY = 2, 300, 10
LINKS = {
    "10 Mbit/s": Conditions(10e6, 0.050),
    "100 Mbit/s": Conditions(100e6, 0.020),
    "1 Gbit/s": Conditions(1e9, 0.002, mtu=9000),
}
# Method -> peak learning rate, and steps that are timed over a link.
METHODS = {
    "AdamW, float32": (0.02, 6),
    "AdamW, 2 bits": (0.02, 6),
    "Muon, float32": (0.08, 6),
    "Muon, 2 bits": (0.08, 6),
    "local_muon": (0.04, 22),
    "curvadion": (0.08, 24),
    "DiLoCo": (0.02, 62),
}
MESSAGES = (4, 4_096, 262_144, 3_400_000)  # bytes


def optimizer(method: str, steps: int, mesh: Any) -> Any:
    """An optimizer of rows. In 2 bits means have error feedback."""
    import baselines
    import measuring
    import optax
    import simulate

    import curvadion_jax as cd
    from curvadion_jax import presets, triggers

    rate = simulate.schedule(METHODS[method][0], steps)
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    momentum = optax.linear_schedule(0.8, 0.95, steps)
    muon = baselines.muon(rate, momentum)
    matrices = {"dimension_numbers": measuring.matrices, "mesh": mesh}

    def in_two_bits(inner):
        two_bits = cd.compressors.quantize(2)
        mean = cd.synchronizers.average_gradients(two_bits)
        return cd.adaptive_sync(inner, triggers.always(), mean, mesh)

    made = {
        "AdamW, float32": lambda: presets.synchronous_adamw(rate, mesh=mesh),
        "AdamW, 2 bits": lambda: in_two_bits(adamw),
        "Muon, float32": lambda: presets.synchronous_muon(
            rate, momentum=momentum, **matrices
        ),
        "Muon, 2 bits": lambda: in_two_bits(muon),
        "local_muon": lambda: cd.local_muon(rate, budget=0.01, **matrices),
        "curvadion": lambda: cd.curvadion(rate, budget=0.01, **matrices),
        "DiLoCo": lambda: presets.diloco(rate, mesh=mesh),
    }
    return made[method]()


def size_of(tiny: bool) -> Any:
    """The study's model, or a tiny one."""
    from simulate import Size

    if tiny:
        return Size(1, 16, 1, 16, 2, 16, replicas=REPLICAS)
    return Size(sequences=8, evaluation=256, replicas=REPLICAS)


def text_of(tiny: bool) -> Any:
    """The study's text."""
    import data

    return data.load(None if tiny else str(corpus.TEXT))


def losses(method: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Held-out losses and whether each step synchronised, replicas simulated."""
    import optax
    import simulate

    import curvadion_jax as cd

    size, text = size_of(tiny), text_of(tiny)
    mesh = cd.replicas.simulated(REPLICAS)
    gpt = simulate.transformer(size, text)
    tx = optimizer(method, steps, mesh)
    params = cd.replicas.replicate(simulate.parameters(gpt, 0), mesh)
    state = params, tx.init(params)
    step = simulate.train_step(gpt, tx, size)
    batches = simulate.Batches(text, 0, size)
    evaluate = simulate.evaluation(gpt, size, text)
    curve, synced = {}, []
    for number in range(1, steps + 1):
        state = step(*state, batches.of(number - 1))
        (counters,) = optax.tree.get_all_with_path(state[1], "counters")
        synced.append(int(counters[1].since) == 0)
        if number % EVALUATE_EVERY == 0:
            curve[str(number)] = evaluate(state[0])
    report = cd.metrics.read(state[1])
    return {"curve": curve, "synced": synced, "share": report["share"]}


def over_link(options: argparse.Namespace) -> None:
    """One process at an end of a link; its lines are times of steps."""
    link.die_with_parent()
    link.enter(Path(options.namespace), options.end)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[options.end % 2]})
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = f"{link.address(0)}:{link.PORT}"
    jax.distributed.initialize(coordinator, REPLICAS, options.end)
    import jax.numpy as jnp
    import measuring
    import model
    import numpy as np
    import simulate
    from jax.experimental import multihost_utils

    import curvadion_jax as cd

    # gloo waits 30 seconds at its first message, and one may compile that much longer.
    multihost_utils.sync_global_devices("started")
    mesh = cd.replicas.make_mesh(REPLICAS)
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(cd.replicas.AXIS))

    def of_process(x):
        own = lambda index: x[index]
        return jax.make_array_from_callback(x.shape, rows, own)

    def timed(function, *arguments):
        before, start = link.received(), time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        seconds = time.perf_counter() - start
        return result, {"seconds": seconds, "received": link.received() - before}

    if options.one == "message":
        # The mean of rows of all replicas.
        total = jax.jit(lambda x: jnp.broadcast_to(x.mean(0), x.shape))
        found = {}
        for size in MESSAGES:
            x = of_process(np.ones((REPLICAS, max(1, size // 4)), np.float32))
            jax.block_until_ready(total(x))
            taken = [timed(total, x)[1] for _ in range(5)]
            found[str(size)] = statistics.median(x["seconds"] for x in taken)
        print(json.dumps({"messages": found}), flush=True)
        return
    size, text = size_of(options.tiny), text_of(options.tiny)
    gpt = simulate.transformer(size, text)
    tx = optimizer(options.one, STEPS, mesh)
    params = cd.replicas.replicate(simulate.parameters(gpt, 0), mesh)
    state = params, tx.init(params)
    loss = lambda params, batch: model.next_token_loss(gpt, params, batch)
    step = measuring.train_step(tx, jax.grad(loss), mesh)
    batches = simulate.Batches(text, 0, size)
    steps = METHODS[options.one][1]
    taken, last = [], 0
    for number in range(steps):
        state, row = timed(step, state, of_process(batches.of(number)))
        syncs = cd.metrics.read(state[1])["syncs"]
        taken.append(row | {"synced": syncs > last})
        last = syncs
    print(json.dumps({"steps": taken}), flush=True)


def in_processes(name: str, what: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both ends over a link: what the first one says, or why there is nothing."""
    with link.open_link(LINKS[name]) as paths, tempfile.TemporaryDirectory() as folder:
        workers, files = [], []
        for end, path in enumerate(paths):
            command = [sys.executable, __file__, "--one", what, "--end", str(end)]
            command += ["--namespace", str(path)] + ["--tiny"] * options.tiny
            files.append(Path(folder, str(end)))
            flags = "--xla_cpu_multi_thread_eigen=false"
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            with files[-1].open("w") as stream:
                workers.append(
                    subprocess.Popen(
                        command, stdout=stream, stderr=stream, env=environment
                    )
                )
        until = time.monotonic() + options.patience
        try:
            for worker in workers:
                worker.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        lines = files[0].read_text().strip().splitlines() or [""]
        if all(worker.returncode == 0 for worker in workers):
            return json.loads(lines[-1])
        return {"error": lines[-1][-300:]}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--patience", type=float, default=900, help="seconds of a run")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=[*LINKS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--namespace", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        over_link(options)
        return
    end = time.monotonic() + options.limit
    plan = [
        {"kind": kind, "link": name, "method": what}
        for name in options.links
        for kind, whats in (("message", ["message"]), ("time", options.methods))
        for what in whats
    ]
    until = {"until": options.steps}
    plan += [{"kind": "loss", "method": x} | until for x in options.methods]
    for task in plan:
        task["tiny"] = options.tiny
        done = study.rows_of(options.rows)
        if any(task.items() <= row.items() for row in done):
            continue
        if time.monotonic() > end:
            return
        if task["kind"] == "loss":
            found = losses(task["method"], options.steps, options.tiny)
        elif why := link.refusal():
            sys.exit(why)
        else:
            found = in_processes(task["link"], task["method"], options)
            conditions = dataclasses.asdict(LINKS[task["link"]])
            found |= {"conditions": conditions}
        row = task | found | {"date": datetime.date.today().isoformat()}
        study.append(options.rows, row)
        print(json.dumps(row)[:300], flush=True)


if __name__ == "__main__":
    main()
