"""Save and restore a whole training state, with every replica in it.

Between two syncs the replicas differ, so a checkpoint holds all of them: every leaf
has a leading replica axis ``[N, ...]``, is written from the devices it lives on, and
is read back onto those of a target state. The work is done by orbax-checkpoint, which
comes with the extra ``curvadion-jax[checkpoint]``.

Nothing that is read is run: a checkpoint is JSON and arrays in TensorStore's formats.
With several processes, all of them call `save`, `restore` and `read_extra`, with a
directory that all of them see. One job at a time writes to a directory.
"""

import errno
import json
import operator
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from curvadion_jax import _digests
from curvadion_jax._version import __version__
from curvadion_jax.replicas import _recover

_FORMAT = 2
# To which TensorStore lets the files grow in which it collects arrays.
_FILE_BYTES = 2**31
_TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of what crashes left, by orbax

Directory = str | os.PathLike[str]
Leaves = dict[str, Any]  # arrays, abstract or not, by their path in the state


def save(
    directory: Directory,
    step: int,
    state: Any,
    *,
    keep: int | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the state of all replicas to disk and waits until it is there.

    A checkpoint appears under its step complete or not at all. The next save removes
    what a crash left behind. A step that holds this very state already is left as it
    is, with its `extra`, so a resumed loop may begin with a save.

    Args:
      directory: the folder of the run, made if it is missing, with one per step in it.
      step: the number of this checkpoint, above those of the checkpoints there are.
      state: any pytree of ``jax.Array`` leaves, each of shape ``[N, ...]`` with N the
        number of replicas; any dtype, typed PRNG keys ``key[N, ...]`` included.
      keep: how many checkpoints to keep, this one included; older ones are removed
        once this one is complete. None keeps all.
      extra: a small dictionary that JSON can hold, such as a data position, for
        `read_extra`. With several processes, the first one's is stored.
      overwrite: whether to remove this step and later ones first, from which a run
        went back.

    Raises:
      ValueError: if the step does not lie above the latest one, or the leaves do not
        share one leading replica axis.
      OSError: if the system refuses a write; its ``errno`` says why. Checkpoints that
        are there stay as they were. With several processes the others wait for this
        one: end it (``os._exit``), and JAX ends them.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> state = {"weight": jnp.arange(6.0).reshape(2, 3)}  # two replicas
      >>> checkpoint.save(folder, 100, state, extra={"tokens": 4096})
      >>> checkpoint.restore(folder, state)["weight"].tolist()
      [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
      >>> checkpoint.latest_step(folder), checkpoint.read_extra(folder)
      (100, {'tokens': 4096})
    """
    path, step = _path(directory), operator.index(step)
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}. Give at least 1, or None to keep all.")
    leaves = _named(state)
    rows = _digests.gathered([_digests.of(x) for x in leaves.values()])
    held = {
        name: {"array": _describe(x), "digests": row.tolist()}
        for (name, x), row in zip(leaves.items(), rows, strict=True)
    }
    notes = {"format": _FORMAT, "version": __version__, "step": step, "leaves": held}
    notes |= {"replicas": _count(leaves), "extra": dict(extra or {})}
    notes = json.loads(json.dumps(notes))  # as they will be read
    there = _steps(path)
    if step in there and not overwrite and _read_notes(path, step)[1]["leaves"] == held:
        return
    if step <= max(there, default=-1) and not overwrite:
        raise ValueError(
            f"Step {step} does not lie above {max(there, default=-1)}, the latest in "
            f"{path}. Save to another directory, or pass overwrite=True to remove the "
            "steps from it on."
        )
    later = [each for each in there if each >= step]
    _write(path, step, leaves, {"notes": notes, "crc32": _crc32(notes)}, later, keep)


def restore(
    directory: Directory,
    target: Any,
    step: int | None = None,
    *,
    replicas: int | None = None,
    partial: bool = False,
) -> Any:
    """Reads a state, bit for bit, into the structure and shardings of a target.

    What is static in the target stays the target's. Its values are not used, so donated
    arrays will do.

    Args:
      directory: the folder given to `save`.
      target: a state of the saved structure, shapes ``[N, ...]`` and dtypes; its
        leaves are ``jax.Array`` or ``jax.ShapeDtypeStruct`` with a ``sharding``.
        The devices need not be those of the saved run.
      step: the step to read; None is the latest.
      replicas: the number of replicas of the target, where the saved state may have
        another one: it is then changed as by `curvadion_jax.replicas.resize`.
        None refuses a checkpoint of another number.
      partial: whether the target may be a part of what was saved, by its paths, such as
        ``{"params": ...}`` for inference or fine-tuning.

    Returns:
      The restored state, with the target's structure, shapes, dtypes and shardings.

    Raises:
      FileNotFoundError: if there is no checkpoint, or none of this step.
      ValueError: if the number of replicas, a leaf's path, shape or dtype differs; the
        files cannot be read, or an array is not what was saved; the folder was renamed;
        or a leaf of the target has no sharding.

    Example:
      The parameters alone, as the mean of two replicas:

      >>> import tempfile, jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> state = {"params": jnp.array([[1.0], [3.0]]), "count": jnp.array([7, 7])}
      >>> checkpoint.save(folder, 1, state)
      >>> like = {"params": jnp.zeros((1, 1))}
      >>> checkpoint.restore(folder, like, replicas=1, partial=True)["params"].tolist()
      [[2.0]]
    """
    path, leaves = _path(directory), _named(target)
    step, notes = _read_notes(path, step)
    saved, before, here = notes["leaves"], notes["replicas"], _count(leaves)
    where = f"step {step} in {path}"
    if here != (before if replicas is None else replicas):
        raise ValueError(
            f"The target has {here} replicas, {where} has {before}, and replicas is "
            f"{replicas}. Pass replicas={here} to change their number."
        )
    for name in leaves if partial else {**leaves, **saved}:
        there = saved[name]["array"] if name in saved else "missing"
        wanted = _describe(leaves[name], before) if name in leaves else "missing"
        if there != wanted:
            raise ValueError(
                f"{name!r} is {there} at {where} and {wanted} in the target. Build the "
                "target as the saved run did, or pass partial=True for a part of it."
            )
    places = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for n, x in leaves.items()
    }
    averaged = dict(zip(leaves, _recover.is_averaged(target), strict=True))
    arrays, digests = {}, []
    # For another number of replicas one at a time: all would be large.
    resized = [{n: _recover.before(x, before)} for n, x in places.items()]
    for some in [places] if before == here else resized:
        for name, x in _read_arrays(path, step, some).items():
            digests.append(_digests.of(x))
            if before != here:
                x = _recover.onto(places[name], x, averaged[name])
            arrays[name] = x
    pairs = zip(arrays, _digests.gathered(digests), strict=True)
    if bad := [n for n, row in pairs if row.tolist() != saved[n]["digests"]]:
        raise ValueError(
            f"{len(bad)} arrays of {where} are not what was saved: {bad[:5]}. Restore "
            f"another step: {[each for each in _steps(path) if each != step]}."
        )
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[n] for n in leaves])


def latest_step(directory: Directory) -> int | None:
    """The highest step that has a complete checkpoint; None if there is none.

    Only lists the directory, so one process may call it alone.

    Args:
      directory: the folder given to `save`; it need not exist.
    """
    return max(_steps(_path(directory)), default=None)


def read_extra(directory: Directory, step: int | None = None) -> dict[str, Any]:
    """The dictionary that was given to `save` as ``extra``, without reading arrays.

    Args:
      directory: the folder given to `save`.
      step: the step to read; None is the latest.

    Returns:
      The dictionary as JSON has it; empty if none was given.

    Raises:
      FileNotFoundError: if there is no checkpoint, or none of this step.
      ValueError: if its files cannot be read, or the folder was renamed.
    """
    return _read_notes(_path(directory), step)[1]["extra"]


def _path(directory: Directory) -> str:
    path = os.fspath(directory)
    return path if "://" in path else os.path.abspath(path)


def _named(state: Any) -> Leaves:
    """The leaves by path, all with one leading replica axis and a place."""
    # Orbax joins the keys of a nested tree with dots, so that {"a.b": x} and
    # {"a": {"b": y}} share a name, and sorts the keys of a node, which fails for the
    # mixed keys of nnx modules. A flat dictionary has neither trouble.
    leaves = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"Two leaves of the state are named {name!r}. Rename one.")
        first = next(iter(leaves.values()), leaf)
        shape = getattr(leaf, "shape", None)
        if not shape or shape[0] != first.shape[0] or leaf.sharding is None:
            raise ValueError(
                f"{name!r} is {leaf!r:.60}, and not an array with a sharding and the "
                "replica axis of all leaves. Make the state with replicas.replicate."
            )
        leaves[name] = leaf
    if not leaves:
        raise ValueError("The state is an empty tree. Give the whole training state.")
    return leaves


def _count(leaves: Leaves) -> int:
    return next(iter(leaves.values())).shape[0]


def _describe(leaf: Any, replicas: int | None = None) -> str:
    shape = leaf.shape if replicas is None else (replicas, *leaf.shape[1:])
    return f"{leaf.dtype}[{','.join(map(str, shape))}]"


def _crc32(notes: Any) -> int:
    return zlib.crc32(json.dumps(notes, sort_keys=True).encode())


# Files, which orbax writes and reads. Not by its CheckpointManager: that tells JAX's
# preemption service each step, and spoils the count of a loop that asks with numbers of
# its own. A Checkpointer alone is atomic.


def _orbax() -> ModuleType:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "curvadion_jax.checkpoint needs orbax-checkpoint. "
            "Run: pip install orbax-checkpoint."
        ) from error
    return ocp


def _steps(path: str) -> list[int]:
    """The complete steps of a folder, which need not exist, ascending."""
    found = _orbax().path.step.standard_name_format().find_all(path)
    return sorted(metadata.step for metadata in found)


def _write(
    path: str, step: int, leaves: Leaves, info: Any, later: list[int], keep: int | None
) -> None:
    ocp, first = _orbax(), jax.process_index() == 0
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(leaves), info=ocp.args.JsonSave(info)
    )
    size = sum(array.nbytes for array in leaves.values())
    try:
        if first:  # the others wait for it where orbax begins
            for left in ocp.utils.tmp_checkpoints(path):
                left.get().rmtree()
            _remove(path, later)
        if "://" not in path:
            # What is refused in the middle leaves writes behind, which print traces.
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as file:
                file.truncate(min(size, _FILE_BYTES))
            # The disk is one for all processes.
            if first and shutil.disk_usage(path).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(f"{path}/{step}", args=items)
        if first and keep:
            _remove(path, _steps(path)[:-keep])
    except Exception as error:
        # TensorStore has the code in a text.
        code = re.search(r"\[os_error_code='(\d+)'\]", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        if number is None:
            raise
        raise OSError(
            number,
            f"{os.strerror(number)}: step {step} of {size / 1e6:.1f} MB in {path}. Its "
            f"complete steps are {_steps(path)}",
        ) from error


def _remove(path: str, steps: list[int]) -> None:
    for step in steps:
        folder = _orbax().path.step.standard_name_format().find_step(path, step).path
        if "://" not in path:
            # One that a crash left half removed under its name would be listed.
            folder = folder.rename(f"{folder}{_TEMPORARY}")
        folder.rmtree()


def _read_notes(path: str, step: int | None) -> tuple[int, dict[str, Any]]:
    """The step, or the latest one, and what is noted of it."""
    steps = _steps(path)
    found = max(steps, default=None) if step is None else step
    if found not in steps:
        raise FileNotFoundError(
            f"No checkpoint{'' if step is None else f' of step {step}'} in {path}; its "
            f"steps are {steps}. Give the directory that save was given."
        )
    info = _read(path, found, info=_orbax().args.JsonRestore()).info
    notes = info.get("notes", {})
    if info.get("crc32") != _crc32(notes) or notes.get("format") != _FORMAT:
        raise ValueError(
            f"The notes of step {found} in {path} are damaged, or another version than "
            f"{__version__} wrote them. Restore another step: {steps}."
        )
    if notes["step"] != found:
        raise ValueError(
            f"Folder {found} in {path} holds step {notes['step']}, so it was renamed. "
            "Give it its name again."
        )
    return found, notes


def _read_arrays(path: str, step: int, wanted: Leaves) -> Leaves:
    """Some of the arrays of a step, or all, onto the devices of abstract ones."""
    ocp = _orbax()
    places = {n: ocp.ArrayRestoreArgs(sharding=x.sharding) for n, x in wanted.items()}
    item = ocp.args.PyTreeRestore(wanted, places, partial_restore=True)
    found = _read(path, step, state=item).state
    # Orbax returns what was asked for in place of what it does not find.
    if lost := [n for n in wanted if not isinstance(found.get(n), jax.Array)]:
        raise ValueError(
            f"Step {step} in {path} has lost {len(lost)} arrays: {lost[:5]}. "
            f"Restore another step: {[each for each in _steps(path) if each != step]}."
        )
    return found


def _read(path: str, step: int, **items: Any) -> Any:
    ocp = _orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            items = ocp.args.Composite(**items)
            return checkpointer.restore(f"{path}/{step}", args=items)
    except Exception as error:
        # What the system refuses passes: a file may be there, and readable later.
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        # TensorStore appends all of its settings, which fill a page.
        cause = error.__cause__ if type(error) is Exception else error
        reason = str(cause).partition(" [tensorstore_spec")[0][:400]
        others = [other for other in _steps(path) if other != step]
        raise ValueError(
            f"Step {step} in {path} cannot be read ({type(error).__name__}: {reason}). "
            f"Restore another step: {others}."
        ) from error
