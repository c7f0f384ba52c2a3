"""The picture of a comparison: loss over steps and bytes, and each method's syncs."""

import math
from pathlib import Path
from typing import Any

import report
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Lines = list[dict[str, Any]]
_MARKERS = "os^Dv<>P"


def draw(journals: dict[str, Lines], summary: list[dict[str, Any]], file: Path) -> None:
    """Draw the journals of several methods into one PNG.

    Above: the loss on held-out text over steps, and over the bytes that a replica has
    sent. Below: when each method synchronised, and over it what the trigger of the
    first method that measures something compared with what.

    Args:
        journals: Method name to its lines, see `journal.Journal`.
        summary: A row a method, as in `summary.json`.
        file: The PNG to write.
    """
    measured = next((x for x, lines in journals.items() if _measures(lines)), None)
    heights = [4.0, *[1.0] * (measured is not None), 0.25 + 0.2 * len(journals)]
    # The canvas needs no display and leaves pyplot's global state alone.
    figure = Figure(figsize=(10, 1.2 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    over_steps = figure.add_subplot(grid[0, 0])
    over_bytes = figure.add_subplot(grid[0, 1], sharey=over_steps)
    colors = {method: f"C{number}" for number, method in enumerate(journals)}
    for number, (method, lines) in enumerate(journals.items()):
        style = {"color": colors[method], "marker": _MARKERS[number % len(_MARKERS)]}
        _loss(over_steps, lines, "step", label=method, **style)
        _loss(over_bytes, lines, "bytes", label=method, **style)
    compared = report.baseline(summary)
    if compared and compared["validation_loss"] is not None:
        for axes in (over_steps, over_bytes):
            axes.axhline(
                compared["validation_loss"],
                color="0.4",
                linestyle="--",
                linewidth=1,
                label=f"{compared['method']} at its end",
            )
    over_steps.set(xlabel="step", ylabel="loss on held-out text (nats per byte)")
    over_steps.set_title("the same number of steps", fontsize="medium")
    over_bytes.set(xlabel="bytes that one replica has sent")
    over_bytes.set_title("the same number of bytes", fontsize="medium")
    # Linear below the first bytes, so that a method that sent none has its place.
    sent = _sent_at_evaluations(journals)
    first = min((x for x in sent if x > 0), default=1)
    over_bytes.set_xscale("symlog", linthresh=first)
    over_bytes.set_xlim(0 if 0 in sent else first / 2, 2 * max([1, *sent]))
    named = over_steps.get_legend_handles_labels()
    figure.legend(*named, loc="outside upper center", ncols=3)
    syncs = figure.add_subplot(grid[-1, :])
    _ticks(syncs, journals, colors)
    if measured is not None:
        panel = figure.add_subplot(grid[1, :], sharex=syncs)
        _trigger(panel, journals[measured], colors[measured], measured)
    figure.savefig(file, dpi=120)


def _sent_at_evaluations(journals: dict[str, Lines]) -> list[float]:
    lines = [line for each in journals.values() for line in each]
    return [line["bytes"] for line in lines if "validation_loss" in line]


def _loss(axes: Axes, lines: Lines, key: str, **style: Any) -> None:
    seen = [line for line in lines if "validation_loss" in line]
    axes.plot([x[key] for x in seen], _column(seen, "validation_loss"), **style)


def _ticks(axes: Axes, journals: dict[str, Lines], colors: dict[str, str]) -> None:
    synced = [[x["step"] for x in each if x["synced"]] for each in journals.values()]
    places = range(len(journals), 0, -1)
    axes.eventplot(
        synced,
        lineoffsets=list(places),
        linelengths=0.7,
        linewidths=0.8,
        colors=[*colors.values()],
    )
    names = [
        f"{name}: {len(steps)}" for name, steps in zip(journals, synced, strict=True)
    ]
    axes.set_yticks(list(places), names)
    axes.set(xlabel="step; each tick is a sync, and after each name is their number")
    axes.set_xlim(0, max((len(lines) for lines in journals.values()), default=1) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _measures(lines: Lines) -> bool:
    return any(line["value"] is not None for line in lines)


def _trigger(axes: Axes, lines: Lines, color: str, method: str) -> None:
    """The value that the trigger compared, and with what."""
    steps, threshold = _column(lines, "step"), _column(lines, "threshold")
    axes.plot(steps, _column(lines, "value"), color=color, linewidth=1)
    axes.plot(steps, threshold, "--", color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.tick_params(labelbottom=False)
    rule = "a sync wherever the change is above the threshold (dashed)"
    if len({x for x in threshold if math.isfinite(x)}) > 1:
        rule = "its budget moves the threshold (dashed), and may forbid or demand syncs"
    axes.set_title(f"{method}: relative momentum change; {rule}", fontsize="medium")


def _column(lines: Lines, key: str) -> list[float]:
    """One number a line; what JSON could not hold is a gap."""
    return [math.nan if line[key] is None else line[key] for line in lines]
