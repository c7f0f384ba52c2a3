"""A store that refuses requests, and loses answers."""

import random
from typing import Any

from obstore.exceptions import GenericError


class FaultyStore:
    """Any store of obstore, of which a share of the requests fails.

    Attributes:
        refuse, lose: Shares of requests that are refused, and whose answers are lost.
        refused: Requests that failed.
        cut_off: Whether all do.
    """

    def __init__(
        self, store: Any, *, refuse: float = 0.0, lose: float = 0.0, seed: int = 0
    ) -> None:
        self._store, self.refuse, self.lose = store, refuse, lose
        self._random = random.Random(seed)
        self.refused, self.cut_off = 0, False

    def put(self, key: str, data: bytes, **options: Any) -> Any:
        return self._ask(lambda: self._store.put(key, data, **options))

    def get(self, key: str) -> Any:
        return self._ask(lambda: self._store.get(key))

    def list(self, **options: Any) -> Any:
        return self._ask(lambda: self._store.list(**options))

    def delete(self, key: str) -> Any:
        return self._ask(lambda: self._store.delete(key))

    def _ask(self, request: Any) -> Any:
        if self.cut_off or self._random.random() < self.refuse:
            self._fail("refused")
        found = request()
        if self._random.random() < self.lose:
            self._fail("answer lost")
        return found

    def _fail(self, why: str) -> None:
        self.refused += 1
        raise GenericError(f"503 {why}")
