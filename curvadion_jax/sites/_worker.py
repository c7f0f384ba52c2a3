"""The thread that talks to the store while steps go on.

It runs no part of a training step: it copies arrays from the devices, and computes on
the host's CPU. The main thread gives it parameters (`give`) and takes what to change in
them (`take`).
"""

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from curvadion_jax.sites._follower import Follower, Own
from curvadion_jax.sites._model import Arrays, host
from curvadion_jax.sites._store import StoreError

log = logging.getLogger("curvadion_jax.sites")

_LONGEST_PAUSE = 30.0
# To start; afterwards a store that is away is waited for, while steps go on.
_ATTEMPTS = 4


class Change(NamedTuple):
    """What becomes of a parameter: new + keep x (now - base).

    Attributes:
      leaf: which of the parameters' leaves.
      base: what progress is counted from; None leaves no progress.
      new: the outer parameter.
      counted: whether what lay before the base has been counted in a round.
    """

    leaf: int
    base: np.ndarray | None
    new: np.ndarray
    counted: bool


class Given(NamedTuple):
    """A copy of a fragment, and the outer parameters it is measured from."""

    arrays: list[jax.Array]
    anchor: Arrays
    tokens: float
    fragment: int


class Worker(threading.Thread):
    """See the module. What both threads use is guarded by `changed`.

    Attributes:
      error: what ended it.
      busy: whether something was given that is not settled.
      outcomes: how what was given ended, since the last `take`: "", "late", or why it
        was rejected, with the fragment and the tokens.
    """

    def __init__(self, make: Callable[[Any], Follower], poll: float) -> None:
        super().__init__(name="curvadion_jax.sites", daemon=True)
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.busy = False
        self.outcomes: list[tuple[Own, str]] = []
        self._follower, self._poll = make(self._settled), poll
        self._params: Arrays = []
        self._given: Given | None = None
        self._landed: Arrays = []
        self._anchor: Arrays = []
        self._bases: dict[int, np.ndarray | None] = {}
        self._told = "", 0.0
        self._ending = self._wants_snapshot = False

    @property
    def follower(self) -> Follower:
        return self._follower

    def enter(self, params: Arrays) -> Arrays:
        """Takes up the run in this thread, and returns the outer parameters."""
        self._params = params
        self.start()
        with self.changed:
            self.changed.wait_for(lambda: self._landed or self.error)
        self.check()
        return self._landed

    def check(self) -> None:
        """Raises what ended the thread."""
        if self.error is not None:
            raise self.error

    def give(self, arrays: list[jax.Array], tokens: float, fragment: int) -> bool:
        """Takes the copies over; not if something was settled since the last `take`.

        Then they hold what is counted already, and would count twice.
        """
        with self.changed:
            if self.busy or self.outcomes:
                return False
            self._given = Given(arrays, self._landed, tokens, fragment)
            self.busy = True
            self.changed.notify_all()
            return True

    def take(self) -> tuple[list[Change], list[tuple[Own, str]]]:
        """What has changed since the last call, and what became of what was given."""
        with self.changed:
            self.check()
            if self._landed is self._anchor and not self.outcomes:
                return [], []
            changes = []
            for index, (old, new) in enumerate(
                zip(self._landed, self._anchor, strict=True)
            ):
                if old is not new or index in self._bases:
                    base = self._bases.get(index, old)
                    changes.append(Change(index, base, new, index in self._bases))
            outcomes, self.outcomes = self.outcomes, []
            self._landed, self._bases = self._anchor, {}
            return changes, outcomes

    def wait(self, seconds: float) -> None:
        """Until what was given is settled, or the thread has ended."""
        with self.changed:
            self.changed.wait_for(lambda: not self.busy or self.error, seconds)

    def ask_for_snapshot(self) -> None:
        with self.changed:
            self._wants_snapshot = True
            self.changed.notify_all()

    def end(self, seconds: float) -> None:
        with self.changed:
            self._ending = True
            self.changed.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(seconds)

    def run(self) -> None:
        failures, answers, entered = 0, 0, False
        while not self._ending:
            try:
                if not entered:
                    self._follower.enter(self._params)
                    entered, self._params = True, []
                    self._publish(first=True)
                    self._follower.model.compile(self._follower.outer)
                self._turn()
                failures = 0
            except StoreError as error:
                # What was done before it failed is not done again.
                going = self._follower.store.answers > answers
                failures = 1 if going else failures + 1
                answers = self._follower.store.answers
                if not entered and failures > _ATTEMPTS:
                    return self._ended(error)
                self._tell(failures, error)
            except BaseException as error:
                return self._ended(error)
            with self.changed:
                pause = self._poll * 2 ** min(failures, 16)
                pause = min(pause, max(_LONGEST_PAUSE, self._poll))
                # After a failure news can wait.
                awake = functools.partial(self._is_awake, failures == 0)
                self.changed.wait_for(awake, pause)
        return None

    def _is_awake(self, for_news: bool) -> bool:
        news = self._given is not None or self._wants_snapshot
        return self._ending or (for_news and news)

    def _tell(self, failures: int, error: StoreError) -> None:
        """Of an error that stays, once in a while."""
        text, now = str(error), time.monotonic()
        if text != self._told[0] or now - self._told[1] > _LONGEST_PAUSE:
            self._told = text, now
            log.warning("attempt %d: %s", failures, error)

    def _turn(self) -> None:
        """Everything that can be done now."""
        follower = self._follower
        while True:
            while follower.advance():
                self._publish()
            with self.changed:
                given, self._given = self._given, None
                follower.snapshot_due |= self._wants_snapshot
                self._wants_snapshot = False
            if given is not None:
                arrays = host(given.arrays)
                follower.bring(arrays, given.anchor, given.tokens, given.fragment)
            follower.post()
            if follower.snapshot_due:
                follower.snapshot()
            if not follower.propose():
                return

    def _publish(self, first: bool = False) -> None:
        with self.changed:
            self._anchor = self._follower.outer.anchor
            if first:
                self._landed = self._anchor
            self.changed.notify_all()

    def _settled(self, own: Own, why: str) -> None:
        """Notes from where progress is counted once the round lands."""
        with self.changed:
            indices = self._follower.model.indices[own.fragment]
            for place, index in enumerate(indices if why != "late" else ()):
                self._bases[index] = None if why else self._base(own, place, index)
            self.outcomes.append((own, why))
            self.busy = False
            self._anchor = self._follower.outer.anchor
            self.changed.notify_all()

    def _base(self, own: Own, place: int, index: int) -> np.ndarray:
        landed = self._landed[index]
        if own.anchor[place] is landed:
            return own.captured[place]
        return landed + own.drift[place]  # at least float32

    def _ended(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()
