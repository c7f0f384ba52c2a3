"""What in a folder is no object: it is ignored and counted.

`obstore` lists nothing of a folder in which one entry is odd: a link to itself, or a
name that is not UTF-8. It reads a pipe until somebody writes to it, and follows links
out of the folder. A shared folder has more users than the run, so sites look at its
entries themselves. The folder may be a link, and nothing in it.
"""

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__package__)

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
        if (link := self._link(prefix.rstrip("/"))) is not None:
            self._ignore(link)
            return found
        for path, is_file in self._entries(self._root / prefix):
            key = path.relative_to(self._root).as_posix()
            if is_file and _KEY.fullmatch(key):
                found.append(key)
            elif not _UPLOAD.fullmatch(path.name):
                self._ignore(key)
        return found

    def version(self, key: str) -> str:
        """A text that changes when an object is replaced; "" if there is none."""
        with suppress(OSError):
            found = (self._root / key).lstat()
            return f"{found.st_ino} {found.st_mtime_ns}"
        return ""

    def odd_at(self, key: str) -> str | None:
        """What lies at a key, or at a folder of its path, and is no such thing."""
        odd = self._link(key)
        if odd is None:
            try:
                is_file = stat.S_ISREG((self._root / key).lstat().st_mode)
            except OSError:  # not there, or the request will say why
                return None
            odd = None if is_file else key
        if odd is not None:
            self._ignore(odd)
        return odd

    def make_room(self, key: str) -> str | None:
        """Removes an empty folder from a key, and a link from where a folder of its
        path belongs. Returns what else is in its way.

        A link at the key itself stays: meanwhile there may be another site's commit. So
        does one to all of a kind, such as `bodies`, which somebody may have wanted.
        """
        odd = self.odd_at(key)
        with suppress(OSError):
            if odd == key:
                (self._root / key).rmdir()
            elif odd is not None and "/" in odd:
                (self._root / odd).unlink()  # which fails for a folder
        return self.odd_at(key)

    def _link(self, key: str) -> str | None:
        """The first part of a path that is a link."""
        parts = key.split("/") if key else []
        for count in range(1, len(parts) + 1):
            part = "/".join(parts[:count])
            if os.path.islink(self._root / part):
                return part
        return None

    def _entries(self, folder: Path) -> Iterator[tuple[Path, bool]]:
        """Paths below a folder that are no folders, and whether they are files."""
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
            elif entry.is_file(follow_symlinks=False):
                yield path, True
            elif os.path.lexists(path):  # not removed meanwhile
                yield path, False

    def _ignore(self, key: str) -> None:
        if key not in self.odd:
            self.odd.add(key)
            log.warning("%r in %s is no object, and is ignored", key, self._root)
