"""The thread that talks to the store while steps go on.

It runs no part of a training step: it copies arrays from the devices, and computes on
the host's CPU. The main thread gives it parameters (`give`) and takes what to change in
them (`take`).
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from curvadion_jax.sites import _params, _rounds
from curvadion_jax.sites._follower import Follower
from curvadion_jax.sites._messages import RunError
from curvadion_jax.sites._model import Arrays, host
from curvadion_jax.sites._params import Change
from curvadion_jax.sites._rounds import Own
from curvadion_jax.sites._store import StoreError

log = logging.getLogger("curvadion_jax.sites")

_LONGEST_PAUSE = 30.0
# Of a step; a contribution has less than 1e18.
_MOST_TOKENS = 1e15
# To start; afterwards a store that is away is waited for, while steps go on.
_ATTEMPTS = 4


class News(NamedTuple):
    """What a training loop is told.

    Attributes:
      changes: of the parameters.
      outcome: what became of what was given: "" if it was counted, "late", or why it
        was rejected; None if nothing was settled.
      number: of the next round.
      contributors: in the last one.
    """

    changes: list[Change]
    outcome: str | None
    number: int
    contributors: int


class Given(NamedTuple):
    """A copy of a fragment, and the outer parameters it is measured from."""

    arrays: list[Any]
    anchor: Any
    tokens: float
    fragment: int


class Worker(threading.Thread):
    """See the module. What both threads use is guarded by `changed`."""

    def __init__(self, make: Callable[[Any], Follower], poll: float) -> None:
        super().__init__(name="curvadion_jax.sites", daemon=True)
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self._follower, self._poll = make(self._settled), poll
        self._params: Arrays = []
        self._given: Given | None = None
        self._busy = False
        # What is known, and of that what the main thread has taken.
        self._anchor: Arrays = []
        self._number = self._contributors = 0
        self._outcome: str | None = None
        self._bases: dict[int, np.ndarray | None] = {}
        self._taken: tuple[Sequence[np.ndarray | None], int] = [], 0
        self._told = "", 0.0
        self._ending = self._wants_snapshot = False

    @property
    def bytes(self) -> tuple[int, int]:
        """Written to and read from the store."""
        return self._follower.store.up, self._follower.store.down

    def enter(self, params: Arrays) -> News:
        """Takes up the run in this thread; the news are all of the outer parameters."""
        self._params, self._taken = params, ([None] * len(params), -1)
        self.start()
        with self.changed:
            self.changed.wait_for(lambda: self._anchor or self.error or self._ending)
            if not (self._anchor or self.error):
                raise RunError("this site was closed before it had started")
            return self._take()

    @property
    def has_news(self) -> bool:
        """Whether `take` returns some, or raises what has ended the thread."""
        with self.changed:
            anchor, number = self._taken
            old = anchor is self._anchor and number == self._number
            return not old or self._outcome is not None or self.error is not None

    def take(self) -> News | None:
        """What is new since the last call, in which all was taken."""
        return self._take() if self.has_news else None

    def _take(self) -> News:
        with self.changed:
            if self.error is not None:
                raise self.error
            changes = []
            for index, (old, new) in enumerate(
                zip(self._taken[0], self._anchor, strict=True)
            ):
                if old is not new or index in self._bases:
                    base = self._bases.get(index, old)
                    changes.append(Change(index, base, new, index in self._bases))
            outcome, self._outcome = self._outcome, None
            self._taken, self._bases = (self._anchor, self._number), {}
            return News(changes, outcome, self._number, self._contributors)

    def counted(self, tokens: Any) -> float:
        """The tokens of a step."""
        found = float(tokens)
        if not 0 < found < _MOST_TOKENS:
            raise ValueError(
                f"tokens must be positive and finite, got {found}; of a step less than "
                f"{_MOST_TOKENS:g}"
            )
        return found

    def give(self, arrays: list[Any], tokens: float, fragment: int) -> None:
        """Takes a copy over; the outcome of the last one must have been taken.

        Else this one holds what is counted already, and would count twice.
        """
        self.take_over(_params.copies(arrays), tokens, fragment)

    def take_over(self, arrays: list[Any], tokens: float, fragment: int) -> None:
        """As `give`, of arrays that are nobody else's: nothing is copied."""
        with self.changed:
            self._given = Given(arrays, self._taken[0], tokens, fragment)
            self._busy = True
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until what was given is settled, or the thread has ended."""
        with self.changed:
            self.changed.wait_for(
                lambda: not self._busy or self.error or self._ending, seconds
            )

    def agreed(self, decision: bool) -> bool:
        """A decision, as all processes of the site make it."""
        return decision

    def ask_for_snapshot(self) -> None:
        with self.changed:
            self._wants_snapshot = True
            self.changed.notify_all()

    def leave(self) -> None:
        """Tells the others not to wait for this site any more."""
        follower = self._follower
        key = _rounds.member_key(follower.name, follower.incarnation, "left")
        try:
            follower.store.create(key, b"{}")
        except StoreError as error:
            text = "the others take %s for one that crashed: %s"
            log.warning(text, follower.name, error)

    def end(self, seconds: float) -> None:
        with self.changed:
            self._ending = True
            self.changed.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(seconds)

    def run(self) -> None:
        failures, done, entered = 0, 0, False
        while not self._ending:
            try:
                if not entered:
                    self._follower.enter(self._params)
                    entered, self._params = True, []
                    self._publish()
                    self._follower.model.compile(self._follower.outer)
                self._turn()
                failures = 0
            except StoreError as error:
                # What was done before it failed is not done again.
                follower, before = self._follower, done
                done = follower.store.answers if entered else follower.progress
                failures = 1 if done > before else failures + 1
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

    def _publish(self) -> None:
        follower = self._follower
        with self.changed:
            self._anchor, self._number = follower.outer.anchor, follower.number
            self._contributors = len(follower.contributors)
            self.changed.notify_all()

    def _settled(self, own: Own, why: str) -> None:
        """Notes from where progress is counted once the round lands."""
        with self.changed:
            indices = self._follower.model.indices[own.fragment]
            for place, index in enumerate(indices if why != "late" else ()):
                self._bases[index] = None if why else self._base(own, place, index)
            self._outcome, self._busy = why, False
            self._publish()

    def _base(self, own: Own, place: int, index: int) -> np.ndarray:
        landed = self._taken[0][index]
        if landed is None or own.anchor[place] is landed:
            return own.captured[place]
        return landed + own.drift[place]  # at least float32

    def _ended(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()
