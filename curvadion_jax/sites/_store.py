"""The object store of a run, and the messages in it.

A message is an object of JSON, its header, and for its arrays another object, its body:
their bytes, little endian and in C order, which are written first. The header has a
digest of the body, and one of itself, its key and its run. The reader knows shapes and
dtypes, and nothing is unpickled.

`obstore` repeats requests that fail on their way. `attempts` covers the rest: a create
that is refused although there is no object (S3 answers 409 when conditional writes
collide), and an object that exists and is not found yet, or is read in part (network
file systems, caches).
"""

import hashlib
import itertools
import json
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curvadion_jax.sites._folder import Folder

FORMAT = 3
# Bytes of the largest header.
HEADER = 2**22
# Bytes in one request: 5 Mbit/s carry them in the 30 seconds that obstore gives it.
PIECE = 2**24
_RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
# Seconds before the second attempt, and attempts: five seconds in all.
_PAUSE, _ATTEMPTS = 0.1, 6


class StoreError(OSError):
    """The store cannot be reached, or refuses a request; it may work later."""


class InvalidError(RuntimeError):
    """An object is not what it should be."""


class Store:
    """Objects by their keys. An object is created whole, once, and never changed.

    Members' objects alone are replaced. Their versions say that a site is alive.
    """

    def __init__(self, given: Any) -> None:
        given = os.fspath(given) if isinstance(given, os.PathLike) else given
        self.url = given if isinstance(given, str) else type(given).__name__
        self._store = _opened(given) if isinstance(given, str) else given
        self._folder = _folder_of(self._store)
        self.run = ""  # the digest of the run's description, which messages have
        self.up = self.down = 0  # bytes written and read
        # Thread -> its request that is under way: a number, and pieces that are sent.
        self.under_way: dict[int, list[int]] = {}
        self._numbers = itertools.count()

    @property
    def ignored(self) -> int:
        """Entries of a folder that are no objects."""
        return len(self._folder.odd) if self._folder else 0

    def create(self, key: str, data: bytes) -> bool:
        """Creates the object unless there is one. Returns whether it holds this data.

        A store may say that there is one because this very request arrived before and
        its answer was lost, or because another request is under way. So the object is
        read, and created again if it is not there.
        """
        there = _obstore().exceptions.AlreadyExistsError, FileExistsError
        self._make_room(key)
        for _ in attempts():
            with self._request(f"write {key}"), suppress(*there):
                self._store.put(key, data, mode="create")
                self.up += len(data)
                return True
            try:
                if (found := self.get(key, len(data))) is not None:
                    return found == data
            except InvalidError:  # a larger object
                return False
        raise StoreError(
            f"The store {self.url} neither creates nor finds {key}. It says that the "
            "object exists, and then that it does not."
        )

    def get(self, key: str, at_most: int) -> bytes | None:
        """The bytes of an object; None if there is none.

        One of more than `at_most` bytes is not read and raises an `InvalidError`.
        """
        found = self._pieces(key, at_most)
        return None if found is None else b"".join(found)

    def _pieces(self, key: str, at_most: int) -> Iterator[bytes] | None:
        """The bytes of an object, not all at once; None if there is none."""
        if self._folder and self._folder.odd_at(key) is not None:
            return None
        with self._request(f"read {key}"), suppress(FileNotFoundError):
            found = self._store.get(key)
            if (size := found.meta["size"]) > at_most:
                raise InvalidError(f"{key} has {size} bytes, and not {at_most}.")
            if size <= PIECE:
                self.down += size
                return iter([bytes(found.bytes())])
            return self._in_ranges(key, size)
        return None

    def _in_ranges(self, key: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, PIECE):
            end = min(start + PIECE, size)
            try:
                with self._request(f"read {key}"):
                    piece = bytes(self._store.get_range(key, start=start, end=end))
            except FileNotFoundError:
                raise InvalidError(f"{key} was removed while it was read.") from None
            self.down += end - start
            yield piece

    def keys(self, prefix: str) -> list[str]:
        """Keys below a prefix, sorted."""
        with self._request(f"list {prefix}"):
            if self._folder:
                return sorted(self._folder.keys(prefix))
            listing = self._store.list(prefix=prefix)
            return sorted(meta["path"] for chunk in listing for meta in chunk)

    def replace(self, key: str, data: bytes) -> None:
        """Writes an object, whether there is one or not."""
        self._make_room(key)
        with self._request(f"write {key}"):
            self._store.put(key, data)
        self.up += len(data)

    def versions(self, prefix: str) -> dict[str, str]:
        """Keys below a prefix, each with a text that changes when it is replaced."""
        if self._folder:
            return {key: self._folder.version(key) for key in self.keys(prefix)}
        with self._request(f"list {prefix}"):
            listing = self._store.list(prefix=prefix)
            return {
                meta["path"]: f"{meta.get('e_tag')} {meta.get('last_modified')}"
                for chunk in listing
                for meta in chunk
            }

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._folder and self._folder.odd_at(key) is not None:
                continue  # A link, which leads to something that is not the run's.
            with self._request(f"remove {key}"), suppress(FileNotFoundError):
                self._store.delete(key)

    def write(
        self, key: str, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> None:
        """Creates a message unless there is one."""
        parts = [as_bytes(x) for x in arrays]
        size, digest = sum(map(len, parts)), hashlib.sha256()
        for part in parts:
            digest.update(part)
        header = self._sealed(key, header | {"body": digest.hexdigest()})
        if size:  # overwrites the same bytes, since the digest is in its key
            body_key = _body_key(key, header)
            self._make_room(body_key)
            with self._request(f"write the body of {key}") as request:
                if size <= PIECE:
                    self._store.put(body_key, b"".join(parts))
                else:  # piece by piece, so that there is no copy of all
                    self._store.put(
                        body_key,
                        _pieces_of(parts, request),
                        chunk_size=PIECE,
                        max_concurrency=2,
                    )
            self.up += size
        self.create(key, json.dumps(header).encode())

    def read(
        self,
        key: str,
        shapes: Sequence[jax.ShapeDtypeStruct] = (),
        exists: bool = False,
    ) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        """Header and arrays of a message; None if it is not there, or its body is not.

        A message that is damaged, or known to exist and not found, is read again.

        Raises:
          InvalidError: if it is damaged, belongs elsewhere, or has another size.
        """
        damage = None
        for _ in attempts():
            try:
                found, damage = self.look(key, shapes), None
            except InvalidError as error:
                damage = error
                continue
            if found is not None or not exists:
                return found
        if damage is not None:
            # Nobody can do without a message without arrays, such as a commit.
            advice = " Use the version that began the run, or begin one at another URL."
            raise InvalidError(f"{damage}{'' if shapes else advice}")
        return None

    def look(
        self, key: str, shapes: Sequence[jax.ShapeDtypeStruct] = ()
    ) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        """`read`, without a second attempt."""
        if (header := self.header(key)) is None:
            return None
        arrays = [np.empty(x.shape, x.dtype) for x in shapes]
        size, digest = sum(x.nbytes for x in arrays), hashlib.sha256()
        pieces = self._pieces(_body_key(key, header), size) if size else iter(())
        if pieces is None:
            return None
        if _fill(arrays, pieces, digest) != size or digest.hexdigest() != header.get(
            "body"
        ):
            raise InvalidError(f"{key} has a body that does not match its digest.")
        return header, arrays

    def header(self, key: str) -> dict[str, Any] | None:
        """The header of a message; None if it is not there."""
        if (data := self.get(key, HEADER)) is None:
            return None
        header, sealed = {}, False
        with suppress(ValueError, AttributeError, RecursionError):
            header = json.loads(data)
            sealed = header == self._sealed(key, header)
        if not sealed:
            raise InvalidError(
                f"{key} is damaged, or of another run, place or version of the library."
            )
        return header

    @contextmanager
    def _request(self, what: str) -> Iterator[list[int]]:
        """Around one request of this thread; gives what `under_way` has of it."""
        thread, request = threading.get_ident(), [next(self._numbers), 0]
        self.under_way[thread] = request
        try:
            with _one_error(self.url, what):
                yield request
        finally:
            del self.under_way[thread]

    def _make_room(self, key: str) -> None:
        odd = self._folder.make_room(key) if self._folder else None
        if odd is not None:
            raise StoreError(
                f"{odd} in {self.url} is a link, or no file and no empty folder. "
                "Remove it; a run's folder may be a link, and nothing in it."
            )

    def _sealed(self, key: str, header: dict[str, Any]) -> dict[str, Any]:
        """The header with its digest, which holds in this place of this run alone."""
        own = {name: x for name, x in header.items() if name != "sha256"}
        place = json.dumps([FORMAT, self.run, key, own])
        return {"sha256": _sha256(place.encode())} | own


def as_bytes(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _pieces_of(parts: list[memoryview], request: list[int]) -> Iterator[bytes]:
    """Pieces of what a request writes, which it counts."""
    for part in parts:
        for start in range(0, len(part), PIECE):
            request[1] += 1
            yield bytes(part[start : start + PIECE])


def _fill(arrays: Sequence[np.ndarray], pieces: Iterable[bytes], digest: Any) -> int:
    """Copies bytes into arrays, one after the other; returns how many there are."""
    targets = [as_bytes(x) for x in arrays]
    size = 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        rest = memoryview(piece)
        while rest and targets:
            count = min(len(rest), len(targets[0]))
            targets[0][:count], rest = rest[:count], rest[count:]
            targets[0] = targets[0][count:]
            if not targets[0]:
                targets.pop(0)
    return size


def _body_key(key: str, header: dict[str, Any]) -> str:
    return f"bodies/{key}/{header['sha256']}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def attempts() -> Iterator[int]:
    """Numbers of attempts, with longer and longer pauses between.

    Pauses are random, so that sites that collided do not collide again.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * 2**attempt * random.uniform(0.5, 1))
        yield attempt


def _opened(url: str) -> Any:
    url = url if re.match(r"\w\w+:/", url) else Path(url).absolute().as_uri()
    parts = urllib.parse.urlsplit(url)
    # Azure's own form is abfs://container@account. A password may hold slashes.
    user = "@" in re.sub("^(file:.*|abfss?://[^:/@]*@)", "", url)
    if user or parts.query or parts.fragment:
        raise ValueError(
            "The URL of a run must have no user, query or fragment, which may hold "
            "credentials. Give them in the environment (AWS_ACCESS_KEY_ID, "
            "AZURE_STORAGE_SAS_KEY, ...)."
        )
    options: Any = {"retry_config": _RETRIES}
    if parts.scheme == "file":
        options = {"mkdir": True, "automatic_cleanup": True}
    with _one_error(url, "be opened"):
        return _obstore().store.from_url(url, **options)


def _folder_of(store: Any) -> Folder | None:
    """The folder of a store that is one."""
    is_local = isinstance(store, _obstore().store.LocalStore)
    return Folder(Path(store.prefix)) if is_local and store.prefix else None


@contextmanager
def _one_error(url: str, what: str) -> Iterator[None]:
    """One kind of error, without queries (they may hold a signature) and bodies."""
    errors = _obstore().exceptions.BaseError, OSError
    try:
        yield
    except errors as error:
        why = str(error).strip().partition("\n")[0].partition("<?xml")[0]
        why = re.sub(r"\?\S*", "?...", why)[:300]
        advice = "Check its address, your credentials and the connection."
        if "http://" in why and "builder error" in why:  # before it asks anybody
            advice = "Set AWS_ALLOW_HTTP=true for an endpoint of http, or use https."
        raise StoreError(
            f"The store {url} cannot {what}: {why} ({type(error).__name__}). {advice}"
        ) from None


def _obstore() -> Any:
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ImportError(
            "curvadion_jax.sites needs obstore. Run: pip install obstore."
        ) from error
    return obstore
