"""Numbers from the results: times of steps, speedups, and what the models say of them.

Works on the records of `measure.py` and starts nothing.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grid
from grid import METHODS, WARM_UP, Case, Record
from job import REPLICAS

from curvadion_jax import cost_model
from curvadion_jax.compressors import Payload

Results = Mapping[str, Record]


class Times(NamedTuple):
    """Mean seconds of a step without and with a sync; NaN where there was none."""

    local: float
    synced: float


class Whole(NamedTuple):
    """A run of all steps, whose losses do not depend on a link.

    Attributes:
        synced: Of every step, whether it did.
        loss: Training loss of every step.
        validation: Step and loss of every evaluation.
        messages: Bytes that a replica sends in each message of a step with a sync.
    """

    synced: list[bool]
    loss: list[float]
    validation: list[tuple[int, float]]
    messages: list[float]

    @property
    def rate(self) -> float:
        """Share of the steps that sync."""
        return sum(self.synced) / len(self.synced)


def whole(name: str, results: Results, rate: float | None = None) -> Whole | None:
    """The run of a method that ended lowest, or that with a learning rate."""
    rates = METHODS[name if name in METHODS else "adamw"].rates
    cases = [Case("loss", name, x) for x in (rates if rate is None else (rate,))]
    records = [results[case.key()] for case in cases if case.key() in results]
    if not records:
        return None
    found = min(
        (record["methods"][name] for record in records),
        key=lambda run: run["validation_loss"][-1] or 0.0,
    )
    validation = enumerate(found["validation_loss"], 1)
    return Whole(
        [bool(x) or not _own(name) for x in found["synced"]],
        found["loss"],
        [(step, loss) for step, loss in validation if loss is not None],
        [_sent(kind, size) for kind, size in found["messages"]],
    )


def _sent(kind: str, size: int) -> float:
    """Bytes that one of two replicas sends for an array that a collective gives."""
    share = 1.0 if kind == "all-reduce" else 0.5
    return share * size * 2 * (REPLICAS - 1) / REPLICAS


def times(run: Record, own: bool = True) -> Times:
    """Mean seconds of the steps of a run, without those at its start.

    Where local steps are a program of their own, that of a sync step is compiled at the
    first one, which is left out too.
    """
    every = list(zip(run["seconds"], run["synced"], strict=True))
    synced = [seconds for seconds, at in every[WARM_UP:] if at or not own]
    local = [seconds for seconds, at in every[WARM_UP:] if own and not at]
    if local and not any(at for _, at in every[:WARM_UP]):
        synced = synced[1:]
    parts = [local, synced]
    return Times(*(statistics.fmean(x) if x else float("nan") for x in parts))


def _own(name: str) -> bool:
    return name in METHODS and METHODS[name].own


def alone(name: str, results: Results) -> Times | None:
    """Without a link: the mean of two processes that compute at the same time."""
    record = results.get(Case("alone").key())
    if record is None or name not in record["processes"][0]:
        return None
    found = [times(each[name], _own(name)) for each in record["processes"]]
    return Times(*(statistics.fmean(x) for x in zip(*found, strict=True)))


def over(link: str, name: str, results: Results) -> Times | None:
    """Over a link."""
    record = results.get(Case("link", link).key())
    if record is None or name not in record["methods"]:
        return None
    found = times(record["methods"][name], _own(name))
    # A run that ended early has no sync to speak of.
    return None if found.synced != found.synced else found


def mean(found: Times, rate: float) -> float:
    """Seconds a step at a rate of syncs."""
    return (
        found.synced if rate == 1 else found.local + rate * (found.synced - found.local)
    )


def step_time(link: str, name: str, results: Results) -> float | None:
    """Mean wall-clock seconds a step over a link."""
    found, run = over(link, name, results), whole(name, results)
    return None if found is None or run is None else mean(found, run.rate)


def speedup(link: str, name: str, results: Results) -> float | None:
    """How many times as fast a step is as one of synchronous AdamW."""
    own, base = (step_time(link, x, results) for x in (name, "adamw"))
    return None if own is None or base is None else base / own


def target(results: Results) -> float | None:
    """A validation loss that all methods reach: the highest of their last ones."""
    runs = [whole(name, results) for name in METHODS]
    last = [run.validation[-1][1] for run in runs if run is not None]
    return max(last) if len(last) == len(METHODS) else None


def steps_to(loss: float, run: Whole) -> int | None:
    """The step of the first evaluation that is not above a loss."""
    return next((step for step, found in run.validation if found <= loss), None)


def time_to(loss: float, link: str, name: str, results: Results) -> float | None:
    """Seconds to that step over a link, from its mean local and synced steps."""
    found, run = over(link, name, results), whole(name, results)
    if found is None or run is None or (steps := steps_to(loss, run)) is None:
        return None
    syncs = sum(run.synced[:steps])
    local = (steps - syncs) * found.local if steps > syncs else 0.0
    return local + syncs * found.synced


class Predicted(NamedTuple):
    """Seconds a step by three models.

    Attributes:
        nominal: `cost_model`, with the rate and the round trip that were asked for.
        calibrated: The same with those that TCP had.
        messages: Each message of the program takes as long as an all-reduce of its
            bytes took over this link.
    """

    nominal: float
    calibrated: float
    messages: float


def predicted(link: str, name: str, results: Results) -> Predicted | None:
    """What the models say of a method's step."""
    record = results.get(Case("link", link).key())
    run, compute = whole(name, results), alone(name, results)
    if record is None or run is None or compute is None:
        return None
    if name not in record["methods"]:
        return None
    asked, got = record["conditions"], record["calibration"]
    links = [
        cost_model.Link(asked["rate"], asked["round_trip"]),
        cost_model.Link(got["stream"], got["round_trip"]),
    ]
    payload = Payload(**record["methods"][name]["payload"])
    found = [
        _step(compute, run.rate, cost_model.ring_time(payload, REPLICAS, each))
        for each in links
    ]
    took = [message_time(size, record["messages"]) for size in run.messages]
    found.append(_step(compute, run.rate, sum(took)))
    return Predicted(*found)


def _step(compute: Times, rate: float, sync: float) -> float:
    """Seconds a step by `cost_model.Method`; a sync computes too."""
    local = compute.synced if rate == 1 else compute.local
    sync += compute.synced - local
    return cost_model.Method(local, max(0.0, sync), rate).step_time


def message_time(size: float, measured: Mapping[str, float]) -> float:
    """Seconds of a message, on straight lines between the sizes that were measured."""
    points = sorted((float(key), seconds) for key, seconds in measured.items())
    if size <= points[0][0]:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    (x, low), (y, high) = next((p for p in pairs if size <= p[1][0]), pairs[-1])
    return low + (high - low) * (size - x) / (y - x)


class Bytes(NamedTuple):
    """Bytes that a replica was sent over a link, after the steps at the start.

    Attributes:
        counted: By `cd.metrics`; for AdamW its gradients and the loss.
        payload: What TCP carried for gloo.
        wire: All of the packets.
        retransmitted: Segments that were sent again, by both.
    """

    counted: float
    payload: float
    wire: float
    retransmitted: int


def sent(link: str, name: str, results: Results) -> Bytes | None:
    """What went over a link, a mean of both directions."""
    record = results.get(Case("link", link).key())
    if record is None or name not in record["methods"]:
        return None
    run = record["methods"][name]
    steps = len(run["seconds"])
    if _own(name):
        counted = run["bytes"][-1] - run["bytes"][WARM_UP - 1]
    else:
        counted = (steps - WARM_UP) * (run["payload"]["averaged"] + 4)
    ends: Sequence[Any] = run["link"]

    def grown(key: str) -> list[int]:
        return [end[key][-1] - end[key][WARM_UP] for end in ends]

    return Bytes(
        counted,
        statistics.fmean(grown("payload")),
        statistics.fmean(grown("bytes")),
        sum(grown("retransmitted")),
    )


class Differences(NamedTuple):
    """How far losses of runs over links lie apart, in relation to them.

    Attributes:
        runs: Number of runs over links.
        between: Largest difference of a step's loss between two links.
        without: Largest difference of one of the first ten steps' from that without a
            link, in one process.
    """

    runs: int
    between: float
    without: float


def loss_differences(results: Results) -> Differences:
    """Whether losses depend on the link."""
    first: dict[str, list[float]] = {}
    count, between, without = 0, 0.0, 0.0
    for link in grid.LINKS:
        record = results.get(Case("link", link).key())
        for name, run in record["methods"].items() if record else ():
            count += 1
            between = max(
                between, _apart(run["loss"], first.setdefault(name, run["loss"]))
            )
            if name in METHODS:
                reference = whole(name, results, METHODS[name].rates[0])
                if reference is not None:
                    without = max(without, _apart(run["loss"][:10], reference.loss))
    return Differences(count, between, without)


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, others, strict=False))
