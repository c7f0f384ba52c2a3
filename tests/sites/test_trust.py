"""What is in the store is checked before it counts, and nothing in it is run."""

import json
import pickle

import numpy as np
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax.sites import _run, _store
from curvadion_jax.sites._store import HEADER, InvalidError

GOOD = [np.asarray(x) for x in PARAMS.values()]
KEY = _run.contribution_key(0, "c")


def send(site: ByHand, arrays=GOOD, key=KEY, run=None, **other) -> None:
    """Writes a contribution of c to the first round, or what differs from it."""
    header = {"uid": "0", "before": site.digest, "tokens": 4096.0, "rounds": 1}
    store = _store.Store(site.store._store)
    store.run = site.store.run if run is None else run
    store.write(key, header | other, arrays)


def message(arrays=GOOD, **other):
    return lambda site: send(site, arrays, **other)


def elsewhere(**other):
    """A message that was written to another place, or in another run."""

    def write(site):
        send(site, **other)
        key = other.get("key", KEY)
        raw = site.store._store
        (body,) = site.store.keys(f"bodies/{key}")
        data = bytes(raw.get(body).bytes())
        raw.put(f"bodies/{KEY}/{body.rpartition('/')[2]}", data)
        raw.put(KEY, bytes(raw.get(key).bytes()))

    return write


def changed(change, body=False):
    """A contribution whose bytes have changed since."""

    def write(site):
        send(site)
        key = site.store.keys(f"bodies/{KEY}")[0] if body else KEY
        raw = site.store._store
        raw.put(key, change(bytes(raw.get(key).bytes())))

    return write


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


CASES = {
    "not finite": (message([GOOD[0] * np.nan, GOOD[1]]), "contains NaN or Inf"),
    "too large": (message([x * 1e4 for x in GOOD]), "is beyond 10 times the median"),
    "a large finite number": (message([x * 2e37 for x in GOOD]), "NaN or Inf"),
    "of fewer arrays": (message(GOOD[:1]), "a body that does not match"),
    "of another anchor": (message(before="0" * 32), "other outer parameters, '00"),
    "of another run": (elsewhere(run="0" * 64), "of the run '00"),
    "of another round": (
        elsewhere(key=_run.contribution_key(3, "c")),
        "belongs at 'rounds/00000003/c'",
    ),
    "of another name": (
        elsewhere(key=_run.contribution_key(0, "d")),
        "belongs at 'rounds/00000000/d'",
    ),
    "without tokens": (message(tokens=0), "no usable tokens"),
    "with endless tokens": (message(tokens=float("inf")), "no usable tokens"),
    "of half a round": (message(rounds=0.5), "no usable tokens"),
    "of endless rounds": (message(rounds=10**400), "no usable tokens"),
    "of tokens in words": (message(tokens="many"), "no usable tokens"),
    "of an endless name": (message(uid="0" * 10**5), "no usable tokens"),
    "of a newer format": (
        changed(lambda x: x.replace(b'"format": 1', b'"format": 9')),
        "of format 9, and this curvadion_jax reads 1",
    ),
    "with other bytes": (changed(lambda x: x[:-1] + b"7", body=True), "its digest"),
    "cut off": (changed(lambda x: x[:-1], body=True), "its digest"),
    "far too large": (changed(lambda x: x + bytes(HEADER)), "bytes, and not 4194304"),
    "with a far too large body": (
        changed(lambda x: x + bytes(HEADER), body=True),
        "bytes, and not 40",
    ),
    "nothing": (changed(lambda x: b""), "no header in JSON"),
    "a pickle": (changed(lambda x: pickle.dumps(Bomb())), "no header in JSON"),
    "a number": (changed(lambda x: b"3"), "no header in JSON"),
    "a deep header": (changed(lambda x: b"[" * 10**5), "no header in JSON"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_not_counted_and_the_commit_says_why(name):
    write, why = CASES[name]
    store = MemoryStore()
    a, b, c = (ByHand(store, name, quorum=2) for name in "abc")
    write(c)
    read = a.store.down
    a.send(1.0)
    b.send(3.0)
    settle(a, b)
    assert a.moved() == pytest.approx(2.0)
    (entry,) = a.commit_of(0)["rejected"]
    assert entry["name"] == "c"
    assert why in entry["why"]
    assert a.store.down - read < 200_000  # what is too large is not read


@pytest.mark.parametrize("key", [KEY, _run.commit_key(0)])
def test_no_bit_of_a_header_can_flip(key):
    a = ByHand(MemoryStore(), "a")
    send(a)
    a.step()
    raw = a.store._store
    data = bytes(raw.get(key).bytes())
    shapes = a.follower.model.message if key == KEY else ()
    assert a.store.read(key, shapes) is not None
    for index in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[index // 8] ^= 1 << index % 8
        raw.put(key, bytes(flipped))
        with pytest.raises(InvalidError):
            a.store.read(key, shapes)


def test_a_damaged_commit_ends_the_site_with_its_name():
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.step()
    store.put(_run.commit_key(0), json.dumps({"before": 0}).encode())
    with pytest.raises(InvalidError, match=r"commits/00000000\.json is of format None"):
        b.advance()


def test_a_site_learns_that_its_contribution_was_damaged():
    store = MemoryStore()
    a, b = ByHand(store, "a"), ByHand(store, "b")
    a.send(1.0)
    store.put(_run.contribution_key(0, "a"), b"")
    b.send(3.0)
    settle(b, a)
    assert a.outcomes == ["rounds/00000000/a has no header in JSON."]
