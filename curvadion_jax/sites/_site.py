"""What a training loop calls: the methods of a `Site`."""

import atexit
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from curvadion_jax.sites import _params, _processes
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._processes import Shared
from curvadion_jax.sites._worker import News, Worker

log = logging.getLogger("curvadion_jax.sites")

# Seconds after which a wait looks around: no process of a site sits longer in one
# collective, which some runtimes take for a hang.
_WAIT = 5.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of :func:`join`."""

    every: int
    fragments: int
    quorum: int
    grace: float
    max_lag: float
    keep: float
    snapshot_every: int
    max_norm: float
    poll: float


class SiteMetrics(NamedTuple):
    """What a site has done, for one's own logger.

    Attributes:
      round: rounds that are committed.
      contributors: sites in the last of them.
      counted, late, rejected: contributions of this site, by what became of them.
      lag: steps since the one that is under way was taken; 0 if none is.
      blocked: seconds in which `sync` has waited.
      bytes_up, bytes_down: written to and read from the store, headers included.

    Example:
      >>> SiteMetrics(7, 4, 6, 1, 0, 12, 0.0, 4160, 12480).counted
      6
    """

    round: int
    contributors: int
    counted: int
    late: int
    rejected: int
    lag: int
    blocked: float
    bytes_up: int
    bytes_down: int


class Site:
    """One program's part in a run; made by :func:`join`.

    It is a context manager: at its end the thread that talks to the store does. The
    parameters that go in and out are any tree of floating-point ``jax.Array``, divided
    over the devices of this program as they may be.

    Args:
      name, settings, make_model, make_worker: as `join` gives them.

    Attributes:
      name: of the site.

    Example:
      >>> import tempfile
      >>> from curvadion_jax.sites import join
      >>> with join(tempfile.mkdtemp(), "oslo") as site:
      ...     params = site.start({"w": jax.numpy.ones(2)})
      ...     params = site.sync(params, tokens=1024)  # after a step
      ...     print(site.name, site.metrics.lag)
      oslo 0
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        make_model: Callable[[Any], Model],
        make_worker: Callable[[Model], Worker | Shared],
    ) -> None:
        self.name, self._settings = name, settings
        self._make_model, self._make_worker = make_model, make_worker
        self._model: Model
        self._worker: Worker | Shared | None = None
        self._structure: Any = None
        self._closed = False
        self._round = self._contributors = 0
        # What is under way: its fragment and tokens.
        self._given: tuple[int, float] | None = None
        # Steps since the last contribution was taken, and tokens by fragment.
        self._steps, self._blocked = 0, 0.0
        self._tokens = [0.0] * settings.fragments
        self._counts = {"counted": 0, "late": 0, "rejected": 0}

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self, params: Any) -> Any:
        """The newest outer parameters of the run, or these if the run is new.

        Args:
          params: as the model's `init` returned them, or from this site's own
            checkpoint; only their shapes count in a run that has begun.

        Returns:
          Parameters that lie as the given ones do.

        Raises:
          ValueError: if the run is one of another model, compressor or quorum.
          RuntimeError: if it was begun by a newer version, or is damaged.
          OSError: if the store cannot be reached.
        """
        if self._worker is not None:
            raise RuntimeError("this site has started: join once for each start")
        _params.check(params)
        arrays, self._structure = jax.tree.flatten(params)
        self._model = self._make_model(params)
        self._worker = self._make_worker(self._model)
        atexit.register(self.close)
        try:
            news = self._worker.enter(_processes.whole(arrays))
        except Exception:
            self._worker.leave()  # or the others would count with this site for ever
            raise
        return self._told(news, params)

    def sync(self, params: Any, tokens: float = 1) -> Any:
        """To be called after every step; returns at once on most.

        Takes over what the run has decided meanwhile, and every `every` steps gives a
        copy of the parameters (of one fragment) to the thread that posts it. Waits only
        where a contribution has been under way for `max_lag` steps.

        Args:
          params: after the step. They may be donated to the next one.
          tokens: that this site has seen in the step, a number; a site counts in a
            round by its tokens, which all are to give in one unit. Of several
            processes the first one's number counts, and no other is looked at.

        Returns:
          The parameters to go on with.

        Raises:
          RuntimeError: if this site cannot go on with the run: another has its name, or
            its outer parameters differ from the run's.
          ValueError: for parameters of another structure, shape or dtype; for tokens
            that are not positive and finite. What the first of several processes raises
            for its tokens all do, at the next call at the latest and at later ones.
        """
        worker = self._started(params)
        tokens = worker.counted(tokens)
        self._steps += 1
        self._tokens = [count + tokens for count in self._tokens]
        while True:
            params = self._told(worker.take(), params)
            if self._given:
                if self._steps < self._settings.max_lag:
                    return params
                self._wait(worker)
            elif self._steps >= self._settings.every:
                self._give(worker, params)
            else:
                return params

    def leave(self, params: Any, timeout: float = 600.0) -> Any:
        """Contributes what is left, and tells the others not to wait any more.

        Args:
          params: after the last step.
          timeout: seconds after which it leaves without; by this machine's clock.

        Returns:
          The parameters after the newest round that this site knows.
        """
        worker = self._started(params)
        end = time.monotonic() + timeout
        while True:
            params = self._told(worker.take(), params)
            # Nothing is left of the next round's fragment where others were quicker.
            due = bool(self._given) or self._tokens[self._fragment] > 0
            if not worker.agreed(due and time.monotonic() < end):
                break
            if not self._given:
                self._give(worker, params)
            self._wait(worker, end)
        if self._given or any(self._tokens):
            log.warning("%s leaves, and its last steps are not counted", self.name)
        worker.leave()
        self.close()
        return params

    def snapshot(self) -> None:
        """Asks for a snapshot of the outer parameters now, in the background."""
        if self._worker is not None:
            self._worker.ask_for_snapshot()

    def close(self) -> None:
        """Ends the thread; the run takes this site for one that has crashed."""
        atexit.unregister(self.close)
        self._closed = True
        if self._worker is not None:
            self._worker.end(seconds=60.0)

    @property
    def metrics(self) -> SiteMetrics:
        """See :class:`SiteMetrics`."""
        up, down = (0, 0) if self._worker is None else self._worker.bytes
        return SiteMetrics(
            round=self._round,
            contributors=self._contributors,
            **self._counts,
            lag=self._steps if self._given else 0,
            blocked=self._blocked,
            bytes_up=up,
            bytes_down=down,
        )

    @property
    def _fragment(self) -> int:
        """Of the next round."""
        return self._model.fragment(self._round)

    def _started(self, params: Any) -> Worker | Shared:
        if self._worker is None:
            raise RuntimeError(
                "this site has not started: call site.start(params) first"
            )
        self._check_open()
        if jax.tree.structure(params) != self._structure:
            raise ValueError(
                "the parameters must be a tree of the structure that start was given, "
                f"{self._structure}, got {jax.tree.structure(params)}"
            )
        return self._worker

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this site has left the run: join again to go on")

    def _give(self, worker: Worker | Shared, params: Any) -> None:
        _params.check_same(params, self._model.shapes)
        fragment = self._fragment
        leaves = self._model.part(jax.tree.leaves(params), fragment)
        self._given = fragment, self._tokens[fragment]
        worker.give(leaves, self._tokens[fragment], fragment)
        self._steps, self._tokens[fragment] = 0, 0.0

    def _told(self, news: News | None, params: Any) -> Any:
        """The parameters after what has been decided, and a note of it."""
        if news is None:
            return params
        self._round, self._contributors = news.number, news.contributors
        if news.outcome is not None:
            self._note(news.outcome)
        leaves, structure = jax.tree.flatten(params)
        for change in news.changes:
            leaves[change.leaf] = _params.moved(
                leaves[change.leaf], change, self._settings.keep
            )
        return jax.tree.unflatten(structure, leaves)

    def _note(self, why: str) -> None:
        (fragment, tokens), self._given = self._given or (0, 0.0), None
        kind = {"": "counted", "late": "late"}.get(why, "rejected")
        self._counts[kind] += 1
        if kind == "late":
            self._tokens[fragment] += tokens
            self._steps = max(self._steps, self._settings.every)
        elif kind == "rejected":
            log.error(
                "%r, this site, is rejected: %s. Its steps are lost", self.name, why
            )
            self._tokens[fragment] = 0.0
            if fragment == self._fragment:
                self._steps = 0

    def _wait(self, worker: Worker | Shared, end: float = math.inf) -> None:
        start = time.monotonic()
        worker.wait(min(_WAIT, max(end - start, 0.0)))
        self._check_open()  # a signal's handler may have closed it
        self._blocked += time.monotonic() - start
