"""Checkpoints: where they are saved, of what state, and for what they are restored."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import checkpoint, replicas
from wrong_uses.case import Case

STATE = replicas.replicate(
    {"b": jnp.zeros(3), "w": {"kernel": jnp.ones((4, 2), jnp.bfloat16)}},
    replicas.make_mesh(4),
)
LEAF = {"momentum": STATE["b"]}


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
    target: Any = STATE,
    **arguments: Any,
) -> Case:
    """Step 3 is saved, and restored for this target."""

    def do(folder):
        checkpoint.save(folder, 3, STATE)
        checkpoint.restore(folder, target, **arguments)

    return Case(name, do, error, given, advice)


def twice(folder: Path) -> None:
    checkpoint.save(folder, 5, STATE)
    checkpoint.save(folder, 5, STATE)


def backwards(folder: Path) -> None:
    checkpoint.save(folder, 5, STATE)
    checkpoint.save(folder, 4, STATE)


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
        *(ValueError, "leaf 'z' is float32[2,2]", "call replicas.replicate"),
        state={**STATE, "z": jnp.ones((2, 2))},
    ),
    saving(
        "a state with a scalar",
        *(ValueError, "leaf 'a' is float32[]", "call replicas.replicate"),
        state={"a": jnp.ones(())},
    ),
    saving(
        "a state with an array of size 0",
        *(ValueError, "leaf 'e' is float32[4,0]", "leave arrays of size 0 out"),
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
]
