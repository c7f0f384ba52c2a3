"""What a training loop calls."""

import atexit
import logging
import math
import time
from typing import Any, NamedTuple

import jax
import optax

from curvadion_jax import _trees, compressors
from curvadion_jax.sites import _arguments, _arrays, _processes
from curvadion_jax.sites._arrays import to_host
from curvadion_jax.sites._follower import Follower
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import Store
from curvadion_jax.sites._worker import Update, Worker, moved

log = logging.getLogger(__package__)

# Seconds that a process of a site waits at most before the next collective: some
# runtimes take a longer wait in one collective for a hang.
_WAIT = 5.0
# Steps between looks for news where a site's processes wait for each other.
_LOOK = 8
# Rounds in a row without this site after which it is warned, first.
_MISSED = 4


class SiteMetrics(NamedTuple):
    """What a site has done, for a training loop's logger: Python numbers.

    Attributes:
      round: rounds that are committed.
      contributors: sites in the last of them.
      counted, late, rejected: contributions of this site, by what became of them.
      contributions: of this site, what is under way included.
      missed: rounds that did not count this site although it had a contribution.
      blocked: seconds in which `sync` has waited.
      bytes_up, bytes_down: written to and read from the store, headers included.
      ignored: entries of the store's folder that are no objects.
    """

    round: int
    contributors: int
    counted: int
    late: int
    rejected: int
    contributions: int
    missed: int
    blocked: float
    bytes_up: int
    bytes_down: int
    ignored: int


class Site:
    """One program's part in a training run that lies in an object store.

    A context manager, at whose end the thread that talks to the store ends. Parameters
    are any tree of floating-point arrays: of JAX with any sharding, of NumPy, or of
    another library that has `__dlpack__` or `__array__`, such as PyTorch. They come
    back as what they were. If none is of JAX, then JAX is used on the CPU alone. The
    processes of a `jax.distributed` program are one site: all make it and call it
    alike, and the numbers of the first one hold. Arrays may have any shape, and the
    dtypes bfloat16, float16, float32, or float64 where JAX has it enabled; what a run
    keeps of them has at least float32.

    Args:
      url: of the run: ``s3://bucket/run-7``, ``gs://``, ``az://``, a folder or a
        `pathlib.Path`; or a store of `obstore`. Credentials come from the environment.
      name: of this site: letters, digits, ``-`` and ``_``. Of several sites that join
        under one name the last stays, and the others raise an error.
      every: steps between contributions.
      outer: Optax transformation of the mean pseudo-gradient. None: plain averaging.
      compressor: of contributions, with error feedback: `quantize`, or `exact` (None).
      quorum: contributions without which a round changes nothing; fewer when sites have
        left for good. The same for all sites.
      grace: seconds for which a round that has its quorum waits for other sites that
        are alive. Who gives no sign of life for so long, or for about 40 seconds if
        that is less, is not waited for. The same for all sites.
      max_lag: steps that may be taken while a contribution is under way, before `sync`
        waits for it. None is 2 x `every`, 0 is lock step, `math.inf` never waits.
      poll: seconds between looks at the store.

    Raises:
      ValueError: for an argument that cannot be used, which the message names.

    Example:
      >>> import jax, tempfile
      >>> params = {"w": jax.numpy.zeros(3)}
      >>> with Site(tempfile.mkdtemp(), "paris", every=2) as site:
      ...     params = site.start(params)
      ...     for _ in range(4):
      ...         params = {"w": params["w"] + 1}  # a training step
      ...         params = site.sync(params)
      ...     params = site.leave(params)
      >>> params["w"].tolist(), site.metrics.counted >= 1
      ([4.0, 4.0, 4.0], True)
    """

    def __init__(
        self,
        url: Any,
        name: str,
        *,
        every: int = 30,
        outer: optax.GradientTransformation | None = None,
        compressor: compressors.Compressor | None = None,
        quorum: int = 1,
        grace: float = 30.0,
        max_lag: float | None = None,
        poll: float = 1.0,
    ) -> None:
        _arguments.check_url(url)
        _arguments.check_name(name)
        _arguments.check_compressor(compressor)
        _arguments.check_count(every, "every")
        _arguments.check_count(quorum, "quorum")
        _arguments.check_at_least_zero(grace, "grace")
        _arguments.check_poll(poll)
        max_lag = 2 * every if max_lag is None else max_lag
        _arguments.check_at_least_zero(max_lag, "max_lag")
        self.name, self._url = name, url
        self._every, self._max_lag = every, max_lag
        self._quorum, self._grace, self._poll = quorum, float(grace), float(poll)
        self._outer = outer or optax.scale(-1)
        self._codec: Any = (compressor or compressors.exact()).codec
        self._worker: Worker | None = None  # of the first process
        self._known: Any = None  # shapes and dtypes of the parameters
        self._closed = False
        # Tokens of the contribution that is under way, if one is.
        self._under_way: float | None = None
        # Since the last contribution was taken.
        self._steps, self._tokens = 0, 0.0
        self._metrics: dict[str, Any] = dict.fromkeys(SiteMetrics._fields, 0)
        self._alarm = _MISSED  # rounds in a row without this site until a warning
        # What a call has applied. If it is interrupted, the next one applies it again.
        self._news: list[Update] = []

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self, params: Any) -> Any:
        """Returns the newest outer parameters of the run, or these if the run is new.

        Args:
          params: as the model's `init` returned them. In a run that has begun, only
            their shapes, dtypes and shardings matter.

        Raises:
          OSError: if the store cannot be reached, read, or written, or if a
            contribution that counts is lost. Call it again, in the latter case after
            what the message says.
          RuntimeError: if the run is damaged or of another version, or if the store
            overwrites objects that it should create.
          TypeError: for leaves that are no floating-point arrays.
          ValueError: for another model, compressor, outer optimizer or quorum than the
            run's, an outer state with random keys, and a tree without arrays.
        """
        if self._known is not None:
            raise RuntimeError("This site has started. Make a site for each start.")
        leaves = jax.tree.leaves(params)
        _arrays.use_no_accelerator(leaves)
        _arguments.check_params(params)
        arrays = _processes.copies(leaves)
        shaped = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        known = jax.tree.unflatten(jax.tree.structure(params), shaped)
        _processes.from_first(lambda: self._enter(known, arrays))
        self._known = known
        atexit.register(self.close)
        self._look()
        return self._returned(params)

    def sync(self, params: Any, tokens: float = 1) -> Any:
        """Returns the parameters to continue with; call it after every step.

        It applies what the run has decided meanwhile. Every `every` steps it hands a
        copy of the parameters to the thread that contributes it. It waits only if a
        contribution has been under way for `max_lag` steps.

        Args:
          params: after the step. They may be donated to the next one.
          tokens: that this site has seen in the step, its weight in a round. With
            several processes the first one's number counts.

        Raises:
          RuntimeError: if another site has joined under this name, this site's outer
            parameters differ from the run's, or what counts in the run is lost.
          TypeError: for a leaf that is no array.
          ValueError: for parameters of another structure (as with None in place of an
            array), shape or dtype than at the start, and for tokens that are not
            positive and at most 1e15.
        """
        self._check_open()
        if not 1e-9 <= float(tokens) <= 1e15:
            raise ValueError(
                f"tokens must be positive and at most 1e15, got {tokens}. Give the "
                "tokens that this site has seen in the step."
            )
        _arguments.check_same(params, self._known)
        self._steps += 1
        self._tokens += float(tokens)
        due = min(self._every, self._max_lag)
        if jax.process_count() > 1 and self._steps < due and self._steps % _LOOK:
            return params
        while True:
            self._look()
            if self._under_way is None and self._steps >= self._every:
                self._submit(params)
            elif self._under_way is not None and self._steps >= self._max_lag:
                self._wait()
            else:
                return self._returned(params)

    def leave(self, params: Any, timeout: float = 600.0) -> Any:
        """Contributes the last steps, and tells the others not to wait any more.

        Args:
          params: after the last step.
          timeout: seconds after which it leaves although its last steps do not count.
            Telling the others may take 5 more.

        Returns:
          The parameters after the newest round that this site knows.

        Raises:
          RuntimeError: if this site has contributed, and none of it counted: then its
            parameters are no model of the run. It has left all the same.
          TypeError, ValueError: as `sync`, and for a timeout that is no number of at
            least 0. Then it has not left.
        """
        _arguments.check_at_least_zero(timeout, "timeout")
        self._check_open()
        _arguments.check_same(params, self._known)
        end = time.monotonic() + float(timeout)
        self._look()
        while self._under_way is not None or self._tokens:
            if not _processes.from_first(lambda: time.monotonic() < end):
                log.warning("%s leaves, and its last steps do not count", self.name)
                break
            if self._under_way is None:
                self._submit(params)
            self._wait(end)
            self._look()
        self._end(max(end - time.monotonic(), _WAIT), leaves=True)
        counted, tried = self._metrics["counted"], self._metrics["contributions"]
        level = logging.INFO if counted == tried else logging.WARNING
        log.log(level, "%s leaves; syncs: %d of %d counted", self.name, counted, tried)
        if self._has_failed():
            raise RuntimeError(
                f"None of the {tried} contributions of this site, {self.name!r}, "
                "counted, so its parameters are its own and not the run's. Look for "
                "the reason in its log, and start it again."
            )
        return self._returned(params)

    def _has_failed(self) -> bool:
        """Whether it has contributed, and nothing of it counted."""
        return self._metrics["contributions"] > 0 == self._metrics["counted"]

    def close(self) -> None:
        """Ends the thread. The other sites wait for this one as if it had crashed."""
        if not self._closed and self._has_failed():
            log.error("%s ends, and none of its contributions counted", self.name)
        self._end(0.0 if self._closed else 60.0)

    def _end(self, seconds: float, leaves: bool = False) -> None:
        atexit.unregister(self.close)
        self._closed = True
        if self._worker is not None:
            self._worker.end(seconds, leaves)

    @property
    def metrics(self) -> SiteMetrics:
        """See :class:`SiteMetrics`."""
        if self._worker is not None:
            store = self._worker.follower.store
            self._metrics |= {
                "bytes_up": store.up,
                "bytes_down": store.down,
                "ignored": store.ignored,
            }
        return SiteMetrics(**self._metrics)

    def _enter(self, known: Any, arrays: list[Any]) -> None:
        store, model = Store(self._url), Model(known, self._outer, self._codec)
        follower = Follower(store, model, self.name, self._quorum, self._grace)
        follower.start(to_host(arrays))
        self._worker = Worker(follower, self._poll)
        self._worker.start()

    def _check_open(self) -> None:
        if self._known is None or self._closed:
            raise RuntimeError(
                "This site has not started, or has left. Call start of a new one."
            )

    def _look(self) -> None:
        """Takes and counts what has been decided since the last look."""
        look = lambda: self._worker and self._worker.take()
        if (update := _processes.from_first(look)) is None:
            return
        self._news.append(update)
        self._metrics["round"] = update.number
        self._metrics["contributors"] = update.contributors
        self._metrics["missed"] = update.missed
        self._warn_of(update.missed_in_a_row)
        if (why := update.outcome) is None:
            return
        tokens, self._under_way = self._under_way or 0.0, None
        kind = {"": "counted", "late": "late"}.get(why, "rejected")
        self._metrics[kind] += 1
        if kind == "late":  # and due again, at once
            self._tokens += tokens
            self._steps = max(self._steps, self._every)
        elif kind == "rejected":
            text = "The contribution of %r, this site, and its steps are lost: %s"
            log.error(text, self.name, why[:999])
            self._steps, self._tokens = 0, 0.0

    def _warn_of(self, missed: int) -> None:
        """Warns of rounds in a row that did not count this site, and of twice as many.

        Such a site trains alone, and its loss shows nothing of it.
        """
        found = self.metrics
        if missed >= self._alarm:
            self._alarm = 2 * missed
            text = (
                "None of the last %d rounds counted this site, %r: it trains alone. "
                "%d of its contributions were late, %d rejected. Look at its link and "
                "at `commits/`; more steps (`every`) or a longer `grace` give it time."
            )
            log.warning(text, missed, self.name, found.late, found.rejected)

    def _moved(self, params: Any) -> list[Any]:
        """The parameters' leaves, moved as has been decided."""
        leaves = jax.tree.leaves(params)
        for update in self._news:
            leaves = moved(leaves, update)
        return leaves

    def _returned(self, params: Any) -> Any:
        leaves = self._moved(params)
        self._news.clear()
        tree = jax.tree.unflatten(jax.tree.structure(self._known), leaves)
        return _trees.shared_as(params, tree)

    def _submit(self, params: Any) -> None:
        leaves = _processes.copies(self._moved(params))
        # Of a library other than JAX and NumPy the copies alone show their dtypes.
        structure = jax.tree.structure(self._known)
        _arguments.check_same(jax.tree.unflatten(structure, leaves), self._known)
        if self._worker is not None:
            self._worker.submit(leaves, self._tokens)
        self._under_way, self._steps, self._tokens = self._tokens, 0, 0.0
        self._metrics["contributions"] += 1

    def _wait(self, end: float = math.inf) -> None:
        start = time.monotonic()
        if self._worker is not None:
            self._worker.wait(min(_WAIT, max(end - start, 0.0)))
        self._check_open()  # a signal's handler may have closed it
        self._metrics["blocked"] += time.monotonic() - start
