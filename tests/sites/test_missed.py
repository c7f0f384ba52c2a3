"""Syncs that fail are seen: while a site trains, when it leaves, and when it ends."""

import logging

import jax.numpy as jnp
import pytest
from gated_sites import stepped
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand

from curvadion_jax import sites
from curvadion_jax.sites import _site, _worker


@pytest.fixture
def alone(monkeypatch):
    """A site whose thread does what a test says, and another one by hand."""
    monkeypatch.setattr(_worker.Worker, "start", lambda _: None)
    monkeypatch.setattr(_worker.Worker, "wait", lambda *_: None)
    memory = MemoryStore()
    rome = ByHand(memory, "rome")
    with sites.Site(memory, "oslo", every=1, max_lag=99, grace=0) as site:
        yield site, site.start(PARAMS), rome


def late_round(site, params, rome):
    """Rome commits a round, of which oslo hears with its contribution under way."""
    params = site.sync(stepped(params))
    rome.step(1.0)
    while site._worker.follower.advance():
        pass
    return site.sync(params)


def messages(caplog):
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_rounds_that_did_not_count_a_site_are_counted_and_warned_of(alone, caplog):
    """After four in a row, and after twice as many."""
    site, params, rome = alone
    warned = []
    for number in range(1, 9):
        params = late_round(site, params, rome)
        assert site.metrics.missed == site.metrics.round == number
        lines = messages(caplog)
        warned += [number] * len(lines)
        assert all(f"None of the last {number} rounds counted" in x for x in lines)
    assert warned == [4, 8]
    site._worker._turn()  # and now it counts
    params = site.sync(stepped(params))
    found = site.metrics
    assert (found.round, found.missed, found.counted) == (9, 8, 1)
    assert found.contributions == found.counted + found.late + 1
    for _ in range(7):  # as many as it has been warned of
        site._worker._turn()
        params = late_round(site, params, rome)
    assert messages(caplog) == []


def nine_rounds(site, rome):
    """Rome commits them, and oslo hears of all at once."""
    for _ in range(9):
        rome.step(1.0)
    while site._worker.follower.advance():
        pass


@pytest.mark.parametrize("has_counted", [False, True])
def test_rounds_for_which_a_site_had_nothing_are_not_missed(alone, caplog, has_counted):
    """Its first steps, or an evaluation, may take longer than others need for rounds.

    Those after it are, from the first.
    """
    site, params, rome = alone
    if has_counted:
        params = site.sync(stepped(params))
        site._worker._turn()
    nine_rounds(site, rome)
    params = site.sync(stepped(params))  # takes them, and gives a contribution
    assert (site.metrics.counted, site.metrics.missed) == (int(has_counted), 0)
    for number in range(1, 5):
        assert messages(caplog) == []
        rome.step(1.0)
        while site._worker.follower.advance():
            pass
        params = site.sync(stepped(params))
        assert site.metrics.missed == number
    assert "None of the last 4 rounds counted this site" in messages(caplog)[0]


def test_rounds_after_a_rejected_contribution_are_not_missed(alone):
    """Until the site has another one: nothing of it waits."""
    site, params, rome = alone
    site.sync({name: x * jnp.nan for name, x in params.items()})
    site._worker._turn()
    follower = site._worker.follower
    assert "NaN" in follower.decided[1]
    nine_rounds(site, rome)
    assert (follower.number, follower.has_uncounted, follower.missed) == (9, False, 1)


def test_rounds_that_count_a_predecessor_leave_what_waits(alone):
    """The site was killed, and its contribution counts while the next one waits."""
    site, params, rome = alone
    killed = ByHand(rome.store._store, "oslo")
    killed.send(4.0)
    follower = site._worker.follower
    site.sync(stepped(params))  # submitted, and not sent
    rome.step(1.0)
    assert [x["name"] for x in rome.commit_of(0)["contributors"]] == ["oslo", "rome"]
    while follower.advance():
        pass
    assert (follower.has_uncounted, follower.missed) == (True, 0)
    rome.step(1.0)
    assert (follower.advance(), follower.missed) == (True, 1)


def test_rounds_that_pass_while_a_site_cannot_send_are_missed(alone, caplog):
    """Its first contribution is given, and the store is out of its reach."""
    site, params, rome = alone
    params = site.sync(stepped(params))
    nine_rounds(site, rome)
    site.sync(stepped(params))
    assert site.metrics.missed == 9
    assert ["None of the last 9" in x for x in messages(caplog)] == [True]


def test_a_site_with_no_sync_that_counted_leaves_with_an_error(alone, caplog):
    site, params, rome = alone
    params = late_round(site, params, rome)
    tried = site.metrics.contributions
    with pytest.raises(RuntimeError, match=f"None of the {tried} contributions of"):
        site.leave(params, timeout=0)
    assert f"oslo leaves; syncs: 0 of {tried} counted" in messages(caplog)
    assert site._worker._leaving  # the others are told


def test_a_site_with_no_sync_that_counted_ends_with_a_line_in_the_log(alone, caplog):
    site, params, rome = alone
    late_round(site, params, rome)
    site.close()
    assert messages(caplog) == ["oslo ends, and none of its contributions counted"]


def test_a_site_says_how_many_of_its_syncs_have_counted(caplog):
    caplog.set_level(logging.INFO)
    options = {"every": 1, "max_lag": 0, "poll": 0.01}
    with sites.Site(MemoryStore(), "oslo", **options) as site:
        params = site.start(PARAMS)
        for _ in range(3):
            params = site.sync(stepped(params))
        site.leave(params)
    assert messages(caplog) == ["oslo leaves; syncs: 3 of 3 counted"]
    assert caplog.records == []


def test_a_site_that_has_taken_no_step_leaves_without_an_error(caplog):
    with sites.Site(MemoryStore(), "oslo") as site:
        site.leave(site.start(PARAMS))
    assert messages(caplog) == []
    assert site.metrics == _site.SiteMetrics(
        *[0] * 8,
        bytes_up=site.metrics.bytes_up,
        bytes_down=site.metrics.bytes_down,
        ignored=0,
    )
