"""All training runs that wait for an accelerator, in the order of their value.

    python benchmarks/gpu/queue_jobs.py --limit 540      # the same command goes on
    python benchmarks/gpu/queue_jobs.py --tiny --text X  # a rehearsal; X is a folder
    python benchmarks/gpu/queue_jobs.py --list           # what is to be done, in order
    python benchmarks/gpu/queue_jobs.py --study --workers 2   # (a) and (b) on a CPU

Each run is a process of its own, and several train at once where one does not fill the
card. A row is written to `map/rows.jsonl` the moment it exists, and to `$OUT` too. At
the limit the runs that train are kept, and a second call resumes them. `map_table.py`
makes the tables and the picture. README.md has the commands for a borrowed machine.

1. *throughput*: 30 steps of 25 million parameters, alone on the card, with activations
   in float32 and bfloat16, with cuDNN's attention, and with replicas one by one or
   together. The fastest that ends within 1% of the first one's loss is used below.
2. *map*: 5 million parameters, 8 replicas, the best synchronous Muon against
   `local_muon` with its defaults, two learning rates each. (a) 100 million tokens at
   2,048, 8,192 and 32,768 tokens per replica and step; (b) 8,192 at 5 and 40 tokens per
   parameter, where 20 are in (a); (c) 2 and 4 replicas, with the tokens of (a).
3. *middle*: `curvadion(threshold=0.3)` and DiLoCo at 8,192 tokens, as in (a).
4. *25m*: 25 million parameters at the largest batch that costs Muon at most 1% in (a),
   with as many tokens as there is text for.
5. *dion*: step and compile times of Muon, and of Dion before and after its products
   were one for each shape, `run.py`. ``--only dion`` does this alone, in some minutes.
6. *one program*: `local_muon`'s local step with the condition of a sync in the program,
   and without it (of local steps alone), `run.py`.

(It is not called queue.py: scripts beside it would import that in place of the standard
library's.)
"""

import argparse
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path[1:1] = [
    str(_ROOT / place)
    for place in (".", "examples/char_lm", "benchmarks", "benchmarks/study")
]

import corpus  # noqa: E402
import study  # noqa: E402
from rows import BEST_MUON, DILOCO, LOCAL_MUON, THRESHOLD  # noqa: E402
from simulate import Run, Size, simulate  # noqa: E402

RESULTS = Path(__file__).with_name("map")
DIONS = ("Muon", *(f"`dion`, rank {x}" for x in ("1/4", "1/2", "1")), "`curvadion`")
KEPT = 75  # exit status of a run that was stopped and can go on
_TRIES = 2
_GRACE = 20.0  # seconds in which runs are kept at the limit
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """One run, or a command.

    Attributes:
        group: What it belongs to.
        run, size: Of a run; None of a command.
        share: Of the card that it takes, so that 1 trains alone.
        command: Arguments of `run.py`.
    """

    group: str
    run: Run | None
    size: Size | None
    share: float
    command: tuple[str, ...] = ()

    @property
    def key(self) -> Row:
        """What a row has of it."""
        if self.run is None:
            return {"command": [*self.command]}
        return {"run": dataclasses.asdict(self.run), "size": _as_dict(self.size)}


def _as_dict(size: Size | None) -> Row:
    return {} if size is None else dataclasses.asdict(size)


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is trained: at full size, or in a rehearsal.

    Attributes:
        small, large: The models of the map and of the throughput.
        batches: Tokens per replica and step of the map.
        parameters: Of the small model, rounded.
        text: Tokens of the text, which bound the longest run.
        steps: Of the throughput; 0 leaves only (a) and (b) of the map.
    """

    small: Size
    large: Size
    batches: tuple[int, ...]
    parameters: int
    text: int
    steps: int


FULL = Scale(
    small=Size(6, 256, 4, 512, evaluation=512),
    large=Size(8, 512, 8, 512, 32, evaluation=256),
    batches=(2048, 8192, 32768),
    parameters=5_000_000,
    text=0,
    steps=30,
)
TINY = Scale(
    small=Size(1, 16, 1, 16, evaluation=16),
    large=Size(1, 32, 1, 16, 4, evaluation=16),
    batches=(32, 64, 128),
    parameters=400,
    text=0,
    steps=4,
)
# For a CPU: the model of the study, whose best rates grow with the batch.
STUDY = Scale(
    small=Size(),
    large=Size(),
    batches=(2048, 8192, 32768),
    parameters=850_000,
    text=0,
    steps=0,
)
RATES = {
    BEST_MUON: (0.08, 0.04),
    LOCAL_MUON: (0.04, 0.02),
    THRESHOLD: (0.08, 0.04),
    DILOCO: (0.02, 0.01),
}
RATES_OF_STUDY = {BEST_MUON: (0.08, 0.16, 0.04), LOCAL_MUON: (0.08, 0.04, 0.02)}
# Muon's and `local_muon`'s of the larger model; 0.04 was best for neither alone.
RATE_OF_LARGE = 0.04
VARIANTS: dict[str, Row] = {
    "products in bfloat16": {},
    "activations in bfloat16": {"half": True},
    "and cuDNN's attention": {"half": True, "attention": "cudnn"},
    "without it, replicas together": {"half": True, "at_once": True},
    "with both": {"half": True, "attention": "cudnn", "at_once": True},
}


def jobs(rows: Sequence[Row], scale: Scale) -> list[Job]:
    """All of them, the most valuable first; those of a finished group as it ended."""
    small, middle, wide = scale.batches
    whole = 20 * scale.parameters
    variants = VARIANTS if scale.steps else ()
    found = [
        Job(
            "throughput",
            Run(LOCAL_MUON, RATE_OF_LARGE, 0, scale.steps),
            _variant(scale, name),
            1.0,
        )
        for name in variants
    ]
    fastest = chosen(rows, scale)
    of = functools.partial(_of_map, scale, fastest)
    both = (BEST_MUON, LOCAL_MUON)
    for batch in (middle, wide, small):
        found += of("map (a)", both, batch, whole)
    found += of("map (b)", both, middle, whole // 4)
    if not scale.steps:
        return found
    found += of("map (c)", both, middle, whole, replicas=4)
    found += of("map (c)", both, middle, whole, replicas=2)
    found += of("middle", (THRESHOLD, DILOCO), middle, whole)
    found += of("map (b)", both, middle, min(2 * whole, scale.text or 2 * whole))
    batch = best_batch(rows, scale)
    large = dataclasses.replace(
        scale.large, sequences=batch // scale.large.length, **fastest
    )
    steps = (scale.text or 10 * whole) // (batch * large.replicas) - 1
    found += [
        Job("25m", Run(method, RATE_OF_LARGE, 0, max(1, steps)), large, 1.0)
        for method in both
    ]
    model = "160m" if scale.small == FULL.small else "tiny"
    of_dion = (
        ("--models", model, "--only", *DIONS),
        ("--models", f"{model} apart", "--only", *DIONS[:2]),
    )
    more = ("--seconds", "1", "--before")
    found += [Job("dion", None, None, 1.0, (*x, *more)) for x in of_dion]
    both = ("--models", model, "--only", "`local_muon`*", "--seconds", "1")
    return [*found, Job("one program", None, None, 1.0, both)]


def _of_map(
    scale: Scale,
    fastest: Row,
    group: str,
    methods: Iterable[str],
    batch: int,
    tokens: int,
    replicas: int = 8,
) -> list[Job]:
    on_card = scale.steps > 0
    together = on_card and batch <= scale.batches[1]
    options = {**fastest, "at_once": together, "replicas": replicas}
    sequences = batch // scale.small.length
    size = dataclasses.replace(scale.small, sequences=sequences, **options)
    # Of the smallest batch's runs four train at once, of the largest's one.
    share = min(1.0, batch / scale.batches[1] / 2) if batch > scale.batches[0] else 0.25
    if not on_card:
        share = 0.0  # a process for each core
    steps = tokens // (replicas * batch)
    return [
        Job(group, Run(method, rate, 0, steps), size, share)
        for method in methods
        for rate in (RATES if on_card else RATES_OF_STUDY)[method]
    ]


def _variant(scale: Scale, name: str) -> Size:
    return dataclasses.replace(scale.large, **VARIANTS[name])


def chosen(rows: Sequence[Row], scale: Scale) -> Row:
    """The fastest variant that ends where the first one ends, or the first one."""
    runs = [x for x in rows if x.get("group") == "throughput" and "loss" in x]
    sizes = {name: _as_dict(_variant(scale, name)) for name in VARIANTS}
    found = {
        name: row for name, size in sizes.items() for row in runs if row["size"] == size
    }
    first, *_ = VARIANTS
    if first not in found:
        return VARIANTS[first]
    close = [
        name
        for name, row in found.items()
        if abs(row["loss"] / found[first]["loss"] - 1) < 0.01
    ]
    return VARIANTS[max(close, key=lambda name: found[name]["tokens_a_second"])]


def best_batch(rows: Sequence[Row], scale: Scale) -> int:
    """The largest batch of (a) at which Muon ends at most 1% above its lowest loss."""
    losses: dict[int, float] = {}
    for row in rows:
        if row.get("group") == "map (a)" and "loss" in row:
            if row["run"]["method"] == BEST_MUON:
                batch = row["size"]["sequences"] * row["size"]["length"]
                losses[batch] = min(row["loss"], losses.get(batch, float("inf")))
    if len(losses) < len(scale.batches):
        return scale.batches[1]
    return max(x for x, loss in losses.items() if loss <= 1.01 * min(losses.values()))


def waiting(rows: Sequence[Row], scale: Scale) -> list[Job]:
    """What is neither done nor has failed too often."""

    def is_open(job: Job) -> bool:
        same = [row for row in rows if job.key.items() <= row.items()]
        tries = 1 if job.group == "throughput" else _TRIES
        return all("error" in x for x in same) and len(same) < tries

    return [job for job in jobs(rows, scale) if is_open(job)]


class Queue:
    """Starts jobs while they fit, and writes what becomes of them."""

    def __init__(self, options: argparse.Namespace, scale: Scale):
        self._options, self._scale = options, scale
        self._file = options.results / "rows.jsonl"
        self._running: dict[subprocess.Popen, tuple[Job, float, Path]] = {}
        self._end = time.monotonic() + options.limit
        options.results.mkdir(parents=True, exist_ok=True)

    def work(self) -> None:
        """Until all is done, or the time is over."""
        while time.monotonic() < self._end - _GRACE:
            self._collect()
            self._start()
            if not self._running:
                return
            time.sleep(0.2)
        for process in self._running:
            process.terminate()
        for process in [*self._running]:
            try:
                process.wait(max(1.0, self._end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # such as one that compiles
                process.wait()
                self._running.pop(process)
        self._collect()
        print("The time is over; the same command goes on.", flush=True)

    def rows(self) -> list[Row]:
        """The rows so far."""
        return study.rows_of(self._file)

    def _start(self) -> None:
        taken = sum(job.share for job, *_ in self._running.values())
        busy = [job for job, *_ in self._running.values()]
        measured = any(job.group == "throughput" for job in busy)
        for job in waiting(self.rows(), self._scale):
            if job in busy or not job.group.startswith(self._options.only):
                continue
            # What follows the throughput depends on it.
            if measured or taken + job.share > 1 or len(busy) >= self._options.workers:
                return
            self._launch(job)
            busy.append(job)
            taken += job.share
            measured = job.group == "throughput"

    def _launch(self, job: Job) -> None:
        name = hashlib.sha256(json.dumps(job.key).encode()).hexdigest()[:16]
        folder = self._options.results / "unfinished" / name
        folder.mkdir(parents=True, exist_ok=True)
        if job.run is None:
            script = Path(__file__).with_name("run.py")
            results = self._options.results / "steps.jsonl"
            command = [script, *job.command, "--results", results]
        else:
            command = [__file__, "--job", json.dumps(job.key), "--folder", folder]
            command += ["--text", self._options.text] if self._options.text else []
        log = (folder / "log").open("w")
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(self._options.results),
        )
        self._running[process] = job, time.monotonic(), folder

    def _collect(self) -> None:
        ended = [x for x in self._running if x.poll() is not None]
        for process in ended:
            job, began, folder = self._running.pop(process)
            if process.returncode in (KEPT, -signal.SIGTERM):
                continue
            row = {"group": job.group, **job.key}
            row["seconds"] = round(time.monotonic() - began, 1)
            row["date"] = datetime.date.today().isoformat()
            lines = (folder / "log").read_text().strip().splitlines() or [""]
            if process.returncode == 0:
                row |= json.loads(lines[-1]) if job.run else {"done": True}
                shutil.rmtree(folder)
            else:
                named = [line for line in lines if "Error" in line.split(":")[0]]
                row["error"] = [*lines, *named][-1][:300]
            study.append(self._file, row)
            words = row.get("error", row.get("loss", "done"))
            print(job.group, job.key.get("run", job.command), words, flush=True)
        if ended and "OUT" in os.environ:
            for file in self._options.results.glob("*.jsonl"):
                shutil.copy(file, os.environ["OUT"])


def _environment(results: Path) -> dict[str, str]:
    """Of the processes: they share the card and compiled programs."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(results.resolve() / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return cache | os.environ


def train(options: argparse.Namespace) -> None:
    """The process of one run; its last line is the row."""
    stopped = False

    def stop(*_):
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    import data
    import jax

    given = json.loads(options.job)
    run, size = Run(**given["run"]), Size(**given["size"])
    text = data.load(str(options.text)) if options.text else corpus.large()
    kept = options.folder / "kept"
    result = simulate(run, text, kept, size, lambda: stopped)
    if result is None:
        sys.exit(KEPT)
    device = jax.devices()[0].device_kind
    about = {"text": text.fingerprint, "device": device, "jax": jax.__version__}
    print(json.dumps(result | about))


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    parser.add_argument("--study", action="store_true", help="the study's model")
    parser.add_argument("--text", type=Path, help="a folder of other text")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=6, help="processes at once")
    parser.add_argument("--list", action="store_true", help="the jobs, in their order")
    parser.add_argument("--only", default="", help="the group, or how its name begins")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        train(options)
        return
    import data

    scale = TINY if options.tiny else FULL
    if options.study:
        scale, options.text = STUDY, options.text or corpus.TEXT
    if options.only not in ("dion", "one program"):  # these need no text
        text = data.load(str(options.text)) if options.text else corpus.large()
        scale = dataclasses.replace(scale, text=int(text.training[0].size))
    queue = Queue(options, scale)
    if options.list:
        for job in waiting(queue.rows(), scale):
            print(f"{job.group:10} {job.share:4} {job.run or job.command} {job.size}")
        return
    queue.work()


if __name__ == "__main__":
    main()
