"""How long a round waits, by a clock that tests set."""

import types

import pytest
from obstore.store import MemoryStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _follower

GRACE = 30.0
MINUTE = 60.0


class Clock:
    """What `time.monotonic` is to the package's rounds; seconds."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    fake = types.SimpleNamespace(monotonic=found)
    monkeypatch.setattr(_follower, "time", fake)
    return found


def three(**settings):
    store = MemoryStore()
    return [ByHand(store, name, grace=GRACE, **settings) for name in "abc"]


def counted(site: ByHand, number: int) -> list[str]:
    return [entry["name"] for entry in site.commit_of(number)["contributors"]]


def test_a_crashed_site_is_waited_for_until_grace_is_over(clock):
    a, b, c = three()
    for site in (a, b, c):
        site.send(1.0)
    settle(a, b, c)
    for number in (1, 2):  # each round has a window of its own
        a.send(1.0)
        b.send(1.0)
        assert not a.follower.propose()
        clock.now += GRACE - 1
        assert not a.follower.propose()
        assert not a.follower.advance()
        clock.now += 1
        settle(a, b)
        assert counted(a, number) == ["a", "b"]


def test_grace_begins_once_the_quorum_is_there(clock):
    a, b, _ = three(quorum=2)
    a.send(1.0)
    assert not a.follower.propose()
    clock.now += 10 * GRACE
    assert not a.follower.propose()
    b.send(1.0)
    assert not a.follower.propose()
    clock.now += GRACE - 1
    assert not a.follower.propose()
    clock.now += 1
    a.commit()
    assert counted(a, 0) == ["a", "b"]


def test_clocks_that_differ_by_hours_change_nothing(clock):
    """Each site's window is by its own clock, and no clock's reading is told."""
    a, b, _ = three()
    offsets = {"a": 3e4, "b": -5e4}

    def proposes(site: ByHand, seconds: float) -> bool:
        clock.now = offsets[site.name] + seconds
        return site.follower.propose()

    a.send(1.0)
    b.send(1.0)
    assert not proposes(b, 0)
    assert not proposes(a, 5)
    assert not proposes(b, GRACE - 1)
    assert not proposes(a, GRACE + 4)
    assert proposes(b, GRACE)
    a.follow()
    b.follow()
    assert a.digest == b.digest
    for key in a.store.keys(""):
        assert b"time" not in (a.store.get(key, 10_000) or b"")


def test_the_log_says_once_a_minute_who_the_quorum_lacks(clock, caplog):
    a, _, _ = three(quorum=3)
    a.send(1.0)

    def lines_after(seconds: float) -> list[str]:
        clock.now += seconds
        caplog.clear()
        assert not a.follower.propose()
        return [record.getMessage() for record in caplog.records]

    assert lines_after(0) == []
    assert lines_after(MINUTE) == []
    (line,) = lines_after(1)
    assert line == (
        "round 0 of MemoryStore has 1 of the contributions it needs; missing: b, c"
    )
    assert lines_after(MINUTE) == []
    assert lines_after(1) == [line]
