"""Signs of life: who is alive, who is silent, and what becomes of members."""

import contextlib

import pytest
from faulty import FaultyStore
from obstore.store import LocalStore, MemoryStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _heart, _run, _store

SILENT = _heart._LOOKS - 1


def beat(site, times=1):
    for _ in range(times):
        site.follower.heart.beat()


def silent(site, of):
    return [name for name in of if site.follower.heart.is_silent(name)]


@pytest.fixture(params=["folder", "bucket"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "bucket" else LocalStore(tmp_path)


def test_who_does_not_beat_is_silent_and_who_beats_again_is_not(store):
    a, b, c = (ByHand(store, name) for name in "abc")
    for _ in range(SILENT):
        assert silent(a, "abcd") == []  # nobody is, whom it has not looked at so long
        beat(b)
        beat(a)
    beat(a)
    assert silent(a, "abcd") == ["c"]
    beat(c)
    beat(a)
    assert silent(a, "abcd") == []
    beat(a, SILENT)
    assert silent(a, "abcd") == ["b", "c"]
    again = ByHand(store, "b")  # was killed, and joins again
    beat(a)
    assert silent(a, "abcd") == ["b", "c"]  # until it has taken its first steps
    assert again.follower.incarnation == 2
    again.step()
    a.follow()
    beat(a)
    assert silent(a, "abcd") == ["c"]


def test_a_store_that_is_away_makes_nobody_silent():
    memory = MemoryStore()
    faulty = FaultyStore(memory)
    a, b = ByHand(faulty, "a"), ByHand(memory, "b")
    beat(a)
    faulty.cut_off = True
    for _ in range(2 * SILENT):
        with pytest.raises(_store.StoreError):
            beat(a)
    faulty.cut_off = False
    beat(a)
    assert silent(a, "ab") == []
    assert not silent(b, "ab")


def test_an_object_that_a_listing_lacks_is_no_sign_of_life(store):
    a, b = ByHand(store, "a"), ByHand(store, "b")
    beat(a)
    b.store.delete(b.store.keys("members/b/"))
    beat(a, SILENT)
    assert silent(a, "ab") == ["b"]


class Times:
    """An event that is set after so many waits."""

    def __init__(self, count):
        self.left, self.pauses = count, []

    def wait(self, pause):
        self.pauses.append(pause)
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(
    ("grace", "pause"), [(1.0, 0.25), (30.0, 7.5), (1e9, 10.0), (0.0, 10.0)]
)
def test_a_heart_beats_until_it_ends_although_requests_fail(grace, pause):
    faulty = FaultyStore(MemoryStore())
    a = ByHand(faulty, "a", grace=grace)
    heart = a.follower.heart
    found = {a.store.versions(_run.MEMBERS)["members/a/000001.json"]}
    beats, heart._ended = heart.beat, Times(6)

    def every_second_fails():
        faulty.cut_off = not faulty.cut_off
        with contextlib.suppress(_store.StoreError):
            beats()
            found.update(a.store.versions(_run.MEMBERS).values())
            return
        raise _store.StoreError("it is away")

    heart.beat = every_second_fails
    heart.run()
    assert heart._ended.pauses == [pause] * 7
    assert len(found) == 4  # joined, and renewed three times


def test_a_beat_makes_nobody_a_member_who_has_left():
    a, b = (ByHand(MemoryStore(), name) for name in "ab")
    _run.leave(b.store, "b", 1, has_contributed=True)
    beat(b)
    assert "b" in _run.members(b.store.keys(_run.MEMBERS)).left
    assert silent(a, "ab") == []


MANY = 300


@pytest.mark.parametrize("how", ["killed", "left"])
def test_members_long_gone_are_removed_and_the_quorum_stays(how, monkeypatch):
    """Those with a share of the mean, and those that beat, are not."""
    monkeypatch.setattr(_run, "_REMOVED", 120)
    store = MemoryStore()
    a, b, c = (ByHand(store, x, quorum=2, snapshot_every=2) for x in "abc")
    kind = "left" if how == "left" else "json"
    for number in range(MANY):
        store.put(_run.member_key(f"m{number}", 1, kind), b"")
    alive = ByHand(store, "zz", quorum=2)

    def rounds(count):
        for _ in range(count):
            settle(a, b, by=[1.0, 1.0])
            beat(alive)
            beat(a)
            beat(b)

    settle(a, b, c, by=[1.0, 1.0, 1.0])
    rounds(9)
    members = _run.members(a.store.keys(_run.MEMBERS))
    # Of c, which has died, and the others a hundred.
    gone = {x for x in members.newest if x == "c" or x.startswith("m")}
    assert len(gone) == _run._KEPT_MEMBERS
    assert members.newest.keys() - gone == {"a", "b", "zz"}
    assert members.needed(2, {}) == 2
    c.store.delete(c.store.keys("members/c/"))
    c.follow()
    c.send(1.0)
    assert not c.follower.propose()  # but its object is made again
    c.follower.send()
    a.send(1.0)
    settle(a, c)
    assert c.outcomes[-1] == ""
    assert "c" in _run.members(a.store.keys(_run.MEMBERS)).newest
