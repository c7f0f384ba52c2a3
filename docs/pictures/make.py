"""Make the pictures of the README and the site: the idea, loss by method and by bytes.

python docs/pictures/make.py
"""

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "study"))

import curve
import curve_table
import rows
import study
import table
from matplotlib import pyplot

HERE = Path(__file__).parent

# The same bytes on every run; text stays text.
pyplot.rcParams |= {"svg.hashsalt": "curvadion_jax", "svg.fonttype": "none"}
pyplot.rcParams |= {"font.family": "sans-serif", "font.size": 11}
BLUE, ORANGE = "#1f77b4", "#d95f02"
GREY, LIGHT = "0.35", "0.75"
# The rows of the README's table, in its order: label and colour.
SYNCHRONOUS = {
    rows.MUON + rows.RISING: "Muon, rising momentum",
    rows.MUON: "Muon",
    rows.DION: "Dion, full rank",
    rows.ADAMW: "AdamW",
    rows.DION + ", rank 1/4": "Dion, rank 1/4",
}
LOCAL = {
    rows.LOCAL_MUON: ("local_muon", BLUE),
    "MuLoCo, 2 bits": ("MuLoCo, 2 bits", BLUE),
    rows.CURVADION: ("curvadion(budget=0.01)", ORANGE),
    rows.THRESHOLD: ("curvadion(threshold=0.3)", ORANGE),
    "MuLoCo": ("presets.muloco, float32", BLUE),
}


def save(figure, name: str) -> None:
    figure.savefig(HERE / name, metadata={"Date": None}, bbox_inches="tight")


def idea() -> None:
    """Three replicas, and in the same time the same training on every step in sync."""
    figure, axes = pyplot.subplots(figsize=(8.4, 3.0))
    axes.axis("off")
    axes.set(xlim=(-3.6, 20.6), ylim=(-1.9, 2.9))
    syncs = (6.5, 13.5)
    for replica in range(3):
        y = 2.0 - replica * 0.8
        axes.text(-0.5, y, f"replica {replica + 1}", ha="right", va="center")
        axes.plot([0, 20.2], [y, y], color="0.85", linewidth=1, zorder=0)
        steps = [x + 0.5 for x in range(20) if x + 0.5 not in syncs]
        axes.scatter(steps, [y] * len(steps), s=46, color=BLUE)
    for x in syncs:
        axes.plot([x, x], [0.2, 2.2], color=ORANGE, linewidth=9, zorder=1)
        axes.text(x, 2.5, "sync, 2 bits", ha="center", color=ORANGE)
    axes.text(2.4, 2.5, "local steps", ha="center", color=BLUE)
    # In the same time: every step waits for an all-reduce.
    y = -1.2
    axes.plot([-3.6, 20.2], [-0.4, -0.4], color="0.9", linewidth=1)
    axes.text(-0.5, y, "data-parallel", ha="right", va="center", color=GREY)
    axes.plot([0, 20.2], [y, y], color="0.85", linewidth=1, zorder=0)
    for start in range(0, 20, 4):
        axes.scatter([start + 0.5], [y], s=46, color=GREY, zorder=2)
        wait = (start + 1.2, start + 3.8)
        axes.plot(wait, [y, y], color=LIGHT, linewidth=9, solid_capstyle="butt")
    axes.text(2.5, y + 0.35, "all-reduce, float32", ha="center", color=GREY, size=9)
    axes.text(20.2, -1.8, "time", ha="right", va="center", color=GREY, size=9)
    axes.annotate("", (18.9, -1.8), (16.2, -1.8), arrowprops={"arrowstyle": "->"})
    save(figure, "idea.svg")


def result() -> None:
    """Held-out loss against synchronous Muon, with a dot for each seed."""
    results = study.read()
    muon = table.by_seed(results, rows.MUON, study.STEPS)
    lines = [(name, label, GREY) for name, label in SYNCHRONOUS.items()]
    lines += [(name, label, color) for name, (label, color) in LOCAL.items()]
    figure, axes = pyplot.subplots(figsize=(8.4, 4.4))
    axes.axvline(0, color=LIGHT, linewidth=1, zorder=0)
    for number, (name, label, color) in enumerate(lines):
        y = -number - 0.6 * (number >= len(SYNCHRONOUS))
        runs = table.by_seed(results, name, study.STEPS)
        gaps = table.above(runs, muon)
        share = 100 * table.share_of_bytes(next(iter(runs.values())), study.STEPS)
        axes.scatter(gaps, [y] * len(gaps), s=22, color=color, alpha=0.45, linewidths=0)
        axes.plot([min(gaps), max(gaps)], [y, y], color=color, linewidth=1, alpha=0.45)
        axes.scatter([statistics.fmean(gaps)], [y], s=60, color=color, marker="D")
        bold = {"weight": "bold"} if name == rows.LOCAL_MUON else {}
        axes.text(-4.6, y, label, ha="right", va="center", color=color, **bold)
        sent = f"{share:.0f}%" if share > 10 else f"{share:.1f}%"
        axes.text(30.5, y, sent, ha="right", va="center", color=color, **bold)
    axes.text(30.5, 1, "bytes sent", ha="right", va="center", color=GREY)
    axes.text(-4.6, 1, "synchronous on every step", ha="right", color=GREY, size=9)
    axes.text(-4.6, -5, "local steps", ha="right", color=GREY, size=9)
    axes.text(0.3, 1, "synchronous Muon", color=GREY, size=9)
    axes.annotate("better", (-4, -11.1), (-0.4, -11.1), va="center", color=GREY, size=9,
                  arrowprops={"arrowstyle": "->", "color": GREY})  # fmt: skip
    axes.set(xlim=(-4.2, 31), ylim=(-11.6, 1.6), yticks=[])
    axes.set_xticks(
        [0, 5, 10, 15, 20, 25], ["0", "+5%", "+10%", "+15%", "+20%", "+25%"]
    )
    axes.set_xlabel("held-out loss against synchronous Muon; small dots are seeds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    save(figure, "result.svg")


# Methods of the study that the curve is compared with: label, and colour.
OTHERS = {
    rows.MULOCO + ", 2 bits": ("MuLoCo, 2 bits", ORANGE),
    rows.DILOCO: ("DiLoCo,\nfloat32", ORANGE),
    rows.LARGE_BATCH: ("Muon, 2 bits,\nbatches of 7 steps", GREY),
    rows.BEST_MUON: ("Muon", GREY),
}
LARGEST = 20.0  # percent; what lies above is written at the edge


def curve_of_bytes() -> None:
    """Loss over the share of the bytes; AdamW has a panel once it has runs."""
    found = curve_table.points(curve.read(), study.STEPS)
    panels = [[of for of in found if of.form.name not in curve_table.OF_ADAMW]]
    panels += [[of for of in found if of.form.name in curve_table.OF_ADAMW]]
    panels = [panel for panel in panels if panel]
    figure, every = pyplot.subplots(
        1, len(panels), figsize=(8.4, 4.6), squeeze=False, sharey=True
    )
    for axes, panel, against in zip(
        every[0],
        panels,
        ("the best synchronous Muon", "synchronous AdamW"),
        strict=False,
    ):
        axes.axhline(0, color=LIGHT, linewidth=1, zorder=0)
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
            axes.annotate(
                name.replace("`", ""),
                (lines[-1][0], means[-1]),
                xytext=(-8, -20),
                textcoords="offset points",
                color=color,
                weight="bold" if color == BLUE else "normal",
            )
        axes.set_xscale("log")
        axes.set(xlim=(0.12, 160), ylim=(-3, LARGEST + 1.5))
        axes.set_xticks(
            [0.3, 1, 3, 7, 14, 100], ["0.3%", "1%", "3%", "7%", "14%", "100%"]
        )
        axes.minorticks_off()
        axes.set_yticks([0, 5, 10, 15, 20], ["0", "+5%", "+10%", "+15%", "+20%"])
        axes.set_xlabel("bytes sent, of float32 gradients on every step")
        axes.set_title(f"held-out loss against {against}", size=11, color=GREY)
        axes.spines[["top", "right"]].set_visible(False)
    _others(every[0][0])
    save(figure, "curve.svg")


def _seeds(axes, share: float, gaps: list[float], color: str) -> None:
    """A dot for each seed, and a larger one for their mean."""
    axes.scatter([share] * len(gaps), gaps, s=22, color=color, alpha=0.45, linewidths=0)
    axes.scatter([share], [statistics.fmean(gaps)], s=50, color=color, marker="D")


def _others(axes) -> None:
    """The study's other methods, at the edge where they lie above it."""
    results = study.read()
    best = table.by_seed(results, rows.BEST_MUON, study.STEPS)
    for name, (label, color) in OTHERS.items():
        runs = table.by_seed(results, name, study.STEPS)
        gaps = table.above(runs, best)
        share = 100 * table.share_of_bytes(next(iter(runs.values())), study.STEPS)
        mean = statistics.fmean(gaps)
        if mean > LARGEST:
            axes.annotate(
                f"{label}\n+{mean:.0f}%",
                (share, LARGEST + 1.3),
                xytext=(share, LARGEST - 3.4),
                ha="center",
                color=color,
                size=9,
                arrowprops={"arrowstyle": "->", "color": color},
            )
            continue
        _seeds(axes, share, gaps, color)
        axes.annotate(
            label, (share, mean), xytext=(8, 2), textcoords="offset points", color=color
        )


if __name__ == "__main__":
    idea()
    result()
    curve_of_bytes()
