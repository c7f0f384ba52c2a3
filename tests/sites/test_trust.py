"""What is in the store is checked before it counts, and nothing in it is run."""

import pickle

import numpy as np
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax.sites import _run, _store

GOOD = [np.asarray(x) for x in PARAMS.values()]
KEY = _run.contribution_key(0, "c")


def sent(arrays=GOOD, key=KEY, run=None, **other):
    """Writes a contribution of c to the first round, or what differs from it."""

    def write(site):
        header = {"uid": "0", "before": site.digest, "tokens": 1.0, "rounds": 1}
        store = _store.Store(site.store._store)
        store.run = run or site.store.run
        store.write(key, header | other, arrays)

    return write


def changed(change, key=KEY, **other):
    """A contribution whose header, or with `bodies/` its body, has changed since."""

    def write(site):
        sent(**other)(site)
        found, raw = (site.store.keys(key) or [key])[0], site.store._store
        raw.put(found, change(bytes(raw.get(found).bytes())))

    return write


def copied(key=KEY, run=None):
    """A message that was written for another place, or another run."""

    def write(site):
        sent(key=key, run=run)(site)
        raw = site.store._store
        raw.put(KEY, bytes(raw.get(key).bytes()))

    return write


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


BODY = f"bodies/{KEY}"
CASES = {
    "not finite": (sent([GOOD[0] * np.nan, GOOD[1]]), "contains NaN or Inf"),
    "too large": (sent([x * 1e4 for x in GOOD]), "is beyond 10 times the median"),
    "of fewer arrays": (sent(GOOD[:1]), "a body that does not match"),
    "of another anchor": (sent(before="0" * 32), "other outer parameters, '00"),
    "of another run": (copied(run="0" * 64), "of another run, place"),
    "of another site": (copied("rounds/00000000/d"), "of another run, place"),
    "of another round": (copied("rounds/00000003/c"), "of another run, place"),
    "without tokens": (sent(tokens=0), "no usable tokens"),
    "of endless tokens": (sent(tokens=float("inf")), "no usable tokens"),
    "of no rounds": (sent(rounds=None), "no usable tokens"),
    "of other bytes": (changed(lambda x: x[:-1] + b"7", BODY), "not match its digest"),
    "cut off": (changed(lambda x: x[:-1], BODY), "not match its digest"),
    "with a huge header": (changed(lambda x: x + bytes(2**22)), "and not 4194304"),
    "with a huge body": (changed(lambda x: x + bytes(2**22), BODY), "and not 40"),
    "a pickle": (changed(lambda x: pickle.dumps(Bomb())), "is damaged"),
    "deep": (changed(lambda x: b"[" * 10**4), "is damaged"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_not_counted_and_the_commit_says_why(name):
    write, why = CASES[name]
    store = MemoryStore()
    a, b, c = (ByHand(store, name, quorum=2) for name in "abc")
    write(c)
    read = a.store.down
    settle(a, b, by=[1.0, 3.0])
    assert a.moved() == pytest.approx(2.0)
    (entry,) = a.commit_of(0)["rejected"]
    assert entry["name"] == "c"
    assert why in entry["why"]
    assert a.store.down - read < 200_000  # what is too large is not read


@pytest.mark.parametrize("key", [KEY, _run.commit_key(0)])
def test_no_bit_of_a_header_can_flip(key):
    a = ByHand(MemoryStore(), "a")
    sent()(a)
    a.step()
    raw = a.store._store
    data = bytes(raw.get(key).bytes())
    shapes = a.follower.model.message if key == KEY else ()
    assert a.store.read(key, shapes) is not None
    for index in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[index // 8] ^= 1 << index % 8
        raw.put(key, bytes(flipped))
        with pytest.raises(_store.InvalidError):
            a.store.read(key, shapes)


def test_what_the_store_has_damaged_is_sent_again():
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.send(1.0)
    store.put(_run.contribution_key(0, "a"), b"")
    b.send(3.0)
    settle(b, a)
    assert a.outcomes == ["late"]
