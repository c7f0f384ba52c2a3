"""How a site joins: its arguments, and its name."""

import dataclasses
import json
import math
import re
import uuid
from typing import Any

import jax
import optax

from curvadion_jax import _arguments, compressors
from curvadion_jax.compressors import check_compressor
from curvadion_jax.sites import _messages, _processes, _rounds
from curvadion_jax.sites._follower import Follower
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._processes import Shared
from curvadion_jax.sites._site import Settings, Site
from curvadion_jax.sites._store import Store
from curvadion_jax.sites._worker import Worker
from curvadion_jax.synchronizers._fragments import check_number

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def join(
    url: Any,
    name: str,
    *,
    every: int = 30,
    outer: optax.GradientTransformation | None = None,
    compressor: compressors.Compressor | None = None,
    fragments: int = 1,
    quorum: int = 1,
    grace: float = 30.0,
    max_lag: float | None = None,
    keep: float = 1.0,
    snapshot_every: int = 10,
    max_norm: float = 10.0,
    poll: float = 1.0,
) -> "Site":
    """Joins a training run that lies in an object store, or begins one.

    The processes of a `jax.distributed` program are one site, and all call this alike.

    Args:
      url: of the run: ``s3://bucket/run-7``, ``gs://``, ``az://``, a folder, also as a
        `pathlib.Path`; or a store of `obstore`. Credentials come from the environment.
      name: of this site: letters, digits, ``-`` and ``_``. The site that joins last
        under a name is the one: whoever bears it still is told so and stops.
      every: steps between contributions.
      outer: Optax transformation that is given the mean pseudo-gradient, as for
        :func:`curvadion_jax.synchronizers.reconcile`. None is the plain average.
      compressor: form of contributions, with error feedback: `quantize` or
        `exact`. None is `exact`.
      fragments: as for `reconcile`: a round is of one n-th of the parameters, in turn.
      quorum: posts without which no round is committed; fewer when sites have left for
        good. The same for all sites.
      grace: seconds for which a round waits for the known sites that are not there yet,
        once it has its quorum.
      max_lag: steps that may be taken while a contribution is under way, before `sync`
        waits for it; None is 2 x `every`, 0 is lock step, and `math.inf` never waits.
      keep: share of the progress made while a contribution was under way that stays,
        in [0, 1].
      snapshot_every: rounds between the snapshots from which others start.
      max_norm: a contribution is rejected if its norm is so many times the median of
        its round's, of three or more.
      poll: seconds between looks at the store.

    Returns:
      The site, which has yet to `start`.

    Raises:
      ImportError: without `obstore`, the extra ``curvadion-jax[sites]``.
      OSError: if the store cannot be reached, read, or written.
      RuntimeError: if it overwrites objects that it is told to create.
      TypeError, ValueError: for an argument that is of the wrong kind, out of range, or
        not the same in all processes of the site; or a compressor for which all
        replicas must be at work together.

    Example:
      >>> import jax, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> params = {"w": jax.numpy.zeros(3)}
      >>> with join(folder, "paris", every=2) as site:
      ...     params = site.start(params)
      ...     for _ in range(4):
      ...         params = {"w": params["w"] + 1}  # a training step
      ...         params = site.sync(params)
      ...     params = site.leave(params)
      >>> params["w"].tolist(), site.metrics.counted >= 1
      ([4.0, 4.0, 4.0], True)
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            "name must be 1 to 64 letters, digits, '-' and '_', the first of them a "
            f"letter or digit, got {name!r}"
        )
    counts = {"every": every, "quorum": quorum, "snapshot_every": snapshot_every}
    for what, number in (counts | {"fragments": fragments}).items():
        check_number(what, number)
    max_lag = 2 * every if max_lag is None else max_lag
    numbers = {"grace": grace, "max_lag": max_lag, "keep": keep, "poll": poll}
    for what, number in (numbers | {"max_norm": max_norm}).items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{what} must be a number, got {number!r}")
        if not 0 <= number or (what == "keep" and number > 1):
            raise ValueError(f"{what} must not be negative, nor keep above 1: {number}")
    if not 0 < poll < math.inf:
        raise ValueError(
            f"poll must be positive and finite, got {poll}: the store is asked so often"
        )
    if max_norm < 1:
        raise ValueError(
            f"max_norm must be at least 1, got {max_norm}: else what is as large as "
            "the others is rejected; math.inf rejects nothing"
        )
    if outer is not None:
        _arguments.check_transformation(outer, "outer")
    form = check_compressor(compressor or compressors.exact())
    if form.codec is None:
        raise ValueError(
            "the compressor has no codec, without which sites cannot read a "
            "contribution on its own: give quantize or exact"
        )
    settings = Settings(
        every=every,
        fragments=fragments,
        quorum=quorum,
        grace=grace,
        max_lag=max_lag,
        keep=keep,
        snapshot_every=snapshot_every,
        max_norm=max_norm,
        poll=poll,
    )
    if jax.process_count() > 1:
        _processes.check_alike({"name": name, **dataclasses.asdict(settings)})
    entered = _processes.of_first(lambda: _entered(url, name))
    parts = optax.scale(-1) if outer is None else outer, form.codec

    def make_model(params: Any) -> Model:
        return Model(params, *parts, fragments)

    def make_worker(model: Model) -> Worker | Shared:
        if entered is None:
            return Shared(None)
        store, number = entered
        own = store, model, name, number, settings
        worker = Worker(lambda settled: Follower(*own, settled), poll)
        return worker if jax.process_count() == 1 else Shared(worker)

    return Site(name, settings, make_model, make_worker)


def _entered(url: Any, name: str) -> tuple[Store, int]:
    store = Store(url)
    return store, _enter_name(store, name)


def _enter_name(store: Store, name: str) -> int:
    """The number of times that a site of this name has joined, this one included."""
    while True:
        found = _rounds.members(store.keys(f"{_rounds.MEMBERS}{name}/"))
        incarnation = found.newest.get(name, 0) + 1
        key = _rounds.member_key(name, incarnation)
        data = json.dumps(
            {"format": _messages.FORMAT, "uid": uuid.uuid4().hex}
        ).encode()
        if not store.create(key, data):
            continue
        if store.create(key, data):
            raise RuntimeError(
                f"the store {store.url} overwrites objects that it is told to create "
                "only, so that two sites could both commit a round: use one that knows "
                "conditional writes (If-None-Match)"
            )
        return incarnation
