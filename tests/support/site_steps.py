"""Sites without threads: every request is made when a test says so."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax import compressors
from curvadion_jax.sites import _join, _site
from curvadion_jax.sites._follower import Follower
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import Store

PARAMS = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
SETTINGS = _site.Settings(
    every=1,
    fragments=1,
    quorum=1,
    grace=0.0,
    max_lag=1,
    keep=1.0,
    snapshot_every=1000,
    max_norm=10.0,
    poll=0.01,
)


# Half of an array is sent, and half of it is owed.
HALF = compressors.exact()._replace(
    codec=compressors.Codec(
        lambda tree: jax.tree.map(lambda x: x / 2, tree), lambda message, like: message
    )
)


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
        chosen = dataclasses.replace(SETTINGS, **settings)
        params = PARAMS if params is None else params
        form = compressor or compressors.exact()
        model = Model(params, outer or optax.scale(-1), form.codec, chosen.fragments)
        incarnation = _join._enter_name(self.store, name)
        self.follower = Follower(
            *(self.store, model, name, incarnation, chosen),
            lambda own, why: self.outcomes.append(why),
        )
        self.follower.enter([np.asarray(x) for x in params.values()])

    @property
    def anchor(self) -> list[np.ndarray]:
        return self.follower.outer.anchor

    def bring(self, by: float, tokens: float = 1.0) -> None:
        """All parameters have moved from the anchor by so much."""
        follower = self.follower
        anchor, fragment = follower.outer.anchor, follower.fragment
        moved = [
            (x + by).astype(x.dtype) for x in follower.model.part(anchor, fragment)
        ]
        follower.bring(moved, anchor, tokens, fragment)

    def post(self, by: float, tokens: float = 1.0) -> None:
        self.bring(by, tokens)
        self.follower.post()

    def commit(self) -> None:
        assert self.follower.propose()
        assert self.follower.advance()

    def follow(self) -> None:
        while self.follower.advance():
            pass

    def moved(self) -> float:
        """How far the anchor is from the start; all its elements move alike."""
        start = [np.asarray(x) for x in PARAMS.values()]
        found = [x - y for x, y in zip(self.anchor, start, strict=True)]
        np.testing.assert_allclose(found[0], found[0].flat[0], rtol=1e-6)
        return float(found[0].flat[0])


def settle(*sites: ByHand) -> None:
    """The first proposes, all follow, and have the same bits."""
    sites[0].commit()
    for site in sites[1:]:
        site.follow()
    assert len({site.follower.outer.digest for site in sites}) == 1
