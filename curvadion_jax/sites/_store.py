"""The object store: what a run needs of it, and one error for what it refuses.

The work is `obstore`'s: connections, retries, credentials (from the environment). An
object is created whole or not at all, by one of those who want to, and never changed.
"""

import contextlib
import os
import urllib.parse
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

# A part of a large message crosses a link of 10 Mbit/s in a minute.
_TIMEOUTS: dict[str, Any] = {"timeout": "10 minutes", "connect_timeout": "10 seconds"}
_RETRIES: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}


class StoreError(OSError):
    """The store cannot be reached, or refuses a request; it may work later."""


class Store:
    """Objects by their keys, with what was moved counted in bytes.

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

    def create(self, key: str, data: bytes) -> bool:
        """Creates the object; False if there is one of this key.

        Where an answer was lost a store tells the second attempt of the same request
        that there is one: callers look whether it is their own.
        """
        with self._asked(f"write {key}"):
            try:
                self._store.put(key, data, mode="create")
            except (_exceptions().AlreadyExistsError, FileExistsError):
                return False
        self.up += len(data)
        return True

    def get(self, key: str) -> bytes | None:
        """What the object holds; None if there is none."""
        with self._asked(f"read {key}"):
            try:
                data = bytes(self._store.get(key).bytes())
            except FileNotFoundError:
                return None
        self.down += len(data)
        return data

    def keys(self, prefix: str) -> list[str]:
        """Keys below a prefix, in order."""
        return [meta["path"] for meta in self.objects(prefix)]

    def objects(self, prefix: str) -> list[dict[str, Any]]:
        """Keys, sizes and times (the store's own) of what lies below a prefix."""
        with self._asked(f"list {prefix}"):
            found = self._store.list(prefix=prefix).collect()
        return sorted(found, key=lambda meta: meta["path"])

    def delete(self, keys: list[str]) -> None:
        """Removes objects; it is no error if another has."""
        for key in keys:
            with self._asked(f"remove {key}"):
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(key)

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        with _refusals(self.url, what):
            yield
        self.answers += 1


def _opened(url: str, make: bool) -> Any:
    obstore_store = _module()
    parts = urllib.parse.urlsplit(url)
    if parts.password is not None:
        raise ValueError(
            "the URL of a run must hold no credentials: the store takes them from the "
            "environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
        )
    if parts.scheme in ("", "file"):
        path = urllib.parse.unquote(parts.path) if parts.scheme else url
        try:
            if make:
                Path(path).mkdir(parents=True, exist_ok=True)
            os.listdir(path)
        except OSError as error:
            raise StoreError(f"cannot use the folder {path}: {error}") from error
        return obstore_store.LocalStore(os.path.abspath(path))
    # Options that are given replace those of the environment, this one among them.
    names = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
    plain = any(os.environ.get(name, "").lower() in ("true", "1") for name in names)
    options = _TIMEOUTS | ({"allow_http": True} if plain else {})
    with _refusals(url, "be opened"):
        return obstore_store.from_url(
            url, client_options=options, retry_config=_RETRIES
        )


@contextlib.contextmanager
def _refusals(url: str, what: str) -> Iterator[None]:
    """One kind of error, without the request's headers and the answer's body."""
    errors = _exceptions()
    known = (errors.AlreadyExistsError, FileNotFoundError, StoreError)
    try:
        yield
    except known:
        raise
    except (errors.BaseError, OSError) as error:
        why = str(error).strip().partition("\n")[0].partition("<?xml")[0][:300]
        raise StoreError(
            f"the store {url} cannot {what}: {why} ({type(error).__name__})"
        ) from None


def _module() -> Any:
    try:
        import obstore.store
    except ImportError as error:
        raise ImportError(
            "curvadion_jax.sites needs obstore: pip install 'curvadion-jax[sites]'"
        ) from error
    return obstore.store


def _exceptions() -> Any:
    _module()
    import obstore.exceptions

    return obstore.exceptions
