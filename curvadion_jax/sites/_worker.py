"""The thread that talks to the store while steps go on, and what it hands over.

It runs no part of a training step: it copies arrays from the devices, and computes on
the host's CPU. The main thread gives it parameters (`submit`) and takes what to change
in them (`take`).
"""

import logging
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax.sites._follower import Follower
from curvadion_jax.sites._model import Arrays, to_host
from curvadion_jax.sites._rounds import Contribution
from curvadion_jax.sites._store import RunError, StoreError

log = logging.getLogger("curvadion_jax.sites")

_LONGEST_PAUSE = 30.0
# To start; afterwards a store that is away is waited for, while steps go on.
_ATTEMPTS = 4


class Update(NamedTuple):
    """What a training loop learns: parameters become new + keep x (now - base).

    Attributes:
      number: of the open round.
      contributors: in the round before.
      outcome: of what was submitted: "" if it counted, "late", or why it was rejected;
        None if nothing was decided.
      new: the outer parameters; None if parameters stay as they are.
      base: from where progress is counted; None leaves no progress.
    """

    number: int
    contributors: int
    outcome: str | None
    new: Arrays | None
    base: Arrays | None


class Worker(threading.Thread):
    """See the module. What both threads use is guarded by `changed`."""

    def __init__(self, follower: Follower) -> None:
        super().__init__(name="curvadion_jax.sites", daemon=True)
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self._follower, self._poll = follower, follower.settings.poll
        follower.on_outcome = self._on_outcome
        self._params: Arrays = []
        # Parameters, the anchor that they are measured from, and tokens.
        self._submitted: tuple[list[Any], Arrays, float] | None = None
        self._busy = self._ending = False
        # What is known, and of that what the main thread has taken.
        self._known: tuple[int, int, Arrays] = 0, 0, []
        self._taken = self._known
        self._outcome: str | None = None
        self._base: Arrays | None = None
        self._warned = "", 0.0

    def enter(self, params: Arrays) -> Update:
        """Takes up the run in this thread; returns all of the outer parameters."""
        self._params = params
        self.start()
        with self.changed:
            self.changed.wait_for(lambda: self.has_update or self._ending)
            if (update := self.take()) is None:
                raise RunError("This site was closed before it had started.")
            return update

    @property
    def has_update(self) -> bool:
        """Whether `take` returns one, or raises what has ended the thread."""
        return self._known is not self._taken or self.error is not None

    def take(self) -> Update | None:
        """What is new since the last call, in which all was taken."""
        with self.changed:
            if self.error is not None:
                raise self.error
            if not self.has_update:
                return None
            (*_, old), (number, contributors, new) = self._taken, self._known
            outcome, base = self._outcome, self._base
            if outcome in (None, "late"):  # all progress is still to be counted
                new, base = None if new is old else new, old or None
            self._taken, self._outcome, self._base = self._known, None, None
            return Update(number, contributors, outcome, new, base)

    def submit(self, arrays: list[Any], tokens: float) -> None:
        """Takes arrays over, which nobody else has.

        The outcome of the last ones must have been taken. Else these hold what has
        counted already, and it would count twice.
        """
        with self.changed:
            self._submitted, self._busy = (arrays, self._taken[2], tokens), True
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until what was submitted is decided, or the thread has ended."""
        with self.changed:
            self.changed.wait_for(
                lambda: not self._busy or self.error or self._ending, seconds
            )

    def end(self, seconds: float) -> None:
        with self.changed:
            self._ending = True
            self.changed.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(seconds)

    def run(self) -> None:
        failures, done, started = 0, 0, False
        follower = self._follower
        while not self._ending:
            try:
                if not started:
                    follower.start(self._params)
                    started, self._params = True, []
                    self._publish()
                self._turn()
                failures = 0
            except StoreError as error:
                # What was done before it failed is not done again.
                before = done
                done = follower.store.answers if started else follower.progress
                failures = 1 if done > before else failures + 1
                if not started and failures > _ATTEMPTS:
                    return self._ended(error)
                self._warn(failures, error)
            except BaseException as error:
                return self._ended(error)
            pause = self._poll * 2 ** min(failures, 16)
            with self.changed:  # after a failure a new contribution can wait
                self.changed.wait_for(
                    lambda: self._ending or (self._submitted and not failures),  # noqa: B023
                    min(pause, max(_LONGEST_PAUSE, self._poll)),
                )
        return None

    def _warn(self, failures: int, error: StoreError) -> None:
        """Of an error that stays, once in a while."""
        text, now = str(error), time.monotonic()
        if text != self._warned[0] or now - self._warned[1] > _LONGEST_PAUSE:
            self._warned = text, now
            log.warning("attempt %d: %s", failures, error)

    def _turn(self) -> None:
        """Everything that can be done now."""
        follower = self._follower
        while True:
            while follower.advance():
                self._publish()
            with self.changed:
                given, self._submitted = self._submitted, None
            if given is not None:
                follower.prepare(to_host(given[0]), *given[1:])
            follower.send()
            follower.write_snapshot()
            if not follower.propose():
                return

    def _publish(self) -> None:
        follower = self._follower
        with self.changed:
            contributors = len(follower.contributors)
            self._known = follower.number, contributors, follower.outer.anchor
            self.changed.notify_all()

    def _on_outcome(self, own: Contribution, why: str) -> None:
        """Notes from where progress is counted once the round lands."""
        with self.changed:
            landed = self._taken[2]
            if why:
                self._base = None
            elif own.anchor is landed:
                self._base = own.captured
            else:  # at least float32
                pairs = zip(landed, own.drift, strict=True)
                self._base = [x + y for x, y in pairs]
            self._outcome, self._busy = why, False
            self._publish()

    def _ended(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()


def moved(now: list[jax.Array], update: Update, keep: float) -> list[jax.Array]:
    """The parameters after an update."""
    if update.new is None:
        return now
    # Progress that has not counted yet stays: it is contributed later.
    share = np.float32(keep if update.outcome == "" else 1)
    bases = update.base or [None] * len(now)
    found = []
    for x, new, base in zip(now, update.new, bases, strict=True):
        new = _placed(new, x)
        if base is not None:
            new = _progressed(x, _placed(base, x), new, share)
        found.append(new)
    return found


def _placed(x: np.ndarray, like: jax.Array) -> jax.Array:
    """The array where another lies, with memory of its own: it may be donated."""
    if like.is_fully_addressable:
        return jax.device_put(x, like.sharding, may_alias=False)
    return jax.make_array_from_callback(
        x.shape, like.sharding, lambda index: x[index].copy()
    )


@jax.jit
def _progressed(now, base, new, share):
    """new + share x (now - base), to the bit `new` if there was no progress."""
    wide = jnp.promote_types(now.dtype, jnp.float32)
    progress = now.astype(wide) - base.astype(wide)
    return (new.astype(wide) + share.astype(wide) * progress).astype(now.dtype)
