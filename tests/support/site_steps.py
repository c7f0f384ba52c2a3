"""Sites without threads: every request is made when a test says so."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax import compressors
from curvadion_jax.sites import _run
from curvadion_jax.sites._follower import Follower
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import Store

PARAMS = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}


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
        quorum: int = 1,
        grace: float = 0.0,
        snapshot_every: int = 1000,
    ) -> None:
        self.store = Store(store)
        self.name, self.outcomes = name, []
        params = PARAMS if params is None else params
        if params is PARAMS and outer is None and compressor is None:
            model = plain_model()
        else:
            form = compressor or compressors.exact()
            model = Model(params, outer or optax.scale(-1), form.codec)
        self.follower = Follower(self.store, model, name, quorum, grace)
        self.follower.snapshot_every = snapshot_every
        self.follower.start([np.asarray(x) for x in params.values()])

    @property
    def anchor(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in self.follower.outer.anchor]

    @property
    def digest(self) -> str:
        return self.follower.outer.digest

    def prepare(self, by: float, tokens: float = 1.0) -> None:
        """All parameters have moved from the anchor by so much."""
        params = self.follower.outer.params
        moved = [(x + by).astype(x.dtype) for x in params]
        self.follower.prepare(moved, params, tokens)

    def send(self, by: float, tokens: float = 1.0) -> None:
        self.prepare(by, tokens)
        self.follower.send()

    def commit(self) -> None:
        assert self.follower.propose()
        assert self.advance()

    def advance(self) -> bool:
        advanced = self.follower.advance()
        if self.follower.decided is not None:
            self.outcomes.append(self.follower.decided[1])
            self.follower.decided = None
        return advanced

    def follow(self) -> None:
        while self.advance():
            pass

    def step(self, by: float = 1.0) -> None:
        """A round of this site alone."""
        self.send(by)
        self.commit()

    def moved(self) -> float:
        """How far the anchor is from the start; all its elements move alike."""
        start = [np.asarray(x) for x in PARAMS.values()]
        found = [x - y for x, y in zip(self.anchor, start, strict=True)]
        np.testing.assert_allclose(found[0], found[0].flat[0], rtol=1e-6)
        return float(found[0].flat[0])

    def commit_of(self, number: int) -> dict[str, Any]:
        found = self.store.read(_run.commit_key(number))
        assert found is not None
        return found[0]


def settle(*sites: ByHand, by: Sequence[float] = ()) -> None:
    """They send, the first proposes, all follow, and have the same bits."""
    for site, own in zip(sites, by, strict=False):
        site.send(own)
    sites[0].commit()
    for site in sites[1:]:
        site.follow()
    assert len({site.digest for site in sites}) == 1
