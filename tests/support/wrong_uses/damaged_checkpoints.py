"""Checkpoints that are damaged, or that another program or version wrote."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from curvadion_jax import checkpoint
from wrong_uses.case import Case

# Of several arrays orbax would leave reads behind when one of them fails. Its elements
# are many enough to lie in a file of their own.
STATE = {"w": jax.random.normal(jax.random.key(0), (2, 32, 32))}


def damaged(
    name: str, error: Any, given: str, advice: str, damage: Callable[[Path], Any]
) -> Case:
    """Step 3 is saved, its folder damaged, and restored."""

    def do(folder):
        checkpoint.save(folder, 3, STATE)
        damage(folder / "3")
        checkpoint.restore(folder, STATE)

    return Case(name, do, error, given, advice)


def changed(**entries: Any) -> Callable[[Path], None]:
    """Writes other entries into what is noted of a checkpoint; None takes one out."""

    def change(folder):
        file = folder / "info" / "metadata"
        info = {**json.loads(file.read_text()), **entries}
        kept = {key: x for key, x in info.items() if x is not None}
        file.write_text(json.dumps(kept))

    return change


def halve(pattern: str) -> Callable[[Path], None]:
    """Cuts off the largest of the files."""

    def change(folder):
        file = max(folder.glob(pattern), key=lambda file: file.stat().st_size)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return change


def somebody_elses(folder: Path) -> None:
    with ocp.CheckpointManager(folder) as manager:
        items = ocp.args.Composite(params=ocp.args.StandardSave(STATE))
        manager.save(3, args=items)
    checkpoint.restore(folder, STATE)


UNREADABLE = "If its files are damaged, restore another step"
CASES = [
    damaged(
        "a checkpoint of another format",
        *(ValueError, "step 3 in FOLDER has format 2", "Use the version that wrote it"),
        changed(format=2),
    ),
    Case(
        "a checkpoint of another program",
        somebody_elses,
        *(ValueError, "step 3 in FOLDER", "restore it with what wrote it"),
    ),
    damaged(
        "a checkpoint without its notes",
        *(ValueError, "step 3 in FOLDER", "restore it with what wrote it"),
        lambda folder: shutil.rmtree(folder / "info"),
    ),
    damaged(
        "notes that lack an entry",
        *(ValueError, "no ['replicas'] in info/metadata", "restore another step"),
        changed(replicas=None),
    ),
    damaged(
        "notes that are cut off",
        *(ValueError, "step 3 in FOLDER cannot be read", UNREADABLE),
        halve("info/metadata"),
    ),
    damaged(
        "a checkpoint without its arrays",
        *(ValueError, "step 3 in FOLDER cannot be read", UNREADABLE),
        lambda folder: shutil.rmtree(folder / "state"),
    ),
    damaged(
        "a list of arrays that is cut off",
        *(ValueError, "step 3 in FOLDER cannot be read", UNREADABLE),
        halve("state/manifest.ocdbt"),
    ),
    damaged(
        "arrays that are cut off",
        *(ValueError, "step 3 in FOLDER cannot be read", UNREADABLE),
        halve("state/**/d/*"),
    ),
    Case(
        "a folder of .npy files",
        lambda folder: (
            np.save(folder / "w.npy", np.ones(3)),
            checkpoint.restore(folder, STATE),
        ),
        *(
            FileNotFoundError,
            "no checkpoint in FOLDER",
            "Give the directory that save was given",
        ),
    ),
]
