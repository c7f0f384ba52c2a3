"""What a training loop calls: :func:`join`, and the methods of a :class:`Site`."""

import atexit
import dataclasses
import logging
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import compressors
from curvadion_jax.sites import _processes, _rounds, _run
from curvadion_jax.sites._follower import Follower, Settings
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import Store, StoreError
from curvadion_jax.sites._worker import Update, Worker, moved

log = logging.getLogger("curvadion_jax.sites")

# Seconds after which a wait looks around: no process of a site sits longer in one
# collective, which some runtimes take for a hang.
_WAIT = 5.0
# Of a step; a contribution has less than 1e18.
_MOST_TOKENS = 1e15


def join(
    url: Any,
    name: str,
    *,
    every: int = 30,
    outer: optax.GradientTransformation | None = None,
    compressor: compressors.Compressor | None = None,
    quorum: int = 1,
    grace: float = 30.0,
    max_lag: float | None = None,
    keep: float = 1.0,
    poll: float = 1.0,
) -> "Site":
    """Joins a training run that lies in an object store, or begins one.

    The processes of a `jax.distributed` program are one site, and all call this alike.

    Args:
      url: of the run: ``s3://bucket/run-7``, ``gs://``, ``az://``, a folder or a
        `pathlib.Path`; or a store of `obstore`. Credentials come from the environment.
      name: of this site: letters, digits, ``-`` and ``_``. If several sites join under
        one name, the last one stays, and the others raise an error and stop.
      every: steps between contributions.
      outer: Optax transformation that is given the mean pseudo-gradient. None is the
        plain average.
      compressor: form of contributions, with error feedback: `quantize` or `exact`,
        which None means.
      quorum: contributions without which a round changes nothing; fewer when sites have
        left for good. The same for all sites.
      grace: seconds for which a round that has its quorum waits for other known sites.
      max_lag: steps that may be taken while a contribution is under way, before `sync`
        waits for it; None is 2 x `every`, 0 is lock step, and `math.inf` never waits.
      keep: share of the progress made while a contribution was under way that stays,
        in [0, 1].
      poll: seconds between looks at the store.

    Returns:
      The site, which has yet to `start`.

    Raises:
      ImportError: without `obstore`, the extra ``curvadion-jax[sites]``.
      OSError: if the store cannot be reached, read, or written.
      RuntimeError: if it overwrites objects that it is told to create.
      ValueError: for an argument out of range, or not alike in all processes.

    Example:
      >>> import jax, tempfile
      >>> params = {"w": jax.numpy.zeros(3)}
      >>> with join(tempfile.mkdtemp(), "paris", every=2) as site:
      ...     params = site.start(params)
      ...     for _ in range(4):
      ...         params = {"w": params["w"] + 1}  # a training step
      ...         params = site.sync(params)
      ...     params = site.leave(params)
      >>> params["w"].tolist(), site.metrics.counted >= 1
      ([4.0, 4.0, 4.0], True)
    """
    if not _rounds.NAME.fullmatch(name):
        raise ValueError(
            f"name must have 1 to 64 letters, digits, '-' and '_', got {name!r}. The "
            "first must be a letter or digit."
        )
    max_lag = 2 * every if max_lag is None else max_lag
    settings = Settings(every, quorum, grace, max_lag, keep, poll)
    least = {"every": 1, "quorum": 1, "grace": 0, "max_lag": 0, "keep": 0, "poll": 1e-4}
    for what, number in least.items():
        if not number <= (given := getattr(settings, what)) or keep > 1:
            raise ValueError(
                f"{what} must be at least {number}, and keep at most 1, got {given} "
                f"and keep={keep}."
            )
    codec = (compressor or compressors.exact()).codec
    if codec is None:
        raise ValueError(
            "The compressor has no codec, so that contributions cannot be read one by "
            "one. Give quantize or exact."
        )
    if jax.process_count() > 1:
        _processes.check_alike({"name": name, **dataclasses.asdict(settings)})
    joined = []
    _processes.from_first(lambda: joined.append(_joined(url, name)))
    return Site(name, settings, (outer or optax.scale(-1), codec), joined)


def _joined(url: Any, name: str) -> tuple[Store, int]:
    store = Store(url)
    return store, _run.join(store, name)


class SiteMetrics(NamedTuple):
    """What a site has done, for one's own logger.

    Attributes:
      round: rounds that are committed.
      contributors: sites in the last of them.
      counted, late, rejected: contributions of this site, by what became of them.
      lag: steps since the contribution that is under way was taken; 0 if none is.
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

    A context manager, at whose end the thread that talks to the store ends. Parameters
    are any tree of floating-point ``jax.Array``, sharded over the devices in any way.

    Args:
      name, settings, parts, joined: as `join` gives them.

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
        parts: tuple[optax.GradientTransformation, compressors.Codec],
        joined: list[tuple[Store, int]],
    ) -> None:
        self.name, self._settings = name, settings
        self._parts, self._joined = parts, joined
        self._worker: Worker | None = None
        self._shared: _processes.Shared | None = None
        self._structure: Any = None
        self._closed = False
        self._round = self._contributors = 0
        # Tokens of the contribution that is under way, if one is.
        self._under_way: float | None = None
        # Since the last contribution was taken.
        self._steps, self._tokens, self._blocked = 0, 0.0, 0.0
        self._counts = {"counted": 0, "late": 0, "rejected": 0}

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self, params: Any) -> Any:
        """The newest outer parameters of the run, or these if the run is new.

        Args:
          params: as the model's `init` returned them; only their shapes and where they
            are placed count in a run that has begun.

        Returns:
          Parameters that are placed as the given ones are.

        Raises:
          ValueError: for another model, compressor, outer optimizer or quorum.
          RuntimeError: if the run is damaged, or of a newer version.
          OSError: if the store cannot be reached.
        """
        if self._structure is not None:
            raise RuntimeError("This site has started. Join once for each start.")
        _check(params)
        leaves, self._structure = jax.tree.flatten(params)
        self._model = Model(params, *self._parts)
        for store, incarnation in self._joined:
            parts = store, self._model, self.name, incarnation, self._settings
            self._worker = Worker(Follower(*parts))
        if jax.process_count() > 1:
            self._shared = _processes.Shared()
        atexit.register(self.close)
        arrays, worker = _processes.gather(leaves), self._worker
        try:
            update = _processes.from_first(lambda: worker and worker.enter(arrays))
        except Exception:
            self._leave()  # or the others would count with this site for ever
            raise
        return self._apply(update, params)

    def sync(self, params: Any, tokens: float = 1) -> Any:
        """Call it after every step; it returns at once on most.

        It takes over what the run has decided meanwhile, and every `every` steps hands
        a copy of the parameters to the thread that contributes it. It waits only where
        a contribution has been under way for `max_lag` steps.

        Args:
          params: after the step. They may be donated to the next one.
          tokens: that this site has seen in the step; a site counts in a round by its
            tokens. Of several processes the first one's number counts.

        Returns:
          The parameters to continue with.

        Raises:
          RuntimeError: if another site has this one's name, or its outer parameters
            differ from the run's.
          ValueError: for parameters of another structure, shape or dtype; for tokens
            that are not positive and finite.
        """
        self._check_open(params)
        if self._joined and not 0 < float(tokens) < _MOST_TOKENS:
            raise ValueError(
                f"tokens must be positive and less than {_MOST_TOKENS:g}, got {tokens}."
                " Give those that this site has seen in the step."
            )
        self._steps += 1
        self._tokens += float(tokens) if self._joined else 1.0
        while True:
            params = self._apply(self._take(), params)
            if self._under_way is not None:
                if self._steps < self._settings.max_lag:
                    return params
                self._wait(params)
            elif self._steps >= self._settings.every:
                self._submit(params)
            else:
                return params

    def leave(self, params: Any, timeout: float = 600.0) -> Any:
        """Contributes the last steps, and tells the others not to wait any more.

        Args:
          params: after the last step.
          timeout: seconds after which it leaves without; by this machine's clock.

        Returns:
          The parameters after the newest round that this site knows.
        """
        self._check_open(params)
        end = time.monotonic() + timeout
        while True:
            params = self._apply(self._take(), params)
            due = self._under_way is not None or self._tokens > 0
            if not _processes.agreed(due and time.monotonic() < end):
                break
            if self._under_way is None:
                self._submit(params)
            self._wait(params, end)
        if self._under_way is not None or self._tokens:
            log.warning("%s leaves, and its last steps do not count", self.name)
        self._leave()
        self.close()
        return params

    def close(self) -> None:
        """Ends the thread; the run takes this site for one that has crashed."""
        atexit.unregister(self.close)
        self._closed = True
        if self._worker is not None:
            self._worker.end(seconds=60.0)

    @property
    def metrics(self) -> SiteMetrics:
        """See :class:`SiteMetrics`."""
        lag = 0 if self._under_way is None else self._steps
        up, down = next(((x.up, x.down) for x, _ in self._joined), (0, 0))
        known = self._round, self._contributors, *self._counts.values()
        return SiteMetrics._make((*known, lag, self._blocked, up, down))

    def _check_open(self, params: Any) -> None:
        if self._structure is None or self._closed:
            raise RuntimeError(
                "This site has not started, or has left the run. Join, and call start."
            )
        if (found := jax.tree.structure(params)) != self._structure:
            raise ValueError(
                f"The parameters are {found}. Give them in the structure that start "
                f"was given, {self._structure}."
            )

    def _take(self) -> Update | None:
        if self._shared is not None:
            return self._shared.take(self._worker)
        return self._worker and self._worker.take()

    def _leave(self) -> None:
        try:
            for store, incarnation in self._joined:
                _run.leave(store, self.name, incarnation)
        except StoreError as error:
            log.warning(
                "%s leaves, which the others do not learn: %s", self.name, error
            )

    def _submit(self, params: Any) -> None:
        leaves = jax.tree.leaves(params)
        for name, x, then in zip(
            self._model.names, leaves, self._model.shapes, strict=True
        ):
            if (x.shape, x.dtype) != (then.shape, then.dtype):
                raise ValueError(
                    f"{name} is {x.dtype}{list(x.shape)}, and was {then.dtype}"
                    f"{list(then.shape)} at start. Keep shapes and dtypes."
                )
        if self._shared is None:  # one by one: they may lie on different devices
            leaves = [_copy(x) for x in leaves]
        else:
            leaves = _processes.gather(leaves)
        if self._worker is not None:
            self._worker.submit(leaves, self._tokens)
        self._under_way, self._steps, self._tokens = self._tokens, 0, 0.0

    def _apply(self, update: Update | None, params: Any) -> Any:
        """The parameters after what has been decided, and a note of it."""
        if update is None:
            return params
        self._round, self._contributors = update.number, update.contributors
        if (why := update.outcome) is not None:
            tokens, self._under_way = self._under_way or 0.0, None
            kind = {"": "counted", "late": "late"}.get(why, "rejected")
            self._counts[kind] += 1
            if kind == "late":
                self._tokens += tokens
                self._steps = max(self._steps, self._settings.every)
            elif kind == "rejected":
                text = "%r, this site, is rejected: %.999r. Its steps are lost"
                log.error(text, self.name, why)
                self._steps, self._tokens = 0, 0.0
        leaves = moved(jax.tree.leaves(params), update, self._settings.keep)
        return jax.tree.unflatten(self._structure, leaves)

    def _wait(self, params: Any, end: float = math.inf) -> None:
        start = time.monotonic()
        if self._worker is not None:
            self._worker.wait(min(_WAIT, max(end - start, 0.0)))
        self._check_open(params)  # a signal's handler may have closed it
        self._blocked += time.monotonic() - start


_copy = jax.jit(jnp.copy)


def _check(params: Any) -> None:
    for path, x in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
            kind = x.dtype if hasattr(x, "dtype") else type(x).__name__
            raise TypeError(
                f"{name} is {kind}, and no floating-point jax.Array. Give the "
                "parameters alone, without the optimizer's state."
            )
        processes = {device.process_index for device in x.sharding.device_set}
        if len(processes) != jax.process_count():
            raise ValueError(
                f"{name} lies on devices of some of this site's {jax.process_count()} "
                "processes. Give parameters on a mesh of all devices."
            )
