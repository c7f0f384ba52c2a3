"""The tables and the picture of `measure.py`'s rows, as the page has them.

    python benchmarks/links/wan/wan_table.py

Prints the tables, and draws `results/seconds.svg`. The time of a method to a loss is
that of its steps until then, with the median times of its steps and of its syncs over
the link; of runs of several lengths the fastest counts. The losses are those of
synchronous Muon in float32 after 20, 50 and 100% of 300 steps.

The calculator's step is computation and what `cost_model.py` says of the sync.
Computation is the median local step over the fastest link, without its vote:
synchronous methods have none of their own, and take that of the method with the same
inner optimizer.
"""

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import cost_model
import measuring
import themed

HERE = Path(__file__).parent
BASELINE, STEPS = "Muon, float32", 300
LOCAL = "local_muon"
SHARES = (0.2, 0.5, 1.0)
PARAMETERS = 853_120
# Messages of a sync, one after another in gloo: one for each of the model's 11 arrays,
# or one of codes; and the replicas' weights, a number each.
MESSAGES = {"float32": 12, "2 bits": 2}
IN_FLOAT32 = ("AdamW, float32", "Muon, float32", "DiLoCo")
VOTES = ("curvadion",)
# Whose local steps have the computation of which synchronous method.
SAME_COMPUTATION = {
    "AdamW, float32": "DiLoCo",
    "AdamW, 2 bits": "DiLoCo",
    "Muon, float32": LOCAL,
    "Muon, 2 bits": LOCAL,
}
# Colour, line and marker of each, in the legend's order.
# Of the picture: colour, line, and how far a label is moved up from its curve's end.
STYLES = {
    "Muon, float32": (themed.GREY, "-", 0),
    "Muon, 2 bits": (themed.GREY, "--", 0),
    "curvadion": (themed.ORANGE, "-", 0),
    "local_muon": (themed.BLUE, "-", -26),
}
Row = Mapping[str, Any]


def step_times(row: Row) -> tuple[float, float]:
    """Median seconds of a local step and of a sync; the first of each compiles."""
    kinds: dict[bool, list[float]] = {False: [], True: []}
    for step in row["steps"]:
        kinds[step["synced"]].append(step["seconds"])
    local, sync = (x[1:] or x for x in (kinds[False], kinds[True]))
    return statistics.median(local or sync), statistics.median(sync or local)


def steps_to(curve: Mapping[str, float], wanted: float) -> int | None:
    """The first step at which a curve is at a loss, or below.

    Examples:
        >>> steps_to({"10": 3.0, "20": 2.0}, 2.5), steps_to({"10": 3.0}, 2.5)
        (20, None)
    """
    reached = [int(step) for step, loss in curve.items() if loss <= wanted]
    return min(reached, default=None)


def seconds_to(runs: Sequence[Row], time: Row, wanted: float) -> float | None:
    """Least seconds to a loss over a link; None where no run reaches it."""
    local, sync = step_times(time)
    found = []
    for run in runs:
        steps = steps_to(run["curve"], wanted)
        if steps is not None:
            syncs = sum(run["synced"][:steps])
            found.append((steps - syncs) * local + syncs * sync)
    return min(found, default=None)


def wanted_losses(run: Row) -> list[float]:
    """A run's losses after so many of its steps."""
    curve = {int(step): x for step, x in run["curve"].items()}
    last = max(curve)
    near = lambda share: min(curve, key=lambda step: abs(step - share * last))
    return [curve[near(share)] for share in SHARES]


def break_even(
    rates: Sequence[float], local: Sequence[float], synchronous: Sequence[float]
) -> float:
    """The speed of the link at which both take the same seconds.

    Between two links both are straight lines of logarithms. Infinity means that local
    steps are faster over all links, and 0 that they are over none.

    Examples:
        >>> round(break_even([1e7, 1e9], [10.0, 10.0], [100.0, 1.0]))
        100000000
        >>> break_even([1e7, 1e9], [1.0, 1.0], [100.0, 2.0])
        inf
    """
    gains = [math.log(s / x) for x, s in zip(local, synchronous, strict=True)]
    if gains[0] <= 0:
        return 0.0
    points = zip([math.log(rate) for rate in rates], gains, strict=True)
    for (left, gain), (right, loss) in itertools.pairwise(points):
        if loss <= 0:
            return math.exp(left + (right - left) * gain / (gain - loss))
    return math.inf


def payload(method: str) -> cost_model.Payload:
    """What a method's sync sends.

    Between two replicas codes are gathered: a mean in two stages would save nothing.
    """
    if method in IN_FLOAT32:
        return cost_model.gradient_payload(cost_model.ModelSize(PARAMETERS))
    return cost_model.Payload(gathered=sum(cost_model.drift_payload(PARAMETERS)))


class Measured:
    """The rows, by what they are."""

    def __init__(self, rows: Sequence[Row]):
        self.runs: dict[str, list[Row]] = {}
        for row in rows:
            if row["kind"] == "loss":
                self.runs.setdefault(row["method"], []).append(row)
        whole = [row for row in rows if "error" not in row]
        self.times = [row for row in whole if row["kind"] == "time"]
        self.messages = [row for row in whole if row["kind"] == "message"]
        first = [x for x in self.runs.get(BASELINE, []) if len(x["synced"]) == STEPS]
        self.wanted = wanted_losses(first[0]) if first else []

    def seconds(self, method: str, wanted: float) -> dict[float, float]:
        """Seconds to a loss by the link's bits a second, as far as it is reached."""
        found = {
            row["conditions"]["rate"]: seconds_to(
                self.runs.get(method, []), row, wanted
            )
            for row in self.times
            if row["method"] == method
        }
        return {rate: x for rate, x in sorted(found.items()) if x is not None}

    def break_even(self, synchronous: str, wanted: float) -> float | None:
        """The link's bits a second, or None where one of both is not measured."""
        ours, theirs = (self.seconds(x, wanted) for x in (LOCAL, synchronous))
        if not ours or ours.keys() != theirs.keys():
            return None
        return break_even([*ours], [*ours.values()], [*theirs.values()])

    def computation(self, method: str) -> float:
        """Seconds of a step without communication."""
        name = SAME_COMPUTATION.get(method, method)
        fastest = max(
            (row for row in self.times if row["method"] == name),
            key=lambda row: row["conditions"]["rate"],
        )
        vote = cost_model.flag_time(2, link_of(fastest)) * (name in VOTES)
        return step_times(fastest)[0] - vote

    def predicted(self, row: Row, gloo: bool = False) -> float:
        """The calculator's seconds of a step with a sync."""
        method, link = row["method"], link_of(row, gloo)
        kind = "float32" if method in IN_FLOAT32 else "2 bits"
        messages = MESSAGES[kind] if gloo else 1
        sync = cost_model.ring_time(payload(method), 2, link, messages)
        vote = cost_model.flag_time(2, link) * (method in VOTES)
        return self.computation(method) + vote + sync


def link_of(row: Row, gloo: bool = False) -> cost_model.Link:
    """A row's link, for the calculator: ideal, or as gloo uses it."""
    conditions = row["conditions"]
    use = cost_model.GLOO if gloo else {}
    return cost_model.Link(conditions["rate"], conditions["round_trip"], **use)


def number(x: float) -> str:
    """Three digits or more.

    Examples:
        >>> number(1399.2), number(279.8), number(8.67)
        ('1,399', '280', '8.7')
    """
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def seconds_table(measured: Measured) -> Iterator[str]:
    """Milliseconds of steps, and seconds to each loss, by link and method."""
    header = ["method", "local, ms", "sync, ms"]
    header += [f"s to {loss:.3f}" for loss in measured.wanted]

    def cell(row: Row, wanted: float) -> str:
        runs = measured.runs.get(row["method"], [])
        if not runs:
            return ""
        seconds = seconds_to(runs, row, wanted)
        best = min(min(run["curve"].values()) for run in runs)
        return f"({best:.3f})" if seconds is None else number(seconds)

    def lines():
        for row in measured.times:
            local, sync = (f"{1e3 * x:,.0f}" for x in step_times(row))
            if all(step["synced"] for step in row["steps"]):
                local = ""
            cells = [cell(row, wanted) for wanted in measured.wanted]
            yield [row["link"], _name(row["method"]), local, sync, *cells]

    return measuring.markdown(header, measuring.grouped(lines()))


def _name(method: str) -> str:
    """Names of the library are code."""
    return f"`{method}`" if method in (LOCAL, *VOTES) else method


def lengths_table(measured: Measured) -> Iterator[str]:
    """The last loss of each run."""
    lines = (
        [
            _name(method),
            ", ".join(
                f"{[*run['curve'].values()][-1]:.3f} ({len(run['synced'])})"
                for run in sorted(runs, key=lambda run: len(run["synced"]))
            ),
            f"{sum(runs[0]['synced'])} of {len(runs[0]['synced'])}",
            f"{100 * runs[0]['share']:.1f}%",
        ]
        for method, runs in measured.runs.items()
    )
    header = ["method", "last loss (steps)", "syncs", "bytes sent"]
    return measuring.markdown(header, lines)


def steps_table(measured: Measured) -> Iterator[str]:
    """Steps with a sync: measured, and by the calculator, ideal and as gloo."""
    header = ["method", "kB", "measured, ms", "over ideal", "over gloo"]

    def lines():
        for row in measured.times:
            _, sync = step_times(row)
            received = [x["received"] for x in row["steps"] if x["synced"]]
            cells = [f"{statistics.median(received) / 1e3:,.0f}", f"{1e3 * sync:,.0f}"]
            for gloo in (False, True):
                cells.append(f"{sync / measured.predicted(row, gloo):.2f}")
            yield [row["link"], _name(row["method"]), *cells]

    return measuring.markdown(header, measuring.grouped(lines()))


def messages_table(measured: Measured) -> Iterator[str]:
    """All-reduces of one array: measured, and by the calculator."""
    header = ["bytes", "measured, ms", "over ideal", "over gloo"]

    def lines():
        for row in measured.messages:
            for size, seconds in row["messages"].items():
                load = cost_model.Payload(averaged=int(size))
                cells = [row["link"], f"{int(size):,}", f"{1e3 * seconds:,.1f}"]
                for gloo in (False, True):
                    time = cost_model.ring_time(load, 2, link_of(row, gloo))
                    cells.append(f"{seconds / time:.2f}")
                yield cells

    return measuring.markdown(header, measuring.grouped(lines()))


def speed(rate: float, rates: Sequence[float]) -> str:
    """A break-even in words.

    Examples:
        >>> speed(2.5e7, [1e7, 1e9]), speed(math.inf, [1e7, 1e9])
        ('25 Mbit/s', 'above 1,000 Mbit/s')
    """
    if 0 < rate < math.inf:
        return f"{rate / 1e6:.0f} Mbit/s"
    end = max(rates) if rate else min(rates)
    return f"{'above' if rate else 'below'} {end / 1e6:,.0f} Mbit/s"


def break_even_table(measured: Measured) -> Iterator[str]:
    """The link's speed up to which `local_muon` is first, by loss."""
    header = ["`local_muon` against"]
    header += [f"to {loss:.3f}" for loss in measured.wanted]
    rates = [row["conditions"]["rate"] for row in measured.times]

    def lines():
        for method in ("Muon, float32", "Muon, 2 bits"):
            found = [measured.break_even(method, loss) for loss in measured.wanted]
            yield [method, *("" if x is None else speed(x, rates) for x in found)]

    return measuring.markdown(header, lines())


def tables(rows: Sequence[Row]) -> str:
    """All tables, as the page has them."""
    measured = Measured(rows)
    made: tuple[Callable[[Measured], Iterator[str]], ...] = (
        seconds_table,
        break_even_table,
        lengths_table,
        steps_table,
        messages_table,
    )
    return "\n\n".join("\n".join(table(measured)) for table in made)


def draw(rows: Sequence[Row], file: Path) -> None:
    """Seconds to the last loss over the link's speed, with each method at its curve."""
    measured = Measured(rows)
    links = {row["conditions"]["rate"]: row["conditions"] for row in measured.times}
    rates, wanted = sorted(links), measured.wanted[-1]
    figure, ((axes,),) = themed.subplots(300)
    for method, (color, line, up) in STYLES.items():
        seconds = measured.seconds(method, wanted)
        if not seconds:
            continue
        weight = "bold" if method == "local_muon" else "normal"
        axes.plot([*seconds], [*seconds.values()], line, color=color, marker="o",
                  markersize=4)  # fmt: skip
        axes.annotate(method, (min(seconds), seconds[min(seconds)]), color=color,
                      xytext=(4, 6 + up), textcoords="offset points",
                      weight=weight)  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.set_title(f"seconds to a held-out loss of {wanted:.3f}")
    axes.set_xticks(rates, [_label(links[rate]) for rate in rates])
    axes.set_xlim(rates[0] / 1.5, rates[-1] * 2)
    ticks = (10, 30, 100, 300, 1000)
    axes.set_yticks(ticks, [f"{x:,}" for x in ticks])
    axes.set_ylim(top=3000)
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlabel("speed and round trip of the emulated link")
    themed.save(figure, file)


def _label(conditions: Row) -> str:
    rate = conditions["rate"] / 1e6
    name = f"{rate:.0f} Mbit/s" if rate < 1000 else f"{rate / 1000:.0f} Gbit/s"
    return f"{name}\n{1e3 * conditions['round_trip']:.0f} ms"


def main() -> None:
    """Run the program."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--rows", type=Path, default=HERE / "results" / "rows.jsonl")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    print(tables(rows))
    if Measured(rows).wanted:
        draw(rows, options.rows.with_name("seconds.svg"))


if __name__ == "__main__":
    main()
