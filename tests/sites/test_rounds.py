"""Who counts in a round, and how much; what becomes of who does not."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from obstore.store import MemoryStore
from site_steps import HALF, PARAMS, ByHand, settle

from curvadion_jax import compressors
from curvadion_jax.sites import _rounds, _run
from curvadion_jax.sites._messages import RunError

# The parameters here are small whole numbers, and so are most of their moves.
ROUNDING = 1e-5


def commit_of(site: ByHand, number: int) -> dict:
    return json.loads(site.store.get(_rounds.commit_key(number)) or b"")


def test_sites_count_by_their_tokens():
    store = MemoryStore()
    a, b = ByHand(store, "a", quorum=2), ByHand(store, "b", quorum=2)
    a.post(4.0, tokens=300)
    b.post(8.0, tokens=100)
    settle(a, b)
    assert a.moved() == pytest.approx(0.75 * 4 + 0.25 * 8, abs=ROUNDING)
    assert a.outcomes == b.outcomes == [""]


def test_below_the_quorum_nothing_is_committed():
    store = MemoryStore()
    a, b = ByHand(store, "a", quorum=2), ByHand(store, "b", quorum=2)
    a.post(4.0)
    assert not a.follower.propose()
    assert not a.follower.advance()
    assert not b.follower.propose()  # nor by who has not posted
    assert a.moved() == 0


def test_a_round_waits_for_known_sites_in_the_grace_window_alone():
    store = MemoryStore()
    a = ByHand(store, "a", grace=1e9)
    b = ByHand(store, "b", grace=0.0)
    a.post(1.0)
    assert not a.follower.propose()  # b is new, and not there
    b.post(1.0)
    assert a.follower.propose()
    a.follow()
    b.follow()
    b.post(1.0)
    assert b.follower.propose()  # its own window is over


def test_who_is_late_keeps_its_drift_and_its_share():
    """One of two comes every second time, with twice as much."""
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.post(1.0)
    b.post(1.0)
    settle(a, b)
    a.post(1.0)
    a.commit()
    b.bring(1.0)
    b.follower.post()  # to the round that is over
    b.follow()
    assert b.outcomes == ["", "late"]
    a.post(1.0)
    b.post(2.0, tokens=2)
    settle(a, b)
    assert a.moved() == pytest.approx(1 + 0.5 * 1 + 0.5 * (1 + 2), abs=ROUNDING)


def test_who_is_late_keeps_what_it_owes():
    store = MemoryStore()
    a, b = (ByHand(store, name, compressor=HALF) for name in "ab")
    b.post(1.0)
    settle(b, a)
    owed = b.follower._owed[0]
    assert any(x.any() for x in owed)
    a.post(1.0)
    a.commit()
    b.bring(1.0)
    b.follower.post()
    b.follow()
    assert b.outcomes == ["", "late"]
    for now, before in zip(b.follower._owed[0], owed, strict=True):
        np.testing.assert_array_equal(now, before)


def test_nothing_is_lost_of_what_sites_owe():
    """The anchor and what is owed add up to all that was brought."""
    store = MemoryStore()
    form = compressors.quantize(2, block=4)
    a, b = (ByHand(store, name, quorum=2, compressor=form) for name in "ab")
    brought = np.zeros((2, 3))
    rng = np.random.default_rng(0)
    for _ in range(5):
        for site in (a, b):
            by = rng.normal()
            brought += by / 2
            site.post(by)
        settle(a, b)
    owed = sum(site.follower._owed[0][0] for site in (a, b)) / 2
    found = a.anchor[0] - np.asarray(PARAMS["a"]) + owed
    np.testing.assert_allclose(found, brought, atol=ROUNDING)


def test_two_propose_and_one_is_followed():
    store = MemoryStore()
    a, b = ByHand(store, "a", quorum=2), ByHand(store, "b", quorum=2)
    a.post(2.0)
    b.post(4.0)
    assert a.follower.propose()
    assert b.follower.propose()
    settled = commit_of(a, 0)
    a.follow()
    b.follow()
    assert settled["by"] == "a"
    assert a.follower.outer.digest == b.follower.outer.digest
    assert a.moved() == pytest.approx(3.0)


def test_who_has_not_come_for_long_is_not_expected():
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.post(1.0)
    b.post(1.0)
    settle(a, b)
    moved = [a.moved()]
    for _ in range(_rounds.FORGET + 1):
        a.post(1.0)
        a.commit()
        moved.append(a.moved())
    halves, whole = np.diff(moved)[:-1], np.diff(moved)[-1]
    np.testing.assert_allclose(halves, 0.5, atol=ROUNDING)
    assert whole == pytest.approx(1.0, abs=ROUNDING)


def test_one_that_left_is_neither_waited_for_nor_expected():
    store = MemoryStore()
    a, b = ByHand(store, "a", quorum=2, grace=1e9), ByHand(store, "b", quorum=2)
    a.post(1.0)
    b.post(1.0)
    settle(a, b)
    b.store.create(_rounds.member_key("b", 1, "left"), b"{}")
    a.post(1.0)
    a.commit()
    assert a.moved() == pytest.approx(2.0)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_late_comer_has_the_bits_of_the_others(fragments):
    store = MemoryStore()
    parts = {
        "outer": optax.sgd(0.7, momentum=0.9, nesterov=True),
        "snapshot_every": 3,
        "fragments": fragments,
    }
    a = ByHand(store, "a", **parts)
    for number in range(8):
        a.post(0.3 * number)
        a.commit()
        if a.follower.snapshot_due:
            a.follower.snapshot()
    b = ByHand(store, "b", params={k: v + 7 for k, v in PARAMS.items()}, **parts)
    assert b.follower.number == 8
    assert b.follower.outer.digest == a.follower.outer.digest
    a.post(1.0)
    b.post(2.0)
    settle(b, a)


def test_old_rounds_are_collected_and_commits_stay():
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=2)
    b = ByHand(store, "b", snapshot_every=2)
    b.post(5.0)  # and is stopped here; the round takes it in
    for _ in range(9):
        a.post(1.0)
        a.commit()
        if a.follower.snapshot_due:
            a.follower.snapshot()
    rounds = a.store.keys(_rounds.ROUNDS)
    assert rounds[0] == _rounds.post_key(5, "a")
    assert len(a.store.keys(_rounds.SNAPSHOTS)) == 2
    assert len(a.store.keys(_rounds.COMMITS)) == 9
    b.follow()
    assert b.outcomes == [""]  # it was counted, says the commit of the round
    assert b.follower.outer.digest == a.follower.outer.digest


def test_large_messages_lie_in_parts(monkeypatch):
    monkeypatch.setattr("curvadion_jax.sites._messages.PART", 16)
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=1)
    for _ in range(4):
        a.post(1.0)
        a.commit()
        a.follower.snapshot()
    b = ByHand(store, "b", snapshot_every=1)
    assert b.moved() == 4.0
    parts = a.store.keys("parts/")
    assert [key for key in parts if "snapshots/00000003" in key]
    assert not [key for key in parts if "rounds/00000000" in key]


def test_of_two_that_begin_at_once_one_leaves_nothing(monkeypatch):
    monkeypatch.setattr("curvadion_jax.sites._messages.PART", 16)
    store, read = MemoryStore(), _run.read
    a = ByHand(store, "a")
    before = a.store.keys("")
    answers = [None]  # the other has not begun yet
    monkeypatch.setattr(
        _run, "read", lambda store: answers.pop() if answers else read(store)
    )
    b = ByHand(store, "b")
    assert set(a.store.keys("")) - set(before) == {"members/b/000001.json"}
    assert b.follower.outer.digest == a.follower.outer.digest


def test_a_killed_predecessors_post_stands():
    store = MemoryStore()
    first = ByHand(store, "a")
    first.post(1.0)
    again = ByHand(store, "a")
    again.post(5.0)
    again.commit()
    assert again.outcomes == ["late"]
    assert again.moved() == 1.0


def test_the_older_of_two_sites_of_one_name_stops():
    store = MemoryStore()
    first, _ = ByHand(store, "a"), ByHand(store, "a")
    first.post(1.0)
    with pytest.raises(RunError, match="another site has joined the run as 'a'"):
        first.follower.propose()


def test_a_site_of_another_outer_optimizer_stops_and_the_others_do_not():
    store = MemoryStore()
    a, b = ByHand(store, "a", quorum=3), ByHand(store, "b", quorum=3)
    other = ByHand(store, "other", quorum=3, outer=optax.scale(-0.5))
    for site in (a, b, other):
        site.post(1.0)
    a.commit()
    b.follow()
    other.follow()
    for site in (other, a, b):
        site.post(1.0)
    with pytest.raises(RunError, match="give all sites the same outer optimizer"):
        other.follower.propose()
    settle(a, b)
    rejected = commit_of(a, 1)["rejected"]
    assert [entry["name"] for entry in rejected] == ["other"]
    with pytest.raises(RunError, match="have the digest"):
        other.follow()


def test_params_in_bfloat16_move_in_float32():
    store = MemoryStore()
    params = {k: x.astype(jnp.bfloat16) for k, x in PARAMS.items()}
    a, b = (ByHand(store, n, params=params, quorum=2) for n in "ab")
    a.post(2.0)
    b.post(1.0)
    settle(a, b)
    assert a.anchor[0].dtype == jnp.bfloat16
    assert np.float32(a.anchor[0])[0, 0] == 1.5
