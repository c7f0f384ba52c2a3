"""Steps of the optimizers on an accelerator: time, memory, and the first step.

    python benchmarks/gpu/run.py                     # until all is measured
    python benchmarks/gpu/run.py --limit 480         # at most eight minutes; goes on
    python benchmarks/gpu/run.py --table             # what there is so far
    python benchmarks/gpu/run.py --before            # with older code beside today's

Every measurement is a process of its own, since a device's peak of memory is that of a
process, and goes to `results.jsonl` at once; what is there is not run again. One that
fails, as for want of memory, is noted with its error. The models are those of
`optimizer_speed.py` with embedding and head, float32, all layers at `160m` and one at
`1b`. A step takes given gradients to new parameters, one replica on the device (a mesh
of it), with donated state:

* *first step*: seconds to trace, lower and compile; of a sync too, where that is a
  program of its own.
* *step*: median over as many as fit in `--seconds`, on which no decision is due, of
  several launched together, so that launching does not count.
* *sync adds*: what a sync computes, codes and outer step, for one replica. One replica
  has nobody to send codes to and encodes nothing, so it is measured with two on the
  device (`simulated(2)`): half of the time of a step that synchronises, less half of a
  local step's. (*One program* has the condition of a sync in it, and never
  synchronises: what the condition costs a local step, in time and memory.)
* *over the limit*: the time of a step over that of reading what it is given and writing
  what it returns once, at the bandwidth that adding a number to 1 GiB of them shows.
* *peak*: arguments and temporary arrays of the larger program, as compiled, over the
  bytes of the parameters; of a sync those of both replicas over both's parameters.

The older code is in the folder `before`, as README.md says; its methods have ", before"
in their names. On a CPU the times are a clock's and say little.
"""

import argparse
import datetime
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
import measuring
import optimizer_speed

import curvadion_jax as cd

RATE = 0.01
RESULTS = Path(__file__).with_name("results.jsonl")
LAYERS = {"tiny": 2, "160m": 12, "1b": 1}
APART = " apart"  # behind a model's name: each layer's kernels are arrays of their own
RANKS = (1.0, 0.5, 0.25, 0.125, 0.0625)
BEFORE = ", before"
OLDER = Path(__file__).with_name("before")
ONE_PROGRAM = "`local_muon`, one program"
INNER = ("AdamW", "Muon", *map(optimizer_speed.dion_name, RANKS))  # they never sync
AT_ONCE = 5  # steps that are launched together
HEADER = [
    *("model", "optimizer", "first step, s", "first sync, s", "step, ms"),
    *("over AdamW", "over the limit", "sync adds, ms", "peak over parameters", "date"),
]


def methods(numbers: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    """What is measured, by its name in the table."""
    muon = {"muon_weight_dimension_numbers": numbers}
    ours = {"mesh": mesh, "dimension_numbers": numbers}

    def bare(tx):
        return cd.replicas.lift(tx, mesh)

    dions = {
        optimizer_speed.dion_name(rank): lambda rank=rank: bare(
            cd.dion(RATE, rank=rank, dimension_numbers=numbers)
        )
        for rank in RANKS
    }
    return {
        "AdamW": lambda: bare(optax.adamw(RATE)),
        "Muon": lambda: bare(optax.contrib.muon(RATE, **muon)),
        "`local_muon`": lambda: cd.local_muon(RATE, **ours),
        ONE_PROGRAM: lambda: cd.local_muon(RATE, budget=1e-6, **ours),
        "`curvadion`": lambda: cd.curvadion(RATE, threshold=0.0, **ours),
        "`curvadion`, rank 1/4": lambda: cd.curvadion(
            RATE, threshold=0.0, rank=0.25, **ours
        ),
        **dions,
    }


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    size = model.removesuffix(APART)
    matrices = optimizer_speed.matrices(size, LAYERS[size])
    if model != size:
        matrices = {
            f"{name} {layer}": shape[1:]
            for name, shape in matrices.items()
            for layer in range(LAYERS[size])
        }
    return matrices | optimizer_speed.vectors(size)


def matrices_of(model: str) -> Any:
    """The dimension numbers of the matrices; embedding and head have none."""
    others = optimizer_speed.vectors(model.removesuffix(APART))
    last_two = cd.DimensionNumbers(-2, -1)
    return {name: None if name in others else last_two for name in shapes(model)}


def measure(model: str, method: str, seconds: float) -> dict[str, Any]:
    """One line of the results."""
    one, two = cd.replicas.make_mesh(1), cd.replicas.simulated(2)
    syncs = method != ONE_PROGRAM and method not in INNER
    local = measure_step(model, method, one, seconds, False if syncs else None)
    row = {"model": model, "method": method, "first_step": local.pop("first")} | local
    if syncs:
        alone, sync = (
            measure_step(model, method, two, seconds, due) for due in (False, True)
        )
        row |= {
            "first_sync": sync["first"],
            "sync_adds": (sync["step"] - alone["step"]) / 2,
            "sync_encodes": sync["encodes"],
            "peak": max(row["peak"], sync["peak"]),
        }
    return row


def measure_step(
    model: str, method: str, mesh: Any, seconds: float, due: bool | None
) -> dict[str, Any]:
    """Seconds to make a program and of its steps, its limit and its memory."""
    tx = methods(matrices_of(model), mesh)[method]()
    rows = lambda seed: cd.replicas.replicate(
        optimizer_speed.normal(shapes(model), seed), mesh
    )
    params = rows(0)
    size = sum(x.nbytes for x in params.values())
    state, gradients = (params, tx.init(params)), rows(1)
    del params
    one = measuring.when(tx, due)
    step = measuring.train_step(one, lambda _, gradients: gradients, mesh)
    start = time.perf_counter()
    compiled = step.lower(state, gradients).compile()
    first = time.perf_counter() - start
    memory = compiled.memory_analysis()
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {
        "first": first,
        "step": steps_take(compiled, state, gradients, seconds),
        "limit": moved / bandwidth(),
        "peak": held / size,
        "encodes": "u8[" in compiled.as_text(),
    }


def steps_take(compiled: Any, state: Any, gradients: Any, seconds: float) -> float:
    """The median seconds of a step."""
    taken, end = [], time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(AT_ONCE):
            state = compiled(state, gradients)
        jax.block_until_ready(state)
        taken.append((time.perf_counter() - start) / AT_ONCE)
    return statistics.median(taken[1:])


def bandwidth() -> float:
    """Bytes a second, read and written, of a kernel that does nothing else."""
    rows = 2**28 if jax.default_backend() != "cpu" else 2**22
    x, more = jnp.zeros(rows), jax.jit(lambda x: x + 1, donate_argnums=0)
    x, taken = more(x), []
    for _ in range(5):
        jax.block_until_ready(x)
        start = time.perf_counter()
        for _ in range(AT_ONCE):
            x = more(x)
        jax.block_until_ready(x)
        taken.append((time.perf_counter() - start) / AT_ONCE)
    return 2 * x.nbytes / statistics.median(taken)


def stored(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    rows = map(json.loads, lines)
    return {(row["model"], row["method"]): row for row in rows}


def names(model: str, patterns: list[str], before: bool) -> Iterator[str]:
    """Methods that match; ours once more for the older code, which Optax has not."""
    for method in methods(matrices_of(model), None):
        if any(fnmatch.fnmatchcase(method, pattern) for pattern in patterns):
            yield method
            if before and method.startswith("`"):
                yield method + BEFORE


def in_a_process(model: str, method: str, options: argparse.Namespace) -> dict:
    """A measurement, or why there is none."""
    command = [sys.executable, __file__, "--one", model, method.removesuffix(BEFORE)]
    command += ["--seconds", str(options.seconds)]
    places = os.environ.get("PYTHONPATH", "")
    if method.endswith(BEFORE):
        places = f"{OLDER}{os.pathsep}{places}"
    environment = os.environ | {"PYTHONPATH": places}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]) | {"method": method}
    why = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    return {"model": model, "method": method, "error": why[:300]}


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(HEADER)} |"
    yield "|---" * len(HEADER) + "|"
    for (model, method), row in rows.items():
        if "error" in row:
            yield f"| {model} | {method} | {row['error']} |" + " |" * (len(HEADER) - 3)
            continue
        adamw = rows.get((model, "AdamW"), {}).get("step")
        cells = [
            *(f"{row['first_step']:.1f}", _or_none(row.get("first_sync"), ".1f")),
            f"{1e3 * row['step']:.2f}",
            _or_none(adamw and row["step"] / adamw, ".2f"),
            f"{row['step'] / row['limit']:.2f}",
            _or_none(row.get("sync_adds") and 1e3 * row["sync_adds"], ".2f"),
            *(_or_none(row.get("peak"), ".2f"), f"{row['date']}, {row['device']}"),
        ]
        yield f"| {model} | {method} | {' | '.join(cells)} |"


def _or_none(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="160m,1b", help=f"of {', '.join(LAYERS)}, or with{APART}"
    )
    parser.add_argument("--only", nargs="+", default=["*"], help="names, or patterns")
    parser.add_argument("--before", action="store_true", help="older code, too")
    parser.add_argument("--seconds", type=float, default=10, help="of steps, for each")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print it, run nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = measure(*options.one, options.seconds)
        row["device"] = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
        print(json.dumps(row | {"date": datetime.date.today().isoformat()}))
        return
    if options.before and not (OLDER / "curvadion_jax").exists():
        parser.error(f"there is no package in {OLDER}: README.md says how to get it")
    end = time.monotonic() + options.limit
    for model in () if options.table else options.models.split(","):
        for method in names(model, options.only, options.before):
            there = (model, method) in stored(options.results)
            if there or time.monotonic() > end:
                continue
            row = in_a_process(model, method, options)
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(table(stored(options.results))))


if __name__ == "__main__":
    main()
