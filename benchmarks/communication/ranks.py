"""Rank correlations of signals with what syncs brought: the table and the picture."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

SIGNALS = {
    "rmmc_max": "RMMC, largest",
    "rmmc_median": "RMMC, median",
    "rmmc_of_mean": "RMMC of the mean, largest",
    "rmmc_recent": "RMMC, largest, mean of 4 steps",
    "drift": "relative drift",
    "divergence": "divergence",
    "agreement": "agreement of drifts",
    "gradient_norm": "gradient norm",
    "quiet_steps": "quiet steps",
    "learning_rate": "learning rate",
    "training_loss": "training loss",
}
# What is held fixed: nothing, where training is, and how long ago the last sync was.
TREND = ("step", "learning_rate")
ADJUSTMENTS = {
    "raw": (),
    "without trend": TREND,
    "without trend and quiet steps": (*TREND, "quiet_steps"),
}
# Consecutive syncs that are drawn together, since neighbours are alike.
_BLOCK, _DRAWS = 3, 1000
# What is left of ranks, in parts of their spread, is rounding below this.
_NOTHING = 1e-6

# An interval is of draws in which something is left, and they must be most.
_DEFINED = 0.95

Columns = Mapping[str, np.ndarray]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The rows as float64 columns, with what the syncs brought.

    These are in nats a token, positive where the sync was good: `benefit` (of the mean
    of the replicas, some steps later), `averaging` and `outer` (at once, of the mean
    over a single replica, and of the anchor over the mean).
    `group` numbers the outer steps and `run` the runs.
    """
    names = [
        name for name, value in rows[0].items() if not isinstance(value, dict | str)
    ]
    found = {name: np.array([row[name] for row in rows], float) for name in names}
    for what in ("outer", "seed"):
        values = [row["run"][what] for row in rows]
        found[what] = np.unique(values, return_inverse=True)[1]
    seeds, group = found.pop("seed"), found.pop("outer")
    return found | {
        "group": group,
        "run": group * (seeds.max() + 1) + seeds,
        "benefit": found["mean_later"] - found["anchor_later"],
        "averaging": found["single"] - found["mean"],
        "outer": found["mean"] - found["anchor"],
    }


def correlations(
    signals: Iterable[str], y: str, held: Sequence[str], table: Columns
) -> list[float]:
    """Rank correlations of columns with column y, others held fixed.

    Ranks are taken within each group, and the rest of them after a regression on the
    held columns' ranks, their squares and their cubes is correlated: trends need not
    be straight. With nothing held it is Spearman's, of one group.

    Returns:
        Numbers in [-1, 1]; NaN if nothing is left of a column.
    """
    powers = [
        _ranks(table[name], table["group"]) ** n for name in held for n in (1, 2, 3)
    ]
    design = np.stack([np.ones(len(table[y])), *powers], axis=1)
    left, size, _ = np.linalg.svd(design, full_matrices=False)
    basis = left[:, size > _NOTHING * size[0]]

    def rest(name: str) -> np.ndarray:
        ranks = _ranks(table[name], table["group"])
        new = ranks - basis @ (basis.T @ ranks)
        length = np.linalg.norm(new)
        nothing = length <= _NOTHING * np.linalg.norm(ranks)
        return new / (np.nan if nothing else length)

    goal = rest(y)
    return [float(rest(signal) @ goal) for signal in signals]


def _ranks(x: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Ranks within each group, from -1 to 1."""
    ranks = np.empty(len(x))
    for each in np.unique(group):
        chosen = group == each
        ranks[chosen] = stats.rankdata(x[chosen]) / chosen.sum() * 2 - 1
    return ranks


def resampled(table: Columns, random: np.random.Generator) -> dict[str, np.ndarray]:
    """As many rows again, by blocks of consecutive syncs of every run."""
    chosen = []
    for run in np.unique(table["run"]):
        rows = np.flatnonzero(table["run"] == run)
        starts = random.integers(len(rows), size=-(-len(rows) // _BLOCK))
        places = (starts[:, None] + np.arange(_BLOCK)[None, :]).reshape(-1)
        chosen.append(rows[places[: len(rows)] % len(rows)])
    places = np.concatenate(chosen)
    return {name: column[places] for name, column in table.items()}


def intervals(
    table: Columns, y: str = "benefit", draws: int = _DRAWS
) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(signal, adjustment) -> correlation with column y, and its 95% interval.

    NaN where nothing is left of the signal, or in too many draws for an interval.
    """
    random = np.random.default_rng(0)
    samples = [table, *(resampled(table, random) for _ in range(draws))]
    found = {}
    for name, held in ADJUSTMENTS.items():
        values = np.array([correlations(SIGNALS, y, held, each) for each in samples])
        defined = np.mean(~np.isnan(values[1:]), axis=0) > _DEFINED
        known = defined & ~np.isnan(values[0])
        low, high = np.full((2, len(SIGNALS)), np.nan)
        low[known], high[known] = np.nanquantile(
            values[1:, known], (0.025, 0.975), axis=0
        )
        for signal, *cell in zip(SIGNALS, values[0], low, high, strict=True):
            found[signal, name] = tuple(map(float, cell))
    return found


def markdown(table: Columns, found: Mapping[tuple[str, str], tuple[float, ...]]) -> str:
    """The table of all signals, best first by the second column."""
    columns = [f"{name} [95%]" for name in ADJUSTMENTS]
    columns += ["averaging at once, without trend", "outer step at once, without trend"]
    lines = [f"| signal | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    parts = {y: correlations(SIGNALS, y, TREND, table) for y in ("averaging", "outer")}
    for signal in ordered(found):
        cells = [_cell(*found[signal, name]) for name in ADJUSTMENTS]
        cells += [
            _cell(values[list(SIGNALS).index(signal)]) for values in parts.values()
        ]
        lines.append(f"| {SIGNALS[signal]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: float, *bounds: float) -> str:
    if np.isnan(value):
        return "held"
    if bounds and np.isnan(bounds).any():
        return f"{value:+.2f} [-]"
    return f"{value:+.2f}" + (" [{:+.2f}, {:+.2f}]".format(*bounds) if bounds else "")


def ordered(found: Mapping[tuple[str, str], tuple[float, ...]]) -> list[str]:
    """Signals by the size of their correlation without trend, what has none last."""
    size = lambda signal: np.nan_to_num(abs(found[signal, "without trend"][0]))  # noqa: E731
    return sorted(SIGNALS, key=size, reverse=True)


def draw(
    table: Columns, found: Mapping[tuple[str, str], tuple[float, ...]], file: Path
) -> None:
    """Correlations with their intervals, and the benefit over two signals, as a PNG."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    over, *panels = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    names = ordered(found)[::-1]
    for number, adjustment in enumerate(ADJUSTMENTS):
        shown = [(y, found[s, adjustment]) for y, s in enumerate(names)]
        y, values = zip(*[(y, v) for y, v in shown if not np.isnan(v[0])], strict=True)
        value, low, high = np.array(values).T
        over.errorbar(
            value,
            np.array(y) + 0.22 * (1 - number),
            xerr=[value - low, high - value],
            fmt="o",
            color=f"C{number}",
            markersize=4,
            label=adjustment,
        )
    over.axvline(0, color="black", linewidth=0.8)
    over.set_yticks(range(len(names)), [SIGNALS[name] for name in names])
    over.set(xlabel="rank correlation with the benefit of a sync", xlim=(-0.8, 1))
    over.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3)
    best = names[-1]
    for panel, signal in zip(panels, (best, "rmmc_max"), strict=True):
        points = panel.scatter(
            table[signal], table["benefit"], c=table["step"], s=12, cmap="viridis"
        )
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(xlabel=SIGNALS[signal])
    panels[0].set_ylabel("benefit (nats a token)")
    figure.colorbar(points, ax=panels[1], label="step")
    figure.savefig(file, dpi=100)
