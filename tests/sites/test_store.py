"""Stores that misbehave: a site asks again before it decides anything."""

from collections import Counter
from pathlib import Path

import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore, MemoryStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _run, _store


class Wrapped:
    """A store that answers some requests itself."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_a_create_that_is_always_refused_is_an_error(pauses):
    def conflict(*_, **__):
        raise AlreadyExistsError("409 ConditionalRequestConflict")

    refusing = Wrapped(MemoryStore())
    refusing.put = conflict
    with pytest.raises(OSError, match="neither creates nor finds key"):
        _store.Store(refusing).create("key", b"data")
    assert 0 < min(pauses) < sum(pauses) < 10


def test_a_create_says_whose_object_is_there():
    store = _store.Store(MemoryStore())
    assert store.create("key", b"ours")
    assert store.create("key", b"ours")  # its answer was lost
    assert not any(store.create("key", x) for x in (b"others", b"ou"))


@pytest.mark.parametrize("damage", ["gone", "another"])
def test_a_follower_waits_for_a_contribution_that_counts(damage):
    store, key = MemoryStore(), _run.contribution_key(0, "b")
    a, b = (ByHand(store, name, snapshot_every=2) for name in "ab")
    b.step()
    store.delete(key)
    if damage == "another":
        b.store.write(key, {"before": b.digest}, b.anchor)
    for _ in range(2):
        with pytest.raises(OSError, match="is gone or damaged"):
            a.advance()
    b.step()
    b.step()  # with a snapshot
    a.follow()
    assert a.digest == b.digest


def test_a_name_that_no_object_can_have_is_an_error_that_shows_it(tmp_path):
    """S3 shows no name at all beside it."""
    a = ByHand(LocalStore(tmp_path), "a")
    (tmp_path / "members" / "a\tb").write_bytes(b"junk")
    a.send(4.0)
    with pytest.raises(OSError, match=r"cannot list members/: .*members/a"):
        a.follower.propose()


def test_a_site_joins_although_a_listing_is_old():
    store = MemoryStore()
    ByHand(store, "a")
    old = Wrapped(store)
    old.list = lambda **_: iter([])
    assert _run.join(_store.Store(store), "a") == 2
    store.put("members/a/000001.json", b"{}")
    assert _run.join(_store.Store(old), "a") == 3


@pytest.mark.parametrize(
    "run",
    [":SECRET@b/x", "/me:SECRET@b/x", "me:a/SECRET@b", "b/x?sig=SECRET", "b#SECRET"],
)
def test_credentials_in_a_url_are_refused_and_not_shown(run):
    with pytest.raises(ValueError, match="no user, query or fragment") as raised:
        _store.Store(f"s3://{run}")
    assert "SECRET" not in str(raised.value)


def test_a_url_that_was_made_a_path_is_no_folder():
    with pytest.raises(OSError, match=r"s3:/bucket/run cannot be opened"):
        _store.Store(Path("s3://bucket/run"))


def test_a_query_in_a_stores_error_is_not_shown():
    def refuse(**_):
        raise OSError("403 for https://host/run?sig=SECRET (denied)")

    refusing = Wrapped(MemoryStore())
    refusing.list = refuse
    with pytest.raises(OSError, match=r"run\?\.\.\. \(denied\)") as raised:
        _store.Store(refusing).keys("")
    assert "SECRET" not in str(raised.value)


def test_empty_folders_do_not_stay(tmp_path):
    store = _store.Store(str(tmp_path))
    store.create("rounds/00000000/a", b"")
    store.delete(["rounds/00000000/a"])
    assert not list(tmp_path.iterdir())


class Counted(Wrapped):
    """A store that counts requests."""

    def __init__(self, store):
        super().__init__(store)
        self.counts = Counter()

    def __getattr__(self, name):
        self.counts[name] += 1
        return super().__getattr__(name)


def test_requests_of_a_round_are_few():
    """As the table of docs/sites.md has them."""
    memory = MemoryStore()
    named = [ByHand(Counted(memory), f"s{i}", quorum=8) for i in range(8)]
    counts = [site.store._store.counts for site in named]
    for each in counts:
        each.clear()
    before = named[1].store.up
    for site in named:
        site.send(1.0)
    sent = named[1].store.up - before
    settle(*named)
    payload = sum(x.nbytes for x in named[0].anchor)
    assert 0 < sent - payload < 1000  # and a header
    # The last look at a commit, of each, finds none.
    assert counts[0] == {"put": 2 + 1, "list": 2, "get": 2 * 8 + 1}
    assert counts[1:] == [{"put": 2, "get": 2 * 8 + 2}] * 7


def test_members_do_not_grow():
    store = MemoryStore()
    for _ in range(5):
        a = ByHand(store, "a")
    assert a.store.keys(_run.MEMBERS) == ["members/a/000005.json"]
    _run.leave(a.store, "a", 5)
    assert a.store.keys(_run.MEMBERS) == ["members/a/000005.left"]
    ByHand(store, "a")
    assert a.store.keys(_run.MEMBERS) == ["members/a/000006.json"]
