"""Steps go on while a contribution is under way; what becomes of them."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from faulty import FaultyStore
from gated_sites import Gated, stepped
from obstore.store import MemoryStore
from site_runs import start_params, together, train
from site_steps import ByHand

from curvadion_jax import compressors, sites
from curvadion_jax.sites import _site

PARAMS = {"w": jnp.zeros((4, 8))}


def decided(site):
    """Waits for what becomes of the contribution that is under way."""
    site._worker.wait(60)
    assert site._worker.follower.decided


def test_sync_waits_beyond_the_bound_alone(monkeypatch, caplog):
    store = Gated()
    with sites.Site(store, "oslo", every=2, max_lag=2, poll=0.01) as site:
        params = site.start(PARAMS)
        worker, waits = site._worker, []
        wait = worker.wait

        def opening(seconds):
            waits.append(seconds)
            store.open.set()
            wait(seconds)

        monkeypatch.setattr(worker, "wait", opening)
        for _ in range(3):
            params = site.sync(stepped(params))
        assert not waits
        assert site.metrics.blocked == 0
        params = site.sync(stepped(params))  # the second since it was taken
        assert waits
        assert not caplog.records
        assert site.metrics.counted >= 1
        np.testing.assert_array_equal(params["w"], 4.0)


class AtOnce:
    """A condition for which nobody waits."""

    __enter__ = __exit__ = lambda *_: None

    def wait_for(self, *_):
        pass


@pytest.fixture
def at_a_request(monkeypatch):
    """A worker that waits for the answer to a request; and what lets its waits pass."""
    store = Gated()
    with sites.Site(store, "oslo", every=1, max_lag=99, poll=0.01) as site:
        site.sync(site.start(PARAMS))
        assert store.reached.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(site._worker, "_changed", AtOnce())
            yield site._worker
        store.open.set()


def test_a_request_without_an_answer_is_warned_of_once_a_minute(at_a_request, caplog):
    warned = []
    for number in range(40):
        at_a_request.wait(5.0)
        warned += [number] * len(caplog.records)
        caplog.clear()
    assert warned == [13, 26, 39]


def test_a_stopped_machine_or_a_slow_upload_is_not_warned_of(
    at_a_request, clock, caplog
):
    under_way, thread = at_a_request.follower.store.under_way, at_a_request.ident
    for piece in range(40):
        clock.now += 3600.0
        under_way[thread] = [1000, piece]
        at_a_request.wait(5.0)
    del under_way[thread]
    for _ in range(40):  # it computes
        clock.now += 3600.0
        at_a_request.wait(5.0)
    under_way[thread] = [0, 0]
    assert not caplog.records


def test_what_is_decided_between_two_looks_counts_once(monkeypatch):
    """The worst moment: after `sync` has looked, and before it gives a new copy."""
    store = Gated()
    with sites.Site(store, "oslo", every=2, max_lag=99, poll=0.01) as site:
        params = site.start(PARAMS)
        for _ in range(4):
            params = site.sync(stepped(params))
        worker, take = site._worker, site._worker.take

        def look():
            found = take()
            store.open.set()
            decided(site)
            return found

        monkeypatch.setattr(worker, "take", look)
        params = site.sync(stepped(params))
        monkeypatch.setattr(worker, "take", take)
        params = site.leave(params)
    np.testing.assert_array_equal(params["w"], 5.0)


def test_progress_counts_from_where_another_round_has_moved_it(monkeypatch):
    """Rome's round lands after `sync` has looked, and before it gives its copy."""
    memory = MemoryStore()
    store, rome = Gated(memory), ByHand(memory, "rome", params=PARAMS)
    options = {"every": 4, "max_lag": 99, "grace": 0, "poll": 0.01}
    with sites.Site(store, "oslo", **options) as site:
        params = site.start(PARAMS)
        worker, submit = site._worker, site._worker.submit

        def submit_after_a_round(*given):
            rome.send(8.0, tokens=2)
            rome.commit()
            with worker._changed:
                found = worker._changed.wait_for(lambda: worker.follower.number, 60)
                assert found
            submit(*given)

        monkeypatch.setattr(worker, "submit", submit_after_a_round)
        for _ in range(4):
            params = site.sync(stepped(params), tokens=3)
        # All of its progress, which is not counted yet, on rome's 8.
        np.testing.assert_array_equal(params["w"], 8.0 + 4.0)
        assert store.reached.wait(60)
        params = site.sync(stepped(params), tokens=3)
        np.testing.assert_array_equal(params["w"], 8.0 + 5.0)
        store.open.set()
        decided(site)
        params = site.sync(stepped(params), tokens=3)
        # 12 tokens in two rounds, and rome's 2 in one: 3/4 of its 4 on rome's 8.
        rome.follow()
        np.testing.assert_array_equal(rome.anchor[0], 8.0 + 3.0)
        np.testing.assert_array_equal(params["w"], 8.0 + 3.0 + 2.0)
        assert site.metrics[:5] == (2, 1, 1, 0, 0)


def test_who_is_late_contributes_the_steps_since_at_once():
    memory = MemoryStore()
    store, rome = Gated(memory, "rounds/"), ByHand(memory, "rome", params=PARAMS)
    options = {"every": 4, "max_lag": 99, "grace": 0, "poll": 0.01}
    with sites.Site(store, "oslo", **options) as site:
        params = site.start(PARAMS)
        for _ in range(4):
            params = site.sync(stepped(params), tokens=2)
        assert store.reached.wait(60)
        params = site.sync(stepped(params), tokens=2)
        rome.send(8.0, tokens=18)
        rome.commit()
        store.open.set()
        decided(site)
        store.close()
        params = site.sync(stepped(params), tokens=2)
        # All six steps, of which none is counted yet, on rome's 8.
        np.testing.assert_array_equal(params["w"], 8.0 + 6.0)
        assert site.metrics[:5] == (1, 1, 0, 1, 0)
        assert store.reached.wait(60)  # the next contribution is under way
        for _ in range(2):
            params = site.sync(stepped(params), tokens=2)
        store.open.set()
        decided(site)
        params = site.sync(stepped(params), tokens=2)
        # 12 tokens in two rounds, and rome's 18 in one: 1/4 of its 6 on rome's 8.
        rome.follow()
        np.testing.assert_array_equal(rome.anchor[0], 8.0 + 1.5)
        np.testing.assert_array_equal(params["w"], 9.5 + 3.0)
        assert site.metrics[:5] == (2, 1, 1, 1, 0)


def test_a_rejected_site_continues_from_the_outer_parameters():
    memory, run = MemoryStore(), {"quorum": 2}
    store = Gated(memory)
    rome, bonn = (ByHand(memory, n, params=PARAMS, **run) for n in ("rome", "bonn"))
    with sites.Site(store, "oslo", every=1, max_lag=99, poll=0.01, **run) as site:
        site.start(PARAMS)
        rome.send(1.0)
        bonn.send(1.0)
        params = site.sync({"w": PARAMS["w"].at[0, 0].set(jnp.nan)})
        assert store.reached.wait(60)
        for _ in range(2):
            params = site.sync(stepped(params))
        store.open.set()
        decided(site)
        rome.follow()
        bonn.follow()
        store.close()
        params = site.sync(stepped(params))
        # None of its steps is left, those since the contribution included.
        np.testing.assert_array_equal(params["w"], rome.anchor[0])
        assert site.metrics[2:5] == (0, 0, 1)
        # It begins anew from there: one step, of one token, and no residual.
        rome.send(1.0)
        bonn.send(1.0)
        params = site.sync(stepped(params))
        assert store.reached.wait(60)
        assert site._worker.follower.contribution.tokens == 1
        store.open.set()
        decided(site)
        rome.follow()
        params = site.sync(stepped(params))
        np.testing.assert_array_equal(rome.anchor[0], 2.0)
        np.testing.assert_array_equal(params["w"], 3.0)
        assert site.metrics.counted == 1


@pytest.mark.slow
def test_a_store_that_fails_costs_time_and_nothing_else():
    """Refused requests and lost answers: what is created once is counted once."""
    found = {}
    for faults in ({"refuse": 0.2, "lose": 0.1}, {}):
        memory, options = MemoryStore(), {"every": 4, "quorum": 3, "max_lag": 0}
        options |= {"poll": 0.002, "compressor": compressors.quantize(2, block=16)}

        def run(number, memory=memory, faults=faults, options=options):
            store = FaultyStore(memory, seed=number)
            with sites.Site(store, f"s{number}", **options) as site:
                params = site.start(start_params())
                vars(store).update(faults)
                params = train(site, number, optax.sgd(0.1), params=params)
                assert site.metrics.counted == 3
                assert bool(store.refused) == bool(faults)
                return np.asarray(params["kernel"]).tobytes()

        runs = {f"{n} {faults}": lambda n=n: run(n) for n in range(3)}
        found |= together(runs)
    assert len(set(found.values())) == 1


def test_who_leaves_contributes_what_is_left_and_does_not_wait_for_ever(monkeypatch):
    store, left = FaultyStore(memory := MemoryStore()), "members/oslo/000001.left"
    with sites.Site(store, "oslo", every=2, max_lag=0, poll=0.01) as site:
        params = site.start(PARAMS)
        for _ in range(5):
            params = site.sync(stepped(params))
        store.refuse = 0.6  # also of the requests that tell the others
        params = site.leave(params)
        assert site.metrics.counted == 3
        np.testing.assert_array_equal(params["w"], 5.0)
    assert [x["path"] for part in memory.list("members/") for x in part] == [left]
    assert not site._worker.follower.heart.is_alive()
    store = Gated(prefix=left)
    monkeypatch.setattr(_site, "_WAIT", 0.1)
    with sites.Site(store, "oslo", quorum=2, every=1, poll=0.01) as site:
        params = site.sync(stepped(site.start(PARAMS)))
        with pytest.raises(RuntimeError, match="None of the 1 contributions of this"):
            site.leave(params, timeout=0.2)
    store.open.set()


def test_a_sync_that_is_interrupted_takes_nothing_with_it(monkeypatch):
    """Ctrl-C while it waits for a second round, after rome's has landed."""
    memory = MemoryStore()
    store, rome = Gated(memory, "rounds/"), ByHand(memory, "rome", params=PARAMS)
    options = {"every": 1, "max_lag": 0, "grace": 0, "poll": 0.01}
    with sites.Site(store, "oslo", **options) as site:
        params = site.start(PARAMS)
        wait, waits = site._worker.wait, []

        def late_and_interrupted(seconds):
            if waits:
                raise KeyboardInterrupt
            waits.append(seconds)
            assert store.reached.wait(60)
            rome.step(8.0)
            store.open.set()
            wait(seconds)

        monkeypatch.setattr(site._worker, "wait", late_and_interrupted)
        params = stepped(params)
        with pytest.raises(KeyboardInterrupt):
            site.sync(params)
        monkeypatch.undo()
        params = site.sync(stepped(params))
    rome.follow()
    # Of its first step, in two rounds, a third counts, of the other one half.
    np.testing.assert_allclose(rome.anchor[0], 8.0 + 1 / 3 + 1 / 2, rtol=1e-6)
    np.testing.assert_array_equal(params["w"], rome.anchor[0])
