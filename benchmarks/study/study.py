"""Train the study's runs, and write each result as soon as it is there.

    python benchmarks/study/corpus.py               # the text, once
    python benchmarks/study/study.py [--workers 2]  # some 25 hours of a core
    python benchmarks/study/table.py                # the tables

Each method takes the best of four learning rates at a quarter of the steps on one
seed; where the best is at an edge, the next one is tried too. Then all methods train a
quarter of the steps and all of them, on three seeds; those that others are compared
with have a second rate, and take the better. A line for each run goes to
`results/runs.jsonl` beside this file; what is there is not trained again, and what was
stopped goes on: stop the command whenever you like.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import corpus
import jax
from rows import COMPARED_WITH, METHODS, RATES, SAME_RATE
from simulate import Run, Size, simulate

STEPS, QUARTER = 1040, 260  # 20 tokens a parameter, and 5
SEEDS = (0, 1, 2)
TUNING_SEED = 3  # no table reports it
RESULTS = Path(__file__).with_name("results")
FILE = RESULTS / "runs.jsonl"

Results = dict[Run, dict[str, Any]]


def lines(file: Path) -> str:
    """The whole lines of a file that may be missing; a kill may cut off the last."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1]


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, as they were written."""
    return [json.loads(line) for line in lines(file).splitlines()]


def append(file: Path, row: dict[str, Any]) -> None:
    """Writes a line behind the whole ones."""
    whole = lines(file)
    with file.open("a") as stream:
        stream.truncate(len(whole.encode()))
        stream.write(json.dumps(row) + "\n")


def read(file: Path = FILE) -> Results:
    """The results so far."""
    return {Run(**row["run"]): row for row in rows_of(file)}


def losses_by_rate(results: Results, method: str) -> dict[float, float]:
    """Losses of a method by learning rate, at a quarter of the steps on seed 0."""
    return {
        run.rate: row["loss"] if math.isfinite(row["loss"]) else math.inf
        for run, row in results.items()
        if (run.method, run.seed, run.steps) == (method, 0, QUARTER)
    }


def best_rate(results: Results, method: str, steps: int = QUARTER) -> float | None:
    """The learning rate at which a method ended lowest; None while more is to try.

    After a quarter of the steps on one seed, or of two after all of them.
    """
    best = best_rates(results, method)
    if steps == QUARTER or method not in COMPARED_WITH:
        return next(iter(best), None)
    means = {rate: mean_loss(results, method, rate) for rate in best[:2]}
    return min(means, key=means.__getitem__, default=None)


def best_rates(results: Results, method: str) -> list[float]:
    """Those tried for a quarter of the steps, the best first; none while one lacks."""
    related = SAME_RATE.get(method, method)
    losses = losses_by_rate(results, related)
    tried = sorted(losses, key=losses.__getitem__)
    return [] if rates_to_try(losses, related) else tried


def mean_loss(results: Results, method: str, rate: float) -> float:
    """After all steps, of all seeds; infinite while one is missing."""
    runs = [Run(method, rate, seed, STEPS) for seed in SEEDS]
    if not all(run in results for run in runs):
        return math.inf
    mean = statistics.fmean(results[run]["loss"] for run in runs)
    return mean if math.isfinite(mean) else math.inf


def rates_to_try(losses: dict[float, float], method: str) -> list[float]:
    """Learning rates of which the loss is needed before one can be the best.

    Examples:
        >>> rates_to_try({0.02: 2.0, 0.04: 1.9}, "`local_muon`")
        [0.08, 0.16]
        >>> rates_to_try({0.02: 2.0, 0.04: 1.9, 0.08: 1.8, 0.16: 1.7}, "`local_muon`")
        [0.32]
    """
    if first := [rate for rate in RATES[method] if rate not in losses]:
        return first
    best = min(losses, key=losses.__getitem__)
    return [rate for rate in (best / 2, 2 * best) if rate not in losses]


def plan(results: Results) -> list[Run]:
    """The runs that are to be trained next, in their order."""
    grid = [
        Run(method, rate, 0, QUARTER)
        for method in RATES
        for rate in rates_to_try(losses_by_rate(results, method), method)
    ]
    two = [
        Run(method, rate, seed, STEPS)
        for seed in SEEDS
        for method in COMPARED_WITH
        for rate in best_rates(results, method)[:2]
    ]
    table = [
        Run(method, rate, seed, steps)
        for seed in SEEDS
        for steps in (QUARTER, STEPS)
        for method in METHODS
        if (rate := best_rate(results, method)) is not None
    ]
    return grid or [run for run in dict.fromkeys(table + two) if run not in results]


def folder_of(run: Run) -> Path:
    """Where a run is kept until its result is written."""
    name = hashlib.sha256(repr(run).encode()).hexdigest()[:16]
    return RESULTS / "unfinished" / name


def train(run: Run) -> dict[str, Any]:
    """One run, in a process of its own: JAX starts there."""
    import data

    text = data.load(str(corpus.TEXT))
    at_once = jax.default_backend() != "cpu"
    result = simulate(run, text, folder_of(run), Size(at_once=at_once))
    return {
        "run": dataclasses.asdict(run),
        **result,
        "text": text.fingerprint,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }


def train_into(file: Path, run: Run, task: dict[str, Any]) -> None:
    """One run of this process, whose line begins with what else tells it apart.

    Its last state is removed: a later run of the same name would go on from there.
    """
    row = train(run)
    append(file, task | row)
    shutil.rmtree(folder_of(run), ignore_errors=True)
    print(f"{row['loss']:.4f} {task}", flush=True)


def keep(file: Path, row: dict[str, Any]) -> None:
    """Writes a result that has come, and removes the run's last state."""
    append(file, row)
    shutil.rmtree(folder_of(Run(**row["run"])), ignore_errors=True)
    print(f"{row['loss']:.4f} {row['run']}", flush=True)


def train_or_table(
    description: str | None, train: Callable[[], None], table: Callable[[], None]
) -> None:
    """Runs a script that trains what is missing, and with `--table` prints it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print the results")
    if parser.parse_args().table:
        table()
    else:
        train()


def processes(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes of one thread each, a new one for every run."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )


def trained(runs: Sequence[Run], workers: int) -> Iterator[dict[str, Any]]:
    """The results as they come.

    Where a run fails the others still end; its error is raised after them.
    """
    with processes(workers) as pool:
        futures = [pool.submit(train, run) for run in runs]
        for future in concurrent.futures.as_completed(futures):
            if future.exception() is None:
                yield future.result()
    for future in futures:
        future.result()


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--steps", type=int, choices=(QUARTER, STEPS), help="only these"
    )
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    while runs := [x for x in plan(read()) if options.steps in (None, x.steps)]:
        print(f"{len(runs)} runs to train", flush=True)
        for row in trained(runs, options.workers):
            keep(FILE, row)


if __name__ == "__main__":
    main()
