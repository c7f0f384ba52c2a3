"""The picture: speedups over synchronous AdamW by link."""

from pathlib import Path

import compare
import matplotlib

matplotlib.use("Agg")
from compare import Results
from grid import LINKS, METHODS, Case
from matplotlib import pyplot

# What the paper projects, from fast InfiniBand to sites far apart.
_PROJECTED = (1.02, 4.36)
_MARKERS = ("o", "s", "^")
_APART = 0.15


def draw(results: Results, file: Path) -> None:
    """Two panels: time of a step, and time to a loss."""
    links = [name for name in LINKS if Case("link", name).key() in results]
    loss = compare.target(results)
    figure, panels = pyplot.subplots(
        2, 1, figsize=(9, 7.5), sharex=True, layout="constrained"
    )
    for index, name in enumerate(list(METHODS)[1:]):
        label = METHODS[name].label.replace("`", "")
        places = [number + _APART * (index - 1) for number in range(len(links))]
        by_step = [compare.speedup(link, name, results) for link in links]
        panels[0].plot(places, _known(by_step), _MARKERS[index], label=label)
        if loss is not None:
            to_loss = [_to_loss(loss, link, name, results) for link in links]
            panels[1].plot(places, _known(to_loss), _MARKERS[index])
    for axes, title in zip(panels, ("time of a step", "time to a loss"), strict=True):
        axes.axhspan(*_PROJECTED, alpha=0.15, color="grey")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel(f"speedup over synchronous AdamW,\n{title}")
        axes.grid(alpha=0.3, axis="y")
    title = "grey: what the paper projects for CurvaDion, 1.02x to 4.36x"
    figure.legend(fontsize=8, title=title, ncols=3, loc="outside upper center")
    names = [link.replace(", ", "\n") for link in links]
    panels[1].set_xticks(range(len(links)), names, fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _to_loss(loss: float, link: str, name: str, results: Results) -> float | None:
    own, base = (compare.time_to(loss, link, x, results) for x in (name, "adamw"))
    return None if own is None or base is None else base / own


def _known(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
