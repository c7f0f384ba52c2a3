"""Make the pictures of the README and the site: the idea, and loss over bytes.

And `card.png`, which other sites show with a link to this one.

python docs/pictures/make.py
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "study"))

import curve
import curve_table
import rows
import study
import table
import themed
from themed import BLUE, GREY, LINE, ORANGE

HERE = Path(__file__).parent
PIXELS = 1280  # width of the card, which is half as high


def idea() -> None:
    """Three replicas, and in the same time the same training on every step in sync."""
    figure, axes = themed.canvas(196)
    first, step, syncs = 108, 15, (6, 13)
    place = lambda number: first + step * number
    end = place(19) + 6
    for replica in range(3):
        y = 158 - 26 * replica
        axes.text(92, y, f"replica {replica + 1}", ha="right", va="center")
        axes.plot([first - 8, end], [y, y], color=LINE, linewidth=0.8, zorder=0)
        steps = [place(number) for number in range(20) if number not in syncs]
        axes.scatter(steps, [y] * len(steps), s=34, color=BLUE, linewidths=0)
    for number in syncs:
        axes.plot([place(number)] * 2, [100, 164], color=ORANGE, linewidth=9, zorder=1)
    axes.text(place(syncs[1]), 178, "sync, 2 bits", ha="center", color=ORANGE)
    axes.text(place(2), 178, "local steps", ha="center", color=BLUE)
    axes.plot([0, end], [84, 84], color=LINE, linewidth=0.8)
    # In the same time: every step waits for an all-reduce.
    y = 42
    axes.text(92, y, "data-parallel", ha="right", va="center")
    for number in range(0, 20, 4):
        axes.scatter([place(number)], [y], s=34, color=GREY, zorder=2, linewidths=0)
        wait = (place(number) + 9, place(number + 3) + 6)
        axes.plot(wait, [y, y], color=LINE, linewidth=9, solid_capstyle="butt")
    axes.text(
        *(first - 8, y + 14), "every step waits for the link: float32", color=GREY
    )
    axes.text(end, 8, "time", ha="right", va="center", color=GREY)
    arrow = {"arrowstyle": "->", "color": GREY}
    axes.annotate("", (end - 32, 8), (end - 80, 8), arrowprops=arrow)
    themed.save(figure, HERE / "idea.svg")


def card() -> None:
    """1,280 x 640 pixels: the name, a line about it, and replicas between two syncs."""
    figure, axes = themed.canvas(200)  # 400 x 200 units
    axes.text(24, 160, "curvadion_jax", size=30, weight="bold", va="center")
    axes.text(24, 128, "Low-communication training for JAX and Optax", size=13)
    axes.text(24, 108, "Local Muon steps, syncs in 2 bits, a byte budget", size=13)
    first, step, syncs = 32, 18, (6, 13)
    for replica in range(3):
        y = 76 - 22 * replica
        axes.plot([24, 376], [y, y], color=LINE, linewidth=0.8, zorder=0)
        steps = [first + step * number for number in range(20) if number not in syncs]
        axes.scatter(steps, [y] * len(steps), s=44, color=BLUE, linewidths=0)
    for number in syncs:
        x = first + step * number
        axes.plot([x, x], [26, 82], color=ORANGE, linewidth=11, zorder=1)
    axes.text(first + step * 3, 12, "local steps", ha="center", va="center", color=BLUE)
    x = first + step * syncs[1]
    axes.text(x, 12, "sync, 2 bits", ha="center", va="center", color=ORANGE)
    metadata = {"Software": None}  # else the file names matplotlib's version
    dpi = PIXELS * 72 / themed.WIDTH
    figure.savefig(HERE / "card.png", dpi=dpi, metadata=metadata, facecolor="white")


# Methods of the study that the curve is compared with: label, colour, and how far the
# label at the edge is moved to the right.
OTHERS = {
    rows.MULOCO + ", 2 bits": ("MuLoCo, 2 bits", ORANGE, 0),
    rows.DILOCO: ("DiLoCo,\nfloat32", ORANGE, 16),
    rows.LARGE_BATCH: ("Muon, 2 bits,\nbatches of 7", GREY, -12),
    rows.BEST_MUON: ("Muon", GREY, 0),
}
LARGEST = 20.0  # percent; what lies above is written at the edge


def curve_of_bytes() -> None:
    """Loss over the share of the bytes; AdamW has a panel once it has two shares."""
    found = curve_table.points(curve.read(), study.STEPS)
    of_muon = curve.LOCAL_MUON, curve.FEW_BITS
    panels = [
        [of for of in found if of.form.name in names]
        for names in (of_muon, (curve.LOCAL_ADAMW,))
    ]
    panels = [panel for panel in panels if len(panel) > 1]
    figure, every = themed.subplots(300 * len(panels), len(panels))
    for axes, panel, against in zip(
        every[:, 0],
        panels,
        ("the best synchronous Muon", "synchronous AdamW"),
        strict=False,
    ):
        axes.axhline(0, color=LINE, linewidth=1, zorder=0)
        largest = LARGEST
        names = {of.form.name for of in panel}
        for name, color in zip(sorted(names, reverse=True), (BLUE, GREY), strict=False):
            of_name = [of for of in panel if of.form.name == name]
            lines = [
                (
                    100
                    * table.share_of_bytes(next(iter(of.rows.values())), study.STEPS),
                    table.above(of.rows, curve_table.reference(name, study.STEPS)),
                )
                for of in of_name
            ]
            means = [statistics.fmean(gaps) for _, gaps in lines]
            axes.plot([x for x, _ in lines], means, color=color, linewidth=1.5)
            for share, gaps in lines:
                _seeds(axes, share, gaps, color)
                largest = max(largest, *gaps)
            # Below its line where another one is above it.
            is_below = color == BLUE and len(names) > 1
            middle = (len(lines) - 1) // 2 if color == BLUE else len(lines) - 1
            axes.annotate(
                name.replace("`", ""),
                (lines[middle][0], means[middle]),
                xytext=(-10, -14) if is_below else (10, 2),
                ha="right" if is_below else "left",
                textcoords="offset points",
                color=color,
                weight="bold" if color == BLUE else "normal",
            )
        axes.set_xscale("log")
        axes.set(xlim=(0.12, 160), ylim=(-3, largest + 1.5))
        ticks = [0.1, 0.3, 1, 3, 7, 13, 100]
        axes.set_xticks(ticks, [f"{tick:g}%" for tick in ticks])
        axes.minorticks_off()
        levels = range(0, int(largest) + 1, 5)
        axes.set_yticks(levels, [f"+{level}%" * bool(level) or "0" for level in levels])
        axes.set_xlabel("bytes sent, of float32 gradients on every step")
        axes.set_title(f"held-out loss above {against}")
    _others(every[0][0])
    themed.save(figure, HERE / "curve.svg")


def _seeds(axes, share: float, gaps: list[float], color: str) -> None:
    """A dot for each seed, and a larger one for their mean."""
    axes.scatter([share] * len(gaps), gaps, s=22, color=color, alpha=0.5, linewidths=0)
    axes.scatter([share], [statistics.fmean(gaps)], s=50, color=color, marker="D")


def _others(axes) -> None:
    """The study's other methods, at the edge where they lie above it."""
    results = study.read()
    best = table.by_seed(results, rows.BEST_MUON, study.STEPS)
    for name, (label, color, aside) in OTHERS.items():
        runs = table.by_seed(results, name, study.STEPS)
        gaps = table.above(runs, best)
        share = 100 * table.share_of_bytes(next(iter(runs.values())), study.STEPS)
        mean = statistics.fmean(gaps)
        if mean > LARGEST:
            axes.annotate(
                f"{label}\n+{mean:.0f}%",
                (share, LARGEST + 1.3),
                xytext=(aside, -52),
                textcoords="offset points",
                ha="center",
                color=color,
                arrowprops={"arrowstyle": "->", "color": color},
            )
            continue
        _seeds(axes, share, gaps, color)
        axes.annotate(
            label, (share, mean), xytext=(8, 2), textcoords="offset points", color=color
        )


if __name__ == "__main__":
    idea()
    card()
    curve_of_bytes()
