"""The object store of a run, and the messages in it.

A message is one line of JSON, its header, and then the bytes of its arrays: little
endian, in C order. The reader knows their shapes and dtypes, and nothing is unpickled.
The header has digests of itself and of the arrays. Arrays above 64 MiB lie in objects
of their own, written before the message.

`obstore` does the work: connections, credentials, and retries of requests that end in
an answer 5xx, a lost connection or, where they only read, a timeout. `_attempts` covers
the rest: a create that is refused although no object is there (S3 answers 409 where
conditional writes collide), and an object that exists and is not found yet (network
file systems, caches).
"""

import contextlib
import hashlib
import json
import os
import random
import re
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np

FORMAT = 1
# Bytes of arrays in one object; S3 takes at most 5 GiB in one request.
PART = 2**26
# The largest header, commit or description of a run.
HEADER = 2**22
# A part crosses a link of 10 Mbit/s in a minute.
_TIMEOUTS: dict[str, Any] = {"timeout": "10 minutes", "connect_timeout": "10 seconds"}
_RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
# Seconds before the second attempt, and attempts: five seconds in all.
_PAUSE, _ATTEMPTS = 0.1, 6


class StoreError(OSError):
    """The store cannot be reached, or refuses a request; it may work later."""


class RunError(RuntimeError):
    """This site cannot continue with the run; the other sites do."""


class InvalidError(RunError):
    """An object is not what it should be; the text says why."""


class Store:
    """Objects by their keys. An object is created whole, once, and never changed.

    Attributes:
      url: for messages.
      up, down: bytes written and read.
      answers: requests that did not fail.
    """

    def __init__(self, given: Any, make: bool = True) -> None:
        given = os.fspath(given) if isinstance(given, os.PathLike) else given
        self.url = given if isinstance(given, str) else type(given).__name__
        self._store = _opened(given, make) if isinstance(given, str) else given
        self.up = self.down = self.answers = 0

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Creates the object unless there is one; whether it now holds this data.

        A store may say that there is one because this very request arrived before and
        its answer was lost, or because another request is under way. So the object is
        read, and created again if it is not there.
        """
        for _ in _attempts():
            with self._request(f"write {key}"):
                try:
                    self._store.put(key, data, mode="create")
                    self.up += len(data)
                    return True
                except (_obstore().exceptions.AlreadyExistsError, FileExistsError):
                    pass
            try:
                if (found := self.get(key, len(data))) is not None:
                    return found == data
            except InvalidError:  # a larger object
                return False
        raise StoreError(
            f"the store {self.url} neither creates nor has {key}: it says that there "
            "is one, and then finds none"
        )

    def get(self, key: str, at_most: int, exists: bool = False) -> bytes | None:
        """What the object holds; None if there is none.

        One that is known to exist is looked for repeatedly. One that has more bytes
        than `at_most` is not read, and is an `InvalidError`.
        """
        for _ in _attempts() if exists else range(1):
            with self._request(f"read {key}"), contextlib.suppress(FileNotFoundError):
                found = self._store.get(key)
                if (size := found.meta["size"]) > at_most:
                    raise InvalidError(f"it has {size} bytes, and not {at_most}")
                data = bytes(found.bytes())
                self.down += len(data)
                return data
        return None

    def keys(self, prefix: str) -> list[str]:
        """Keys below a prefix, in order."""
        return [meta["path"] for meta in self.objects(prefix)[0]]

    def objects(self, prefix: str) -> tuple[list[dict[str, Any]], int]:
        """Keys, sizes and times (the store's) of the objects below a prefix.

        Also the number of names that no object of a run can have. On S3 the names
        that come after such a name on its page are missing.
        """
        found, strays = [], 0
        with self._request(f"list {prefix}"):
            # One by one: an error ends a chunk.
            listing = iter(self._store.list(prefix=prefix, chunk_size=1))
            while strays < 1000:
                try:
                    found += next(listing)
                except _obstore().exceptions.InvalidPathError:
                    strays += 1
                except StopIteration:
                    break
        return sorted(found, key=lambda meta: meta["path"]), strays

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; it is no error if one is gone."""
        for key in keys:
            with self._request(f"remove {key}"), contextlib.suppress(FileNotFoundError):
                self._store.delete(key)

    @contextlib.contextmanager
    def _request(self, what: str) -> Iterator[None]:
        with _one_error(self.url, what):
            yield
        self.answers += 1


def write(
    store: Store, key: str, header: dict[str, Any], arrays: Sequence[np.ndarray]
) -> tuple[bool, str]:
    """Creates a message unless there is one; whether it is there now, and its digest.

    That is the header's, and so of all of it.
    """
    parts = _parts(b"".join(as_bytes(x) for x in arrays))
    head = seal(header | {"parts": [_sha256(part) for part in parts]})
    digest = unseal(head)["sha256"]
    if len(parts) > 1:
        for index, part in enumerate(parts):
            store.create(_part_key(key, digest, index), part)
        parts = []
    return store.create(key, b"\n".join([head, b"".join(parts)])), digest


def read(
    store: Store, key: str, kind: str, run: str, shapes: Sequence[jax.ShapeDtypeStruct]
) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Header and arrays of a message that is known to exist; None if it is gone.

    Raises:
      InvalidError: if it is damaged, or of another kind, run or size.
    """
    sizes = [x.size * x.dtype.itemsize for x in shapes]
    count = -(-sum(sizes) // PART)
    data = store.get(key, HEADER + (sum(sizes) if count <= 1 else 0), exists=True)
    if data is None:
        return None
    head, _, body = data.partition(b"\n")
    header = unseal(head)
    for name, wanted in (("kind", kind), ("run", run)):
        if header.get(name) != wanted:
            raise InvalidError(f"its {name} is {header.get(name)!r}, and not {wanted}")
    digests = header.get("parts")
    if not isinstance(digests, list) or len(digests) != count:
        raise InvalidError("its arrays are not as large as the run's")
    if count > 1:
        body = bytearray()
        for index in range(count):
            part = store.get(_part_key(key, header["sha256"], index), PART, exists=True)
            if part is None:
                return None
            body += part
    if len(body) != sum(sizes):
        raise InvalidError(f"it has {len(body)} bytes of arrays, and not {sum(sizes)}")
    if [_sha256(part) for part in _parts(body)] != digests:
        raise InvalidError("its bytes are not those of its digest")
    ends = np.cumsum([0, *sizes])
    return header, [
        np.frombuffer(body, x.dtype, x.size, first).reshape(x.shape)
        for x, first in zip(shapes, ends, strict=False)
    ]


def seal(header: dict[str, Any]) -> bytes:
    """JSON with its own digest and format."""
    header = {"format": FORMAT} | header
    digest = _sha256(json.dumps(header).encode())
    return json.dumps({"sha256": digest} | header).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """What `seal` made, the digest included."""
    try:
        found = json.loads(data)
        header = {name: x for name, x in found.items() if name != "sha256"}
        digest = _sha256(json.dumps(header).encode())
    except (ValueError, AttributeError, RecursionError) as error:
        raise InvalidError("it is no JSON object") from error
    if (number := found.get("format")) != FORMAT:
        newer = isinstance(number, int) and number > FORMAT
        raise InvalidError(
            f"it is of format {number!r:.20}, and this curvadion_jax reads {FORMAT}"
            + (": upgrade it" if newer else "")
        )
    if found.get("sha256") != digest:
        raise InvalidError("its bytes are not those of its digest")
    return found


def as_bytes(x: np.ndarray) -> memoryview:
    """The bytes of an array, of any dtype."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _parts(body: bytes | bytearray) -> list[memoryview]:
    view = memoryview(body)
    return [view[first : first + PART] for first in range(0, len(body), PART)]


def _part_key(key: str, digest: str, index: int) -> str:
    return f"parts/{key}/{digest}/{index:06d}"


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _attempts() -> Iterator[int]:
    """Numbers of attempts, with longer and longer pauses between.

    They differ at random, so that sites that collided do not collide again.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * 2**attempt * random.uniform(0.5, 1))
        yield attempt


def _opened(url: str, make: bool) -> Any:
    stores = _obstore().store
    parts = urllib.parse.urlsplit(url)
    if parts.scheme in ("", "file"):
        path = urllib.parse.unquote(parts.path) if parts.scheme else url
        try:
            if make:
                Path(path).mkdir(parents=True, exist_ok=True)
            os.listdir(path)
        except OSError as error:
            raise StoreError(f"cannot use the folder {path}: {error}") from error
        return stores.LocalStore(os.path.abspath(path), automatic_cleanup=True)
    # Azure's own form is abfs://container@account.dfs.core.windows.net.
    user = parts.username is not None and not parts.scheme.startswith("abfs")
    if user or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            "The URL of a run must have no user, query or fragment, which may hold "
            "credentials. Give them in the environment (AWS_ACCESS_KEY_ID, "
            "AZURE_STORAGE_SAS_KEY, ...)."
        )
    # Options that are given replace those of the environment, this one among them.
    names = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
    plain = any(os.environ.get(name, "").lower() in ("true", "1") for name in names)
    options = _TIMEOUTS | ({"allow_http": True} if plain else {})
    with _one_error(url, "be opened"):
        return stores.from_url(url, client_options=options, retry_config=_RETRIES)


@contextlib.contextmanager
def _one_error(url: str, what: str) -> Iterator[None]:
    """One kind of error, without queries (they may hold a signature) and bodies."""
    try:
        yield
    except (StoreError, InvalidError):
        raise
    except (_obstore().exceptions.BaseError, OSError) as error:
        why = str(error).strip().partition("\n")[0].partition("<?xml")[0]
        why = re.sub(r"\?\S*", "?...", why)[:300]
        raise StoreError(
            f"the store {url} cannot {what}: {why} ({type(error).__name__})"
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
