"""What a file system refuses, told as one `OSError`: where, what, and what to do.

Orbax raises what it meets: an `OSError` for the folders that it makes, a `ValueError`
of TensorStore for the arrays, and meanwhile logs each of them from threads of its own.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

_CODE = re.compile(r"\[os_error_code='(\d+)'\]")
_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ACCESS = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextlib.contextmanager
def explained(
    path: str, step: int, size: int, steps: Callable[[], list[int]]
) -> Iterator[None]:
    """Turns a refusal within it into one `OSError`; other errors pass.

    Args:
      path: the folder that is written to.
      step: the step that is saved.
      size: bytes of its arrays.
      steps: reads the complete steps of the folder.

    Yields:
      Nothing.

    Raises:
      OSError: the system refused something; its own error is the cause.
    """
    filters = _Reported()
    logging.getLogger("absl").addFilter(filters)
    refused = False
    try:
        with no_late_callbacks():
            yield
    except Exception as error:
        number = _number(error)
        if number is None:
            raise
        refused = True
        raise OSError(number, _message(number, path, step, size, steps)) from error
    finally:
        logging.getLogger("absl").removeFilter(filters)
        if not refused:
            for record in filters.dropped:
                logging.getLogger("absl").handle(record)


@contextlib.contextmanager
def no_late_callbacks() -> Iterator[None]:
    """Drops what TensorStore's threads say when the first failure has ended the rest.

    The first read or write that fails ends orbax's event loop. The others then find it
    closed when they are done, where nobody can catch it, and print a trace each. So
    after an error, and only then, these are dropped from here on.

    Yields:
      Nothing.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = _without_late_callbacks(hook)
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        if not failed:
            sys.unraisablehook = hook


def remove(path: str, name: str) -> None:
    """Removes a folder in another, on a local disk, if it is there.

    Args:
      path: the folder that it is in.
      name: its name.

    Raises:
      OSError: the system refused it.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(os.path.join(path, name))


def _number(error: BaseException | None) -> int | None:
    """The system's number of an error, if the system is where it comes from."""
    if isinstance(error, OSError):
        return error.errno
    found = _CODE.search(str(error)) if isinstance(error, ValueError) else None
    return int(found[1]) if found else None


def _message(
    number: int, path: str, step: int, size: int, steps: Callable[[], list[int]]
) -> str:
    reason = os.strerror(number)
    try:
        found = steps()
    except OSError:
        found = []
    if step in found:
        return (
            f"step {step} is complete in {path}, and older ones could not be removed:"
            f" {reason}. Its steps: {found}; remove those that you do not want."
        )
    kept = f"Its steps {found} are as they were" if found else "It has no checkpoint"
    return f"step {step} was not saved in {path}: {reason}. {kept}. " + _advice(
        number, path, size
    )


def _advice(number: int, path: str, size: int) -> str:
    if number in _ROOM:
        return (
            f"The arrays have {size / 1e6:.1f} MB{_free(number, path)}: make room, or"
            " save to another directory. The next save removes what this one left."
        )
    if number in _ACCESS:
        return "Give a directory that this process may write to."
    return "See what the system says, then save again, or to another directory."


def _free(number: int, path: str) -> str:
    if number != errno.ENOSPC:  # a quota or a limit: the disk may have room
        return ""
    try:
        return f", and {shutil.disk_usage(path).free / 1e6:.1f} MB are free"
    except OSError:
        return ""


class _Reported(logging.Filter):
    """Keeps back log lines, with their traces, of errors that may be raised as well."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        kept = bool(record.exc_info) and _number(record.exc_info[1]) is not None
        if kept:
            self.dropped.append(record)
        return not kept


def _without_late_callbacks(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if getattr(hook, "drops_late_callbacks", False):
        return hook

    def dropping(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    dropping.drops_late_callbacks = True  # type: ignore[attr-defined]
    return dropping
