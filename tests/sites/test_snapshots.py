"""From what a site starts, and what is kept for that."""

import optax
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax.sites import _run, _store

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def test_a_newcomer_has_the_bits_of_the_others(monkeypatch):
    monkeypatch.setattr(_store, "PIECE", 16)  # bodies are read in several requests
    store, parts = MemoryStore(), {"outer": NESTEROV, "snapshot_every": 3}
    a = ByHand(store, "a", **parts)
    for number in range(8):
        a.step(0.3 * number)
    b = ByHand(store, "b", params={k: v + 7 for k, v in PARAMS.items()}, **parts)
    assert b.follower.number == 8
    assert b.digest == a.digest
    settle(b, a, by=[2.0, 1.0])


def test_old_rounds_are_collected_and_commits_stay():
    store = MemoryStore()
    a, b = (ByHand(store, name, snapshot_every=2) for name in "ab")
    b.send(5.0)  # and is stopped here; the round takes it in
    for _ in range(9):
        a.step()
    assert a.store.keys("rounds/")[0] == _run.contribution_key(6, "a")
    bodies = a.store.keys("bodies/")
    assert len(bodies) == len(a.store.keys("rounds/")) + 2  # two snapshots
    found = a.store.keys(_run.SNAPSHOTS)
    assert found == [_run.snapshot_key(6), _run.snapshot_key(8)]
    assert len(a.store.keys("commits/")) == 9
    b.follow()
    assert b.outcomes == [""]  # it counted, says the commit of the round
    assert b.digest == a.digest


@pytest.mark.parametrize("moment", [_run.RUN, _run.snapshot_key(0)])
def test_sites_that_begin_a_run_at_once_begin_at_the_same(moment, monkeypatch):
    """The other begins it just before this one creates an object."""
    store, create, others = MemoryStore(), _store.Store.create, []

    def overtaken(self, key, data):
        if key == moment and not others:
            others.append("a")
            others[0] = ByHand(store, "a")
        return create(self, key, data)

    monkeypatch.setattr(_store.Store, "create", overtaken)
    b = ByHand(store, "b", params={k: v + 7 for k, v in PARAMS.items()})
    assert b.digest == others[0].digest
    assert b.store.run == others[0].store.run


@pytest.mark.parametrize("damage", ["a bit", "cut off", "away", "another model"])
def test_a_snapshot_that_cannot_be_used_is_passed_over(damage):
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=5)
    for _ in range(12):
        a.step()
    key = _run.snapshot_key(10)
    (body,) = a.store.keys(f"bodies/{key}")
    data = bytes(store.get(body).bytes())
    if damage == "a bit":
        store.put(body, data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut off":
        store.put(body, data[:-1])
    else:
        store.delete(key)
    if damage == "another model":
        wrong = a.follower.model.outer_step.initial([x * 9 for x in a.anchor])
        a.store.write(key, {"roster": {}}, [*wrong.anchor, *wrong.state])
    # Objects of strangers are no snapshots, and nothing is collected because of them.
    for stray in ("Thumbs.db", "99999998", "99999999"):
        store.put(_run.SNAPSHOTS + stray, b"junk")
    b = ByHand(store, "b")
    assert (b.moved(), b.follower.number) == (12.0, 12)
    for _ in range(4):
        a.step()
    first = 5 if damage == "away" else 10
    assert a.store.keys("rounds/")[0] == _run.contribution_key(first, "a")


def test_many_snapshots_that_cannot_be_used_cost_a_start_no_pauses(pauses):
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=2)
    for _ in range(5):
        a.step()
    for number in range(100, 120):
        store.put(_run.snapshot_key(number), b"junk")
    assert ByHand(store, "b").digest == a.digest
    assert pauses == []


def test_a_snapshot_with_another_outer_state_is_passed_over():
    store, parts = MemoryStore(), {"outer": NESTEROV, "snapshot_every": 2}
    a = ByHand(store, "a", **parts)
    for _ in range(5):
        a.step()
    key, model = _run.snapshot_key(4), a.follower.model
    _, arrays = a.store.read(key, model.outer_step.snapshot)
    store.delete(key)
    a.store.write(key, {"roster": {}}, [*arrays[:2], *(x + 1 for x in arrays[2:])])
    assert ByHand(store, "b", **parts).digest == a.digest


def test_without_a_usable_snapshot_nobody_starts_anew():
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=2)
    for _ in range(5):
        a.step()
    a.store.delete(a.store.keys(_run.SNAPSHOTS))
    with pytest.raises(OSError, match="no snapshot that can be used"):
        ByHand(store, "b")
