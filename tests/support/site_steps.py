"""Sites without threads: every request is made when a test says so."""

import dataclasses
import functools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax import compressors
from curvadion_jax.sites import _rounds, _run
from curvadion_jax.sites._follower import Follower, Settings
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import HEADER, Store

PARAMS = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
SETTINGS = Settings(
    every=1, grace=0.0, max_lag=1, poll=0.01, snapshot_every=1000, max_norm=10.0
)


@functools.cache
def plain_model() -> Model:
    """Compiled once."""
    return Model(PARAMS, optax.scale(-1), compressors.exact().codec)


class ByHand:
    """A site whose parameters are moved by numbers that tests give."""

    def __init__(
        self,
        store: Any,
        name: str,
        *,
        params: Any = None,
        outer: Any = None,
        compressor: Any = None,
        **settings: Any,
    ) -> None:
        self.store = Store(store)
        self.name, self.outcomes = name, []
        params = PARAMS if params is None else params
        if params is PARAMS and outer is None and compressor is None:
            model = plain_model()
        else:
            form = compressor or compressors.exact()
            model = Model(params, outer or optax.scale(-1), form.codec)
        incarnation = _run.join(self.store, name)
        self.follower = Follower(
            *(self.store, model, name, incarnation),
            dataclasses.replace(SETTINGS, **settings),
        )
        self.follower.on_outcome = lambda own, why: self.outcomes.append(why)
        self.follower.start([np.asarray(x) for x in params.values()])

    @property
    def anchor(self) -> list[np.ndarray]:
        return self.follower.outer.anchor

    @property
    def digest(self) -> str:
        return self.follower.outer.digest

    def prepare(self, by: float, tokens: float = 1.0) -> None:
        """All parameters have moved from the anchor by so much."""
        anchor = self.anchor
        moved = [(x + by).astype(x.dtype) for x in anchor]
        self.follower.prepare(moved, anchor, tokens)

    def send(self, by: float, tokens: float = 1.0) -> None:
        self.prepare(by, tokens)
        self.follower.send()

    def commit(self) -> None:
        assert self.follower.propose()
        assert self.follower.advance()

    def follow(self) -> None:
        while self.follower.advance():
            pass

    def step(self, by: float = 1.0) -> None:
        """A round of this site alone, and the snapshot if one is due."""
        self.send(by)
        self.commit()
        self.follower.write_snapshot()

    def moved(self) -> float:
        """How far the anchor is from the start; all its elements move alike."""
        start = [np.asarray(x) for x in PARAMS.values()]
        found = [x - y for x, y in zip(self.anchor, start, strict=True)]
        np.testing.assert_allclose(found[0], found[0].flat[0], rtol=1e-6)
        return float(found[0].flat[0])

    def commit_of(self, number: int) -> dict[str, Any]:
        return json.loads(self.store.get(_rounds.commit_key(number), HEADER) or b"")


def settle(*sites: ByHand) -> None:
    """The first proposes, all follow, and have the same bits."""
    sites[0].commit()
    for site in sites[1:]:
        site.follow()
    assert len({site.digest for site in sites}) == 1
