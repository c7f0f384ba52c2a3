"""Starts the training processes of a run, over a link or without one."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import forwarder
import namespaces
from job import REPLICAS, Job
from line import Conditions
from link import Link, open_link

_WORKER = Path(__file__).with_name("worker.py")
Rows = list[dict[str, Any]]


class Ended(NamedTuple):
    """What became of a process.

    Attributes:
        status: Exit status; None if it had to be killed.
        rows: The lines that it wrote.
        output: What it printed.
        time: When it ended, on the clock of the lines.
    """

    status: int | None
    rows: Rows
    output: str
    time: float


class Running(NamedTuple):
    """Processes at work.

    Attributes:
        workers: They.
        files: Of their lines.
    """

    workers: list[subprocess.Popen]
    files: list[Path]

    def all(self) -> bool:
        """Whether none has ended."""
        return all(worker.poll() is None for worker in self.workers)


def train(job: Job, limit: float) -> Ended:
    """A run of one process without a link."""
    (ended,) = _together([job], limit)
    return ended


def train_alone(job: Job, limit: float) -> list[Ended]:
    """One replica in each of two processes at a time, which send nothing."""
    return _together(
        [
            dataclasses.replace(job, replicas=1, core=_core(index))
            for index in range(REPLICAS)
        ],
        limit,
    )


def train_over(
    conditions: Conditions,
    job: Job,
    limit: float,
    meanwhile: Callable[[Link, Running], None] | None = None,
) -> list[Ended]:
    """A replica at each end of a link.

    Args:
        conditions: The link.
        job: What both do.
        limit: Seconds after which they are killed.
        meanwhile: Called with the link, in a thread, once the processes have started;
            it returns when they have ended.
    """
    with open_link(conditions) as link:
        jobs = [
            dataclasses.replace(
                job,
                process=index,
                processes=REPLICAS,
                namespace=str(link.namespaces[index]),
                counters=str(link.counters_file),
                coordinator=f"{namespaces.address(0)}:{forwarder.COORDINATOR_PORT}",
                core=_core(index),
            )
            for index in range(REPLICAS)
        ]
        return _together(
            jobs, limit, meanwhile and (lambda running: meanwhile(link, running))
        )


def _core(index: int) -> int:
    """A core for each process: the training of one does not disturb the other's."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[index % len(cores)]


def _together(
    jobs: list[Job],
    limit: float,
    meanwhile: Callable[[Running], None] | None = None,
) -> list[Ended]:
    with tempfile.TemporaryDirectory(prefix="wan-") as folder:
        files = [Path(folder) / f"{index}.jsonl" for index in range(len(jobs))]
        outputs = [file.with_suffix(".txt") for file in files]
        named = [
            dataclasses.replace(job, out=str(file))
            for job, file in zip(jobs, files, strict=True)
        ]
        with _started(named, outputs) as workers:
            until = time.monotonic() + limit
            running = Running(workers, files)
            beside = threading.Thread(
                target=meanwhile or (lambda _: None), args=(running,), daemon=True
            )
            beside.start()
            ends = _wait(workers, until)
            for worker in workers:  # `meanwhile` goes on for as long as they run
                worker.kill()
            beside.join()
        return [
            Ended(status, read(file), output.read_text(errors="replace"), end)
            for (status, end), file, output in zip(ends, files, outputs, strict=True)
        ]


@contextlib.contextmanager
def _started(jobs: list[Job], outputs: list[Path]) -> Iterator[list[subprocess.Popen]]:
    workers = []
    try:
        for job, output in zip(jobs, outputs, strict=True):
            argument = json.dumps(dataclasses.asdict(job))
            with output.open("w") as stream:
                workers.append(
                    subprocess.Popen(
                        [sys.executable, str(_WORKER), argument],
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _wait(
    workers: list[subprocess.Popen], until: float
) -> list[tuple[int | None, float]]:
    """Exit status of each and when it ended; None for one that has not by then."""
    ends: dict[int, tuple[int | None, float]] = {}
    while len(ends) < len(workers) and time.monotonic() < until:
        for index, worker in enumerate(workers):
            if index not in ends and worker.poll() is not None:
                ends[index] = (worker.returncode, time.monotonic())
        time.sleep(0.05)
    return [ends.get(index, (None, time.monotonic())) for index in range(len(workers))]


def read(file: Path) -> Rows:
    """The lines of a file that is written to, without one that is not whole."""
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]
