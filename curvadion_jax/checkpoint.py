"""Save and restore a whole training state, with every replica in it.

Between two syncs the replicas differ, so a checkpoint holds all rows, and what is
common once. The work is done by orbax-checkpoint, which comes with the extra
``curvadion-jax[checkpoint]``; no stored code is ever run. With several processes, all
of them call `save`, `restore` and `read_extra`, with a directory that all of them see.
One job at a time writes to it.
"""

from __future__ import annotations

import json
import operator
import os
import zlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _checksum, _memory, _trees, metrics
from curvadion_jax.dimension_numbers import _record
from curvadion_jax.matrices._dion import DionState
from curvadion_jax.matrices._two_optimizers import TwoOptimizersState
from curvadion_jax.replicas import _resize

__all__ = ["Directory", "latest_step", "read_extra", "restore", "save"]

_FORMAT = 6

Directory = str | os.PathLike[str]
Leaves = dict[str, Any]  # arrays, abstract or not, by their path in the state


def save(
    directory: Directory,
    step: int,
    state: Any,
    *,
    keep: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the state of all replicas to disk and waits until it is there.

    A checkpoint appears under its step complete or not at all. The next save removes
    what a crash left behind. A step that holds this very state is left as it is, so a
    resumed loop may begin with a save.

    Args:
      directory: the folder of the run, which gets a folder per step.
      step: the number of this checkpoint, higher than that of any other there.
      state: any pytree of ``jax.Array`` leaves, of any dtype, typed PRNG keys included.
        (`replicas.place` makes arrays of numbers.)
      keep: how many checkpoints to keep, this one included. None keeps all.
      extra: a small dictionary for JSON, such as a data position, for `read_extra`.
        Single numbers may be NumPy's or JAX's.
        With several processes, the first one's is stored.

    Raises:
      ValueError: if the step is not above the latest, or a leaf is no array.
      OSError: if the system refuses a write. Older checkpoints stay as they were. With
        several processes the others wait for this one: end it (``os._exit``).

    Warns:
      UserWarning: if parameters were changed behind an optimizer of the state
        (`displaced` in :func:`curvadion_jax.metrics.read`).

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
    path = _path(directory)
    step = operator.index(step)
    leaves = _by_path(state)
    metrics.warn_of_displaced(state)
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}. Give at least 1, or None to keep all.")
    digests = _digests(leaves)
    contents = {"arrays": {n: _describe(x) for n, x in leaves.items()}}
    contents |= {"digests": digests, "partitions": _partitions(state)}
    steps = _steps(path)
    latest = max(steps, default=-1)
    if step <= latest:
        if step in steps and contents.items() <= _read_notes(path, step).items():
            return
        raise ValueError(
            f"Step {step} does not lie above {latest}, the latest in {path}. Save to "
            "another directory, or remove the folders of the steps from it on."
        )
    notes = {"format": _FORMAT, "step": step, "extra": _plain(extra), **contents}
    ocp, is_first = _orbax(), jax.process_index() == 0
    if is_first:  # The others wait for it where orbax begins.
        for crashed in ocp.utils.tmp_checkpoints(path):
            crashed.get().rmtree()
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(_without_empty(leaves)),
        info=ocp.args.JsonSave({"notes": notes, "crc32": _crc32(notes)}),
    )
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(f"{path}/{step}", args=items)
    except (OSError, ValueError) as error:  # TensorStore's has all of its settings
        message = f"Step {step} cannot be written to {path}: {error}"
        raise OSError(message.partition(" [tensorstore_spec")[0]) from error
    if is_first and keep:
        for old in _steps(path)[:-keep]:
            _remove(path, old)


def restore(
    directory: Directory,
    target: Any,
    step: int | None = None,
    *,
    resize: bool = False,
    partial: bool = False,
) -> Any:
    """Returns a saved state, bit for bit, in the structure and shardings of a target.

    Args:
      directory: the folder given to `save`.
      target: a state of the saved structure, shapes and dtypes, whose values are not
        used: arrays, also donated ones, or ``jax.ShapeDtypeStruct`` with a
        ``sharding``. The devices need not be those of the saved run.
      step: the step to read. None means the latest.
      resize: whether the saved state may have another number of replicas than the
        target: it is then changed as by `curvadion_jax.replicas.resize`.
      partial: whether the target may be a part of what was saved, by its paths, such as
        ``{"params": ...}`` for inference or fine-tuning.

    Returns:
      A tree like `target`, with its shardings.

    Raises:
      FileNotFoundError: if there is no checkpoint, or none of this step.
      ValueError: if target and checkpoint differ, also in which parameters are
        matrices, or the files are damaged. The message names the arrays.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, 100, {"w": jnp.array([[0.0, 1.0], [2.0, 3.0]])})
      >>> target = {"w": jnp.zeros((1, 2))}  # one replica in place of two
      >>> checkpoint.restore(folder, target, resize=True)["w"].tolist()
      [[1.0, 2.0]]
    """
    path, leaves = _path(directory), _by_path(target)
    notes = _read_notes(path, step)
    found: int = notes["step"]
    arrays = notes["arrays"]
    for name, now in _partitions(target).items():
        saved = notes["partitions"].get(name, [])
        if differs := _record.difference(saved, now):
            raise ValueError(
                f"Step {found} in {path} was trained with another partition of the "
                f"parameters: {differs}"
            )
    kinds = dict(zip(leaves, jax.tree.leaves(_resize.row_kinds(target)), strict=True))
    lengths = {}  # of saved rows, where their number changes
    for name in leaves if partial else {**leaves, **arrays}:
        wanted = _describe(leaves[name]) if name in leaves else "missing"
        saved = arrays.get(name, "missing")
        if saved == wanted:
            continue
        is_row = resize and kinds.get(name, "common") != "common"
        if is_row and saved != "missing" and _of_row(saved) == _of_row(wanted):
            lengths[name] = saved["shape"][0]
            continue
        advice = "Build the target as the saved run did"
        if not resize and _of_row(saved) == _of_row(wanted):
            advice += ", or pass resize=True to change the number of replicas"
        elif wanted == "missing":
            advice += ", or pass partial=True for a part"
        raise ValueError(
            f"{name!r}{_owner(name)} is {_shown(saved)} at step {found} in {path} and "
            f"{_shown(wanted)} in the target. {advice}."
        )
    restored, digests = {}, {}
    # Where rows are resized one array at a time: all of them would be large.
    for names in [[name] for name in leaves] if lengths else [leaves]:
        read = _read_arrays(path, found, {n: leaves[n] for n in names}, lengths)
        digests |= _digests(read)
        for name, x in read.items():
            if name in lengths:
                x = _resized(x, leaves[name], kinds[name])
            restored[name] = x
    if bad := [n for n in leaves if digests.get(n) != notes["digests"][n]]:
        raise _damaged(path, found, f"differs in {len(bad)} arrays {bad[:5]}")
    values = [restored[name] for name in leaves]
    tree = jax.tree.unflatten(jax.tree.structure(target), values)
    return _trees.shared_as(target, tree)


def _resized(x: jax.Array, wanted: Any, kind: str) -> jax.Array:
    """Rows in another number, where the wanted ones lie."""
    rows = _resize.resized_rows(x, replicas=wanted.shape[0], kind=kind)
    return _memory.put(rows, wanted.sharding)


def latest_step(directory: Directory) -> int | None:
    """The highest step that has a complete checkpoint; None if there is none.

    One process may call it alone.

    Args:
      directory: the folder given to `save`, which need not exist.

    Returns:
      The step, or None.

    Example:
      >>> from curvadion_jax import checkpoint
      >>> checkpoint.latest_step("never/written") is None
      True
    """
    return max(_steps(_path(directory)), default=None)


def read_extra(directory: Directory, step: int | None = None) -> dict[str, Any]:
    """Reads the ``extra`` that was given to `save`.

    Args:
      directory: the folder given to `save`.
      step: the step to read. None means the latest.

    Returns:
      The dictionary as JSON has it, with lists for tuples; {} if none was given.

    Raises:
      FileNotFoundError: if there is no checkpoint, or none of this step.
      ValueError: if the files are damaged.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> extra = {"batch": 4096, "seed": 0}
      >>> checkpoint.save(folder, 100, {"w": jnp.zeros(2)}, extra=extra)
      >>> checkpoint.read_extra(folder)["batch"]
      4096
    """
    return _read_notes(_path(directory), step)["extra"]


def _path(directory: Directory) -> str:
    path = os.fspath(directory)
    return path if "://" in path else os.path.abspath(path)


def _by_path(state: Any) -> Leaves:
    """The leaves by path, all of which need a sharding.

    A flat dictionary: orbax would join the keys of a nested tree, so that {"a.b": x}
    and {"a": {"b": y}} share a name, and sort the mixed keys of nnx modules.
    """
    pairs = _trees.leaves_with_path(state)
    leaves = dict(pairs)
    if not leaves or len(leaves) < len(pairs):
        raise ValueError("The state has no leaves, or two of one path. Rename one.")
    for name, leaf in pairs:
        if not getattr(leaf, "sharding", None):
            raise ValueError(
                f"{name!r} is {leaf!r:.60}, which has no sharding. Make arrays of "
                "numbers with replicas.place(state, mesh), and give abstract arrays a "
                "sharding."
            )
    return leaves


def _without_empty(leaves: Leaves) -> Leaves:
    """The arrays that have elements. Orbax stores no others, and the notes suffice."""
    return {name: x for name, x in leaves.items() if x.size}


def _partitions(state: Any) -> dict[str, Any]:
    """Which parameters are matrices, by the place of each optimizer in the state."""
    has_one = lambda node: isinstance(node, TwoOptimizersState | DionState)
    nodes = jax.tree.leaves_with_path(state, is_leaf=has_one)
    return {
        _trees.path_of(path): _record.lines_of(node.partition)
        for path, node in nodes
        if has_one(node)
    }


def _describe(leaf: Any) -> dict[str, Any]:
    return {"dtype": str(leaf.dtype), "shape": [*leaf.shape]}


def _of_row(described: Any) -> Any:
    """A description without the number of rows."""
    if described == "missing":
        return described
    return described["dtype"], described["shape"][1:]


# Whose state a field of AdaptiveSyncState is, as the user knows it.
_OWNERS = {
    "common/anchor": "the synchronizer, of which reconcile has an anchor",
    "common/sync_state": "the synchronizer and its outer optimizer",
    "common/trigger_state": "the trigger",
    "rows/before_state": "before=",
    "rows/inner_state": "the inner optimizer, in which each schedule counts its steps",
    "rows/remembered": "the trigger",
    "rows/residual": "the compressor, which bits= chooses",
    "rows/weight": "the synchronizer, of which reconcile counts weights",
}


def _owner(name: str) -> str:
    """Says whose option makes a difference in the state, if that is known."""
    owners = [owner for part, owner in _OWNERS.items() if f"/{part}/" in f"/{name}/"]
    return f", of {owners[0]}," if owners else ""


def _shown(described: Any) -> str:
    if described == "missing":
        return described
    return f"{described['dtype']}[{', '.join(map(str, described['shape']))}]"


def _digests(arrays: Leaves) -> dict[str, int]:
    """Hashes each array to a uint32, so that a flipped bit is noticed.

    Hashes are computed on the arrays' devices, and do not depend on the sharding.
    """
    # One at a time: on a CPU of few cores many small programs that communicate wait
    # for each other, until XLA aborts.
    return {n: _on_host(_digest(_memory.to_device(x))) for n, x in arrays.items()}


def _on_host(x: jax.Array) -> int:
    """A number that is the same on all devices, of which other processes have some."""
    return int(np.asarray(x.addressable_data(0)))


_digest = jax.jit(_checksum.of_array)


def _plain(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What JSON makes of a dictionary; single numbers may be NumPy's or JAX's."""

    def number(x):
        if getattr(x, "ndim", None) == 0:
            return x.item()
        raise TypeError(
            f"extra holds {x!r:.80}, which JSON has no form for. Give numbers, "
            "strings, lists and dictionaries; arrays belong into the state."
        )

    return json.loads(json.dumps(dict(extra or {}), default=number))


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
    """The complete steps of a folder, which need not exist, in ascending order."""
    found = _orbax().path.step.standard_name_format().find_all(path)
    return sorted(metadata.step for metadata in found)


def _remove(path: str, step: int) -> None:
    folder = _orbax().path.step.standard_name_format().find_step(path, step).path
    if "://" not in path:
        # As orbax names what is not complete: half removed it would be listed.
        folder = folder.rename(f"{folder}.orbax-checkpoint-tmp")
    folder.rmtree()


def _damaged(path: str, step: int, what: str) -> ValueError:
    others = [other for other in _steps(path) if other != step]
    return ValueError(
        f"Step {step} in {path} {what}. Restore another step of {others}."
    )


def _read_notes(path: str, step: int | None) -> dict[str, Any]:
    """Reads the notes of a step, or of the latest one."""
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
        raise _damaged(path, found, "has damaged notes, or another version's")
    if notes["step"] != found:
        raise _damaged(path, found, f"was renamed, it holds step {notes['step']}")
    return notes


def _read_arrays(path: str, step: int, wanted: Leaves, lengths: dict[str, int]):
    """Reads arrays to where the wanted ones are, some with another number of rows."""

    def place(name, leaf):
        sharding, rows = leaf.sharding, lengths.get(name)
        if rows is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if isinstance(sharding, NamedSharding):
            sharding = sharding.update(memory_kind=None)
            if rows % leaf.shape[0]:  # Then each device gets all rows.
                sharding = sharding.update(spec=P(None, *sharding.spec[1:]))
        shape = (rows, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    empty = {
        n: jnp.zeros_like(x, device=x.sharding) for n, x in wanted.items() if not x.size
    }
    wanted = _without_empty(wanted)
    if not wanted:
        return empty
    ocp, places = _orbax(), {name: place(name, x) for name, x in wanted.items()}
    how = {n: ocp.ArrayRestoreArgs(sharding=x.sharding) for n, x in places.items()}
    item = ocp.args.PyTreeRestore(places, how, partial_restore=True)
    arrays = _read(path, step, state=item).state
    # Orbax returns what was asked for in place of what it does not find.
    return empty | {n: x for n, x in arrays.items() if isinstance(x, jax.Array)}


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
        raise _damaged(path, step, "cannot be read") from error
