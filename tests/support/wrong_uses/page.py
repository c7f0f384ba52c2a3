"""The table as a page of the documentation."""

from wrong_uses import (
    axes,
    checkpoints,
    costs,
    example,
    optimizers,
    places,
    sending,
    trees,
    triggers,
)
from wrong_uses.case import Case, outcome, shortened

SECTIONS: dict[str, list[Case]] = {
    "Optimizers and presets": optimizers.CASES,
    "Triggers": triggers.CASES,
    "Synchronizers, compressors, outer optimizers": sending.CASES,
    "Parameters, gradients, states": trees.CASES,
    "Axes, and gradients averaged before": axes.CASES,
    "Meshes, replicas, metrics": places.CASES,
    "Checkpoints": checkpoints.CASES,
    "The cost model": costs.CASES,
    "The example": example.CASES,
}
_HEAD = """\
# Wrong uses

What one may get wrong, and the message that it gets. Every row is tested in
`tests/docs/test_wrong_uses.py`: the message shows what was given, and says what to do.
`FOLDER` stands for a path. `python tests/support/make_wrong_uses.py` makes the page.
"""


def row(case: Case, message: str) -> str:
    """A line of the table."""
    return f"| {_code(case.name)} | {_code(shortened(message))} |"


def _code(text: str) -> str:
    text = text.replace("|", r"\|")
    fence = "``" if "`" in text else "`"
    space = " " if fence == "``" else ""
    return f"{fence}{space}{text}{space}{fence}"


def page() -> str:
    """All of it, after every wrong use was tried."""
    parts = [_HEAD]
    for title, cases in SECTIONS.items():
        lines = [row(case, outcome(case)[1]) for case in cases]
        table = ["| wrong use | message |", "|---|---|", *lines]
        parts.append("\n".join([f"## {title}\n", *table]) + "\n")
    return "\n".join(parts)
