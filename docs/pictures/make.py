"""Make the pictures of the README: the idea, and what it costs.

python docs/pictures/make.py
"""

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "communication"))

import plans
import study
import tables
from matplotlib import pyplot

HERE = Path(__file__).parent

# The same bytes on every run; text stays text.
pyplot.rcParams |= {"svg.hashsalt": "curvadion_jax", "svg.fonttype": "none"}
pyplot.rcParams |= {"font.family": "sans-serif", "font.size": 11}
BLUE, ORANGE, GREY = "#1f77b4", "#d95f02", "0.45"


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
    """Loss above synchronous Muon over bytes, of the README's table."""
    results = study.read(study.RESULTS / study.FILE)

    def losses(run):
        return tables.by_seed(results, "cpu-32k", run.but(steps=1200))

    figure, axes = pyplot.subplots(figsize=(6.6, 2.9))
    rows = [
        ("Muon, synchronous (baseline)", plans.MUON, 100, "s", GREY),
        ("Dion, synchronous", plans.DION, 100, "D", GREY),
        ("local_muon", plans.LOCAL_MUON, 1, "o", BLUE),
        ("curvadion(budget=0.01)", plans.CURVADION, 1, "^", ORANGE),
    ]
    for name, run, share, marker, color in rows:
        gaps = tables.above(losses(run), losses(plans.MUON))
        mean, spread = statistics.fmean(gaps), statistics.stdev(gaps)
        # Side by side where two share a place.
        x = share * (1.12 if marker in "^D" else 1)
        error = spread if spread else None
        axes.errorbar(x, mean, error, fmt=marker, color=color, capsize=4, markersize=8)
        left = share == 1
        axes.annotate(
            name,
            (x, mean),
            xytext=(14 if left else -14, 0),
            textcoords="offset points",
            ha="left" if left else "right",
            va="center",
            color=color,
        )
    axes.set(xscale="log", xlim=(0.7, 160), ylim=(-0.4, 2.8))
    axes.set_xticks([1, 10, 100], ["1%", "10%", "100%"])
    axes.set_xlabel("bytes sent (100%: float32 gradients on every step)")
    axes.set_ylabel("loss above Muon (%)")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "result.svg")


if __name__ == "__main__":
    idea()
    result()
