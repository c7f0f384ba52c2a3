"""What a training loop calls: the methods of a `Site`."""

import atexit
import dataclasses
import logging
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from curvadion_jax import compressors
from curvadion_jax.sites import _params, _rounds
from curvadion_jax.sites._follower import Follower, Own
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import Store, StoreError
from curvadion_jax.sites._worker import Worker

log = logging.getLogger("curvadion_jax.sites")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of :func:`join`."""

    every: int
    fragments: int
    quorum: int
    grace: float
    max_lag: int
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
      store, name, incarnation, settings, outer, form: as `join` gives them.

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
        store: Store,
        name: str,
        incarnation: int,
        settings: Settings,
        outer: optax.GradientTransformation,
        form: compressors.Posted,
    ) -> None:
        self._store, self.name = store, name
        self._incarnation, self._settings = incarnation, settings
        self._outer, self._form = outer, form
        self._worker: Worker | None = None
        self._structure: Any = None
        self._closed = False
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
            raise RuntimeError(
                "this site has started already: join once for each start"
            )
        _params.check(params)
        arrays, self._structure = jax.tree.flatten(params)
        model = Model(params, self._outer, self._form, self._settings.fragments)

        def follower(settled):
            parts = self._store, model, self.name, self._incarnation, self._settings
            return Follower(*parts, settled)

        self._worker = Worker(follower, self._settings.poll)
        atexit.register(self.close)
        found = self._worker.enter([np.array(x) for x in arrays])
        pairs = zip(found, arrays, strict=True)
        placed = [_params.placed(*pair) for pair in pairs]
        return jax.tree.unflatten(self._structure, placed)

    def sync(self, params: Any, tokens: float = 1) -> Any:
        """To be called after every step; returns at once on most.

        Takes over what the run has decided meanwhile, and every `every` steps gives a
        copy of the parameters (of one fragment) to the thread that posts it. Waits only
        where a contribution has been under way for `max_lag` steps.

        Args:
          params: after the step. They may be donated to the next one.
          tokens: that this site has seen in the step, a number; a site counts in a
            round by its tokens, which all are to give in one unit.

        Returns:
          The parameters to go on with.

        Raises:
          RuntimeError: if this site cannot go on with the run: another has its name, or
            its outer parameters differ from the run's.
          ValueError: for parameters of another structure.
        """
        tokens = float(tokens)
        if not 0 < tokens < math.inf:
            raise ValueError(f"tokens must be positive and finite, got {tokens}")
        worker = self._started(params)
        self._steps += 1
        self._tokens = [count + tokens for count in self._tokens]
        while True:
            params = self._landed(worker, params)
            if worker.busy:
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
          The parameters. Sites whose last contribution is in the same round return the
          same bits.
        """
        worker = self._started(params)
        end = time.monotonic() + timeout
        fragments = set(range(self._settings.fragments)) if self._tokens[0] else set()
        while True:
            params = self._landed(worker, params)
            left = {p for p in fragments if self._tokens[p]}
            if not worker.busy and not left:
                break
            if time.monotonic() > end:
                log.warning("%s leaves, and its last steps are not counted", self.name)
                break
            if not worker.busy:
                self._give(worker, params)
            self._wait(worker, end)
        key = _rounds.member_key(self.name, self._incarnation, "left")
        try:
            self._store.create(key, b"{}")
        except StoreError as error:
            log.warning("the others take %s for one that crashed: %s", self.name, error)
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
        worker = self._worker
        follower = None if worker is None else worker.follower
        return SiteMetrics(
            round=0 if follower is None else follower.number,
            contributors=0 if follower is None else len(follower.contributors),
            **self._counts,
            lag=self._steps if worker is not None and worker.busy else 0,
            blocked=self._blocked,
            bytes_up=self._store.up,
            bytes_down=self._store.down,
        )

    def _started(self, params: Any) -> Worker:
        if self._worker is None:
            raise RuntimeError(
                "this site has not started: call site.start(params) first"
            )
        if self._closed:
            raise RuntimeError(
                "this site has left the run: join again to go on with it"
            )
        if jax.tree.structure(params) != self._structure:
            raise ValueError(
                "the parameters must be a tree of the structure that start was given, "
                f"{self._structure}, got {jax.tree.structure(params)}"
            )
        return self._worker

    def _give(self, worker: Worker, params: Any) -> None:
        follower = worker.follower
        fragment = follower.fragment
        leaves = follower.model.part(jax.tree.leaves(params), fragment)
        if worker.give(_params.copies(leaves), self._tokens[fragment], fragment):
            self._steps = 0

    def _landed(self, worker: Worker, params: Any) -> Any:
        changes, outcomes = worker.take()
        for own, why in outcomes:
            self._note(own, why)
        if not changes:
            return params
        leaves, structure = jax.tree.flatten(params)
        for change in changes:
            leaves[change.leaf] = _params.moved(
                leaves[change.leaf], change, self._settings.keep
            )
        return jax.tree.unflatten(structure, leaves)

    def _note(self, own: Own, why: str) -> None:
        kind = {"": "counted", "late": "late"}.get(why, "rejected")
        self._counts[kind] += 1
        if kind == "late":
            self._steps = max(self._steps, self._settings.every)
            return
        self._tokens[own.fragment] -= own.tokens
        if kind == "rejected":
            text = "the contribution of this site, %r, was rejected: %s. It goes on "
            text += "from the outer parameters, without its steps since the last round"
            log.error(text, self.name, why)

    def _wait(self, worker: Worker, end: float = math.inf) -> None:
        start = time.monotonic()
        worker.wait(min(60.0, max(end - start, 0.0)))
        self._blocked += time.monotonic() - start
        if worker.busy and time.monotonic() < end:
            number, url = worker.follower.number, self._store.url
            log.warning("%s waits for round %d of %s", self.name, number, url)
