"""The table as a page of the documentation."""

from wrong_uses import (
    adaptive_sync,
    axes,
    checkpoints,
    costs,
    counters,
    damaged_checkpoints,
    example,
    optimizers,
    places,
    presets,
    sending,
    steps,
    trees,
    triggers,
)
from wrong_uses.case import Case, outcome, shortened

SECTIONS: dict[str, list[Case]] = {
    "Optimizers and presets": [
        *optimizers.CASES,
        *adaptive_sync.CASES,
        *presets.CASES,
    ],
    "Triggers": triggers.CASES,
    "Synchronizers, compressors, outer optimizers": sending.CASES,
    "Parameters, gradients, states": trees.CASES,
    "Axes, and gradients averaged before": axes.CASES,
    "Meshes, replicas": [*places.CASES, *steps.CASES],
    "Metrics": counters.CASES,
    "Checkpoints": [*checkpoints.CASES, *damaged_checkpoints.CASES],
    "The cost model": costs.CASES,
    "The example": example.CASES,
}
_HEAD = """\
# All messages

Every error that the library gives for a wrong use, and the use that it is for: the
message shows what was given, and says what to do. (What is met most, with JAX's own
messages among it, is in [common errors](errors.md).) Each row is tested in
`tests/docs/test_wrong_uses.py`; `FOLDER` stands for a path.
`python tests/support/make_wrong_uses.py` makes the page.
"""


def row(case: Case, message: str) -> str:
    """A line of the table."""
    return f"| {_code(shortened(message))} | {_code(case.name)} |"


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
        table = ["| message | wrong use |", "|---|---|", *lines]
        parts.append("\n".join([f"## {title}\n", *table]) + "\n")
    return "\n".join(parts)
