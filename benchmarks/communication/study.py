"""Train the runs of a plan, and write each result as soon as it is there.

    python benchmarks/communication/study.py PLAN [PLAN...]
    python benchmarks/communication/study.py scaling --size cpu-32k --steps 1200
    python benchmarks/communication/study.py against --size cpu --steps 300

Results go to `results/cpu.jsonl` beside this file (or to another size's), a line a run;
what is in it is not trained again, so a study that was stopped goes on with the same
command. With `--limit` it keeps the runs that it is at when the time is over, and goes
on in the middle of them; what is killed before is not kept. One command at a time may
train the same runs with the same directory. Plans are listed in `plans.py`; `tables.py`
makes the tables and the picture.
Plans of `gap.py` are trained one a command, at any size and number of steps: their
results go to one file, `scaling.jsonl`, of which `scaling.py` makes the tables.
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
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pieces
from runs import Run
from sizes import SIZES, Size

import curvadion_jax as cd

# The example's model and data.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))
RESULTS = Path(__file__).parent / "results"
Plans = Mapping[str, Callable[..., list[Run]]]


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The results so far by the key of their run; a line cut off by a kill is left out.

    Each has the fields of the run under 'run' and those of `simulate` beside it.
    """
    rows = [json.loads(line) for line in whole_lines(file)]
    return {row.get("size", "") + Run(**row["run"]).key(): row for row in rows}


def whole_lines(file: Path) -> list[str]:
    """The lines of a file that may be missing; one cut off by a kill is left out."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines(keepends=True)


def missing(runs: Sequence[Run], file: Path, size: str = "") -> list[Run]:
    """Those of the runs that have no result yet, each once.

    The size is to be named where the results of several are in one file.
    """
    done = read(file)
    wanted = {size + run.key(): run for run in runs}
    return [run for key, run in wanted.items() if key not in done]


def train(
    run: Run, size: Size, piece: pieces.Piece | None = None
) -> dict[str, Any] | None:
    """One run, in a process of its own: JAX starts there. None if its piece ended."""
    import jax
    import simulate
    import texts

    if piece is not None and piece.is_over():
        return None
    result = simulate.simulate(run, size, texts.load(size.data), piece)
    jax.clear_caches()  # else every run's programs would stay in memory
    if result is None:
        return None
    if jax.default_backend() != "cpu":
        result["device"] = jax.devices()[0].device_kind
    date = datetime.date.today().isoformat()
    return {"run": dataclasses.asdict(run), **result, "date": date}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    import gap
    import plans
    import texts

    options, size = _options(plans.PLANS, gap.PLANS, arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    together = options.plan[0] in gap.PLANS
    name = "scaling" if together else options.size
    file = options.results / f"{name}.jsonl"
    results = read(file)
    if others := {row.get("data") for row in results.values()} - {options.data}:
        sys.exit(f"{file} has results of other --data: {', '.join(map(str, others))}")
    _check_text(results, options.size, texts.load(size.data).fingerprint)
    if together:
        runs = gap.PLANS[options.plan[0]](results, options.size, options.steps)
    else:
        runs = [run for name in options.plan for run in plans.PLANS[name](results)]
    left = missing(runs, file, options.size if together else "")
    print(f"{len(runs)} runs, {len(left)} of them to train", flush=True)
    file.write_text("".join(whole_lines(file)))  # without a line that was cut off
    for run in set(runs).difference(left):  # killed after its result was written
        _piece(run, size, options, 0.0).clear()
    ended = failed = 0
    with file.open("a") as stream:
        for run, result in _trained(left, size, options):
            if isinstance(result, Exception):
                failed += 1
                print(f"{run.key()}: {result!r}", file=sys.stderr, flush=True)
            elif result is not None:
                ended += 1
                if together:
                    result = _described(run, options.size) | result
                if options.data is not None:
                    result["data"] = options.data
                stream.write(json.dumps(result) + "\n")
                stream.flush()
                share = 100 * result["bytes"] / result["synchronous_bytes"]
                print(f"{result['loss']:.4f} {share:.3f}% {run.key()}", flush=True)
    if failed:
        sys.exit(f"{failed} of {len(left)} runs failed; the same command tries again")
    if ended < len(left):
        print(f"{len(left) - ended} runs are left; the same command goes on")


def _check_text(results: Mapping[str, Any], size: str, fingerprint: str) -> None:
    """Ends the program where there are results of a size on another text."""
    for row in results.values():
        if (
            row.get("size", size) == size
            and row.get("text", fingerprint) != fingerprint
        ):
            sys.exit(
                f"there are results of another text, {row['text']}, and this is "
                f"{fingerprint}: give another --results, or the Python whose library "
                "they are of"
            )


def _options(
    several: Plans, alone: Plans, arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, Size]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(
            ["plans of plans.py:", *_said(several), "", "of gap.py:", *_said(alone)]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*several, *alone]
    parser.add_argument("plan", nargs="+", choices=names, metavar="PLAN")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes; one a core"
    )
    parser.add_argument(
        "--size", choices=SIZES, default="cpu", help="model and batch, see sizes.py"
    )
    parser.add_argument("--steps", type=int, help="of gap.py's plans; 300 if left out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory")
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        help="seconds after which runs are kept and stopped, to go on another time; "
        "starting and compiling count, some 15 seconds of a run: give minutes",
    )
    parser.add_argument("--data", help="text or token shards; give --results too")
    options = parser.parse_args(arguments)
    if len(options.plan) > 1 and set(alone) & set(options.plan):
        parser.error(f"{' and '.join(alone)} go to a file of their own: train alone")
    if options.steps is None:
        options.steps = 300
    elif options.plan[0] not in alone:
        parser.error(f"{options.plan[0]} has steps of its own: leave --steps out")
    size = SIZES[options.size]
    if options.data is not None:
        if options.results.resolve() == RESULTS:
            parser.error("--data needs a directory of its own for --results")
        size = dataclasses.replace(size, data=options.data)
    return options, size


def _said(plans: Plans) -> list[str]:
    """What each plan is, in a line."""
    return [
        f"  {name}: {(plan.__doc__ or name).splitlines()[0]}"
        for name, plan in plans.items()
    ]


def _trained(
    runs: Sequence[Run], size: Size, options: argparse.Namespace
) -> Iterator[tuple[Run, dict[str, Any] | Exception | None]]:
    """The runs as they end or stop, each with its result, its error, or None."""
    end = time.time() + options.limit
    with _workers(options.workers) as pool:
        waiting = {}
        for run in runs:
            piece = _piece(run, size, options, end)
            waiting[pool.submit(train, run, size, piece)] = run, piece
        for future in concurrent.futures.as_completed(waiting):
            run, piece = waiting[future]
            result = future.exception() or future.result()
            if result is None and (step := cd.checkpoint.latest_step(piece.folder)):
                print(f"stopped after step {step} of {run.steps}: {run.key()}")
            yield run, result
            if isinstance(result, dict):
                piece.clear()


def _piece(
    run: Run, size: Size, options: argparse.Namespace, end: float
) -> pieces.Piece:
    """Where a run is kept until it ends."""
    name = hashlib.sha256(f"{size}{run.key()}".encode()).hexdigest()[:16]
    return pieces.Piece(options.results / "unfinished" / name, end)


def _described(run: Run, size: str) -> dict[str, Any]:
    """What tells runs of several sizes in one file apart."""
    import bases

    tokens = SIZES[size].tokens // run.replicas
    return {"method": bases.SCALED[run.inner], "size": size, "tokens": tokens}


def _workers(number: int) -> concurrent.futures.Executor:
    """Processes of one thread each: small models gain nothing from more."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return concurrent.futures.ProcessPoolExecutor(
        number, mp_context=multiprocessing.get_context("spawn")
    )


if __name__ == "__main__":
    main()
