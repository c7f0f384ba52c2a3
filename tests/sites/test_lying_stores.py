"""Sites under kills and a store that lies now and then, in an order drawn at random.

Requests fail before or after their effect, writes and deletions arrive later or twice,
reads find nothing, something else or a part, listings are old or have holes, sites are
killed at any request, leave and come back, and two have one name. No good contribution
may be rejected, lost or counted twice: a site's parameters are always the outer ones
and the steps that it does not know to have counted. All end with the same bits.
"""

import contextlib
import functools
import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import MemoryStore
from site_steps import PARAMS, plain_model

from curvadion_jax import sites
from curvadion_jax.sites import _run, _site, _store, _worker

TURNS = 160


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

    def _write(self, request):
        if self._delayed and self._comes("arrives"):
            self._delayed.pop(self._rng.randrange(len(self._delayed)))()
        if self._comes("delayed"):
            self._delayed.append(lambda: late(request))
            raise GenericError("timeout")
        request()
        if self._comes("twice"):
            late(request)
        if self._comes("answer lost"):
            raise GenericError("connection reset")

    def put(self, key, data, **options):
        self._request()
        if options.get("mode") == "create" and self._comes("409"):
            raise AlreadyExistsError("409 ConditionalRequestConflict")
        self._write(lambda: self._store.put(key, data, **options))

    def get(self, key):
        self._request()
        if self._comes("hidden"):
            raise FileNotFoundError(key)
        data = bytearray(self._store.get(key).bytes())
        if data and self._comes("flipped"):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        if data and self._comes("cut off"):
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
        self._write(lambda: self._store.delete(key))


def late(request):
    try:
        request()
    except (AlreadyExistsError, FileNotFoundError):
        pass


class Program:
    """A site whose thread does something when a test says so, and starts again."""

    def __init__(self, store, name, rng, quorum):
        self.store, self._name, self._rng, self._quorum = store, name, rng, quorum
        self.site, self.counted = None, set()

    @property
    def follower(self):
        return self.site._worker.follower

    def _start(self):
        options = {"every": self._rng.randint(1, 3), "max_lag": math.inf, "grace": 0}
        site = sites.Site(self.store, self._name, quorum=self._quorum, **options)
        self._params = site.start(PARAMS)
        site._worker.follower.snapshot_every = 2
        # Steps, those of the contribution under way, and those that have counted.
        self._steps, self._sent, self._done, self.site = 0, 0, 0, site
        submit, prepare = site._worker.submit, self.follower.prepare

        def noted(*given):
            self._sent = self._steps
            if self._rng.random() < 0.2:  # the thread is at work just then
                with contextlib.suppress(_store.StoreError):
                    site._worker._turn()
            submit(*given)

        def named(*given):
            prepare(*given)
            self._uid = self.follower.contribution.uid

        site._worker.submit, self.follower.prepare = noted, named

    def _step(self):
        self._params = jax.tree.map(lambda x: x + 1, self._params)
        self._steps, sent, before = self._steps + 1, self._sent, self.site.metrics
        self._params = self.site.sync(self._params)
        if self.site.metrics.counted > before.counted:
            self._done = sent
            self.counted.add(self._uid)
        assert self.site.metrics.rejected == 0
        anchor = self.site._worker._taken[1]
        for x, outer in zip(self._params.values(), anchor, strict=True):
            own = self._steps - self._done
            np.testing.assert_allclose(x, outer + own, rtol=1e-5, atol=1e-4)

    def turn(self):
        try:
            if self.site is None:
                self._start()
            for _ in range(self._rng.randrange(4)):
                self._step()
            if self.store.rates and self._rng.random() < 0.02:
                site, self.site = self.site, None
                # Who has not counted yet is told so once it has left.
                with contextlib.suppress(RuntimeError):
                    site.leave(self._params, timeout=0)
                site._worker._turn()
            elif self._rng.random() < 0.7:
                self.site._worker._turn()
            if self.site is not None and self._rng.random() < 0.3:
                self.follower.heart.beat()
        except _store.StoreError:
            pass
        except Killed:
            self.site = None
        except RuntimeError as error:
            if "Another site has joined" not in str(error):
                raise
            self.site = None


CASES = {
    "writes": ["refused", "answer lost", "409", "delayed", "arrives", "twice"],
    "reads": ["hidden", "flipped", "cut off", "old", "hole"],
    "kills": ["refused", "answer lost", "409", "delayed", "arrives", "cut off", "old"],
}


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(_site, "Model", lambda *_: plain_model())
    monkeypatch.setattr(_worker.Worker, "start", lambda _: None)
    monkeypatch.setattr(_site.atexit, "register", lambda _: None)
    monkeypatch.setattr(_worker.Worker, "wait", lambda *_: None)


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_nothing_counts_twice_or_is_lost(case, seed):
    rng, memory, delayed = random.Random(seed), MemoryStore(), []
    rates = dict.fromkeys(CASES[case], 0.05 if case == "writes" else 0.03)
    lying = functools.partial(Lying, memory, rng, rates, delayed)
    names = "abc" if seed else "abca"
    programs = [Program(lying(), name, rng, 1 + seed) for name in names]
    for _ in range(TURNS):
        program = rng.choice(programs)
        kill = case == "kills" and rng.random() < 0.3
        program.store.left = rng.randrange(25) if kill else math.inf
        program.turn()
    rates.clear()
    for each in delayed:
        each()
    for program in programs:
        program.store.left = math.inf
    for program in programs[:3] * 6:  # an older twin sees late that it is one
        program.turn()
    followers = [program.follower for program in programs[:3]]
    for follower in followers * 2:
        while follower.advance():
            pass
    assert len({(x.number, x.outer.digest) for x in followers}) == 1
    assert followers[0].number > 5
    commits = map(followers[0].store.read, map(_run.commit_key, itertools.count()))
    found = [commit for commit, _ in itertools.takewhile(bool, commits)]
    assert not any(commit["rejected"] for commit in found)
    counted = Counter(x["uid"] for commit in found for x in commit["contributors"])
    assert max(counted.values()) == 1
    reported = [uid for program in programs for uid in program.counted]
    assert 5 < len(reported) == len(set(reported) & counted.keys())
