"""Checkpoints: what is saved where, of what, and what is found in its place."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from curvadion_jax import checkpoint, replicas
from wrong_uses.case import Case

STATE = replicas.replicate(
    {"b": jnp.zeros(3), "w": {"kernel": jnp.ones((4, 2), jnp.bfloat16)}},
    replicas.make_mesh(4),
)
LEAF = {"momentum": STATE["b"]}
# Of several arrays orbax would leave reads behind when one of them fails. Its elements
# are many enough to lie in a file of their own.
ONE = {"w": jax.random.normal(jax.random.key(0), (2, 32, 32))}


def saving(name: str, error: Any, given: str, advice: str, **changed: Any) -> Case:
    """A save with another argument than a right one."""
    arguments = {"step": 1, "state": STATE, **changed}
    do = lambda folder: checkpoint.save(folder, **arguments)  # noqa: E731
    return Case(name, do, error, given, advice)


def restoring(
    name: str,
    error: Any,
    given: str,
    advice: str,
    *,
    damage: Callable[[Path], Any] | None = None,
    target: Any = STATE,
    **arguments: Any,
) -> Case:
    """Step 3 is saved, and restored; or, where its folder is damaged, a small one."""

    def do(folder):
        checkpoint.save(folder, 3, STATE if damage is None else ONE)
        if damage is not None:
            damage(folder / "3")
        checkpoint.restore(folder, target if damage is None else ONE, **arguments)

    return Case(name, do, error, given, advice)


def _changed(**entries: Any) -> Callable[[Path], None]:
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


def twice(folder: Path) -> None:
    checkpoint.save(folder, 5, STATE)
    checkpoint.save(folder, 5, STATE)


def backwards(folder: Path) -> None:
    checkpoint.save(folder, 5, STATE)
    checkpoint.save(folder, 4, STATE)


def somebody_elses(folder: Path) -> None:
    with ocp.CheckpointManager(folder) as manager:
        items = ocp.args.Composite(params=ocp.args.StandardSave(STATE))
        manager.save(3, args=items)
    checkpoint.restore(folder, STATE)


def a_file(folder: Path) -> Path:
    file = folder / "run"
    file.write_text("not a folder")
    return file


def deleted() -> dict[str, Any]:
    gone = {"b": jnp.ones((4, 3))}
    gone["b"].delete()
    return gone


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


DAMAGED = "If its files are damaged, restore another step"
MODEL = "Build the target with the model and the optimizer of the saved run"
CASES = [
    Case(
        "restore from an empty folder",
        lambda folder: checkpoint.restore(folder, STATE),
        *(FileNotFoundError, "no checkpoint in FOLDER", "Give the directory that save"),
    ),
    Case(
        "restore from a folder that is not there",
        lambda folder: checkpoint.restore(folder / "runs", STATE),
        *(FileNotFoundError, "in FOLDER/runs", "Give the directory that save"),
    ),
    Case(
        "read_extra from an empty folder",
        checkpoint.read_extra,
        *(FileNotFoundError, "no checkpoint in FOLDER", "Give the directory that save"),
    ),
    Case(
        "save into a file",
        lambda folder: checkpoint.save(a_file(folder), 1, STATE),
        *(NotADirectoryError, "FOLDER/run is a file", "give the directory of the run"),
    ),
    Case(
        "restore from a file",
        lambda folder: checkpoint.restore(a_file(folder), STATE),
        *(NotADirectoryError, "FOLDER/run is a file", "give the directory of the run"),
    ),
    Case(
        "restore from below a file",
        lambda folder: checkpoint.restore(a_file(folder) / "first", STATE),
        *(NotADirectoryError, "FOLDER/run is a file", "give the directory of the run"),
    ),
    Case(
        "restore(state, directory), swapped",
        lambda folder: checkpoint.restore(STATE, folder),
        *(TypeError, "got a dict", "the order is save(directory, step, state)"),
    ),
    Case(
        "a step that exists",
        twice,
        *(ValueError, "step 5 exists already in FOLDER", "Save to another directory"),
    ),
    Case(
        "a step below the latest",
        backwards,
        *(ValueError, "step 4 lies below 5", "remove those that the run went"),
    ),
    saving("step=-1", ValueError, "got -1", "step must be 0 or more", step=-1),
    saving("step='1'", TypeError, "got '1'", "step must be an int", step="1"),
    saving("step=1.0", TypeError, "got 1.0", "step must be an int", step=1.0),
    saving("keep=0", ValueError, "got 0", "keep must be None (all) or at leas", keep=0),
    saving("keep='2'", TypeError, "got '2'", "keep must be an int", keep="2"),
    saving("extra=[1]", TypeError, "got a list", "must be a dictionary", extra=[1]),
    saving(
        "an array in extra",
        *(TypeError, "ArrayImpl is not JSON", "must be what JSON can hold"),
        extra={"x": jnp.ones(2)},
    ),
    saving(
        "a state with a leaf of another size",
        *(ValueError, "leaf 'z' is float32[2,2]", "replicas.replicate adds the axis"),
        state={**STATE, "z": jnp.ones((2, 2))},
    ),
    saving(
        "a state with a scalar",
        *(ValueError, "leaf 'a' is float32[]", "replicas.replicate adds the axis"),
        state={"a": jnp.ones(())},
    ),
    saving(
        "a state with an array of size 0",
        *(ValueError, "leaf 'e' is float32[4,0]", "replicas.replicate adds the axis"),
        state={**STATE, "e": jnp.ones((4, 0))},
    ),
    saving(
        "a state without arrays",
        *(ValueError, "is an empty tree", "give the whole training state"),
        state={"a": None},
    ),
    saving(
        "a state with a Python number",
        *(TypeError, "leaf 'step' is a int", "replicas.replicate makes such a state"),
        state={**STATE, "step": 3},
    ),
    saving(
        "an abstract state",
        *(TypeError, "leaf 'b' is a ShapeDtypeStruct", "replicas.replicate makes such"),
        state=abstract(STATE),
    ),
    saving(
        "a state that a step has reused",
        *(ValueError, "leaf 'b' was deleted", "Save the state that the step returned"),
        state=deleted(),
    ),
    saving(
        "two leaves of one name",
        *(ValueError, "named 'a/b'", "rename one"),
        state={"a/b": STATE["b"], "a": {"b": STATE["b"]}},
    ),
    restoring(
        "a step that is not there",
        *(FileNotFoundError, "no step 9 in FOLDER", "None takes the latest"),
        step=9,
    ),
    restoring(
        "step='latest'",
        *(TypeError, "got 'latest'", "step must be an int, None (the latest)"),
        step="latest",
    ),
    restoring(
        "a target of other replicas",
        *(ValueError, "saved with 4 replicas, target has 2", "pass replicas=2 to chan"),
        target=jax.tree.map(lambda x: x[:2], STATE),
    ),
    restoring(
        "replicas=8 and a target of 4",
        *(ValueError, "replicas=8, and the target has 4", "make the target for 8"),
        replicas=8,
    ),
    restoring(
        "replicas='4'",
        *(TypeError, "got '4'", "replicas must be an int"),
        replicas="4",
    ),
    restoring(
        "another model: a name more",
        *(ValueError, "leaf 'momentum' is missing at step 3", MODEL),
        target={**STATE, **LEAF},
    ),
    restoring(
        "another model: a name less",
        *(ValueError, "bfloat16[4,4,2] at step 3 in FOLDER and missing", MODEL),
        target={"b": STATE["b"]},
    ),
    restoring(
        "another model: a shape",
        *(ValueError, "'b' is float32[4,3] at step 3", MODEL),
        target={**STATE, "b": STATE["b"][:, :2]},
    ),
    restoring(
        "another model: a dtype",
        *(ValueError, "'w/kernel' is bfloat16[4,4,2] at step 3", MODEL),
        target={**STATE, "w": {"kernel": jnp.ones((4, 4, 2))}},
    ),
    restoring(
        "another model: a random key for an array",
        *(ValueError, "'b' is float32[4,3] at step 3", MODEL),
        target={**STATE, "b": jax.random.split(jax.random.key(0), 4)},
    ),
    restoring(
        "a target without shardings",
        *(
            ValueError,
            "leaf 'b' of the target has no sharding",
            "give jax.ShapeDtypeStruct(..., sharding=...)",
        ),
        target=abstract(STATE),
    ),
    restoring(
        "a checkpoint of another format",
        *(ValueError, "step 3 in FOLDER has format 2", "Use the version that wrote it"),
        damage=_changed(format=2),
    ),
    Case(
        "a checkpoint of another program",
        somebody_elses,
        *(ValueError, "step 3 in FOLDER", "restore it with what wrote it"),
    ),
    restoring(
        "a checkpoint without its notes",
        *(ValueError, "step 3 in FOLDER", "restore it with what wrote it"),
        damage=lambda folder: shutil.rmtree(folder / "info"),
    ),
    restoring(
        "notes that lack an entry",
        *(ValueError, "no ['replicas'] in info/metadata", "restore another step"),
        damage=_changed(replicas=None),
    ),
    restoring(
        "notes that are cut off",
        *(ValueError, "step 3 in FOLDER cannot be read", DAMAGED),
        damage=halve("info/metadata"),
    ),
    restoring(
        "a checkpoint without its arrays",
        *(ValueError, "step 3 in FOLDER cannot be read", DAMAGED),
        damage=lambda folder: shutil.rmtree(folder / "state"),
    ),
    restoring(
        "a list of arrays that is cut off",
        *(ValueError, "step 3 in FOLDER cannot be read", DAMAGED),
        damage=halve("state/manifest.ocdbt"),
    ),
    restoring(
        "arrays that are cut off",
        *(ValueError, "step 3 in FOLDER cannot be read", DAMAGED),
        damage=halve("state/**/d/*"),
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
