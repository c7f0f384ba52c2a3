"""Sites under kills and a store that lies now and then, in an order drawn at random.

Requests fail before or after their effect, writes arrive later or twice, reads find
nothing, something else or a part, listings are old or have holes, and sites are killed
at any request. No good contribution may be rejected, lost or counted twice, and all
sites must have the same bits in the end.
"""

import math
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import MemoryStore
from site_steps import ByHand

from curvadion_jax.sites import _run, _store

NAMES, TURNS = "abc", 120


class Killed(BaseException):
    """The process ends at a request."""


class Lying:
    """A store that lies to one site, at these rates."""

    def __init__(self, store, rng, rates, delayed):
        self._store, self._rng, self.rates = store, rng, rates
        self._delayed, self._last, self.left = delayed, {}, math.inf

    def _comes(self, what):
        return self._rng.random() < self.rates.get(what, 0)

    def _request(self):
        self.left -= 1
        if self.left < 0:
            raise Killed
        if self._comes("refused"):
            raise GenericError("503")

    def put(self, key, data, **options):
        self._request()
        if self._delayed and self._comes("arrives"):
            self._delayed.pop()()
        if options.get("mode") == "create" and self._comes("409"):
            raise AlreadyExistsError("409 ConditionalRequestConflict")
        if self._comes("delayed"):
            self._delayed.append(lambda: self._late(key, data, **options))
            raise GenericError("timeout")
        self._store.put(key, data, **options)
        if self._comes("twice"):
            self._store.put(key, data, **options)
        if self._comes("answer lost"):
            raise GenericError("connection reset")

    def _late(self, key, data, **options):
        try:
            self._store.put(key, data, **options)
        except AlreadyExistsError:
            pass

    def get(self, key):
        self._request()
        if self._comes("hidden"):
            raise FileNotFoundError(key)
        data = bytearray(self._store.get(key).bytes())
        if self._comes("flipped"):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        if self._comes("cut off"):
            del data[self._rng.randrange(len(data)) :]
        return SimpleNamespace(meta={"size": len(data)}, bytes=lambda: data)

    def list(self, prefix):
        self._request()
        now = [meta for chunk in self._store.list(prefix=prefix) for meta in chunk]
        found = self._last.get(prefix, []) if self._comes("old") else now
        self._last[prefix] = now
        return iter([[x for x in found if not self._comes("hole")]])

    def delete(self, key):
        self._request()
        self._store.delete(key)


class Program:
    """A site that starts again when it is killed, and knows what has counted."""

    def __init__(self, store, name, rng, **options):
        self.store, self.name, self._rng, self._options = store, name, rng, options
        self.site, self.counted, self.rejected, self.unknown = None, set(), [], set()

    def follow(self):
        while self.site.follower.advance():
            if self.site.follower.decided is not None:
                own, why = self.site.follower.decided
                self.site.follower.decided = None
                if not why:
                    self.counted.add(own.uid)
                elif why != "late":
                    self.rejected.append(why)

    def turn(self):
        """Does all that it can, with one new contribution at most."""
        try:
            if self.site is None:
                self.site = ByHand(self.store, self.name, **self._options)
            self.follow()
            if self.site.follower.contribution is None:
                self.site.prepare(self._rng.random(), 1 + self._rng.randrange(3))
            self.site.follower.send()
            self.site.follower.propose()
        except _store.StoreError:
            pass
        except Killed:
            if self.site is not None and self.site.follower.contribution is not None:
                self.unknown.add(self.site.follower.contribution.uid)
            self.site = None


CASES = {
    "writes": ["refused", "answer lost", "409", "delayed", "arrives", "twice"],
    "reads": ["hidden", "flipped", "cut off", "old", "hole"],
    "kills": ["refused", "answer lost", "409", "delayed", "arrives", "cut off"],
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_nothing_counts_twice_or_is_lost(case, seed):
    rng, memory, delayed = random.Random(seed), MemoryStore(), []
    rates = dict.fromkeys(CASES[case], 0.1 if case == "writes" else 0.03)
    options = {"quorum": 1 + seed, "snapshot_every": 2}
    stores = {name: Lying(memory, rng, rates, delayed) for name in NAMES}
    programs = [Program(stores[x], x, rng, **options) for x in NAMES]
    for _ in range(TURNS):
        program = rng.choice(programs)
        kill = case == "kills" and rng.random() < 0.3
        program.store.left = rng.randrange(25) if kill else math.inf
        program.turn()
    for store in stores.values():
        store.rates, store.left = {}, math.inf
    for program in programs * 2:
        program.turn()
    for program in programs:
        program.follow()
    followers = [program.site.follower for program in programs]
    assert len({(x.number, x.outer.digest) for x in followers}) == 1
    assert followers[0].number > 10
    found = Counter()
    for number in range(followers[0].number):
        commit = programs[0].site.commit_of(number)
        assert not commit["rejected"]
        found.update((x["name"], x["uid"]) for x in commit["contributors"])
    assert max(found.values()) == 1
    for program in programs:
        counted = {uid for name, uid in found if name == program.name}
        assert program.counted <= counted <= program.counted | program.unknown
        assert not program.rejected
    assert _run.members(programs[0].site.store.keys("")).newest.keys() == set(NAMES)
