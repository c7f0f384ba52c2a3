"""Objects that the store loses: before a round is over, and after they have counted."""

import pytest
from obstore.store import MemoryStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _follower, _run, _store

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


def test_what_an_old_listing_lacks_is_written_again_and_changes_nothing(monkeypatch):
    a, b = named("ab", quorum=2)
    a.send(1.0)
    objects = lambda: {key: a.store.get(key, 10**6) for key in a.store.keys("")}
    before, written = objects(), a.store.up
    keys = a.store.keys
    with monkeypatch.context() as patch:
        patch.setattr(a.store, "keys", lambda at: [] if "rounds" in at else keys(at))
        assert not a.follower.propose()
    a.follower.send()
    assert a.store.up > written
    assert objects() == before
    b.send(3.0)
    settle(a, b)
    assert a.moved() == 2.0
    assert [a.outcomes, b.outcomes] == [[""], [""]]


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
    with pytest.raises(_store.StoreError, match="no later snapshot can be used"):
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
    found = _run.load(a.store, a.follower.model)
    assert found is not None
    assert found[2] == 0


LOST = "rounds/00000001/b or its body, which counts in round 1, is gone"
LOOK = 50.0  # seconds from one look of a site that waits to the next


def stuck(clock):
    """A site that cannot take round 1, since a contribution to it is lost."""
    a, b, c = named("abc", quorum=2)
    settle(a, b, c, by=[1.0, 1.0, 1.0])
    a.send(1.0)
    b.send(2.0)
    assert a.follower.propose()
    lose(a, "rounds/00000001/b")
    c.prepare(3.0)
    return c


def seconds_until_it_ends(clock, site):
    """Of a site that looks again and again, and the error."""
    began = clock.now
    while True:
        try:
            site.advance()
        except _store.StoreError:
            clock.now += LOOK
        except RuntimeError as error:
            return clock.now - began, str(error)


def test_a_site_ends_if_nobody_has_a_counted_contribution_any_more(clock):
    c = stuck(clock)
    digest, contribution = c.digest, c.follower.contribution
    seconds, error = seconds_until_it_ends(clock, c)
    assert _follower._GIVE_UP < seconds <= _follower._GIVE_UP + LOOK
    assert LOST in error
    assert "have of round 1 and later" in error
    assert (c.follower.number, c.digest) == (1, digest)
    assert c.follower.contribution is contribution


def a_contribution(clock, site):
    """To a later round, of a site that has taken this one."""
    site.store.write(_run.contribution_key(2, "a"), {})


def an_outage(clock, site):
    clock.now += 10 * _follower._GIVE_UP


def a_long_period(clock, site):
    """Of two contributions whose distance is more than a third of the wait."""
    site.follower._period = _follower._GIVE_UP


@pytest.mark.parametrize("news", [a_contribution, an_outage, a_long_period])
def test_a_site_waits_for_one_that_may_have_taken_the_round(clock, news):
    c = stuck(clock)
    for _ in range(5):
        with pytest.raises(_store.StoreError, match=LOST):
            c.advance()
        clock.now += LOOK
    news(clock, c)
    seconds, _ = seconds_until_it_ends(clock, c)
    assert seconds > _follower._GIVE_UP


def test_a_period_is_the_time_between_two_contributions(clock):
    a, b = named("ab", quorum=2)
    for _ in range(2):
        assert a.follower._period == 0
        clock.now += 300.0
        settle(a, b, by=[1.0, 1.0])
    assert a.follower._period == 300.0


def test_a_snapshot_whose_body_is_lost_is_written_again(clock):
    """By a site that waits for one that needs it."""
    a, b, c = named("abc", quorum=3)
    settle(a, b, c, by=[1.0, 1.0, 1.0])
    for site in (a, b, c):
        site.send(2.0)
    settle(a, b)
    _run.write_snapshot(a.store, a.follower.outer, a.follower._roster, 2)
    lose(a, "bodies/rounds/00000001/b")
    lose(a, "bodies/snapshots/00000002")
    with pytest.raises(_store.StoreError, match=LOST):
        c.follow()
    a.send(1.0)
    for _ in range(2):
        assert not a.follower.propose()
        clock.now += MINUTE + 1
    c.follow()
    assert c.digest == a.digest


@pytest.mark.parametrize("later", [False, True])
def test_a_round_that_is_removed_is_decided_again(later):
    """As the error of a lost contribution says; also if sites have gone further."""
    store = MemoryStore()
    first = [ByHand(store, name, quorum=3) for name in "abc"]
    settle(*first, by=[1.0, 1.0, 1.0])
    settle(*first, by=[2.0, 2.0, 2.0])
    if later:
        settle(*first, by=[7.0, 7.0, 7.0])
        outer, roster = first[0].follower.outer, first[0].follower._roster
        _run.write_snapshot(first[0].store, outer, roster, 3)
        lose(first[0], "bodies/snapshots/00000003")
    lose(first[0], "bodies/rounds/00000001/b")
    with pytest.raises(_store.StoreError, match=LOST):
        ByHand(store, "c", quorum=3)
    for number in range(1, 3 if later else 2):
        lose(first[0], _run.commit_key(number))
        lose(first[0], _run.contribution_key(number, ""))
    again = [ByHand(store, name, quorum=3) for name in "abc"]
    assert [x.follower.number for x in again] == [1, 1, 1]
    for by in (3.0, 4.0, 5.0):
        settle(*again, by=[by, by, by])
    assert again[0].moved() == 1.0 + 3.0 + 4.0 + 5.0
    assert ByHand(store, "d", quorum=3).digest == again[0].digest


@pytest.mark.parametrize("later", [False, True])
def test_a_kill_between_a_body_and_its_header_leaves_nothing_that_counts(
    monkeypatch, later
):
    """The site that starts again contributes its own."""
    a, b, killed = named("abc", quorum=3)
    settle(a, b, killed, by=[1.0, 1.0, 1.0])

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(killed.store, "create", die)
        with pytest.raises(KeyboardInterrupt):
            killed.send(900.0)
    assert len(a.store.keys("bodies/rounds/00000001/c")) == 1
    c = ByHand(a.store._store, "c", quorum=3)
    for site in (a, b):
        site.send(2.0)
    if later:
        assert not a.follower.propose()
    c.send(5.0)
    settle(a, b, c)
    assert a.moved() == 1.0 + 3.0
    assert c.outcomes == [""]


def test_a_killed_site_s_contribution_without_a_body_costs_its_round_alone():
    """Nobody else can write its body, or replace its header."""
    a, b, killed = named("abc", quorum=3)
    settle(a, b, killed, by=[1.0, 1.0, 1.0])
    killed.send(900.0)
    key = _run.contribution_key(1, "c")
    header = a.store.header(key)
    lose(a, f"bodies/{key}")
    c = ByHand(a.store._store, "c", quorum=3)
    for site, by in zip((a, b, c), (2.0, 2.0, 5.0), strict=True):
        site.send(by)
    for site in (a, b):
        assert not site.follower.propose()  # it might be written again
    settle(c, a, b)
    (rejected,) = c.commit_of(1)["rejected"]
    assert (rejected["name"], "without a body" in rejected["why"]) == ("c", True)
    assert c.commit_of(1)["contributors"] == []
    assert a.store.header(key) == header
    settle(a, b, c, by=[2.0, 2.0, 5.0])
    assert a.moved() == 1.0 + 3.0
    assert [a.outcomes, b.outcomes] == [["", "late", ""]] * 2
    assert c.outcomes == ["late", ""]


@pytest.mark.parametrize("first", ["who has read it", "who started again"])
def test_a_round_that_others_have_judged_before_its_body_was_lost(clock, first):
    """One commit is written, and all take its step."""
    a, b, killed = named("abc", quorum=3)
    settle(a, b, killed, by=[1.0, 1.0, 1.0])
    for site in (a, b, killed):
        site.send(4.0)
    a.follower._receive_listed(a.follower._members())  # all three
    lose(a, f"bodies/{_run.contribution_key(1, 'c')}")
    c = ByHand(a.store._store, "c", quorum=3)
    c.send(5.0)
    counts = first == "who has read it"
    for site in (a, c) if counts else (c, a):
        assert site.follower.propose()
    names = [x["name"] for x in a.commit_of(1)["contributors"]]
    assert names == (["a", "b", "c"] if counts else [])
    a.follow()
    if counts:
        for site in (b, c):
            with pytest.raises(_store.StoreError, match="no later snapshot can be"):
                site.follow()
        a.send(1.0)  # which confirms a snapshot
        _run.write_snapshot(a.store, a.follower.outer, a.follower._roster, 2)
    for site in (b, c):
        site.follow()
    assert len({site.digest for site in (a, b, c)}) == 1
    assert a.moved() == (5.0 if counts else 1.0)
    assert c.outcomes == ["late"]


def test_a_body_that_is_back_before_the_commit_counts():
    """Though its site has found its predecessor's contribution without it."""
    a, b, killed = named("abc", quorum=3)
    settle(a, b, killed, by=[1.0, 1.0, 1.0])
    killed.send(4.0)
    (body,) = a.store.keys("bodies/rounds/00000001/c")
    data = a.store._store.get(body).bytes()
    a.store.delete([body])
    c = ByHand(a.store._store, "c", quorum=3)
    c.send(5.0)
    assert not c.follower.propose()
    assert "without a body" in c.follower._received["c"].why
    a.store._store.put(body, bytes(data))
    for site in (a, b):
        site.send(2.5)
    settle(c, a, b)
    assert a.moved() == 1.0 + 3.0
    assert [a.outcomes, b.outcomes, c.outcomes] == [["", ""], ["", ""], ["late"]]


def test_a_site_alone_is_not_stopped_by_what_it_left_without_a_body():
    killed = ByHand(MemoryStore(), "a")
    killed.send(900.0)
    lose(killed, "bodies/rounds/00000000/a")
    a = ByHand(killed.store._store, "a")
    a.step(2.0)
    a.step(2.0)
    assert (a.outcomes, a.moved()) == (["late", ""], 2.0)


def test_a_round_decided_again_needs_nothing_that_it_leaves_out():
    """A site that had waited for a lost contribution was not stopped meanwhile."""
    a, b, c = named("abc", quorum=2)
    settle(a, b, c, by=[1.0, 1.0, 1.0])
    for site, by in zip((a, b, c), (2.0, 2.0, 4.0), strict=True):
        site.send(by)
    b.commit()
    lose(a, "rounds/00000001/c")
    lose(a, "bodies/rounds/00000001/c")
    with pytest.raises(_store.StoreError, match="no later snapshot can be used"):
        a.follow()
    a.store.delete([_run.commit_key(1)])
    b = ByHand(a.store._store, "b", quorum=2)
    b.send(2.0)
    b.commit()
    assert [x["name"] for x in b.commit_of(1)["contributors"]] == ["a", "b"]
    a.follow()
    assert a.digest == b.digest
    # Two of three sites that are expected bring theirs.
    assert a.moved() == pytest.approx(1.0 + (2.0 + 2.0) / 3)


class Counting:
    """A store that notes the keys that are read, and counts the bytes of bodies."""

    def __init__(self, store):
        self._store, self.read, self.size = store, [], 0
        self.list, self.put, self.delete = store.list, store.put, store.delete

    def get(self, key):
        self.read.append(key)
        found = self._store.get(key)
        self.size += found.meta["size"] if key.startswith("bodies/") else 0
        return found


@pytest.mark.parametrize("lost", ["rounds/00000001/e", "bodies/rounds/00000001/e"])
def test_a_site_that_waits_for_a_lost_contribution_reads_the_others_once(lost):
    """And the lost one once per look. Once it is back, the round is taken."""
    memory = MemoryStore()
    counting = Counting(memory)
    others = [ByHand(memory, name, quorum=5) for name in "bcde"]
    a = ByHand(counting, "a", quorum=5)
    settle(*others, a, by=[1.0] * 5)
    for site in (*others, a):
        site.send(2.0)
    others[0].commit()
    keys = [key for key in a.store.keys("") if key.startswith(lost)]
    gone = {key: bytes(memory.get(key).bytes()) for key in keys}
    lose(a, lost)
    message = sum(x.size * x.dtype.itemsize for x in a.follower.model.message)
    headers = [_run.commit_key(1), _run.contribution_key(1, "e")]
    for look in range(4):
        counting.read, counting.size = [], 0
        with pytest.raises(_store.StoreError, match="no later snapshot can be used"):
            a.follow()
        assert counting.size == (3 * message if look == 0 else 0)
        bodies = [key for key in counting.read if key.startswith("bodies/")]
        if look:
            assert [key for key in counting.read if key not in bodies] == headers
            assert len(bodies) == lost.startswith("bodies/")
    for key, data in gone.items():
        memory.put(key, data)
    counting.size = 0
    a.follow()
    assert counting.size == (1 + 4) * message  # to see that it is there, and the step
    assert a.digest == others[0].digest
    assert a.outcomes == ["", ""]


def test_a_run_whose_description_is_gone_is_not_begun_again():
    a = ByHand(MemoryStore(), "a")
    a.send(1.0)
    a.commit()
    a.store.delete([_run.RUN])
    with pytest.raises(_store.StoreError, match=r"run.json .* is gone, .* Restore it"):
        _run.enter(a.store, a.follower.model, 1)
