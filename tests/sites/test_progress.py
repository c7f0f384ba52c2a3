"""A site's parameters after rounds that were not as it had expected."""

import jax.numpy as jnp
import numpy as np
import pytest
from gated_sites import Gated, stepped
from obstore.store import MemoryStore
from site_steps import HALF, ByHand

from curvadion_jax import sites
from curvadion_jax.sites import _messages, _rounds

PARAMS = {"w": jnp.zeros((4, 8))}


def settled(site: sites.Site) -> None:
    """Waits for what becomes of the contribution that is under way."""
    site._worker.wait(60)
    assert not site._worker._busy


def surprise(site, rome, monkeypatch, then=lambda: None) -> None:
    """Rome's round lands after `sync` has looked, and before it gives its copy."""
    worker, give = site._worker, site._worker.give

    def give_after_a_round(*given):
        monkeypatch.setattr(worker, "give", give)
        rome.post(8.0, tokens=2)
        rome.commit()
        with worker.changed:
            assert worker.changed.wait_for(lambda: worker._number == 1, 60)
        give(*given)
        then()

    monkeypatch.setattr(worker, "give", give_after_a_round)


@pytest.mark.parametrize(("keep", "wanted"), [(1.0, 13.0), (0.5, 12.0)])
def test_progress_counts_from_where_another_round_has_moved_it(
    keep, wanted, monkeypatch
):
    memory = MemoryStore()
    store, rome = Gated(memory), ByHand(memory, "rome", params=PARAMS)
    options = {"every": 4, "max_lag": 99, "grace": 0, "keep": keep, "poll": 0.01}
    with sites.join(store, "oslo", **options) as site:
        params = site.start(PARAMS)
        surprise(site, rome, monkeypatch)
        for _ in range(4):
            params = site.sync(stepped(params), tokens=3)
        # All of its progress, which is not counted yet, on rome's 8.
        np.testing.assert_array_equal(params["w"], 8.0 + 4.0)
        assert store.asked.wait(60)
        params = site.sync(stepped(params), tokens=3)
        np.testing.assert_array_equal(params["w"], 8.0 + 5.0)
        store.open.set()
        settled(site)
        params = site.sync(stepped(params), tokens=3)
        # 12 tokens in two rounds, and rome's 2 in one: 3/4 of its 4 on rome's 8.
        rome.follow()
        np.testing.assert_array_equal(rome.anchor[0], 8.0 + 3.0)
        np.testing.assert_array_equal(params["w"], wanted)
        assert site.metrics[:5] == (2, 1, 1, 0, 0)


SPOILT = {
    "too large": PARAMS["w"] + 1e4,
    "not finite": (PARAMS["w"] + 2.0).at[0, 0].set(jnp.nan),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_rejected_site_goes_on_from_the_outer_parameters(how):
    memory, form = MemoryStore(), HALF
    run = {"quorum": 3, "compressor": form}
    store = Gated(memory)
    rome, bonn = (ByHand(memory, n, params=PARAMS, **run) for n in ("rome", "bonn"))
    with sites.join(store, "oslo", every=1, max_lag=99, poll=0.01, **run) as site:
        site.start(PARAMS)
        rome.post(1.0)
        bonn.post(1.0)
        params = site.sync({"w": SPOILT[how]})
        assert store.asked.wait(60)
        for _ in range(2):
            params = site.sync(stepped(params))
        store.open.set()
        settled(site)
        rome.follow()
        store.close()
        params = site.sync(stepped(params))
        # None of its steps is left, those since the contribution included.
        assert rome.anchor[0].any()
        np.testing.assert_array_equal(params["w"], rome.anchor[0])
        assert site.metrics.rejected == 1
        assert site.metrics.counted == 0
        # It begins anew from there: one step, of one token, and nothing owed.
        bonn.follow()
        rome.post(1.0)
        bonn.post(1.0)
        params = site.sync(stepped(params))
        assert store.asked.wait(60)
        key, shapes = _rounds.post_key(1, "oslo"), rome.follower.model.messages[0]
        header, message = _messages.read(rome.store, key, "post", shapes)
        assert header["tokens"] == 1
        # Half of 32 elements of size 1.
        assert rome.follower.model.norm(0, message) == pytest.approx(8**0.5)
        store.open.set()
        settled(site)
        rome.follow()
        params = site.sync(stepped(params))
        np.testing.assert_array_equal(params["w"], rome.anchor[0] + 1)
        assert site.metrics.counted == 1


def test_a_rejected_fragment_holds_up_no_other():
    memory, params = MemoryStore(), {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    run, store = {"quorum": 3, "fragments": 2}, Gated(memory)
    rome, bonn = (ByHand(memory, n, params=params, **run) for n in ("rome", "bonn"))
    with sites.join(store, "oslo", every=2, max_lag=99, poll=0.01, **run) as site:
        params = site.start(params)
        rome.post(1.0)
        bonn.post(1.0)
        params = site.sync({"a": params["a"] + jnp.nan, "b": params["b"] + 1})
        params = site.sync(stepped(params))
        assert store.asked.wait(60)
        params = site.sync(stepped(params))
        store.open.set()
        settled(site)
        rome.follow()
        bonn.follow()
        store.close()
        rome.post(1.0)
        bonn.post(1.0)
        # Two steps since the last contribution: the other fragment's is under way.
        params = site.sync(stepped(params))
        assert site.metrics.rejected == 1
        assert store.asked.wait(60)
        store.open.set()
        settled(site)
        rome.follow()
        params = site.sync(stepped(params))
        # And a step since, of both.
        np.testing.assert_array_equal(params["a"], rome.anchor[0] + 1)
        np.testing.assert_array_equal(params["b"], rome.anchor[1] + 1)
        assert site.metrics.counted == 1


def test_who_is_late_brings_the_steps_since_at_once():
    memory = MemoryStore()
    store, rome = Gated(memory, "rounds/"), ByHand(memory, "rome", params=PARAMS)
    options = {"every": 4, "max_lag": 99, "grace": 0, "keep": 0.5, "poll": 0.01}
    with sites.join(store, "oslo", **options) as site:
        params = site.start(PARAMS)
        for _ in range(4):
            params = site.sync(stepped(params), tokens=2)
        assert store.asked.wait(60)
        params = site.sync(stepped(params), tokens=2)
        rome.post(8.0, tokens=18)
        rome.commit()
        store.open.set()
        settled(site)
        store.close()
        params = site.sync(stepped(params), tokens=2)
        # All six steps, of which none is counted yet, on rome's 8.
        np.testing.assert_array_equal(params["w"], 8.0 + 6.0)
        assert site.metrics[:5] == (1, 1, 0, 1, 0)
        # It is two steps since the last contribution, and the next is under way.
        assert site._worker._busy
        assert store.asked.wait(60)
        for _ in range(2):
            params = site.sync(stepped(params), tokens=2)
        assert site.metrics.lag == 2
        store.open.set()
        settled(site)
        params = site.sync(stepped(params), tokens=2)
        # 12 tokens in two rounds, and rome's 18 in one: 1/4 of its 6 on rome's 8; and
        # half of its three steps since.
        rome.follow()
        np.testing.assert_array_equal(rome.anchor[0], 8.0 + 1.5)
        np.testing.assert_array_equal(params["w"], 9.5 + 1.5)
        assert site.metrics[:5] == (2, 1, 1, 1, 0)


def test_a_fragment_that_is_late_comes_in_its_next_round(monkeypatch):
    memory, params = MemoryStore(), {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    store = Gated(memory)
    rome = ByHand(memory, "rome", params=params, fragments=2)
    options = {"every": 4, "max_lag": 99, "grace": 0, "keep": 0.5, "poll": 0.01}
    with sites.join(store, "oslo", fragments=2, **options) as site:
        params = site.start(params)
        surprise(site, rome, monkeypatch, then=lambda: settled(site))
        for _ in range(4):
            params = site.sync(stepped(params), tokens=3)
        # Late, and the other fragment is under way at once.
        assert site.metrics[:5] == (1, 1, 0, 1, 0)
        assert store.asked.wait(60)
        posts = rome.store.keys(_rounds.post_key(0))
        assert posts == [_rounds.post_key(0, "rome")]
        params = site.sync(stepped(params), tokens=1.5)
        store.open.set()
        settled(site)
        params = site.sync(stepped(params), tokens=1.5)
        # 12 tokens in two rounds, and rome's 2 in one: 3/4 of its 4.
        np.testing.assert_array_equal(params["a"], 8.0 + 6.0)
        np.testing.assert_array_equal(params["b"], 3.0 + 0.5 * 2)
        store.close()
        for _ in range(2):
            params = site.sync(stepped(params), tokens=1.5)
        assert store.asked.wait(60)
        store.open.set()
        settled(site)
        params = site.sync(stepped(params), tokens=1.5)
        # Once all eight steps, of 18 tokens in three rounds: 3/4 of them on rome's 8.
        np.testing.assert_array_equal(params["a"], 8.0 + 6.0 + 0.5 * 1)
        assert site.metrics[:5] == (3, 1, 2, 1, 0)
