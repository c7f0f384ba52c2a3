"""Train the runs of a plan, and write each result as soon as it is there.

    python benchmarks/communication/study.py PLAN [--size cpu-32k] [--steps 1200]

Results go to `results/runs.jsonl` beside this file, a line a run; what is in it is not
trained again, so a study that was stopped continues with the same command. With
`--limit` it keeps the runs that it is at when the time is over, and continues in the
middle of them; what is killed before is not kept. One command at a time may train the
same runs with the same directory. `tables.py` makes the tables and the picture.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pieces
from plans import PLANS
from runs import Run
from sizes import SIZES, Size

import curvadion_jax as cd

# The example's model and data.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))
RESULTS = Path(__file__).parent / "results"
FILE = "runs.jsonl"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The results so far by size and run; a line cut off by a kill is left out."""
    rows = [json.loads(line) for line in whole_lines(file)]
    return {key(row["size"], Run(**row["run"])): row for row in rows}


def key(size: str, run: Run) -> str:
    """What tells a result from all others."""
    return size + run.key()


def whole_lines(file: Path) -> list[str]:
    """The lines of a file that may be missing; one cut off by a kill is left out."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines(keepends=True)


def train(run: Run, size: str, data: str | None, piece: pieces.Piece) -> dict | None:
    """One run, in a process of its own: JAX starts there. None if its piece ended."""
    import data as corpora
    import jax
    import simulate

    if piece.is_over():
        return None
    corpus = corpora.load(data)
    result = simulate.simulate(run, sized(size, data), corpus, piece)
    jax.clear_caches()  # else every run's programs would stay in memory
    if result is None:
        return None
    where = {"size": size, "device": jax.devices()[0].device_kind}
    if data is not None:
        where["data"] = data
    date = datetime.date.today().isoformat()
    return {"run": dataclasses.asdict(run), **where, **result, "date": date}


def sized(size: str, data: str | None) -> Size:
    """A size, on a text."""
    return dataclasses.replace(SIZES[size], data=data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    import data

    options = _options(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / FILE
    results = read(file)
    _check_text(results, options, data.load(options.data).fingerprint)
    runs = dict.fromkeys(PLANS[options.plan](options.seeds, options.steps))
    left = [run for run in runs if key(options.size, run) not in results]
    print(f"{len(runs)} runs, {len(left)} of them to train", flush=True)
    file.write_text("".join(whole_lines(file)))  # without a line that was cut off
    for run in runs.keys() - set(left):  # killed after its result was written
        _piece(run, options, 0.0).clear()
    ended = failed = 0
    with file.open("a") as stream:
        for run, result in _trained(left, options):
            if isinstance(result, Exception):
                failed += 1
                print(f"{run.key()}: {result!r}", file=sys.stderr, flush=True)
            elif result is not None:
                ended += 1
                stream.write(json.dumps(result) + "\n")
                stream.flush()
                share = 100 * result["bytes"] / result["synchronous_bytes"]
                print(f"{result['loss']:.4f} {share:.3f}% {run.key()}", flush=True)
    if failed:
        sys.exit(f"{failed} of {len(left)} runs failed; the same command tries again")
    if ended < len(left):
        print(f"{len(left) - ended} runs are left; the same command goes on")


def _check_text(
    results: Mapping[str, Any], options: argparse.Namespace, fingerprint: str
) -> None:
    """Ends the program where there are results on another text."""
    for row in results.values():
        if row.get("data") != options.data or row["text"] != fingerprint:
            sys.exit(
                f"The results are of another text, {row['text']}, and this is "
                f"{fingerprint}. Give another --results, or the Python whose library "
                "they are of."
            )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    said = [f"  {name}: {plan.__doc__}" for name, plan in PLANS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(["plans:", *said]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", choices=PLANS, metavar="PLAN")
    parser.add_argument("--size", choices=SIZES, default="cpu", help="see sizes.py")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes; one a core"
    )
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
    if options.data is not None and options.results.resolve() == RESULTS:
        parser.error("--data needs a directory of its own for --results")
    return options


def _trained(
    runs: Sequence[Run], options: argparse.Namespace
) -> Iterator[tuple[Run, dict[str, Any] | Exception | None]]:
    """The runs as they end or stop, each with its result, its error, or None."""
    end = time.time() + options.limit
    with _workers(options.workers) as pool:
        waiting = {}
        for run in runs:
            piece = _piece(run, options, end)
            future = pool.submit(train, run, options.size, options.data, piece)
            waiting[future] = run, piece
        for future in concurrent.futures.as_completed(waiting):
            run, piece = waiting[future]
            result = future.exception() or future.result()
            if result is None and (step := cd.checkpoint.latest_step(piece.folder)):
                print(f"stopped after step {step} of {run.steps}: {run.key()}")
            yield run, result
            if isinstance(result, dict):
                piece.clear()


def _piece(run: Run, options: argparse.Namespace, end: float) -> pieces.Piece:
    """Where a run is kept until it ends."""
    text = f"{sized(options.size, options.data)}{run.key()}"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return pieces.Piece(options.results / "unfinished" / name, end)


def _workers(number: int) -> concurrent.futures.Executor:
    """Processes of one thread each: small models gain nothing from more."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return concurrent.futures.ProcessPoolExecutor(
        number, mp_context=multiprocessing.get_context("spawn")
    )


if __name__ == "__main__":
    main()
