"""The picture of a comparison: loss over steps and bytes, and each method's syncs."""

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

Lines = list[dict[str, Any]]


def draw(journals: dict[str, Lines], file: Path) -> None:
    """Draw the journals of several methods into one PNG.

    Above: the loss over steps and over the bytes that a replica has sent. Below, a
    panel a method: the trigger's value, its threshold, and when it synchronised; of a
    trigger that looks at nothing, the number of syncs.

    Args:
        journals: Method name to its lines, see `journal.Journal`.
        file: The PNG to write.
    """
    count = len(journals)
    # The canvas needs no display and leaves pyplot's global state alone.
    figure = Figure(figsize=(11, 4 + 2 * count), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + count, 2, height_ratios=[2.5] + [1] * count)
    over_steps = figure.add_subplot(grid[0, 0])
    over_bytes = figure.add_subplot(grid[0, 1], sharey=over_steps)
    for number, (method, lines) in enumerate(journals.items()):
        _loss(over_steps, lines, "step", f"C{number}", method)
        _loss(over_bytes, lines, "bytes", f"C{number}", method)
        panel = figure.add_subplot(grid[1 + number, :])
        _trigger(panel, lines, f"C{number}", method)
    over_steps.set(xlabel="step", ylabel="loss (nats a token)")
    over_steps.set_title("lines: training; dots: validation", fontsize="medium")
    over_steps.legend()
    over_bytes.set(xlabel="bytes sent by a replica", xscale="log")
    figure.savefig(file, dpi=120)


def _loss(axes: Axes, lines: Lines, key: str, color: str, method: str) -> None:
    seen = [line for line in lines if line[key] > 0]
    x, y = [line[key] for line in seen], _column(seen, "loss")
    axes.plot(x, y, color=color, alpha=0.5, linewidth=1, label=method)
    seen = [line for line in seen if "validation_loss" in line]
    x, y = [line[key] for line in seen], _column(seen, "validation_loss")
    axes.plot(x, y, "o", color=color, markersize=4)


def _trigger(axes: Axes, lines: Lines, color: str, method: str) -> None:
    steps, values = _column(lines, "step"), _column(lines, "value")
    synced = [line["step"] for line in lines if line["synced"]]
    ticks = f"{len(synced)} {'sync' if len(synced) == 1 else 'syncs'} (ticks)"
    # In units of the panel's height, whatever the scale of the values.
    height = axes.get_xaxis_transform()
    axes.vlines(synced, 0.0, 0.08, color=color, transform=height, linewidth=0.8)
    if any(value > 0 for value in values):
        axes.plot(steps, values, color=color, linewidth=1)
        threshold = _column(lines, "threshold")
        axes.plot(steps, threshold, "--", color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(ylabel="trigger")
        title = f"{method}: value, threshold (dashed), {ticks}"
    else:  # A trigger that looks at nothing has no value.
        count = _column(lines, "syncs")
        axes.plot(steps, count, color=color, linewidth=1, drawstyle="steps-post")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.set_ylim(bottom=0, top=1.1 * max(1, *count))
        axes.set(ylabel="syncs so far")
        title = f"{method}: {ticks}"
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step")
    axes.set_title(title, fontsize="medium")


def _column(lines: Lines, key: str) -> list[float]:
    """One number a line; what JSON could not hold is a gap."""
    return [math.nan if line[key] is None else line[key] for line in lines]
