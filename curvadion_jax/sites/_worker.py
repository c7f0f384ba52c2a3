"""The thread that follows a run while training continues, and what training learns.

It runs no part of a training step: it copies arrays from the devices, and computes on
the host's CPU.
"""

import logging
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from curvadion_jax.sites import _arrays, _run
from curvadion_jax.sites._arrays import Arrays, on_cpu, to_host, wide
from curvadion_jax.sites._follower import PATIENCE, Follower
from curvadion_jax.sites._model import drift
from curvadion_jax.sites._store import StoreError

log = logging.getLogger(__package__)


class Update(NamedTuple):
    """What a training loop learns: parameters become new + (now - base).

    The base is the old anchor, from which all progress is left, while a contribution is
    undecided or late; what was captured, once it has counted; nothing, if it does not.
    """

    number: int  # of the open round
    contributors: int  # to the round before
    missed: int  # rounds that did not count what this site had for them
    missed_in_a_row: int  # the last of them
    # Of what was submitted: "" if it counted, "late", or why not. None if undecided.
    outcome: str | None
    new: Arrays | None  # None if parameters stay as they are
    base: Arrays | None  # None leaves no progress


class Worker(threading.Thread):
    """See the module. `_changed`, the follower's, guards what both threads use.

    The main thread gives it parameters (`submit`) and takes their changes (`take`).
    """

    def __init__(self, follower: Follower, poll: float) -> None:
        super().__init__(name="curvadion_jax.sites", daemon=True)
        self.follower, self._poll, self._changed = follower, poll, follower.changed
        self._error: BaseException | None = None
        # Parameters, the anchor that they are measured from, and tokens.
        self._submitted: tuple[list[Any], Arrays, float] | None = None
        self._ending = self._leaving = False
        # The open round and the anchor that the main thread knows.
        self._taken: tuple[int, Arrays] = -1, []
        # What request `wait` has seen last, and for how many seconds of waiting.
        self._seen: list[int] = []
        self._unanswered = 0.0

    def take(self) -> Update | None:
        """What is new since the last call, in which all was taken.

        Raises what has ended the thread.
        """
        follower, (number, landed) = self.follower, self._taken
        with self._changed:
            if self._error is not None:
                raise self._error
            if follower.number == number:
                return None
            new, decided = follower.outer.params, follower.decided
            number, contributors = follower.number, follower.contributors
            missed = follower.missed, follower.missed_in_a_row
            self._taken, follower.decided = (number, new), None
        own, why = decided or (None, None)
        if own is None or why == "late":  # all progress is still to be counted
            base = landed or None
            new = None if new is landed else new
        elif why:
            base = None
        elif own.anchor is landed:
            base = own.captured
        else:  # the loop has landed elsewhere since, with the same progress
            moves = zip(landed, own.captured, own.anchor, strict=True)
            base = [x + drift(y, z) for x, y, z in moves]
        return Update(number, contributors, *missed, why, new, base)

    def submit(self, arrays: list[Any], tokens: float) -> None:
        """Takes over arrays, which nobody else may hold.

        The outcome of the last ones must have been taken. Otherwise these would hold
        progress that has counted already, and it would count twice.
        """
        with self._changed:
            self._submitted = arrays, self._taken[1], tokens
            self.follower.has_uncounted = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Returns when what was submitted is decided, or the thread has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.follower.decided or self._error or self._ending, seconds
            )
        under_way = self.follower.store.under_way
        # No clock: it runs on while the machine does something else.
        seen, before = [*under_way.get(self.ident or 0, [])], self._seen
        is_same = bool(seen) and seen == before
        self._unanswered = self._unanswered + seconds if is_same else 0.0
        self._seen = seen
        if self._unanswered > PATIENCE:
            self._unanswered = 0.0
            text = "%s has had no answer to a request for a minute, and waits for it."
            log.warning(text, self.follower.name)

    def end(self, seconds: float, leaves: bool) -> None:
        """Ends the thread, which first tells the others if the site leaves."""
        with self._changed:
            self._leaving, self._ending = leaves, not leaves
            self._changed.notify_all()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(min(seconds, threading.TIMEOUT_MAX))
        self._ending = True
        if self._leaving:
            log.warning("%s leaves and cannot tell the others", self.follower.name)

    def run(self) -> None:
        warned = -PATIENCE
        self.follower.heart.start()
        try:
            while not self._ending:
                failed = False
                try:
                    self._turn()
                except StoreError as error:
                    failed = True
                    if time.monotonic() - warned >= PATIENCE:
                        warned = time.monotonic()
                        log.warning("%s This site tries again.", error)
                with self._changed:  # after a failure a new contribution waits as well
                    self._changed.wait_for(
                        lambda failed=failed: (
                            self._ending
                            or ((self._submitted or self._leaving) and not failed)
                        ),
                        self._poll,
                    )
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self.follower.heart.end()

    def _turn(self) -> None:
        """Does everything that can be done now."""
        follower = self.follower
        while not self._leaving:
            while follower.advance():
                pass
            with self._changed:
                given, self._submitted = self._submitted, None
            if given is not None:
                arrays, anchor, tokens = given
                follower.prepare(to_host(arrays), anchor, tokens)
            follower.send()
            if not follower.propose():
                return
        follower.heart.end()  # which would make it a member again
        _run.leave(
            follower.store,
            follower.name,
            follower.incarnation,
            follower.has_contributed,
        )
        self._leaving, self._ending = False, True


def moved(now: list[Any], update: Update) -> list[Any]:
    """The parameters after an update, in the kinds and places that they have."""
    if update.new is None:
        return now
    if update.base is None:
        return [_arrays.like(new, x) for new, x in zip(update.new, now, strict=True)]
    triples = zip(now, update.base, update.new, strict=True)
    return [_progressed(*each) for each in triples]


def _progressed(now: Any, base: np.ndarray, new: np.ndarray) -> Any:
    """new + (now - base); the bits of `new` if there was no progress."""
    if isinstance(now, jax.Array):
        return _progress(now, _arrays.like(base, now), _arrays.like(new, now))
    with on_cpu():
        found = _progress(_arrays.to_numpy(now), base, new)
    return _arrays.like(np.asarray(found), now)


@jax.jit
def _progress(now, base, new):
    dtype = wide(now.dtype)
    progress = now.astype(dtype) - base.astype(dtype)
    return (new.astype(dtype) + progress).astype(now.dtype)
