"""What a run sends and how long its steps take, before any of it is run.

    python benchmarks/links/cost_model.py --parameters 160e6 --step-time 0.3 \
        --bandwidth 1e9 --round-trip 0.05

prints, for replicas joined by such a link, the bytes and the time of a step of
synchronous training and of local steps at several shares of the bytes, and names the
share that reaches a loss first; then the same over link speeds, which `--picture FILE`
draws. How many local steps replace a synchronous one is read from the study's rows
(`study/results/steps.json`, by `study/curve_table.py`): it is measured in a GPT of 0.85
million parameters, and no forecast for a large one. Plain arithmetic: nothing here
touches a device. `waiting.py` and `projections.py` are tables made with it.

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
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measuring
import numpy as np

from curvadion_jax import compressors
from curvadion_jax.compressors import Payload

FLOAT32_BYTES = 4
VOTE = Payload(averaged=4)

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


class Measured(NamedTuple):
    """Steps of a method for one of the best synchronous Muon's, in the study.

    Attributes:
        method: Local steps with syncs in few bits, or Muon in few bits on every step.
        budget: Share of the bytes.
        bits: Of a code.
        steps: Mean over the seeds.
        seeds: Their number.
    """

    method: str
    budget: float
    bits: int
    steps: float
    seeds: int

    @property
    def synchronous(self) -> bool:
        return self.method != LOCAL_MUON

    @property
    def name(self) -> str:
        if self.synchronous:
            return f"synchronous, {self.bits} bits"
        return f"local_muon, {100 * self.budget:g}% of the bytes"


class Row(NamedTuple):
    """A line of the calculator.

    Attributes:
        name: Of the method.
        sent: Bytes of a step.
        method: Its times.
        synchronous: Whether no replica takes local steps.
        steps_needed: For the loss of one step of synchronous Muon; None if nobody has
            measured how many.
        seeds: Of the runs that say so; 0 if none does.
    """

    name: str
    sent: float
    method: Method
    synchronous: bool = True
    steps_needed: float | None = 1.0
    seeds: int = 0

    @property
    def time_to_loss(self) -> float:
        """Seconds for the loss of a step of synchronous Muon; infinite if not known."""
        steps = math.inf if self.steps_needed is None else self.steps_needed
        return steps * self.method.step_time


LOCAL_MUON = "`local_muon`"
STEPS_FILE = Path(__file__).parents[1] / "study" / "results" / "steps.json"


def measured() -> list[Measured]:
    """What the study has, with falling bytes."""
    found = (Measured(**row) for row in json.loads(STEPS_FILE.read_text()))
    return sorted(found, key=lambda each: (not each.synchronous, -each.budget))


def compare(
    parameters: int,
    step_time: float,
    link: Link,
    replicas: int = 8,
    arrays: int = 1,
    known: Sequence[Measured] | None = None,
) -> list[Row]:
    """Synchronous training, and local steps at every share that is known.

    Gradients are `arrays` messages, and codes are one. `known` is what the study has by
    default.
    """
    whole = gradient_payload(ModelSize(parameters))
    half = Payload(whole.averaged // 2)
    full = sync_bytes(whole, replicas)
    on_every_step = Method(step_time, ring_time(whole, replicas, link, arrays))
    overlapped = Method(
        step_time,
        ring_time(half, replicas, link, arrays),
        hidden=BACKWARD * step_time,
    )
    rows = [
        Row("synchronous, float32", full, on_every_step),
        Row("synchronous, bfloat16 behind the backward pass", full / 2, overlapped),
    ]
    for each in measured() if known is None else known:
        codes = drift_payload(parameters, each.bits)
        of_sync = sync_bytes(codes, replicas)
        rate = 1.0 if each.synchronous else min(1.0, each.budget * full / of_sync)
        method = Method(step_time, ring_time(codes, replicas, link), rate)
        steps = each.steps if math.isfinite(each.steps) else None
        sent = rate * of_sync
        row = Row(each.name, sent, method, each.synchronous, steps, each.seeds)
        rows.append(row)
    return rows


def fastest(rows: Iterable[Row], synchronous: bool | None = None) -> Row:
    """The row that reaches a loss first, of all or of one kind."""
    return min(
        (row for row in rows if synchronous in (None, row.synchronous)),
        key=lambda row: row.time_to_loss,
    )


def break_even(row: Row, rows: Iterable[Row]) -> float:
    """Steps for one of synchronous Muon's below which a row's local steps pay.

    They are compared with the synchronous form that reaches a loss first.
    """
    return fastest(rows, synchronous=True).time_to_loss / row.method.step_time


def verdict(rows: Sequence[Row]) -> str:
    """Which row reaches a loss first, and by how much."""
    synchronous, local = fastest(rows, True), fastest(rows, False)
    if local.steps_needed is None:
        return (
            f"The fastest to a loss without local steps is {synchronous.name}. "
            f"{local.name} pays if it needs fewer than {break_even(local, rows):.2f} "
            "steps for each of synchronous Muon's, which nobody has measured."
        )
    gain = synchronous.time_to_loss / local.time_to_loss
    if gain <= 1:
        return (
            f"Stay synchronous: {synchronous.name} reaches a loss first, {local.name} "
            f"in {1 / gain:.2f} times its time."
        )
    return (
        f"Take {local.name}: it reaches a loss first, {gain:.2f} times as fast as the "
        f"fastest without local steps ({synchronous.name}). It pays while it needs "
        f"fewer than {break_even(local, rows):.2f} steps for each of synchronous "
        f"Muon's, and in the study it needed {local.steps_needed:g}."
    )


HEADER = (
    *("method", "MB a step", "s a step", "waits", "steps for one of Muon's (seeds)"),
    *("pays below", "s for a Muon step's loss"),
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a Markdown table of one link."""

    def cells(row: Row) -> tuple[str, ...]:
        known = "?" if row.steps_needed is None else f"{row.steps_needed:.3g}"
        needs = "?" if row.steps_needed is None else f"{row.time_to_loss:.3g}"
        return (
            row.name,
            f"{row.sent / 1e6:.3g}",
            f"{row.method.step_time:.3g}",
            f"{row.method.communication_share:.1%}",
            known + f" ({row.seeds})" * (row.seeds > 0),
            "" if row.synchronous else f"{break_even(row, rows):.2f}",
            needs,
        )

    return measuring.markdown(HEADER, map(cells, rows))


SPEEDS = (10e6, 30e6, 100e6, 300e6, 1e9, 3e9, 10e9, 30e9, 100e9)
At = Callable[[float], Sequence[Row]]
"""From bits a second to the rows of a link of that speed."""


def speed_table(at: At) -> Iterator[str]:
    """Which method reaches a loss first at each speed, and how much sooner."""

    def cells(speed: float) -> tuple[str, ...]:
        rows = at(speed)
        synchronous, first = fastest(rows, True), fastest(rows)
        gain = synchronous.time_to_loss / first.time_to_loss
        return (
            in_bits(speed),
            synchronous.name,
            f"{synchronous.time_to_loss:.3g}",
            f"**{first.name}**",
            f"{first.time_to_loss:.3g}",
            f"{gain:.2f}",
        )

    header = (
        *("link", "fastest without local steps", "s for a Muon step's loss"),
        *("first", "s", "times as fast"),
    )
    return measuring.markdown(header, map(cells, SPEEDS))


def in_bits(speed: float) -> str:
    """A speed in words.

    Examples:
        >>> in_bits(30e6), in_bits(1e9)
        ('30 Mbit/s', '1 Gbit/s')
    """
    return f"{speed / 1e6:g} Mbit/s" if speed < 1e9 else f"{speed / 1e9:g} Gbit/s"


def picture(at: At, title: str, file: Path) -> None:
    """Draws each method's seconds for a synchronous step's loss over the link."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "curvadion_jax", "svg.fonttype": "none"}
    from matplotlib import pyplot

    speeds = np.geomspace(SPEEDS[0], SPEEDS[-1], 121)
    rows = [at(speed) for speed in speeds]
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6))
    locals_ = sum(not row.synchronous for row in rows[0])
    blues = iter(pyplot.get_cmap("Blues")(np.linspace(0.95, 0.45, locals_)))
    greys = iter(("0.3", "0.5", "0.65", "0.8"))
    for number, row in enumerate(rows[0]):
        seconds = [each[number].time_to_loss for each in rows]
        color, style = (next(greys), "--") if row.synchronous else (next(blues), "-")
        axes.plot(speeds, seconds, style, color=color, label=row.name)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set_xticks(SPEEDS, [in_bits(x) for x in SPEEDS], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_ylabel("seconds for the loss of a step of Muon")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


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
        help="share of the bytes of float32 gradients on every step; by default all "
        "that the study has trained to its end",
    )
    parser.add_argument(
        "--steps-needed",
        type=float,
        help="local steps at `--budget` for the loss of one of synchronous Muon's, if "
        "you know",
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
    parser.add_argument("--picture", type=Path, help="a file for it, such as x.svg")
    options = parser.parse_args(arguments)
    use = GLOO if options.gloo else {}
    needed = options.steps_needed
    if options.replicas < 2 or (needed is not None and needed <= 0):
        parser.error("give at least two replicas, and more than 0 steps")
    if needed is not None and options.budget is None:
        parser.error("--steps-needed is of one budget: give --budget too")

    def at(bandwidth: float) -> list[Row]:
        return compare(
            int(options.parameters),
            options.step_time,
            Link(bandwidth, options.round_trip, **use),
            options.replicas,
            options.arrays,
            with_budget(options.budget, needed),
        )

    rows = at(options.bandwidth)
    print("\n".join(table(rows)))
    print(verdict(rows))
    print("\n".join(["", *speed_table(at)]))
    if options.picture is not None:
        title = (
            f"{options.parameters / 1e6:g} million parameters, {options.replicas} "
            f"replicas, {options.step_time:g} s a step, {options.round_trip:g} s "
            "round trip"
        )
        picture(at, title, options.picture)


def with_budget(budget: float | None, steps: float | None) -> list[Measured]:
    """What the study has, of local steps only what it has at this budget, or these."""
    known = measured()
    if budget is None:
        return known
    same = [
        each
        for each in known
        if not each.synchronous and math.isclose(budget, each.budget, rel_tol=0.01)
    ]
    if steps is not None or not same:
        unknown = math.inf if steps is None else steps
        same = [Measured(LOCAL_MUON, budget, 2, unknown, 0)]
    return [each for each in known if each.synchronous] + same


if __name__ == "__main__":
    main()
