"""What a run sends and how long its steps take, before any of it is run.

    python benchmarks/cost_model.py --parameters 160e6 --step-time 0.3 \
        --bandwidth 1e9 --round-trip 0.05

prints, for replicas joined by such a link, the bytes and the time of a step of
synchronous training and of local steps, and which of them pays. Plain arithmetic:
nothing here touches a device. `links.py` and `projections.py` are tables made with it.

A message takes latency plus size over bandwidth (Hockney 1994; Thakur, Rabenseifner and
Gropp 2005). Payloads travel around a ring, which sends the least possible number of
bytes in 2 (N - 1) messages one after another. The flag of a vote is four bytes: only
messages in a row count, up a binary tree and down again. Links are equal between all
replicas, unshared, and the same in both directions; arithmetic on received data is
free. Over emulated links two processes with gloo took up to 2.8 times as long as this
for a step, because gloo sends one array after another and waits longer for each, and
TCP does not fill the link (`wan/README.md`). `--gloo` and `--arrays` count that.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax import compressors
from curvadion_jax.compressors import Payload

FLOAT32_BYTES = 4
VOTE = Payload(averaged=4)

# Steps for the loss of one of the best synchronous Muon, in 1,040 steps of the study:
# of `local_muon` by its budget (`curvadion` needed no fewer), 1.79 ± 0.20 at 1% of the
# bytes (three seeds, docs/readme_numbers.py), 2.5 and 3.5 at 0.3 and 0.1% (one seed,
# study/budgets.py); and of that Muon in 2 bits with error feedback on every step,
# 1.51 ± 0.17.
MEASURED_STEPS = {0.01: 1.8, 0.003: 2.5, 0.001: 3.5}
STEPS_IN_TWO_BITS = 1.5
# Of a training step's computation; gradients appear during it, and can be sent.
BACKWARD = 2 / 3
# How gloo over TCP (cubic, no loss) uses a link: two constants that fit all-reduces of
# 4 KB to 3.4 MB between two processes over three emulated links (wan/README.md).
GLOO = {"share": 0.75, "waits": 2.0}


class ModelSize(NamedTuple):
    """The number of parameters, and the matrices among them: count, rows, columns."""

    parameters: int
    matrices: tuple[tuple[int, int, int], ...] = ()


def model_size(params: Any, numbers: Any) -> ModelSize:
    """Size of a model from its parameters, or from their shapes.

    `numbers` are the dimension numbers of the matrices, in a tree of the parameters.

    Examples:
        >>> shapes = {"bias": (3, 4), "kernel": (3, 8, 4)}
        >>> params = {n: jax.ShapeDtypeStruct(s, "float32") for n, s in shapes.items()}
        >>> from curvadion_jax import DimensionNumbers
        >>> model_size(params, {"bias": None, "kernel": DimensionNumbers(1, 2)})
        ModelSize(parameters=108, matrices=((3, 8, 4),))
    """
    leaves, structure = jax.tree.flatten(params)
    matrices = []
    for leaf, axes in zip(leaves, structure.flatten_up_to(numbers), strict=True):
        if axes is not None:
            rows, cols = (_product(leaf.shape, side) for side in axes)
            matrices.append((math.prod(leaf.shape) // (rows * cols), rows, cols))
    return ModelSize(sum(math.prod(leaf.shape) for leaf in leaves), tuple(matrices))


def _product(shape: Sequence[int], axes: int | Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in np.atleast_1d(axes))


def gradient_payload(size: ModelSize) -> Payload:
    """What synchronous training averages: float32 gradients of all parameters."""
    return Payload(averaged=FLOAT32_BYTES * size.parameters)


def factor_payload(size: ModelSize, rank: float) -> Payload:
    """What Dion's compressed sync averages, with the rank as a fraction of a side.

    (m + n) r elements of a matrix of m x n, or all m n where that is less, and the
    gradients of all other parameters.

    Examples:
        >>> factor_payload(ModelSize(5_007, matrices=((1, 100, 50),)), rank=0.04)
        Payload(averaged=1228, gathered=0)
    """
    elements = size.parameters
    for count, rows, cols in size.matrices:
        factors = (rows + cols) * max(1, math.ceil(rank * min(rows, cols) - 1e-9))
        elements -= count * max(0, rows * cols - factors)
    return Payload(averaged=FLOAT32_BYTES * elements)


def drift_payload(parameters: int, bits: int = 2) -> Payload:
    """What `local_muon` sends in a sync: the parameters' drift in codes of few bits."""
    shape = jax.ShapeDtypeStruct((parameters,), jnp.float32)
    return compressors.quantize(bits).payload(shape)


def sync_bytes(payload: Payload, replicas: int) -> float:
    """Bytes that one replica sends in a sync.

    Examples:
        >>> sync_bytes(Payload(averaged=8, gathered=2), replicas=4)  # 12 + 6
        18.0
    """
    averaged = 2 * (replicas - 1) * payload.averaged / replicas
    return averaged + (replicas - 1) * payload.gathered


@dataclass(frozen=True)
class Link:
    """A link to a neighbour.

    Attributes:
        bandwidth: Bits a second.
        round_trip_time: Seconds, of a small message.
        share: Share of the bandwidth that payloads get.
        waits: Delays of one way that a payload waits for, on each turn of a ring.
    """

    bandwidth: float
    round_trip_time: float
    share: float = 1.0
    waits: float = 1.0

    @property
    def latency(self) -> float:
        """Of one message one way, in seconds."""
        return self.round_trip_time / 2


def ring_time(payload: Payload, replicas: int, link: Link, messages: int = 1) -> float:
    """Seconds of a ring all-reduce of what is averaged, then an all-gather.

    `messages` is the number of arrays that are sent one after another.

    Examples:
        >>> ring_time(Payload(10**9), replicas=2, link=Link(8e9, 0.1))  # 2 * 0.05 + 1
        1.1
        >>> gloo = Link(8e9, 0.1, share=0.5, waits=2)
        >>> ring_time(Payload(10**9), 2, gloo, messages=3)  # 3 * 2 * 2 * 0.05 + 2
        2.6
    """
    rounds = 2 * (payload.averaged > 0) + (payload.gathered > 0)
    sent = 8 * sync_bytes(payload, replicas) / (link.share * link.bandwidth)
    waits = messages * link.waits * (replicas - 1) * rounds
    return waits * link.latency + sent


def flag_time(replicas: int, link: Link, interval: int = 1) -> float:
    """Seconds a step that wait for a vote, where one step of `interval` votes.

    Examples:
        >>> round(flag_time(8, Link(5e9, 0.1)), 3)  # 3 round trips
        0.3
    """
    message = link.latency + 8 * VOTE.averaged / link.bandwidth
    return 2 * math.ceil(math.log2(replicas)) * message / interval


@dataclass(frozen=True)
class Method:
    """What a training method spends in a step, in seconds.

    Attributes:
        compute_time: Forward and backward pass and optimizer.
        sync_time: Of one sync.
        sync_rate: Share of the steps that synchronise.
        flag_time: Of votes, per step.
        hidden: Computation that every sync hides behind.
    """

    compute_time: float
    sync_time: float
    sync_rate: float = 1.0
    flag_time: float = 0.0
    hidden: float = 0.0

    @property
    def communication_time(self) -> float:
        """Seconds a step that wait for the link, on average."""
        waits = max(0.0, self.sync_time - self.hidden)
        return self.sync_rate * waits + self.flag_time

    @property
    def step_time(self) -> float:
        """Seconds a step."""
        return self.compute_time + self.communication_time

    @property
    def communication_share(self) -> float:
        """Share of the step that waits for the link."""
        return self.communication_time / self.step_time

    @property
    def overlapped_step_time(self) -> float:
        """Seconds a step if all communication overlaps; no schedule is faster."""
        busy = self.sync_rate * self.sync_time + self.flag_time
        return max(self.compute_time, busy)


def speedup(method: Method, baseline: Method, overlap: bool = False) -> float:
    """How many times as fast a step is as one of the baseline.

    Examples:
        >>> synchronous, rare = Method(0.3, 0.9), Method(0.3, 0.9, sync_rate=0.1)
        >>> round(speedup(rare, synchronous, overlap=True), 6)  # 0.9 / max(0.3, 0.09)
        3.0
    """
    if overlap:
        return baseline.overlapped_step_time / method.overlapped_step_time
    return baseline.step_time / method.step_time


class Row(NamedTuple):
    """A line of the calculator: bytes of a step, and steps for the same loss.

    `steps_needed` is None if nobody has measured how many.
    """

    name: str
    sent: float
    method: Method
    steps_needed: float | None = 1.0

    @property
    def time_to_loss(self) -> float | None:
        """Seconds for the loss of a synchronous step."""
        steps = self.steps_needed
        return None if steps is None else steps * self.method.step_time


def measured_steps(budget: float) -> float | None:
    """Steps of `local_muon` for one of Muon's; None where nobody has measured them."""
    for known, steps in MEASURED_STEPS.items():
        if math.isclose(budget, known, rel_tol=0.01):
            return steps
    return None


def compare(
    parameters: int,
    step_time: float,
    link: Link,
    replicas: int = 8,
    budget: float = 0.01,
    steps_needed: float | None = None,
    arrays: int = 1,
) -> list[Row]:
    """Synchronous training and local steps within a budget, over one link.

    Gradients are `arrays` messages, and codes are one. Without `steps_needed` local
    steps are as many as were measured at the budget.
    """
    if steps_needed is None:
        steps_needed = measured_steps(budget)
    whole = gradient_payload(ModelSize(parameters))
    half = Payload(whole.averaged // 2)
    drift = drift_payload(parameters)
    counts = {whole: arrays, half: arrays, drift: 1}
    times = {x: ring_time(x, replicas, link, count) for x, count in counts.items()}
    full, rarely = (sync_bytes(load, replicas) for load in (whole, drift))
    rate = min(1.0, budget * full / rarely)
    voting = flag_time(replicas, link)
    overlapped = Method(step_time, times[half], hidden=BACKWARD * step_time)
    in_two_bits = Method(step_time, times[drift])
    local = Method(step_time, times[drift], rate)
    asking = Method(step_time, times[drift], rate, voting)
    flag = sync_bytes(VOTE, replicas)
    return [
        Row("synchronous, float32", full, Method(step_time, times[whole])),
        Row("synchronous, bfloat16 behind the backward pass", full / 2, overlapped),
        Row("synchronous, 2 bits", rarely, in_two_bits, STEPS_IN_TWO_BITS),
        Row(f"local_muon, {budget:.2%}", rate * rarely, local, steps_needed),
        Row(f"curvadion, {budget:.2%}", rate * rarely + flag, asking, steps_needed),
    ]


def verdict(rows: Sequence[Row]) -> str:
    """Which row reaches a loss first, and by how much."""
    synchronous = min(rows[:3], key=lambda row: row.time_to_loss or math.inf)
    best = min(rows[3:], key=lambda row: row.method.step_time)
    least = synchronous.time_to_loss or math.inf
    ratio = least / best.method.step_time
    found = (
        f"The fastest to a loss without local steps is {synchronous.name}. {best.name} "
        f"pays if it needs fewer than {ratio:.2f} steps for each of synchronous Muon's"
    )
    if best.time_to_loss is None:
        known = (f"{steps} at {budget:.1%}" for budget, steps in MEASURED_STEPS.items())
        return f"{found}. Measured were {', '.join(known)} of the bytes."
    gain = least / best.time_to_loss
    pays = "local steps pay" if gain > 1 else "stay synchronous"
    return (
        f"{found}, and needs {best.steps_needed:g}: {pays} ({gain:.2f} times as fast)."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, required=True, help="their number")
    parser.add_argument(
        "--step-time", type=float, required=True, help="seconds of a local step"
    )
    parser.add_argument("--bandwidth", type=float, required=True, help="bits a second")
    parser.add_argument("--round-trip", type=float, required=True, help="seconds")
    parser.add_argument("--replicas", type=int, default=8, help="8 by default")
    parser.add_argument(
        "--budget",
        type=float,
        default=0.01,
        help="share of the bytes of float32 gradients on every step, 0.01 by default",
    )
    parser.add_argument(
        "--steps-needed",
        type=float,
        help="local steps for the loss of a synchronous step; at budgets of 1, 0.3 and "
        "0.1%% 1.8, 2.5 and 3.5, measured in a small model and no forecast for a large "
        "one; at others nobody knows",
    )
    parser.add_argument(
        "--gloo",
        action="store_true",
        help="gloo over TCP: longer waits, 75%% of a link",
    )
    parser.add_argument(
        "--arrays",
        type=int,
        default=1,
        help="arrays of gradients that are averaged one after another, as gloo does; "
        "by default one that has all",
    )
    options = parser.parse_args(arguments)
    use = GLOO if options.gloo else {}
    needed = options.steps_needed
    if options.replicas < 2 or (needed is not None and needed <= 0):
        parser.error("give at least two replicas, and more than 0 steps")
    rows = compare(
        int(options.parameters),
        options.step_time,
        Link(options.bandwidth, options.round_trip, **use),
        options.replicas,
        options.budget,
        needed,
        options.arrays,
    )
    print("| method | MB a step | s a step | waits | s for a synchronous step's loss |")
    print("|---|---|---|---|---|")
    for row in rows:
        step = row.method.step_time
        waits = row.method.communication_share
        needs = "?" if row.time_to_loss is None else f"{row.time_to_loss:.3g}"
        print(
            f"| {row.name} | {row.sent / 1e6:.3g} | {step:.3g} | {waits:.1%} "
            f"| {needs} |"
        )
    print(verdict(rows))


if __name__ == "__main__":
    main()
