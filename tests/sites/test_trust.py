"""What is in the store is looked at before it counts, and nothing in it is run."""

import pickle

import numpy as np
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax.sites import _rounds, _store
from curvadion_jax.sites._store import HEADER, InvalidError

GOOD = [np.asarray(x) for x in PARAMS.values()]
KEY = _rounds.contribution_key(0, "c")


def written(site: ByHand, arrays=GOOD, **other) -> bytes:
    """A contribution of c to the first round."""
    header = {
        "kind": "contribution",
        "run": site.follower._run["sha256"],
        "name": "c",
        "uid": "0",
        "round": 0,
        "before": site.digest,
        "tokens": 4096.0,
        "rounds": 1,
    }
    elsewhere = _store.Store(MemoryStore())
    _store.write(elsewhere, KEY, header | other, arrays)
    return elsewhere.get(KEY, HEADER) or b""


def message(arrays=GOOD, **other):
    return lambda site: written(site, arrays, **other)


def changed(find: bytes, replace: bytes):
    def change(site):
        data = written(site)
        assert find in data
        return data.replace(find, replace)

    return change


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


CASES = {
    "not finite": (message([GOOD[0] * np.nan, GOOD[1]]), "it is not finite"),
    "too large": (message([x * 1e4 for x in GOOD]), "is beyond 10 times the median"),
    "a large finite number": (message([x * 2e37 for x in GOOD]), "not finite"),
    "of fewer arrays": (message(GOOD[:1]), "bytes of arrays"),
    "of another anchor": (message(before="0" * 32), "other outer parameters, '00"),
    "of another run": (message(run="0" * 64), "its run is '00"),
    "of another round": (message(round=3), "its round is 3"),
    "of another name": (message(name="a"), "its name is 'a'"),
    "of another kind": (message(kind="snapshot"), "its kind is 'snapshot'"),
    "without tokens": (message(tokens=0), "its tokens is 0"),
    "with endless tokens": (message(tokens=float("inf")), "its tokens is inf"),
    "of half a round": (message(rounds=0.5), "its rounds is 0.5"),
    "of no rounds": (message(rounds=0), "its rounds is 0"),
    "of tokens in words": (message(tokens="many"), "its tokens is 'many'"),
    "of a newer format": (
        changed(b'"format": 1', b'"format": 9'),
        "of format 9, and this curvadion_jax reads 1: upgrade",
    ),
    "with other bytes": (
        changed(GOOD[1].tobytes(), (GOOD[1] + 1).tobytes()),
        "not those of its digest",
    ),
    "cut off": (changed(GOOD[1].tobytes(), b""), "bytes of arrays"),
    "far too large": (
        lambda site: written(site) + bytes(HEADER),
        "bytes, and not 4194344",
    ),
    "nothing": (lambda site: b"", "no JSON object"),
    "a pickle": (lambda site: pickle.dumps(Bomb()), "no JSON object"),
    "a number": (lambda site: b"3", "no JSON object"),
    "a deep header": (lambda site: b"[" * 10**5, "no JSON object"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_not_counted_and_the_commit_says_why(name):
    write, why = CASES[name]
    store = MemoryStore()
    a, b, c = (ByHand(store, name) for name in "abc")
    c.store.create(KEY, write(c))
    read = a.store.down
    a.send(1.0)
    b.send(3.0)
    settle(a, b)
    assert a.moved() == pytest.approx(2.0)
    (entry,) = a.commit_of(0)["rejected"]
    assert entry["name"] == "c"
    assert why in entry["why"]
    assert a.store.down - read < 200_000  # what is too large is not read


def test_no_bit_of_a_message_can_flip():
    a = ByHand(MemoryStore(), "a")
    data = written(a)
    for index in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[index // 8] ^= 1 << index % 8
        store = _store.Store(MemoryStore())
        store.create(KEY, bytes(flipped))
        run = a.follower._run["sha256"], a.follower.model.message
        with pytest.raises(InvalidError):
            _store.read(store, KEY, "contribution", *run)


def test_no_bit_of_a_commit_can_flip():
    a = ByHand(MemoryStore(), "a")
    a.step()
    data = a.store.get(_rounds.commit_key(0), HEADER)
    _rounds.read_commit(data, 0)
    for index in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[index // 8] ^= 1 << index % 8
        with pytest.raises(InvalidError, match="Commit 0 cannot be used"):
            _rounds.read_commit(bytes(flipped), 0)


def test_what_a_predecessor_contributed_is_not_charged_to_who_has_its_name():
    store = MemoryStore()
    killed, b = ByHand(store, "a"), ByHand(store, "b")
    killed.send(float("nan"))
    a = ByHand(store, "a")
    a.send(1.0)
    b.send(3.0)
    settle(b, a)
    assert a.outcomes == ["late"]


def test_a_contribution_that_was_damaged_is_told_to_whose_it_is():
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.send(1.0)
    store.put(_rounds.contribution_key(0, "a"), b"")
    b.send(3.0)
    settle(b, a)
    assert a.outcomes == ["it is no JSON object"]
