"""Objects that the store loses: before a round is over, and after they have counted."""

import pytest
from obstore.store import MemoryStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _run, _store

MINUTE = 60.0


def named(names, **options):
    store = MemoryStore()
    return [ByHand(store, name, **options) for name in names]


def lose(site, prefix):
    """The store loses all objects below a prefix."""
    keys = [key for key in site.store.keys("") if key.startswith(prefix)]
    assert keys
    site.store.delete(keys)


@pytest.mark.parametrize("lost", ["rounds/", "bodies/rounds/", "members/"])
def test_what_the_store_has_lost_is_sent_again(lost):
    a, b = named("ab", quorum=2)
    for site in (a, b):
        site.send(1.0)
    lose(a, lost)
    for site in (a, b):
        assert not site.follower.propose()
        site.follower.send()
    settle(a, b)
    assert a.moved() == 1.0


@pytest.mark.parametrize("lost", ["rounds/", "bodies/rounds/"])
def test_what_is_lost_after_it_was_read_back_is_sent_again(clock, lost):
    """At once if its header is gone; what only its body shows, within a minute."""
    a, b, c = named("abc", quorum=3)
    a.send(1.0)
    assert not a.follower.propose()  # has read its own, and waits for the others
    lose(a, lost)
    clock.now += MINUTE + 1 if "bodies" in lost else 1
    for _ in range(2):
        assert not a.follower.propose()
        a.follower.send()
    b.send(3.0)
    c.send(5.0)
    settle(b, c, a)
    assert a.moved() == 3.0
    assert [a.outcomes, b.outcomes, c.outcomes] == [[""], [""], [""]]


def test_an_own_contribution_that_is_there_is_written_once(clock, monkeypatch):
    a, _ = named("ab", quorum=2)
    written, write = [], a.store.write

    def noted(key, *given):
        written.append(key)
        write(key, *given)

    monkeypatch.setattr(a.store, "write", noted)
    a.send(1.0)
    for _ in range(3):
        clock.now += MINUTE + 1
        assert not a.follower.propose()
        a.follower.send()
    assert written == [_run.contribution_key(0, "a")]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("lost", ["rounds/00000001/b", "bodies/rounds/00000001/b"])
def test_a_counted_contribution_that_is_lost_stops_no_round(clock, lost, again):
    """Although the quorum is all sites: who waits for a stopped one writes a snapshot.

    It starts from there, also if it was killed meanwhile.
    """
    a, b, c = named("abc", quorum=3)
    settle(a, b, c, by=[1.0, 1.0, 1.0])
    for site, by in zip((a, b, c), (1.0, 2.0, 3.0), strict=True):
        site.send(by)
    settle(a, b)
    lose(a, lost)
    with pytest.raises(_store.StoreError, match="no snapshot that can be used"):
        c.follow()
    assert c.follower.number == 1  # it takes no other step than the others
    for site in (a, b):
        site.send(1.0)
    for wait in (0.0, MINUTE):
        clock.now += wait
        assert not a.follower.propose()
        assert a.store.keys(_run.SNAPSHOTS) == [_run.snapshot_key(0)]
    clock.now += 1
    assert not a.follower.propose()
    if again:
        c = ByHand(c.store._store, "c", quorum=3)
    c.follow()
    assert c.digest == a.digest
    assert c.outcomes == ([] if again else ["", ""])
    c.send(4.0)
    settle(a, b, c)
    assert a.moved() == pytest.approx(1.0 + 2.0 + 2.0)


def test_a_site_that_is_slow_costs_no_snapshot(clock):
    a, b = named("ab", quorum=2)
    for number in range(3):
        a.send(1.0)
        for _ in range(3):
            clock.now += MINUTE + 1
            assert not a.follower.propose()
        b.send(1.0)
        settle(b, a)
        assert a.follower.number == number + 1
    assert a.store.keys(_run.SNAPSHOTS) == [_run.snapshot_key(0)]


def test_a_site_needs_nobody_to_read_its_own_contribution():
    a, b = named("ab", quorum=2)
    for site in (a, b):
        site.send(1.0)
    a.commit()
    lose(b, "rounds/00000000/b")
    lose(b, "bodies/rounds/00000000/b")
    b.follow()
    assert a.digest == b.digest
    assert b.outcomes == [""]


@pytest.mark.parametrize("sent", ["nothing", "from another anchor", "from both"])
def test_a_snapshot_of_an_open_round_needs_contributions_that_confirm_it(sent):
    a, b = named("ab", quorum=3)
    a.follower._quorum = 1
    a.step()
    b.follow()
    _run.write_snapshot(a.store, a.follower.outer, {}, 1)
    if sent != "nothing":
        b.follower.outer = b.follower.outer._replace(digest="0" * 32)
        b.send(1.0)
    if sent == "from both":
        a.send(1.0)
    _, _, number = _run.load(a.store, a.follower.model)
    assert number == 0
