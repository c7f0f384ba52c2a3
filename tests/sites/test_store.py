"""Stores that misbehave: a site asks again before it decides anything."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import MemoryStore
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


class Old(Wrapped):
    """A store whose first listings of a prefix are those of long ago: empty."""

    def __init__(self, store, prefix, times):
        super().__init__(store)
        self._prefix, self._times = prefix, times

    def list(self, prefix):
        if prefix == self._prefix and self._times > 0:
            self._times -= 1
            return iter([])
        return self._store.list(prefix=prefix)


@pytest.mark.parametrize("leaves", [False, True], ids=["killed", "left"])
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_site_joins_after_its_predecessors_although_listings_are_old(
    before, times, leaves
):
    """What they were removed of can be created again, so a free number says nothing."""
    store = MemoryStore()
    predecessors = [ByHand(store, "b") for _ in range(before)]
    if leaves:
        _run.leave(predecessors[-1].store, "b", before, has_contributed=True)
    b = ByHand(Old(store, "members/b/", times), "b")
    assert b.follower.incarnation > before
    own = _run.member_key("b", b.follower.incarnation, "json")
    assert b.store.keys("members/b/") == [own]
    assert "b" not in _run.members(b.store.keys(_run.MEMBERS)).left
    b.step(2.0)  # nobody else is said to have joined
    assert b.moved() == 2.0


def test_a_listing_that_never_shows_a_site_is_an_error_at_its_start(pauses):
    with pytest.raises(OSError, match=r"lists members/b/ without members/b/000001"):
        ByHand(Old(MemoryStore(), "members/b/", 10**6), "b")
    assert 0 < sum(pauses) < 10


def test_a_run_begins_although_the_listing_of_its_snapshots_is_old():
    a = ByHand(Old(MemoryStore(), "snapshots/", 3), "a")
    a.step()
    assert a.moved() == 1.0


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


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_endpoint_of_http_is_an_error_that_says_what_to_set(scheme, monkeypatch):
    """Port 9 discards; `obstore` does not even ask it if the endpoint is http."""
    monkeypatch.setattr(_store, "_RETRIES", {"max_retries": 0})
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    environment = {
        "AWS_ENDPOINT_URL": f"{scheme}://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = _store.Store("s3://bucket/run")
    with pytest.raises(OSError, match=r"cannot read run\.json") as raised:
        store.get(_run.RUN, 100)
    advised = "Set AWS_ALLOW_HTTP=true for an endpoint of http" in str(raised.value)
    assert advised == (scheme == "http")


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


def test_every_piece_of_a_body_is_progress_of_its_request(monkeypatch):
    """Which tells a slow link from a store that does not answer."""
    monkeypatch.setattr(_store, "PIECE", 16)
    numbers, memory = [], MemoryStore()
    note = lambda: numbers.extend(map(tuple, store.under_way.values()))

    class Slow(Wrapped):
        def put(self, key, data, **options):
            pieces = [bytes(data)] if isinstance(data, bytes) else []
            for piece in () if pieces else data:
                note()
                pieces.append(piece)
            mode = {x: y for x, y in options.items() if x == "mode"}
            memory.put(key, b"".join(pieces), **mode)

        def get_range(self, key, **options):
            note()
            return memory.get_range(key, **options)

    store, arrays = _store.Store(Slow(memory)), [np.arange(12.0), np.ones(3)]
    store.write("big", {}, arrays)
    assert len(numbers) == len(set(numbers)) == 6 + 2
    found = store.read("big", arrays)
    assert found is not None
    assert len(numbers) == len(set(numbers)) > 2 * 8  # and pieces of the header
    np.testing.assert_array_equal(found[1][0], arrays[0])
    assert store.under_way == {}


def test_pieces_that_are_taken_after_a_failure_are_no_progress(monkeypatch):
    monkeypatch.setattr(_store, "PIECE", 16)
    left = []

    class Failing(Wrapped):
        def put(self, key, data, **_):
            left.append(data)
            raise OSError("reset")

    store = _store.Store(Failing(MemoryStore()))
    with pytest.raises(_store.StoreError, match="reset"):
        store.write("big", {}, [np.arange(12.0)])
    assert len([*left[0]]) == 6
    assert store.under_way == {}


class Counted(Wrapped):
    """A store that counts requests."""

    def __init__(self, store):
        super().__init__(store)
        self.counts = Counter()

    def __getattr__(self, name):
        self.counts[name] += 1
        return super().__getattr__(name)


def test_requests_of_a_round_are_few():
    """At most what the table of docs/operate-sites.md has."""
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
    # The last look at a commit, of each, finds none. Its own message is read back by
    # who proposes, and the others have theirs.
    assert counts[0] == {"put": 2 + 1, "list": 2, "get": 2 * 8 + 1}
    assert counts[1:] == [{"put": 2, "get": 2 * 7 + 2}] * 7


def test_members_do_not_grow():
    store = MemoryStore()
    for _ in range(5):
        a = ByHand(store, "a")
    assert a.store.keys(_run.MEMBERS) == ["members/a/000005.json"]
    _run.leave(a.store, "a", 5, has_contributed=False)
    assert a.store.keys(_run.MEMBERS) == ["members/a/000005.left"]
    ByHand(store, "a")
    assert a.store.keys(_run.MEMBERS) == ["members/a/000006.json"]
