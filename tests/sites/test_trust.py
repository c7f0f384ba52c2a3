"""What is in the store is checked before it counts, and nothing in it is run."""

import json
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
    "of so many rounds": (
        sent([x * 1e4 for x in GOOD], rounds=10**8),
        "is beyond 10 times the median",
    ),
    "of so many tokens": (
        sent([x * 1e4 for x in GOOD], tokens=1e15),
        "is beyond 10 times the median",
    ),
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


# Seconds of all attempts at one request.
ATTEMPTS = 7


def test_many_damaged_objects_delay_a_round_by_no_more_than_one(pauses):
    store = MemoryStore()
    names = [f"c{number}" for number in range(10)]
    a, *others = (ByHand(store, name) for name in ["a", *names])
    for other in others:
        other.send(1.0)
        store.put(_run.contribution_key(0, other.name), b"")
    a.step()
    assert 0 < sum(pauses) < ATTEMPTS
    assert [x["name"] for x in a.commit_of(0)["rejected"]] == names
    assert a.moved() == 1.0


def test_many_contributions_without_bodies_delay_the_first_look_alone(pauses):
    store = MemoryStore()
    a, *others = (ByHand(store, x, quorum=4) for x in "abcd")
    for other in others:
        other.send(1.0)
        a.store.delete(a.store.keys(f"bodies/{_run.contribution_key(0, other.name)}"))
    a.send(1.0)
    assert not a.follower.propose()
    assert 0 < sum(pauses) < ATTEMPTS
    pauses.clear()
    assert not a.follower.propose()
    assert pauses == []


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


COMMIT = _run.commit_key(0)
ENTRY = {"name": "a", "uid": "0", "sha256": "0", "tokens": 1.0, "weight": 1.0}
RIGHT = {"contributors": [ENTRY], "rejected": [], "roster": {"a": [0, 1.0]}}
REJECTED = {"name": "a", "uid": None, "why": "so"}
FORGED = {
    "nothing": (None, "before, roster, rejected"),
    "no digest": ({"before": 7}, "before"),
    "no contributors": ({"contributors": None}, "contributors"),
    "contributors by name": ({"contributors": {"a": ENTRY}}, "contributors"),
    "an empty contributor": ({"contributors": [{}]}, "contributors"),
    "a path": ({"contributors": [ENTRY | {"name": "../../x"}]}, "contributors"),
    "a name in a list": ({"contributors": [ENTRY | {"name": ["a"]}]}, "contributors"),
    "an id in a list": ({"contributors": [ENTRY | {"uid": []}]}, "contributors"),
    "a word for a weight": (
        {"contributors": [ENTRY | {"weight": "1"}]},
        "contributors",
    ),
    "NaN": ({"contributors": [ENTRY | {"weight": float("nan")}]}, "contributors"),
    "a huge weight": ({"contributors": [ENTRY | {"weight": 10**400}]}, "contributors"),
    "nobody expected": ({"roster": {}}, "contributors"),
    "an empty rejection": ({"rejected": [{}]}, "rejected"),
    "a rejection's id": ({"rejected": [REJECTED | {"uid": {}}]}, "rejected"),
    "a rejection's reason": ({"rejected": [REJECTED | {"why": 7}]}, "rejected"),
    "no roster": ({"roster": None}, "roster"),
    "a roster as a list": ({"roster": [1, 2]}, "roster"),
    "a roster of words": ({"roster": {"a": "one"}}, "roster"),
    "a roster of paths": ({"roster": {"a": [0, 1.0], "../x": [0, 1.0]}}, "roster"),
    "endless tokens": ({"roster": {"a": [0, 1e308]}}, "roster"),
    "no tokens": ({"roster": {"a": [0, 1.0], "b": [0, 0]}}, "roster"),
    # Who counts in a round to come would be expected until then.
    "a round to come": ({"roster": {"a": [0, 1.0], "d": [1, 1.0]}}, "roster"),
    "a round before the first": ({"roster": {"a": [-1, 1.0]}}, "roster"),
    "a rate that takes the mean": (
        {"roster": {"a": [0, 1.0], "b": [0, 1.0], "d": [0, 1001.0]}},
        "roster",
    ),
    "more than the whole weight": (
        {"contributors": [ENTRY | {"weight": 1.1}]},
        "contributors",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_commit_with_a_digest_and_unusable_fields_is_named(name):
    changed_fields, fields = FORGED[name]
    store = MemoryStore()
    a = ByHand(store, "a")
    a.send(1.0)
    right = {"before": a.digest, **RIGHT}
    a.store.write(COMMIT, {} if changed_fields is None else right | changed_fields)
    for follow in (a.follower.advance, lambda: ByHand(store, "b")):
        with pytest.raises(RuntimeError) as raised:
            follow()
        message = f"{COMMIT} has no usable {fields}, and was not written by this"
        assert str(raised.value).startswith(message)
    assert (a.moved(), a.follower.number, a.outcomes) == (0, 0, [])
    assert a.follower.contribution is not None


def test_a_commit_that_rejects_by_these_rules_is_followed():
    a = ByHand(MemoryStore(), "a")
    fields = {"before": a.digest, "contributors": [], "rejected": [REJECTED]}
    a.store.write(COMMIT, fields | {"roster": RIGHT["roster"]})
    assert a.advance()
    assert a.follower.number == 1


@pytest.mark.parametrize(
    "roster",
    [
        *(None, [], {"a": 7}, {"a": [0, float("nan")]}),
        {"a": [4, 1.0]},  # before round 4 nobody has counted in it
        {"a": [3, 1.0], "b": [3, 1.0], "d": [3, 1e9]},
    ],
)
def test_a_snapshot_with_a_digest_and_no_usable_roster_is_passed_over(roster):
    store = MemoryStore()
    a = ByHand(store, "a", snapshot_every=2)
    for _ in range(5):
        a.step()
    key = _run.snapshot_key(4)
    _, arrays = a.store.read(key, a.follower.model.outer_step.snapshot)
    a.store.delete([key])
    a.store.write(key, {} if roster is None else {"roster": roster}, arrays)
    assert ByHand(store, "b").digest == a.digest


@pytest.mark.parametrize("what", ["model", "compressor", "quorum"])
@pytest.mark.parametrize("theirs", [None, 7, "x", {}, [[]], [None]])
def test_a_run_of_an_unusable_description_is_of_another(what, theirs):
    raw = MemoryStore()
    ByHand(raw, "a")
    store = _store.Store(raw)
    header, _ = store.read(_run.RUN)
    store.delete([_run.RUN])
    store.write(_run.RUN, header | {what: theirs})
    with pytest.raises(ValueError, match=f"begun with another {what}: "):
        ByHand(raw, "b")


def test_a_header_that_names_no_body_is_invalid():
    store = _store.Store(MemoryStore())
    store.create("key", json.dumps(store._sealed("key", {})).encode())
    with pytest.raises(_store.InvalidError, match="a body that does not match"):
        store.read("key")


def test_a_long_id_does_not_make_the_commit_too_large_to_be_read():
    """Commits repeat ids, and headers of more than 4 MiB are not read."""
    store = MemoryStore()
    a = ByHand(store, "a")
    sent(uid="x" * (_store.HEADER - 10_000))(ByHand(store, "c"))
    a.step()
    (entry,) = a.commit_of(0)["rejected"]
    assert "no usable tokens, rounds, digest and name" in entry["why"]
