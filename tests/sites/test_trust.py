"""What is in the store is looked at before it counts, and nothing in it is run."""

import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax.sites import _messages, _rounds

GOOD = [np.asarray(x) for x in PARAMS.values()]


def header(site: ByHand, **other):
    return {
        "kind": "post",
        "name": "bad",
        "round": 0,
        "before": site.follower.outer.digest,
        "tokens": 1.0,
        "rounds": 1,
    } | other


def spoilt(how):
    return lambda site: how(site, _rounds.post_key(0, "bad"))


def message(arrays=GOOD, **other):
    return spoilt(
        lambda site, key: _messages.write(
            site.store, key, header(site, **other), arrays
        )
    )


def raw(data: bytes):
    return spoilt(lambda site, key: site.store.create(key, data))


def changed(find: bytes, replace: bytes):
    def write(site, key):
        other = ByHand(MemoryStore(), "x").store
        _messages.write(other, key, header(site), GOOD)
        data = other.get(key) or b""
        assert find in data
        site.store.create(key, data.replace(find, replace))

    return spoilt(write)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


CASES = {
    "not finite": (message([GOOD[0] * np.nan, GOOD[1]]), "it is not finite"),
    "too large": (message([x * 1e4 for x in GOOD]), "is beyond 10 times the median"),
    "a large finite number": (message([x * 2e37 for x in GOOD]), "not finite"),
    "of another shape": (message([GOOD[0].T, GOOD[1]]), "another shape or dtype"),
    "of another dtype": (message([jnp.float16(x) for x in GOOD]), "shape or dtype"),
    "of fewer arrays": (message(GOOD[:1]), "another shape or dtype"),
    "of another model": (message(before="0" * 32), "other outer parameters"),
    "of another round": (message(round=3), "its round is 3"),
    "of another name": (message(name="a"), "its name is 'a'"),
    "of another kind": (message(kind="snapshot"), "no post"),
    "without tokens": (message(tokens=0), "its tokens is 0"),
    "with endless tokens": (message(tokens=float("inf")), "its tokens is inf"),
    "of half a round": (message(rounds=0.5), "its rounds is 0.5"),
    "of no rounds": (message(rounds=0), "its rounds is 0"),
    "of tokens in words": (message(tokens="many"), "its tokens is 'many'"),
    "with a uid that is a path": (message(uid="../../run"), "its uid is none"),
    "of more parts": (changed(b'"parts": 0', b'"parts": 9'), "it has 9 parts"),
    "of a newer format": (
        changed(b'"format": 1', b'"format": 9'),
        "format 9, and this curvadion_jax reads 1: upgrade",
    ),
    "with other bytes": (
        changed(GOOD[1].tobytes(), (GOOD[1] + 1).tobytes()),
        "not those that its digest is of",
    ),
    "cut off": (changed(GOOD[1].tobytes(), b""), "bytes of arrays"),
    "nothing": (raw(b""), "no message of this format"),
    "a pickle": (raw(pickle.dumps(Bomb())), "no message of this format"),
    "no JSON": (raw(b"cdsites1" + (4).to_bytes(8, "little") + b"oops"), "no JSON"),
    "a deep header": (
        raw(b"cdsites1" + (10**5).to_bytes(8, "little") + b"[" * 10**5),
        "no JSON",
    ),
    "a header of its own length": (
        raw(b"cdsites1" + (2**62).to_bytes(8, "little") + b"{}"),
        "no message of this format",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_not_counted_and_the_commit_says_why(name):
    write, why = CASES[name]
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    write(a)
    a.post(1.0)
    b.post(3.0)
    settle(a, b)
    assert a.moved() == pytest.approx(2.0)
    (entry,) = json.loads(a.store.get(_rounds.commit_key(0)) or b"")["rejected"]
    assert entry["name"] == "bad"
    assert why in entry["why"]


def test_what_a_predecessor_posted_is_not_charged_to_who_has_its_name():
    store = MemoryStore()
    killed, b = ByHand(store, "a"), ByHand(store, "b")
    killed.post(float("nan"))
    a = ByHand(store, "a")
    a.post(1.0)
    b.post(3.0)
    settle(b, a)
    assert a.outcomes == ["late"]


def test_a_contribution_that_was_damaged_is_told_to_whose_it_is():
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.post(1.0)
    store.put(_rounds.post_key(0, "a"), b"")
    b.post(3.0)
    settle(b, a)
    assert a.outcomes == ["it is no message of this format"]


def test_who_moves_alone_while_the_others_stand_still_counts():
    store = MemoryStore()
    a, b, c = (ByHand(store, name) for name in "abc")
    a.post(0.0)
    b.post(0.0)
    c.post(3.0)
    settle(a, b, c)
    assert a.moved() == pytest.approx(1.0)


def test_whose_contribution_is_rejected_goes_on_from_the_common_model():
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.post(1.0)
    b.post(float("nan"))
    settle(a, b)
    assert b.outcomes == ["it is not finite"]
    a.post(1.0)
    b.post(1.0)
    settle(b, a)
    assert b.outcomes[-1] == ""


def test_a_round_of_nothing_that_counts_changes_nothing():
    a = ByHand(MemoryStore(), "a")
    before = a.follower.outer
    a.post(float("inf"))
    a.commit()
    assert a.follower.outer is before
    assert a.follower.number == 1
