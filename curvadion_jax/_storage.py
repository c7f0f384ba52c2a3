"""A folder of checkpoints, which orbax writes and reads, and what is refused there.

Orbax writes a step whole or not at all. Here is what a crash left behind, how many
steps are kept, and one error for what a file system refuses or damaged files give.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax

from curvadion_jax._saved_state import Leaves

# Orbax takes a folder of such a name for what a crash left.
_REMOVED = "removed.orbax-checkpoint-tmp"
# To which TensorStore lets the files grow in which it collects arrays.
_FILE_BYTES = 2**31
_CODE = re.compile(r"\[os_error_code='(\d+)'\]")
_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ACCESS = {errno.EROFS, errno.EACCES, errno.EPERM}
_DAMAGE = (ValueError, KeyError, FileNotFoundError)


def _orbax() -> ModuleType:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "curvadion_jax.checkpoint needs orbax-checkpoint:"
            " pip install 'curvadion-jax[checkpoint]'"
        ) from error
    return ocp


def steps(path: str) -> list[int]:
    """The complete steps of a folder, which need not exist, ascending."""
    found = _orbax().path.step.standard_name_format().find_all(path)
    return sorted(metadata.step for metadata in found)


def write(path: str, step: int, arrays: Leaves, info: Any, keep: int | None) -> None:
    """Writes a step, after what crashes left was removed, and then removes old ones."""
    ocp, first = _orbax(), jax.process_index() == 0
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(arrays), info=ocp.args.JsonSave(info)
    )
    size = sum(array.nbytes for array in arrays.values())
    with _refusals(path, step, size):
        if first:  # the others wait for it where orbax begins
            for left in ocp.utils.tmp_checkpoints(path):
                left.get().rmtree()
        if "://" not in path:
            _ask_for_room(path, size, first)
        # Not by a CheckpointManager: it would tell JAX's preemption service this step,
        # and spoil the count of a loop that asks with numbers of its own.
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(f"{path}/{step}", args=items)
        if first:
            remove(path, steps(path)[:-keep] if keep else [])


def remove(path: str, old: list[int]) -> None:
    """Removes steps, and what of such was left."""
    if "://" in path:  # where no folder can be moved
        for step in old:
            _orbax().path.step.standard_name_format().find_step(
                path, step
            ).path.rmtree()
        return
    removed = os.path.join(path, _REMOVED)
    # One that a crash left half removed under its name would be taken for a checkpoint.
    for step in old:
        os.makedirs(removed, exist_ok=True)
        os.rename(os.path.join(path, str(step)), os.path.join(removed, str(step)))
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(removed)


def read_info(path: str, step: int) -> Any:
    """What is noted of a step; None where nothing is."""
    try:
        return _read(path, step, info=_orbax().args.JsonRestore()).info
    except ValueError as error:
        if isinstance(error.__cause__, KeyError):  # orbax knows no item of this name
            return None
        raise


def read_arrays(path: str, step: int, wanted: Leaves) -> Leaves:
    """Some of the arrays of a step, or all, onto the devices of abstract ones."""
    ocp = _orbax()
    places = {n: ocp.ArrayRestoreArgs(sharding=x.sharding) for n, x in wanted.items()}
    item = ocp.args.PyTreeRestore(wanted, places, partial_restore=True)
    return _read(path, step, state=item).state


def _read(path: str, step: int, **items: Any) -> Any:
    ocp = _orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            items = ocp.args.Composite(**items)
            return checkpointer.restore(f"{path}/{step}", args=items)
    except Exception as error:
        bare = type(error) is Exception  # orbax's, for the elements of an array
        # What the system refuses passes: a file may be there, and readable later.
        if not bare and not isinstance(error, _DAMAGE):
            raise
        # TensorStore appends all of its settings, which fill a page.
        text = str(error.__cause__ if bare else error)
        reason = text.partition(" [tensorstore_spec")[0][:400]
        others = [other for other in steps(path) if other != step]
        raise ValueError(
            f"step {step} in {path} cannot be read ({type(error).__name__}: {reason})."
            f" If its files are damaged, restore another step; the others: {others}."
        ) from error


def _ask_for_room(path: str, size: int, first: bool) -> None:
    # What is refused in the middle of a save leaves writes behind, which print traces.
    os.makedirs(path, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
        file.truncate(min(size, _FILE_BYTES))
    # The disk is one for all processes, and the first has cleared away what was left.
    if first and shutil.disk_usage(path).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _refusals(path: str, step: int, size: int) -> Iterator[None]:
    """Turns what the system refuses within it into one `OSError`."""
    try:
        yield
    except Exception as error:
        found = _CODE.search(str(error)) if isinstance(error, ValueError) else None
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number is None:
            raise
        raise OSError(number, _message(number, path, step, size)) from error


def _message(number: int, path: str, step: int, size: int) -> str:
    reason, found = os.strerror(number), steps(path)
    if step in found:
        return (
            f"step {step} is complete in {path}, and older ones could not be removed:"
            f" {reason}. Its steps: {found}; remove those that you do not want."
        )
    advice = "See what the system says, then save again, or to another directory."
    if number in _ACCESS:
        advice = "Give a directory that this process may write to."
    if number in _ROOM:
        advice = f"The arrays have {size / 1e6:.1f} MB"
        if number == errno.ENOSPC:  # under a quota or a limit the disk may have room
            advice += f", and {shutil.disk_usage(path).free / 1e6:.1f} MB are free"
        advice += ": make room, or save to another directory."
    kept = f"Its steps {found} are as they were" if found else "It has no checkpoint"
    return f"step {step} was not saved in {path}: {reason}. {kept}. {advice}"
