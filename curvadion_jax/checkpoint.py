"""Saving and restoring a whole training state, with every replica in it.

Between two syncs the replicas differ, so a checkpoint holds all of them: every leaf
has a leading replica axis ``[N, ...]``, is written from the devices it lives on, and
is read back onto those of a target state. This module decides what a checkpoint holds
and when one does not fit; it does not know what the state means. The work is done by
orbax-checkpoint, which comes with the extra ``curvadion-jax[checkpoint]`` and is
imported only when a function is called.

Nothing that is read is run. A checkpoint is JSON (our ``info``, and what orbax notes
about arrays, read with Python's `json`) and arrays in TensorStore's formats (zarr in
OCDBT), read into numbers of the dtypes that the target asks for; orbax also looks at a
file ``checkpoint`` of its old format, msgpack, which `save` does not write. No part is
unpickled, and no name in it is imported.

With several processes, all of them call `save`, `restore` and `read_extra`, with a
directory that all of them see. One job at a time writes to a directory.
"""

import contextlib
import errno
import importlib.metadata
import json
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from curvadion_jax import _storage
from curvadion_jax.replicas import _resize

Directory = str | os.PathLike[str]

_FORMAT = 1
# Orbax takes a folder of such a name for what a crash left, and clears it away.
_REMOVED = "removed.orbax-checkpoint-tmp"
_DISTRIBUTION = "curvadion-jax"


def save(
    directory: Directory,
    step: int,
    state: Any,
    *,
    keep: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the state of all replicas to disk and waits until it is there.

    A checkpoint appears under its step complete or not at all. What a crash leaves
    behind is not taken for a checkpoint, and the next save removes it. Arrays are
    stored under their path in the state, such as ``params/dense/kernel``.

    Args:
      directory: the folder of the run, made if it is missing; each step becomes a
        folder in it.
      step: the number of this checkpoint, above those of the checkpoints there are.
      state: any pytree of ``jax.Array`` leaves, each of shape ``[N, ...]`` with N the
        number of replicas; any dtype, typed PRNG keys ``key[N, ...]`` included.
      keep: how many checkpoints to keep, this one included; older ones are removed
        once this one is complete. ``None`` keeps all.
      extra: a small dictionary that JSON can hold, such as a data position, for
        `read_extra`. Comes back as JSON has it: tuples as lists, keys as strings.
        With several processes, that of the first is stored.

    Raises:
      ValueError: the step exists already or lies below the latest one; ``keep`` is
        below 1; the leaves do not share one leading replica axis; a leaf was donated.
      TypeError: a leaf is not a ``jax.Array``, JSON cannot hold ``extra``, or an
        argument is of the wrong kind.
      OSError: the system refused a write: the disk is full, the directory read-only.
        Its ``errno`` is the system's. The checkpoints there are stay as they were, and
        the next save removes what this one left behind. With several processes the
        others wait for this one: end it (``os._exit``), and JAX ends them.
      NotADirectoryError: the directory is a file, or lies below one.
      ImportError: orbax-checkpoint is not installed.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> state = {"weight": jnp.arange(6.0).reshape(2, 3)}  # two replicas
      >>> checkpoint.save(folder, 100, state, extra={"tokens": 4096})
      >>> checkpoint.restore(folder, state)["weight"].tolist()
      [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
      >>> checkpoint.latest_step(folder), checkpoint.read_extra(folder)
      (100, {'tokens': 4096})
    """
    ocp, path = _orbax(), _absolute(directory)
    step = _whole(step, "step", "the number of this checkpoint")
    if keep is not None and _whole(keep, "keep", "None (all) or a number") < 1:
        raise ValueError(f"keep must be None (all) or at least 1, got {keep}.")
    leaves = _named_leaves(state, jax.Array)
    for name, leaf in leaves.items():
        if leaf.is_deleted():
            raise ValueError(
                f"leaf {name!r} was deleted: the step that it was passed to reused its"
                " buffer. Save the state that the step returned."
            )
    info = {
        "format": _FORMAT,
        "version": importlib.metadata.version(_DISTRIBUTION),
        "step": step,
        "replicas": _count_replicas(leaves),
        "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
        "extra": _json_dict(extra),
    }
    _check_folder(path)
    _check_new_step(step, _steps(ocp, path), path)
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(leaves), info=ocp.args.JsonSave(info)
    )
    size = sum(leaf.nbytes for leaf in leaves.values())
    options = {"create": True, "max_to_keep": keep, "cleanup_tmp_directories": True}
    # Old steps are moved as a whole and then removed: one that a crash left half
    # removed under its own name would be taken for a checkpoint.
    options["todelete_subdir"] = None if "://" in path else _REMOVED
    with _storage.explained(path, step, size, lambda: _steps(ocp, path)):
        with _manager(ocp, path, **options) as manager:
            # It would tell JAX's preemption service this step, to write it in a log,
            # and spoil the count of a loop that asks with numbers of its own.
            manager.reached_preemption = lambda step: False
            manager.save(step, args=items, force=True)
        if jax.process_index() == 0:
            _storage.remove(path, _REMOVED)


def restore(
    directory: Directory,
    target: Any,
    step: int | None = None,
    *,
    replicas: int | None = None,
) -> Any:
    """Reads a state, bit for bit, into the structure and shardings of a target.

    What is static in the target, such as the functions of a flax ``TrainState``, stays
    the target's; its values are not used, so donated arrays will do. Weak types are
    not kept: a step that was compiled before may be compiled once more.

    Args:
      directory: the folder given to `save`.
      target: a state of the saved structure, shapes ``[N, ...]`` and dtypes; its
        leaves are ``jax.Array`` or ``jax.ShapeDtypeStruct`` with a ``sharding``.
        The devices need not be those of the saved run.
      step: the step to read; ``None`` is the latest.
      replicas: the number of replicas of the target, where the saved state may have
        another one: it is then changed as by `curvadion_jax.replicas.resize`.
        ``None`` refuses a checkpoint of another number.

    Returns:
      The restored state, with the target's structure, shapes, dtypes and shardings.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of this step.
      ValueError: the number of replicas, a leaf's path, shape or dtype, or the format
        of the checkpoint differs; its files cannot be read; a leaf of the target has no
        sharding; or the target has another number of replicas than `replicas` says.
      TypeError: a leaf of the target is neither of the two kinds above, or an argument
        is of the wrong kind.
      NotADirectoryError: the directory is a file, or lies below one.
      ImportError: orbax-checkpoint is not installed.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, 1, {"count": jnp.array([7, 7])})
      >>> checkpoint.restore(folder, {"count": jnp.zeros(2, jnp.int32)})
      {'count': Array([7, 7], dtype=int32)}
    """
    ocp, path = _orbax(), _absolute(directory)
    leaves = _named_leaves(target, jax.Array, jax.ShapeDtypeStruct)
    abstract = {name: _abstract(name, leaf) for name, leaf in leaves.items()}
    if replicas is not None:
        replicas = _whole(replicas, "replicas", "None or the target's number of them")
    _check_folder(path)
    steps = _steps(ocp, path)
    step = _existing_step(step, steps, path)
    _check_replicas(_count_replicas(leaves), replicas)
    with _manager(ocp, path, create=False) as manager:
        info = _read_info(ocp, manager, step, steps)
        saved = info["replicas"]
        _check_fit(info, leaves, f"step {step} in {path}", replicas is not None)
        if replicas is None or saved == replicas:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            with _explained(path, step, steps):
                arrays = manager.restore(step, args=items).state
        else:
            averaged = dict(zip(leaves, _resize.is_averaged(target), strict=True))
            arrays = {}
            for name, leaf in abstract.items():  # one at a time: all would be large
                with _explained(path, step, steps):
                    array = _read_one(ocp, manager, step, name, leaf, saved)
                arrays[name] = _resize.onto(leaf, array, averaged[name])
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[n] for n in leaves])


def _read_one(ocp: ModuleType, manager: Any, step: int, name: str, leaf, saved: int):
    """One array as it was saved, for another number of replicas."""
    before = _resize.before(leaf, saved)
    place = ocp.ArrayRestoreArgs(sharding=before.sharding)
    item = ocp.args.PyTreeRestore({name: before}, {name: place}, partial_restore=True)
    items = ocp.args.Composite(state=item)
    return manager.restore(step, args=items).state[name]


def _check_replicas(found: int, wanted: int | None) -> None:
    if wanted is not None and wanted != found:
        raise ValueError(
            f"replicas={wanted}, and the target has {found}: make the target for"
            f" {wanted} with replicas.replicate and replicas.make_mesh({wanted})."
        )


def latest_step(directory: Directory) -> int | None:
    """The highest step that has a complete checkpoint; ``None`` if there is none.

    Only lists the directory, so one process may call it alone.

    Args:
      directory: the folder given to `save`; it need not exist.

    Returns:
      The step, or ``None``.

    Raises:
      ImportError: orbax-checkpoint is not installed.

    Examples:
      >>> from curvadion_jax import checkpoint
      >>> print(checkpoint.latest_step("no_such_folder"))
      None
    """
    return max(_steps(_orbax(), _absolute(directory)), default=None)


def read_extra(directory: Directory, step: int | None = None) -> dict[str, Any]:
    """The dictionary that was given to `save` as ``extra``, without reading arrays.

    Args:
      directory: the folder given to `save`.
      step: the step to read; ``None`` is the latest.

    Returns:
      The dictionary as JSON has it; empty if none was given.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of this step.
      ValueError: the checkpoint has another format, or its files cannot be read.
      ImportError: orbax-checkpoint is not installed.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, 1, {"w": jnp.ones((2, 3))}, extra={"epoch": 4})
      >>> checkpoint.read_extra(folder)
      {'epoch': 4}
    """
    ocp, path = _orbax(), _absolute(directory)
    _check_folder(path)
    steps = _steps(ocp, path)
    step = _existing_step(step, steps, path)
    with _manager(ocp, path, create=False) as manager:
        return _read_info(ocp, manager, step, steps)["extra"]


def _orbax() -> ModuleType:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "curvadion_jax.checkpoint needs orbax-checkpoint:"
            f" pip install '{_DISTRIBUTION}[checkpoint]'"
        ) from error
    return ocp


def _manager(ocp: ModuleType, path: str, **options: Any) -> Any:
    options = {"enable_async_checkpointing": False, **options}
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))


def _absolute(directory: Directory) -> str:
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"directory must be a path, got a {type(directory).__name__}: the order is"
            " save(directory, step, state) and restore(directory, target)."
        )
    text = os.fspath(directory)
    return text if "://" in text else os.path.abspath(text)


def _whole(value: Any, what: str, meaning: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{what} must be an int, {meaning}, got {value!r}.")


def _check_folder(path: str) -> None:
    if "://" in path:
        return
    folder = Path(path)
    for place in (folder, *folder.parents):
        if place.is_file():
            raise NotADirectoryError(
                errno.ENOTDIR,
                f"{place} is a file, and {path} must be a folder, which holds one"
                " folder a step: give the directory of the run.",
            )


def _steps(ocp: ModuleType, path: str) -> list[int]:
    found = ocp.path.step.standard_name_format().find_all(path)
    return sorted(metadata.step for metadata in found)


def _check_new_step(step: int, steps: list[int], path: str) -> None:
    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}.")
    if step in steps:
        raise ValueError(
            f"step {step} exists already in {path}; its steps: {steps}. A checkpoint"
            " is never overwritten: remove it, or save to another directory."
        )
    if steps and step < steps[-1]:
        # `restore` would take the other one for the latest, and `keep` would too.
        raise ValueError(
            f"step {step} lies below {steps[-1]}, the latest step in {path}. Save a"
            " run that went back to another directory, or remove the later steps."
        )


def _existing_step(step: int | None, steps: list[int], path: str) -> int:
    if not steps:
        raise FileNotFoundError(
            f"no checkpoint in {path}. Give the directory that save was given: it"
            " holds one folder a step."
        )
    what = "None (the latest) or the number of a checkpoint"
    step = steps[-1] if step is None else _whole(step, "step", what)
    if step not in steps:
        raise FileNotFoundError(
            f"no step {step} in {path}; its steps: {steps}. None takes the latest."
        )
    return step


def _named_leaves(state: Any, *kinds: type) -> dict[str, Any]:
    # Orbax joins the keys of a nested tree with dots, so that {"a.b": x} and
    # {"a": {"b": y}} share a name, and sorts the keys of a node, which fails for the
    # mixed keys of nnx modules. A flat dictionary has neither trouble.
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two leaves of the state are named {name!r}; rename one.")
        if not isinstance(leaf, kinds):
            raise TypeError(
                f"leaf {name!r} is a {type(leaf).__name__}, not a jax.Array with a"
                " leading replica axis; replicas.replicate makes such a state."
            )
        leaves[name] = leaf
    return leaves


def _count_replicas(leaves: Mapping[str, Any]) -> int:
    if not leaves:
        raise ValueError(
            "the state has no arrays, got an empty tree; give the whole training state."
        )
    first, sizes = next((name, leaf.shape[:1]) for name, leaf in leaves.items())
    for name, leaf in leaves.items():
        if leaf.shape[:1] != sizes or 0 in leaf.shape or not sizes:
            raise ValueError(
                f"leaf {name!r} is {_describe(leaf)}, where {first!r} is"
                f" {_describe(leaves[first])}: all leaves share one leading replica"
                " axis, and no axis has size 0. replicas.replicate adds the axis."
            )
    return sizes[0]


def _describe(leaf: Any, replicas: int | None = None) -> str:
    shape = leaf.shape if replicas is None else (replicas, *leaf.shape[1:])
    return f"{leaf.dtype}[{','.join(map(str, shape))}]"


def _json_dict(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(extra, Mapping | None):
        raise TypeError(f"extra must be a dictionary, got a {type(extra).__name__}.")
    try:
        return json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"extra must be what JSON can hold: {error}. Arrays belong in the state."
        ) from error


def _abstract(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if leaf.sharding is None:
        raise ValueError(
            f"leaf {name!r} of the target has no sharding, so that there is no place"
            " to restore it to; give jax.ShapeDtypeStruct(..., sharding=...)."
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


_DAMAGE = (ValueError, KeyError, FileNotFoundError)


@contextlib.contextmanager
def _explained(path: str, step: int, steps: list[int]) -> Iterator[None]:
    """What orbax and TensorStore say of files that are damaged, and what to do.

    What the system refuses passes: the file may be there, and readable later.
    """
    try:
        with _storage.no_late_callbacks():
            yield
    except Exception as error:
        bare = type(error) is Exception  # orbax's, for the elements of an array
        if not bare and not isinstance(error, _DAMAGE):
            raise
        # TensorStore appends all of its settings, which fill a page.
        text = str(error.__cause__ if bare else error)
        reason = text.partition(" [tensorstore_spec")[0][:400]
        others = [other for other in steps if other != step]
        raise ValueError(
            f"step {step} in {path} cannot be read ({type(error).__name__}: {reason})."
            f" If its files are damaged, restore another step; the others: {others}."
        ) from error


def _read_info(
    ocp: ModuleType, manager: Any, step: int, steps: list[int]
) -> dict[str, Any]:
    where = f"step {step} in {manager.directory}"
    with _explained(str(manager.directory), step, steps):
        try:
            items = ocp.args.Composite(info=ocp.args.JsonRestore())
            info = manager.restore(step, args=items).info
        except KeyError:
            info = None
    if not isinstance(info, dict) or "format" not in info:
        raise ValueError(
            f"{where} was not written by curvadion_jax.checkpoint, which leaves its"
            " format in info/metadata: restore it with what wrote it."
        )
    if info.get("format") != _FORMAT:
        here = importlib.metadata.version(_DISTRIBUTION)
        raise ValueError(
            f"{where} has format {info.get('format')}, written by {_DISTRIBUTION}"
            f" {info.get('version')}; this is {here} and reads format {_FORMAT}. Use"
            " the version that wrote it."
        )
    if missing := {"replicas", "leaves", "extra"} - info.keys():
        raise ValueError(
            f"{where} has no {sorted(missing)} in info/metadata, so that it is damaged:"
            f" restore another step; the others: {[s for s in steps if s != step]}."
        )
    return info


def _check_fit(
    info: Mapping[str, Any], leaves: Mapping[str, Any], where: str, any_number: bool
) -> None:
    replicas, before = _count_replicas(leaves), info["replicas"]
    if before != replicas and not any_number:
        raise ValueError(
            f"{where} was saved with {before} replicas, target has {replicas}: pass"
            f" replicas={replicas} to change their number (see replicas.resize), or"
            f" make a target of {before}."
        )
    saved = info["leaves"]
    wanted = {name: _describe(leaf, before) for name, leaf in leaves.items()}
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"leaf {name!r} is {saved.get(name, 'missing')} at {where} and"
                f" {wanted.get(name, 'missing')} in the target. Build the target with"
                " the model and the optimizer of the saved run."
            )
