"""SVG pictures for the pages: legible on a phone, and in the page's light or dark.

A picture is 400 units wide, transparent, and its colours have a contrast of 4.5 with
the page in either theme. Axes are drawn in `currentColor`.
"""

import re
from pathlib import Path
from typing import Any

WIDTH, TEXT = 400, 11.5  # units; a phone shows the picture 364 pixels wide
# Colours by name: on a light page, which pyplot is given, and on a dark one.
COLORS = {
    "ink": ("#222222", "#dddddd"),
    "grey": ("#5a5a5a", "#aaaaaa"),
    "blue": ("#1a6699", "#6db3e8"),
    "orange": ("#b34700", "#ff9d5c"),
    "green": ("#2f7331", "#7fcf81"),
    "line": ("#8a8a8a", "#7a7a7a"),  # of bars and lines, never of text
    "faint": ("#d6d6d6", "#3a3a3a"),  # of grids
}
INK, GREY, BLUE, ORANGE, GREEN, LINE, FAINT = (light for light, _ in COLORS.values())


def subplots(height: float, rows: int = 1) -> tuple[Any, Any]:
    """A figure of this height, and its axes from top to bottom."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The same bytes on every run; text stays text.
    pyplot.rcParams |= {"svg.hashsalt": "curvadion_jax", "svg.fonttype": "none"}
    pyplot.rcParams |= {"font.family": "sans-serif", "font.size": TEXT}
    sized = ("axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize")
    pyplot.rcParams |= dict.fromkeys((*sized, "legend.fontsize"), TEXT)
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor")
    pyplot.rcParams |= dict.fromkeys((*inked, "xtick.color", "ytick.color"), INK)
    pyplot.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    pyplot.rcParams |= {"grid.color": FAINT, "grid.linewidth": 0.8}
    pyplot.rcParams |= {"axes.titlelocation": "left", "axes.axisbelow": True}
    size = (WIDTH / 72, height / 72)
    return pyplot.subplots(rows, 1, figsize=size, layout="constrained", squeeze=False)


def canvas(height: float) -> tuple[Any, Any]:
    """A figure, and invisible axes in its own units from the lower left corner."""
    figure, ((axes,),) = subplots(height)
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.axis("off")
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    return figure, axes


def save(figure: Any, file: Path) -> None:
    """Writes the picture with colours that follow the theme."""
    from matplotlib import pyplot

    figure.savefig(file, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = file.read_text("utf-8")
    text = text.replace(INK, "currentColor")
    for name, (light, _) in COLORS.items():
        text = text.replace(light, f"var(--{name})")
    light, dark = (
        "; ".join(f"--{name}: {pair[theme]}" for name, pair in COLORS.items())
        for theme in (0, 1)
    )
    style = (
        f"  <style>\n   svg {{ color: var(--ink); {light} }}\n"
        f"   @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n  </style>\n"
    )
    text, count = re.subn(r"(<defs>\n)", rf"\1{style}", text, count=1)
    if not count:
        raise SystemExit(f"{file} has no place for a style.")
    file.write_text(text, "utf-8")
