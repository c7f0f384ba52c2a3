"""Small models of public codebases: their parameters, and which are matrices.

`parameter_trees` holds, of a small model of each of 25 codebases, where its names and
shapes are from, and for each path `[shape]` of what is no matrix: vectors, tables,
heads, convolutions; or `[shape, [[reduction, output], ...]]` with the axes that its own
products sum over and produce, several where a fused kernel is one matrix or more.
`"either"` after them says that a matrix or none is right: routers, adapters, output
layers of few classes. `{0..2}` in a path stands for 0, 1 and 2.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TREES = Path(__file__).parent / "parameter_trees"


def expanded(path: str) -> list[str]:
    """`a/{0..1}` -> `a/0`, `a/1`."""
    if not (found := re.search(r"\{0\.\.(\d+)\}", path)):
        return [path]
    start, end = path[: found.start()], path[found.end() :]
    every = range(int(found[1]) + 1)
    return [full for i in every for full in expanded(f"{start}{i}{end}")]


def read(file: Path) -> dict[str, list[Any]]:
    """What is right by the paths of the parameters: shape, axes, perhaps `either`."""
    found = json.loads(file.read_text("utf-8"))["parameters"]
    return {full: each for key, each in found.items() for full in expanded(key)}


def mistaken(kinds: Mapping[str, str], right: Mapping[str, list[Any]]) -> list[str]:
    """Paths whose kind is wrong; matrices are (fan_in, fan_out), `asked` is right."""
    wrong = []
    for name, (_, *more) in right.items():
        axes = more[0] if more else []
        if kinds[name] == "matrix":
            fine = [[0], [1]] in axes or (not axes and "either" in more)
        else:
            fine = kinds[name] == "asked" or not axes or "either" in more
        if not fine:
            wrong.append(name)
    return wrong
