"""Train the runs of a plan, and write each result as soon as it is there.

    python benchmarks/communication/study.py PLAN [PLAN...]
    python benchmarks/communication/study.py scaling --size cpu-32k --steps 1200
    python benchmarks/communication/study.py against --size cpu --steps 300

Results go to `results/cpu.jsonl` beside this file (or to another size's), a line a run;
what is in it is not trained again, so a study that was stopped goes on with the same
command. Plans are listed in `plans.py`; `tables.py` makes the tables and the picture.
The plans of `gap.py`, `scaling` and `against`, stand alone: all their sizes and lengths
go to one file, `results/scaling.jsonl`, of which `scaling.py` makes the tables.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runs import Run
from sizes import SIZES, Size

# The example's model and data.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))
RESULTS = Path(__file__).parent / "results"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The results so far by the key of their run; a line cut off by a kill is left out.

    Each has the fields of the run under 'run' and those of `simulate` beside it.
    """
    rows = [json.loads(line) for line in _whole_lines(file)]
    return {row.get("size", "") + Run(**row["run"]).key(): row for row in rows}


def _whole_lines(file: Path) -> list[str]:
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines(keepends=True)


def missing(runs: Sequence[Run], file: Path, size: str = "") -> list[Run]:
    """Those of the runs that have no result yet, each once.

    The size is to be named where the results of several are in one file.
    """
    done = read(file)
    wanted = {size + run.key(): run for run in runs}
    return [run for key, run in wanted.items() if key not in done]


def train(run: Run, size: Size) -> dict[str, Any]:
    """One run, in a process of its own: JAX starts there."""
    import data
    import jax
    import prose
    import simulate

    corpus = prose.load() if size.data == "prose" else data.load(size.data)
    result = simulate.simulate(run, size, corpus)
    jax.clear_caches()  # else every run's programs would stay in memory
    date = datetime.date.today().isoformat()
    return {"run": dataclasses.asdict(run), **result, "date": date}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    import gap
    import plans

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", nargs="+", choices=[*plans.PLANS, *gap.PLANS])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--steps", type=int, default=300, help="of gap.py's plans")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory")
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    size, first = SIZES[options.size], options.plan[0]
    together = first in gap.PLANS
    if len(options.plan) > 1 and gap.PLANS.keys() & set(options.plan):
        parser.error(
            f"{' and '.join(gap.PLANS)} go to a file of their own: train alone"
        )
    name = "scaling" if together else options.size
    file = options.results / f"{name}.jsonl"
    results = read(file)
    if together:
        runs = gap.PLANS[first](results, options.size, options.steps)
    else:
        runs = [run for name in options.plan for run in plans.PLANS[name](results)]
    left = missing(runs, file, options.size if together else "")
    print(f"{len(runs)} runs, {len(left)} of them to train", flush=True)
    file.write_text("".join(_whole_lines(file)))  # without a line that was cut off
    with _workers(options.workers) as pool, file.open("a") as stream:
        waiting = {pool.submit(train, run, size): run for run in left}
        failed = 0
        for future in concurrent.futures.as_completed(waiting):
            run = waiting[future]
            if error := future.exception():
                failed += 1
                print(f"{run.key()}: {error!r}", file=sys.stderr, flush=True)
                continue
            result = future.result()
            if together:
                result = _described(waiting[future], options.size) | result
            stream.write(json.dumps(result) + "\n")
            stream.flush()
            share = 100 * result["bytes"] / result["synchronous_bytes"]
            print(f"{result['loss']:.4f} {share:.3f}% {run.key()}", flush=True)
    if failed:
        sys.exit(f"{failed} of {len(left)} runs failed; the same command tries again")


def _described(run: Run, size: str) -> dict[str, Any]:
    """What tells runs of several sizes in one file apart."""
    import gap

    tokens = SIZES[size].tokens // run.replicas
    return {"method": gap.SCALED[run.inner], "size": size, "tokens": tokens}


def _workers(number: int) -> concurrent.futures.Executor:
    """Processes of one thread each: small models gain nothing from more."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return concurrent.futures.ProcessPoolExecutor(
        number, mp_context=multiprocessing.get_context("spawn")
    )


if __name__ == "__main__":
    main()
