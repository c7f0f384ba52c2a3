"""A store that refuses requests, answers late, and loses answers."""

import random
import time
from typing import Any

from obstore.exceptions import GenericError


class FaultyStore:
    """Any store of obstore, with the faults of a network before it.

    Attributes:
        refused: requests that failed.
        cut_off: whether all do.
    """

    def __init__(
        self,
        store: Any,
        *,
        refuse: float = 0.0,
        lose: float = 0.0,
        seconds: float = 0.0,
        bytes_per_second: float = float("inf"),
        seed: int = 0,
    ) -> None:
        """Wraps a store.

        Args:
            store: What does the work.
            refuse: Share of the requests that fail before they reach it.
            lose: Share of those that fail after it has done what it was asked.
            seconds: Time that every request takes before it reaches it.
            bytes_per_second: Of what is written and read.
            seed: Of the faults.
        """
        self._store, self._refuse, self._lose = store, refuse, lose
        self._seconds, self._rate = seconds, bytes_per_second
        self._random = random.Random(seed)
        self.refused, self.cut_off = 0, False

    def put(self, key: str, data: bytes, **options: Any) -> Any:
        return self._ask(len(data), lambda: self._store.put(key, data, **options))

    def get(self, key: str) -> Any:
        found = self._ask(0, lambda: self._store.get(key))
        self._pause(found.meta["size"])
        return found

    def list(self, **options: Any) -> Any:
        return self._ask(0, lambda: self._store.list(**options))

    def delete(self, key: str) -> Any:
        return self._ask(0, lambda: self._store.delete(key))

    def _ask(self, size: int, request: Any) -> Any:
        time.sleep(self._seconds)
        self._pause(size)
        if self.cut_off or self._random.random() < self._refuse:
            self._fail("refused")
        found = request()
        if self._random.random() < self._lose:
            self._fail("answer lost")
        return found

    def _pause(self, size: int) -> None:
        if size and self._rate < float("inf"):
            time.sleep(size / self._rate)

    def _fail(self, why: str) -> None:
        self.refused += 1
        raise GenericError(f"503 {why}")
