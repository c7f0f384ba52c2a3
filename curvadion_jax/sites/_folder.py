"""What in a folder is no object: it is ignored and counted.

`obstore` lists nothing of a folder in which one entry is odd: a link to itself, or a
name that is not UTF-8. It reads a pipe until somebody writes to it. A shared folder has
more users than the run, so sites look at its entries themselves.
"""

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("curvadion_jax.sites")

# Keys have these characters alone, which are the same in names of files.
_KEY = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
# Uploads that are under way, or were killed.
_UPLOAD = re.compile(r".*#[0-9]+")


class Folder:
    """The entries of a store's folder.

    Attributes:
      odd: paths in it that are no objects, as far as they have been met.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.odd: set[str] = set()

    def keys(self, prefix: str) -> list[str]:
        """Keys of the objects below a prefix."""
        found = []
        for path, is_file in self._entries(self._root / prefix):
            key = path.relative_to(self._root).as_posix()
            if is_file and _KEY.fullmatch(key):
                found.append(key)
            elif not _UPLOAD.fullmatch(path.name):
                self._ignore(key)
        return found

    def has_odd(self, key: str) -> bool:
        """Whether something that is no file lies at a key."""
        path = self._root / key
        try:
            odd = not stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            odd = path.is_symlink()  # to nowhere
        except OSError:  # a link to itself
            odd = True
        if odd:
            self._ignore(key)
        return odd

    def make_room(self, key: str) -> bool:
        """Whether an object can lie at a key: an empty folder is removed from there."""
        if self.has_odd(key):
            with suppress(OSError):
                (self._root / key).rmdir()
        return not self.has_odd(key)

    def _entries(self, folder: Path) -> Iterator[tuple[Path, bool]]:
        """Paths below a folder that are no folders, and whether they are files.

        Links to files are followed, as `obstore` does; links to folders are not.
        """
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except FileNotFoundError:  # empty, or removed meanwhile
            return
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                try:
                    yield from self._entries(path)
                except PermissionError:
                    yield path, False
            elif entry.is_file(follow_symlinks=False) or os.path.isfile(path):
                yield path, True
            elif os.path.lexists(path):  # not removed meanwhile
                yield path, False

    def _ignore(self, key: str) -> None:
        if key not in self.odd:
            self.odd.add(key)
            log.warning("%r in %s is no object, and is ignored", key, self._root)
