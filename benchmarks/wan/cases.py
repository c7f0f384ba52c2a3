"""How each kind of case is measured, and what becomes a line of results."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

import grid
import launching
import probe
from grid import LINKS, Case, Record
from job import MESSAGES, Job, Part
from launching import Ended, Rows, Running
from link import Link

# A run that takes longer hangs.
_LIMIT = 1500.0
_PARTITION, _STEP_OF_PARTITION, _PARTITION_STEPS = 30.0, 10, 40


def measured(rows: list[Rows]) -> dict[str, Record]:
    """What the processes wrote about each method, in one dictionary for each.

    Args:
        rows: Lines of process 0, and of process 1.
    """
    found = {}
    for name in dict.fromkeys(row["part"] for row in rows[0]):
        if name == MESSAGES:
            continue
        own = [[row for row in each if row["part"] == name] for each in rows]
        steps = min(len(each) for each in own)
        own = [each[:steps] for each in own]
        first, later = own[0][0], own[0][1:]
        record = {key: first[key] for key in ("payload", "messages") if key in first}
        record["seconds"] = [round(x, 5) for x in _differences(own[0], "time")]
        record["loss"] = [
            statistics.fmean(row["loss"] for row in step)
            for step in zip(*(each[1:] for each in own), strict=True)
        ]
        for key in ("synced", "bytes", "validation_loss"):
            record[key] = [row.get(key) for row in later]
        if "link" in first:
            record["link"] = [_links_of(each) for each in own]
        found[name] = record
    return found


def _differences(rows: Rows, key: str) -> list[float]:
    times = [row[key] for row in rows]
    return [after - before for before, after in itertools.pairwise(times)]


def _links_of(rows: Rows) -> dict[str, list[int]]:
    """The counters of an end, from the first line of a method on."""
    names = rows[0]["link"]
    found = {name: [row["link"][name] for row in rows] for name in names}
    return found | {"retransmitted": [row["retransmitted"] for row in rows]}


def message_times(rows: Rows) -> dict[str, float]:
    """Median seconds of an all-reduce, by its bytes."""
    own = [row for row in rows if row["part"] == MESSAGES]
    sizes = dict.fromkeys(row["size"] for row in own)
    return {
        str(size): statistics.median(
            _differences([row for row in own if row["size"] == size], "time")
        )
        for size in sizes
    }


def _link(case: Case) -> Record:
    conditions = LINKS[case.name]
    record: Record = {"conditions": dataclasses.asdict(conditions)}
    record["calibration"] = probe.calibrate(conditions)
    ended = launching.train_over(conditions, Job(grid.parts(case.name)), _LIMIT)
    record |= _became(ended)
    rows = [each.rows for each in ended]
    record["messages"] = message_times(rows[0])
    return record | {"methods": measured(rows)}


def _alone(case: Case) -> Record:
    del case
    ended = launching.train_alone(Job(grid.alone()), _LIMIT)
    _check(ended)
    # Each process by itself: they do not wait for each other.
    return {"processes": [measured([each.rows]) for each in ended]}


def _loss(case: Case) -> Record:
    ended = launching.train(Job(grid.evaluated(case), evaluate=True), 2 * _LIMIT)
    _check([ended])
    return {"methods": measured([ended.rows])}


def _partition(case: Case) -> Record:
    method = grid.METHODS["curvadion"]
    part = Part("curvadion", _PARTITION_STEPS, method.rates[0])
    cut: dict[str, float] = {}

    def meanwhile(link: Link, running: Running) -> None:
        while len(launching.read(running.files[0])) <= _STEP_OF_PARTITION:
            if not running.all():
                return
            time.sleep(0.01)
        link.cut()
        cut["from"] = time.monotonic()
        time.sleep(_PARTITION)
        link.join()
        cut["to"] = time.monotonic()

    job = Job((part,), heartbeat=int(case.value))
    ended = launching.train_over(LINKS[case.name], job, _LIMIT, meanwhile)
    if not cut:
        _check(ended)
    times = [row["time"] for row in ended[0].rows]
    return {
        **_became(ended),
        "ended_after_cut": [each.time - cut["from"] for each in ended],
        "next_step_after_join": next(
            (t - cut["to"] for t in times if t > cut["to"]), None
        ),
        "steps": [len(each.rows) - 1 for each in ended],
        "loss": [row["loss"] for row in ended[0].rows[1:]],
    }


def _became(ended: list[Ended]) -> Record:
    """Exit statuses, and what was printed where they are not 0."""
    record: Record = {"status": [each.status for each in ended]}
    if any(record["status"]) or None in record["status"]:
        record["output"] = [each.output[-4000:] for each in ended]
    return record


def _check(ended: list[Ended]) -> None:
    for each in ended:
        if each.status != 0:
            raise RuntimeError(f"a process ended with {each.status}:\n{each.output}")


KINDS: dict[str, Callable[[Case], Record]] = {
    "link": _link,
    "alone": _alone,
    "loss": _loss,
    "partition": _partition,
}
