"""The short rule without a loss, `dimension_numbers.by_name`, on 388 public models.

    python benchmarks/matrices/by_name.py

Each is a small model of a public codebase, as names and shapes of its parameters and
what is right for each (`tests/support/codebases.py`). The repository keeps 25 of them;
this script reads all of a commit before it, so it needs a clone with its history.
*Asked* is a parameter that the rule leaves to AdamW with a warning.
"""

import argparse
import collections
import io
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
# The reader of trees that the tests use.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import codebases
import jax
import jax.numpy as jnp
import measuring

import curvadion_jax as cd

ROOT = Path(__file__).parents[2]
COMMIT = "7e4f551^"


def counts(files: Iterable[Path]) -> collections.Counter[str]:
    """Models, parameters by their kind, and those that the rule is wrong about."""
    found: collections.Counter[str] = collections.Counter()
    for file in files:
        right = codebases.read(file)
        params = {
            path: jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
            for path, (shape, *_) in right.items()
        }
        with warnings.catch_warnings(
            action="ignore", category=cd.dimension_numbers.PartitionWarning
        ):
            findings = cd.dimension_numbers.by_name(params).findings
        kinds = {each.path: each.kind for each in findings}
        found.update(models=1, wrong=len(codebases.mistaken(kinds, right)))
        found.update(kinds.values())
    return found


def table(found: collections.Counter[str]) -> Iterable[str]:
    """The counts, and shares of the arrays that are no vectors."""
    kinds = [kind for kind in found if kind not in ("models", "wrong")]
    arrays = sum(found[kind] for kind in kinds) - found["vector"]
    head = ["", "arrays", "of those that are no vectors"]
    rows = [["vector", f"{found['vector']:,}", ""]]
    for kind in sorted(kinds):
        if kind != "vector":
            rows.append([kind, f"{found[kind]:,}", f"{found[kind] / arrays:.0%}"])
    rows.append(["all but vectors", f"{arrays:,}", ""])
    rows.append(["all", f"{arrays + found['vector']:,}", ""])
    rows.append(["wrong", f"{found['wrong']:,}", ""])
    yield f"{found['models']} models"
    yield ""
    yield from measuring.markdown(head, rows)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default=COMMIT, help="whose trees are read")
    commit = parser.parse_args().commit
    command = ["git", "archive", commit, "tests/support/parameter_trees"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        print(*table(counts(sorted(Path(folder).rglob("*.json")))), sep="\n")


if __name__ == "__main__":
    main()
