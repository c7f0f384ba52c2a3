"""Signs of life, from which a site knows whom a round need not wait for.

A site that trains sends nothing between its contributions, and neither does one that
was killed. So from a thread of its own every site renews its object in `members/`,
four times in each `grace` and at least every 10 seconds, and looks at the others'
objects. Clocks are not compared: a site is silent if its object is the same at several
looks of this one. One that has joined again needs time for its first steps, and is
silent until it has contributed.
"""

import threading
from contextlib import suppress

from curvadion_jax.sites import _run
from curvadion_jax.sites._store import Store, StoreError

# Looks in one `grace`. Who dies is seen once more, and then not at all the others.
_LOOKS = 4
# Seconds between looks: at most.
_PAUSE = 10.0


class Heart(threading.Thread):
    """See the module. It never raises: the thread that follows the run does."""

    def __init__(self, store: Store, name: str, incarnation: int, grace: float) -> None:
        super().__init__(name="curvadion_jax.sites.heart", daemon=True)
        self._store, self._name, self._incarnation = store, name, incarnation
        self._pause = min(grace / _LOOKS, _PAUSE) or _PAUSE
        # Of each member how often it has joined, the version of its object, and looks
        # since both were others.
        self._seen: dict[str, tuple[tuple[int, str], int]] = {}
        self._joined_again: set[str] = set()  # and has not contributed since
        self._ended = threading.Event()

    def beat(self) -> None:
        """Renews this site's object, and looks at the others'."""
        _run.renew(self._store, self._name, self._incarnation)
        found = _run.versions(self._store)
        for name in found.keys() | self._seen.keys():
            known, looks = self._seen.get(name, ((0, ""), 0))
            version = found.get(name, known)  # a listing may lack it
            self._seen[name] = version, looks + 1 if version == known else 0
            if 0 < known[0] < version[0]:
                self._joined_again.add(name)

    def is_silent(self, name: str) -> bool:
        """Whether a site is not waited for.

        It has given no sign of life for about `grace`, or 40 seconds if that is less,
        or has joined again and not contributed yet.
        """
        _, looks = self._seen.get(name, (None, 0))
        return looks >= _LOOKS - 1 or name in self._joined_again

    def contributed(self, name: str) -> None:
        """A site that has joined again is at work."""
        self._joined_again.discard(name)

    def run(self) -> None:
        while not self._ended.wait(self._pause):
            with suppress(StoreError):
                self.beat()

    def end(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join(_PAUSE)
