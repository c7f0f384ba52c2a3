"""Saving and restoring a whole training state, with every replica in it.

Between two syncs the replicas differ, so a checkpoint holds all of them: every leaf
has a leading replica axis ``[N, ...]``, is written from the devices it lives on, and
is read back onto those of a target state. The work is done by orbax-checkpoint, which
comes with the extra ``curvadion-jax[checkpoint]``; without it all raise `ImportError`.

Nothing that is read is run: a checkpoint is JSON and arrays in TensorStore's formats,
and orbax also looks for a file ``checkpoint`` of its old one, msgpack. No part is
unpickled. With several processes, all of them call `save`, `restore` and `read_extra`,
with a directory that all of them see. One job at a time writes to a directory.
"""

import errno
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from curvadion_jax import _saved_state, _storage
from curvadion_jax.replicas import _recover

Directory = str | os.PathLike[str]


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
    behind is not taken for a checkpoint, and the next save removes it.

    Args:
      directory: the folder of the run, made if it is missing, with one a step in it.
      step: the number of this checkpoint, above those of the checkpoints there are.
      state: any pytree of ``jax.Array`` leaves, each of shape ``[N, ...]`` with N the
        number of replicas; any dtype, typed PRNG keys ``key[N, ...]`` included.
      keep: how many checkpoints to keep, this one included; older ones are removed
        once this one is complete. ``None`` keeps all.
      extra: a small dictionary that JSON can hold, such as a data position, for
        `read_extra`. With several processes, that of the first is stored.

    Raises:
      ValueError: the step exists already or lies below the latest one; ``keep`` is
        below 1; the leaves do not share one leading replica axis; a leaf was donated.
      TypeError: a leaf is not a ``jax.Array``, JSON cannot hold ``extra``, or an
        argument is of the wrong kind.
      NotADirectoryError: the directory is a file, or lies below one.
      OSError: the system refused a write (its ``errno`` says why), or the disk has
        less room than the arrays have bytes. The checkpoints there are stay as they
        were, and the next save removes what this one left behind. With several
        processes the others wait for this one: end it (``os._exit``), and JAX ends
        them.

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
    path = _folder(directory)
    step = _whole(step, "step", "the number of this checkpoint")
    if keep is not None and _whole(keep, "keep", "None (all) or a number") < 1:
        raise ValueError(f"keep must be None (all) or at least 1, got {keep}.")
    leaves = _saved_state.named_leaves(state, jax.Array)
    if gone := [name for name, leaf in leaves.items() if leaf.is_deleted()]:
        raise ValueError(
            f"leaf {gone[0]!r} was deleted: the step that it was passed to reused its"
            " buffer. Save the state that the step returned."
        )
    notes = _saved_state.note(step, leaves, extra)
    _check_new_step(step, _storage.steps(path), path)
    _storage.write(path, step, leaves, notes, keep)


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
      NotADirectoryError: the directory is a file, or lies below one.
      ValueError: the number of replicas, a leaf's path, shape or dtype, or the format
        of the checkpoint differs; its files cannot be read; a leaf of the target has no
        sharding; or the target has another number of replicas than `replicas` says.
      TypeError: a leaf of the target is neither of the two kinds above, or an argument
        is of the wrong kind.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, 1, {"count": jnp.array([7, 7])})
      >>> checkpoint.restore(folder, {"count": jnp.zeros(2, jnp.int32)})
      {'count': Array([7, 7], dtype=int32)}
    """
    path = _folder(directory)
    leaves = _saved_state.named_leaves(target, jax.Array, jax.ShapeDtypeStruct)
    wanted, here = _saved_state.abstract(leaves), _saved_state.count(leaves)
    what = "None or the target's number of them"
    if replicas is not None and _whole(replicas, "replicas", what) != here:
        raise ValueError(
            f"replicas={replicas}, and the target has {here}: make the target for"
            f" {replicas} with replicas.replicate and replicas.make_mesh({replicas})."
        )
    step, info = _read_info(path, step)
    before, where = info["replicas"], f"step {step} in {path}"
    if before != here and replicas is None:
        raise ValueError(
            f"{where} was saved with {before} replicas, target has {here}: pass"
            f" replicas={here} to change their number (see replicas.resize), or make a"
            f" target of {before}."
        )
    _saved_state.check_fit(info, leaves, where)
    if before == here:
        arrays = _storage.read_arrays(path, step, wanted)
    else:
        averaged = dict(zip(leaves, _recover.is_averaged(target), strict=True))
        arrays = {}
        for name, leaf in wanted.items():  # one at a time: all would be large
            one = {name: _recover.before(leaf, before)}
            array = _storage.read_arrays(path, step, one)[name]
            arrays[name] = _recover.onto(leaf, array, averaged[name])
    return jax.tree.unflatten(jax.tree.structure(target), [arrays[n] for n in leaves])


def latest_step(directory: Directory) -> int | None:
    """The highest step that has a complete checkpoint; ``None`` if there is none.

    Only lists the directory, so one process may call it alone.

    Args:
      directory: the folder given to `save`; it need not exist.

    Returns:
      The step, or None.

    Raises:
      NotADirectoryError: the directory is a file, or lies below one.

    Examples:
      >>> from curvadion_jax import checkpoint
      >>> print(checkpoint.latest_step("no_such_folder"))
      None
    """
    return max(_storage.steps(_folder(directory)), default=None)


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

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import checkpoint
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, 1, {"w": jnp.ones((2, 3))}, extra={"epoch": 4})
      >>> checkpoint.read_extra(folder)
      {'epoch': 4}
    """
    return _read_info(_folder(directory), step)[1]["extra"]


def _folder(directory: Directory) -> str:
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"directory must be a path, got a {type(directory).__name__}: the order is"
            " save(directory, step, state) and restore(directory, target)."
        )
    path = os.fspath(directory)
    if "://" in path:
        return path
    path = os.path.abspath(path)
    for place in (Path(path), *Path(path).parents):
        if place.is_file():
            said = f"{place} is a file, and {path} no folder: give the directory of the"
            raise NotADirectoryError(errno.ENOTDIR, f"{said} run.")
    return path


def _whole(value: Any, what: str, meaning: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{what} must be an int, {meaning}, got {value!r:.200}.")


def _check_new_step(step: int, steps: list[int], path: str) -> None:
    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}.")
    # Below the latest: `restore` and `keep` would take the other one for the latest.
    if steps and step <= steps[-1]:
        wrong = "exists already" if step in steps else f"lies below {steps[-1]}"
        raise ValueError(
            f"step {step} {wrong} in {path}; its steps: {steps}. Save to another"
            " directory, or remove those that the run went back from."
        )


def _read_info(path: str, step: int | None) -> tuple[int, dict[str, Any]]:
    """The step, or the latest one, and what is noted of it."""
    what = "None (the latest) or the number of a checkpoint"
    wanted = None if step is None else _whole(step, "step", what)
    steps = _storage.steps(path)
    if not steps:
        said = f"no checkpoint in {path}. Give the directory that save was given."
        raise FileNotFoundError(said)
    if wanted is not None and wanted not in steps:
        raise FileNotFoundError(
            f"no step {wanted} in {path}; its steps: {steps}. None takes the latest."
        )
    found = steps[-1] if wanted is None else wanted
    info = _storage.read_info(path, found)
    _saved_state.check_notes(info, f"step {found} in {path}")
    return found, info
