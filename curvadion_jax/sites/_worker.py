"""The thread that talks to the store while training continues.

It runs no part of a training step: it copies arrays from the devices, and computes on
the host's CPU. The main thread gives it parameters (`submit`) and takes from it what to
change in them (`take`).
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
from curvadion_jax.sites._store import StoreError

log = logging.getLogger("curvadion_jax.sites")

# Seconds between warnings about a store that is away.
_PATIENCE = 30.0


class Update(NamedTuple):
    """What a training loop learns: parameters become new + (now - base)."""

    number: int  # of the open round
    contributors: int  # to the round before
    # Of what was submitted: "" if it counted, "late", or why it was rejected. None if
    # nothing was decided.
    outcome: str | None
    new: Arrays | None  # None if parameters stay as they are
    base: Arrays | None  # None leaves no progress


class Worker(threading.Thread):
    """See the module. `_changed` guards what both threads use."""

    def __init__(self, follower: Follower, poll: float) -> None:
        super().__init__(name="curvadion_jax.sites", daemon=True)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._follower, self._poll = follower, poll
        # Parameters, the anchor that they are measured from, and tokens.
        self._submitted: tuple[list[Any], Arrays, float] | None = None
        self._busy = self._ending = False
        # Open round, contributors and outer parameters; what the main thread has taken.
        self._known: tuple[int, int, Arrays] = 0, 0, []
        self._taken = self._known
        self._outcome: str | None = None
        self._base: Arrays | None = None
        self._publish()

    def take(self) -> Update | None:
        """What is new since the last call, in which all was taken.

        Raises what has ended the thread.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._known is self._taken:
                return None
            (*_, old), (number, contributors, new) = self._taken, self._known
            outcome, base = self._outcome, self._base
            if outcome in (None, "late"):  # all progress is still to be counted
                new, base = None if new is old else new, old or None
            self._taken, self._outcome, self._base = self._known, None, None
            return Update(number, contributors, outcome, new, base)

    def submit(self, arrays: list[Any], tokens: float) -> None:
        """Takes over arrays, which nobody else may hold.

        The outcome of the last ones must have been taken. Otherwise these would hold
        progress that has counted already, and it would count twice.
        """
        with self._changed:
            self._submitted, self._busy = (arrays, self._taken[2], tokens), True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Returns when what was submitted is decided, or the thread has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._busy or self._error or self._ending, seconds
            )

    def end(self, seconds: float) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(seconds)

    def run(self) -> None:
        failed, warned = False, -_PATIENCE
        try:
            while not self._ending:
                try:
                    self._turn()
                    failed = False
                except StoreError as error:
                    failed = True
                    if time.monotonic() - warned >= _PATIENCE:
                        warned = time.monotonic()
                        log.warning("%s This site tries again.", error)
                self._pause(failed)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _pause(self, failed: bool) -> None:
        with self._changed:  # after a failure a new contribution waits as well
            self._changed.wait_for(
                lambda: self._ending or (self._submitted and not failed), self._poll
            )

    def _turn(self) -> None:
        """Does everything that can be done now."""
        follower = self._follower
        while True:
            while follower.advance():
                self._publish()
            with self._changed:
                given, self._submitted = self._submitted, None
            if given is not None:
                follower.prepare(to_host(given[0]), *given[1:])
            follower.send()
            if not follower.propose():
                return

    def _publish(self) -> None:
        """Tells the main thread where the run stands, and what it has decided."""
        follower = self._follower
        with self._changed:
            landed = self._taken[2]
            if follower.decided is not None:
                own, self._outcome = follower.decided
                if self._outcome:
                    self._base = None
                elif own.anchor is landed:
                    self._base = own.captured
                else:  # in at least float32
                    pairs = zip(landed, own.drift, strict=True)
                    self._base = [x + y for x, y in pairs]
                self._busy = False
            anchor = follower.outer.anchor
            self._known = follower.number, follower.contributors, anchor
            self._changed.notify_all()


def moved(now: list[jax.Array], update: Update) -> list[jax.Array]:
    """The parameters after an update."""
    if update.new is None:
        return now
    bases = update.base or [None] * len(now)
    found = []
    for x, new, base in zip(now, update.new, bases, strict=True):
        new = _placed(new, x)
        if base is not None:
            new = _progressed(x, _placed(base, x), new)
        found.append(new)
    return found


def _placed(x: np.ndarray, like: jax.Array) -> jax.Array:
    """Places an array like another. It is copied, since it may be donated."""
    return jax.make_array_from_callback(
        x.shape, like.sharding, lambda index: x[index].copy()
    )


@jax.jit
def _progressed(now, base, new):
    """new + (now - base); the bits of `new` if there was no progress."""
    wide = jnp.promote_types(now.dtype, jnp.float32)
    progress = now.astype(wide) - base.astype(wide)
    return (new.astype(wide) + progress).astype(now.dtype)
