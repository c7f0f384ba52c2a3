"""The table and the picture of `measure.py`'s rows.

python benchmarks/wan/wan_table.py

Writes `seconds.md` and `seconds.png` beside the rows. The time of a method to a loss is
that of its steps until then, with the median times of its steps and of its syncs over
the link. Three losses are those of synchronous Muon after 20, 50 and 100% of the steps.
`predicted` is `cost_model.py`'s, with the steps of a link that is infinitely fast.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import cost_model
import measuring

HERE = Path(__file__).parent
BASELINE = "Muon, float32"
LOSSES = (0.2, 0.5, 1.0)
Row = Mapping[str, Any]


def step_times(row: Row) -> tuple[float, float]:
    """Median seconds of a local step and of a sync; the first of each compiles."""
    kinds: dict[bool, list[float]] = {False: [], True: []}
    for step in row["steps"]:
        kinds[step["synced"]].append(step["seconds"])
    local, sync = (x[1:] or x for x in (kinds[False], kinds[True]))
    both = statistics.median(local or sync), statistics.median(sync or local)
    return both


def steps_to(curve: Mapping[str, float], wanted: float) -> int | None:
    """The first step at which a curve is at a loss, or below.

    Examples:
        >>> steps_to({"10": 3.0, "20": 2.0}, 2.5), steps_to({"10": 3.0}, 2.5)
        (20, None)
    """
    reached = [int(step) for step, loss in curve.items() if loss <= wanted]
    return min(reached, default=None)


def seconds_to(loss: Row, time: Row, wanted: float) -> float | None:
    """Seconds to a loss over a link; None where it is not reached."""
    steps = steps_to(loss["curve"], wanted)
    if steps is None:
        return None
    local, sync = step_times(time)
    syncs = sum(loss["synced"][:steps])
    return (steps - syncs) * local + syncs * sync


def wanted_losses(loss: Row) -> list[float]:
    """The baseline's losses after so many of its steps."""
    curve = {int(step): x for step, x in loss["curve"].items()}
    last = max(curve)
    near = lambda share: min(curve, key=lambda step: abs(step - share * last))
    return [curve[near(share)] for share in LOSSES]


def predicted(time: Row, messages: Row, share_of_compute: float) -> float:
    """The cost model's seconds of a synchronous step in float32."""
    conditions = time["conditions"]
    link = cost_model.Link(conditions["rate"], conditions["round_trip"])
    size = max(int(x) for x in messages["messages"])
    return share_of_compute + cost_model.ring_time(
        cost_model.Payload(averaged=size), 2, link
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a Markdown table: a method and a link, and seconds to each loss."""
    losses = {row["method"]: row for row in rows if row["kind"] == "loss"}
    times = [row for row in rows if row["kind"] == "time" and "steps" in row]
    times = [row for row in times if isinstance(row["steps"], list)]
    header = ["link", "method", "local step, ms", "step with a sync, ms"]
    if BASELINE not in losses:
        wanted = []
    else:
        wanted = wanted_losses(losses[BASELINE])
    header += [f"s to {loss:.3f}" for loss in wanted]

    def lines():
        for row in times:
            local, sync = step_times(row)
            cells = [row["link"], row["method"], f"{1e3 * local:.0f}"]
            cells.append(f"{1e3 * sync:.0f}")
            for loss in wanted:
                of_method = losses.get(row["method"])
                seconds = of_method and seconds_to(of_method, row, loss)
                cells.append("" if seconds is None else f"{seconds:.1f}")
            yield cells

    return measuring.markdown(header, lines())


def draw(rows: Sequence[Row], file: Path) -> None:
    """Seconds to the last loss that most reach, over the link's speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = {row["method"]: row for row in rows if row["kind"] == "loss"}
    times = [row for row in rows if row["kind"] == "time" and "error" not in row]
    figure, plots = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axes, wanted in zip(plots, wanted_losses(losses[BASELINE]), strict=True):
        for method, loss in losses.items():
            points = [
                (row["conditions"]["rate"] / 1e6, seconds_to(loss, row, wanted))
                for row in times
                if row["method"] == method
            ]
            points = sorted(x for x in points if x[1] is not None)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=method)
        axes.set(xscale="log", yscale="log", xlabel="Mbit/s")
        axes.set_title(f"seconds to a held-out loss of {wanted:.3f}")
        axes.grid(alpha=0.3)
    plots[0].legend(fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run the program."""
    parser = measuring.parser(__doc__)
    parser.add_argument("--rows", type=Path, default=HERE / "rows.jsonl")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    text = "\n".join(table(rows)) + "\n"
    print(text)
    options.rows.with_name("seconds.md").write_text(text)
    if any(row["kind"] == "loss" and row["method"] == BASELINE for row in rows):
        draw(rows, options.rows.with_name("seconds.png"))


if __name__ == "__main__":
    main()
