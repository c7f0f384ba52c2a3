"""From what a site starts, and what is kept for that."""

import optax
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax import compressors
from curvadion_jax.sites import _rounds, _run, _store

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def test_a_late_comer_has_the_bits_of_the_others():
    store, parts = MemoryStore(), {"outer": NESTEROV, "snapshot_every": 3}
    a = ByHand(store, "a", **parts)
    for number in range(8):
        a.step(0.3 * number)
    b = ByHand(store, "b", params={k: v + 7 for k, v in PARAMS.items()}, **parts)
    assert b.follower.number == 8
    assert b.digest == a.digest
    a.send(1.0)
    b.send(2.0)
    settle(b, a)


def test_old_rounds_are_collected_and_commits_stay():
    store = MemoryStore()
    a, b = (ByHand(store, name, snapshot_every=2) for name in "ab")
    b.send(5.0)  # and is stopped here; the round takes it in
    for _ in range(9):
        a.step()
    rounds = a.store.keys(_rounds.ROUNDS)
    assert rounds[0] == _rounds.contribution_key(6, "a")
    found = a.store.keys(_rounds.SNAPSHOTS)
    assert found == [_rounds.snapshot_key(6), _rounds.snapshot_key(8)]
    assert len(a.store.keys(_rounds.COMMITS)) == 9
    b.follow()
    assert b.outcomes == [""]  # it counted, says the commit of the round
    assert b.digest == a.digest


def test_large_messages_lie_in_parts(monkeypatch):
    monkeypatch.setattr(_store, "PART", 16)
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=1)
    for _ in range(4):
        a.step()
    b = ByHand(store, "b", snapshot_every=1)
    assert b.moved() == 4.0
    parts = a.store.keys("parts/")
    assert [key for key in parts if "snapshots/00000003" in key]
    assert not [key for key in parts if "rounds/00000000" in key]


def test_of_two_that_begin_at_once_one_leaves_nothing(monkeypatch):
    monkeypatch.setattr(_store, "PART", 16)
    store, read = MemoryStore(), _run.read
    a = ByHand(store, "a")
    before = a.store.keys("")
    answers = [None]  # the other has not begun yet
    monkeypatch.setattr(
        _run, "read", lambda *given, **more: answers.pop() if answers else read(*given)
    )
    b = ByHand(store, "b")
    assert set(a.store.keys("")) - set(before) == {"members/b/000001.json"}
    assert b.digest == a.digest


@pytest.mark.parametrize("damage", ["a bit", "cut off", "away", "another model"])
def test_a_snapshot_that_cannot_be_used_is_passed_over(damage, monkeypatch):
    monkeypatch.setattr(_store, "_PAUSE", 0)
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=5)
    for _ in range(12):
        a.step()
    key = _rounds.snapshot_key(10)
    data = a.store.get(key, 10_000) or b""
    store.delete(key)
    if damage == "another model":
        found = a.follower.model.initial([x * 9 for x in a.anchor])
        _run._write(a.store, key, a.follower._run, found, {}, 10)
    elif damage != "away":
        store.put(
            key, data[:-1] + (bytes([data[-1] ^ 1]) if damage == "a bit" else b"")
        )
    # Strays are no snapshots, and nothing is collected because of them.
    for stray in ("Thumbs.db", "99999998", "99999999"):
        store.put(_rounds.SNAPSHOTS + stray, b"junk")
    b = ByHand(store, "b")
    assert (b.moved(), b.follower.number) == (12.0, 12)
    for _ in range(4):
        a.step()
    first = 0 if damage == "away" else 10
    assert a.store.keys(_rounds.ROUNDS)[0] == _rounds.contribution_key(first, "a")


def test_what_no_commit_confirms_is_no_snapshot():
    """A site whose outer step differs finds that out at the next commit."""
    store = MemoryStore()
    a, b, c = named = [ByHand(store, x, snapshot_every=1, quorum=2) for x in "abc"]
    for site in named:
        site.send(1.0)
    settle(a, b, c)
    wrong = a.follower.model.initial([x * 9 for x in a.anchor])
    a.follower.outer = wrong
    for site in named:
        site.send(1.0)
        assert site.follower.snapshot is None
    with pytest.raises(_store.RunError, match="have the digest"):
        a.follower.propose()
    settle(b, c)
    b.follower.write_snapshot()
    assert ByHand(store, "d", quorum=2).digest == b.digest


@pytest.mark.parametrize(
    ("outer", "compressor"),
    [
        (optax.sgd(0.7), None),
        (optax.sgd(0.7, momentum=0.9), None),
        (optax.sgd(0.7, momentum=0.8, nesterov=True), None),
        (optax.sgd(0.6, momentum=0.9, nesterov=True), None),
        (NESTEROV, compressors.quantize(8)),
    ],
)
def test_another_outer_step_or_compressor_is_refused_at_the_start(outer, compressor):
    store = MemoryStore()
    ByHand(store, "a", outer=NESTEROV)
    what = "compressor" if compressor else "outer optimizer"
    with pytest.raises(ValueError, match=f"begun with another {what}"):
        ByHand(store, "b", outer=outer, compressor=compressor)
    ByHand(store, "c", outer=NESTEROV)
