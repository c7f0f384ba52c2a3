"""Make the pictures of the README: the idea, and what it costs.

python docs/pictures/make.py
"""

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "study"))

import rows
import study
import table
from matplotlib import pyplot

HERE = Path(__file__).parent

# The same bytes on every run; text stays text.
pyplot.rcParams |= {"svg.hashsalt": "curvadion_jax", "svg.fonttype": "none"}
pyplot.rcParams |= {"font.family": "sans-serif", "font.size": 11}
BLUE, ORANGE, GREY = "#1f77b4", "#d95f02", "0.45"
# Label, marker, colour, and where the label is: right or left of the point, and up.
POINTS = {
    rows.MUON: ("Muon, synchronous (baseline)", "s", GREY, -9, 0),
    rows.DION: ("Dion, synchronous", "D", GREY, -9, 0),
    rows.ADAMW: ("AdamW, synchronous", "v", GREY, -9, 0),
    rows.LOCAL_MUON: ("local_muon", "o", BLUE, 5, -27),
    rows.CURVADION: ("curvadion(budget=0.01)", "^", ORANGE, 5, 13),
    rows.THRESHOLD: ("curvadion(threshold=0.3)", "^", ORANGE, 9, 0),
    "MuLoCo, 2 bits": ("MuLoCo, 2 bits", "P", GREY, 5, 50),
    "MuLoCo": ("MuLoCo", "P", GREY, 9, 5),
}


def save(figure, name: str) -> None:
    figure.savefig(HERE / name, metadata={"Date": None}, bbox_inches="tight")


def idea() -> None:
    """Three replicas, and in the same time the same training on every step in sync."""
    figure, axes = pyplot.subplots(figsize=(8.4, 2.5))
    axes.axis("off")
    axes.set(xlim=(-3.1, 20.6), ylim=(-1.1, 2.9))
    for replica in range(3):
        y = 2.0 - replica
        axes.text(-0.5, y, f"replica {replica + 1}", ha="right", va="center")
        axes.plot([0, 20.2], [y, y], color="0.8", linewidth=1, zorder=0)
        steps = [x for x in range(20) if x % 7 != 6]
        axes.scatter([x + 0.5 for x in steps], [y] * len(steps), s=46, color=BLUE)
    for x in (6.5, 13.5):
        axes.plot([x, x], [-0.2, 2.2], color=ORANGE, linewidth=9, zorder=1)
        axes.text(x, 2.5, "sync", ha="center", color=ORANGE)
    axes.text(3.2, 2.5, "local steps", ha="center", color=BLUE)
    axes.text(
        10,
        -0.95,
        "a local step sends nothing; a sync averages what the replicas have learnt, "
        "in 2 bits per parameter",
        ha="center",
        color=GREY,
    )
    save(figure, "idea.svg")


def result() -> None:
    """Loss above synchronous Muon over bytes; bars where a method has several seeds."""
    results = study.read()
    found = {name: table.by_seed(results, name, study.STEPS) for name in POINTS}
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4))
    for method, (name, marker, color, right, up) in POINTS.items():
        runs = found[method]
        gaps = table.above(runs, found[rows.MUON])
        share = 100 * table.share_of_bytes(next(iter(runs.values())), study.STEPS)
        spread = statistics.stdev(gaps) if len(gaps) > 1 else None
        mean = statistics.fmean(gaps)
        axes.errorbar(share, mean, spread, fmt=marker, color=color, capsize=4)
        axes.annotate(
            name,
            (share, mean),
            xytext=(right, up),
            textcoords="offset points",
            ha="left" if right > 0 else "right",
            va="center",
            color=color,
        )
    axes.set(xscale="log", xlim=(0.7, 160), ylim=(-1.5, 30))
    axes.set_xticks([1, 10, 100], ["1%", "10%", "100%"])
    axes.set_xlabel("bytes sent (100%: float32 gradients on every step)")
    axes.set_ylabel("loss above Muon (%)")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "result.svg")


if __name__ == "__main__":
    idea()
    result()
