"""Steps go on while a contribution is under way; what becomes of them."""

import math
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from faulty import FaultyStore
from gated_sites import Gated, stepped
from jax.sharding import NamedSharding, PartitionSpec
from obstore.store import MemoryStore
from site_runs import together, train
from site_steps import ByHand

from curvadion_jax import compressors, sites

PARAMS = {"w": jnp.zeros((4, 8))}


def until(condition, site, params):
    """Syncs without steps of its own, by the clock of the thread alone."""
    for _ in range(10_000):
        site._worker.wait(0.01)
        if condition():
            return params
    raise AssertionError("it never came")


@pytest.mark.parametrize(("keep", "wanted"), [(1.0, 6.0), (0.5, 5.0), (0.0, 4.0)])
def test_progress_made_meanwhile_is_kept(keep, wanted):
    store = Gated()
    with sites.join(store, "oslo", every=4, max_lag=99, keep=keep, poll=0.01) as site:
        params = site.start(PARAMS)
        for _ in range(4):
            params = site.sync(stepped(params))
        assert store.asked.wait(60)
        params = site.sync(stepped(params))  # at once, though no commit is there
        assert site.metrics.lag == 1
        store.open.set()
        until(lambda: not site._worker._busy, site, params)
        params = site.sync(stepped(params))
        np.testing.assert_array_equal(params["w"], wanted)
        assert site.metrics.counted == 1
        assert site.metrics.lag == 0
        assert site.metrics.blocked == 0


def test_sync_waits_beyond_the_bound_alone():
    store = Gated()
    with sites.join(store, "oslo", every=2, max_lag=2, poll=0.01) as site:
        params = site.start(PARAMS)
        for _ in range(3):
            params = site.sync(stepped(params))
        opener = threading.Thread(
            target=lambda: (store.asked.wait(60), store.open.set())
        )
        opener.start()
        params = site.sync(stepped(params))  # the second since it was taken
        opener.join()
        assert site.metrics.counted >= 1
        assert site.metrics.blocked > 0
        np.testing.assert_array_equal(params["w"], 4.0)


def test_without_a_bound_sync_never_waits():
    store = Gated()
    with sites.join(store, "oslo", every=1, max_lag=math.inf, poll=0.01) as site:
        params = site.start(PARAMS)
        for _ in range(20):
            params = site.sync(stepped(params))
        assert site.metrics.blocked == 0
        store.open.set()
        until(lambda: not site._worker._busy, site, params)
        site.leave(site.sync(stepped(params)))
        assert site.metrics.counted >= 1


def test_what_is_settled_between_two_looks_counts_once(monkeypatch):
    """The worst moment: after `sync` has looked, and before it gives a new copy."""
    store = Gated()
    with sites.join(store, "oslo", every=2, max_lag=99, poll=0.01) as site:
        params = site.start(PARAMS)
        for _ in range(4):
            params = site.sync(stepped(params))
        worker, take = site._worker, site._worker.take

        def look():
            found = take()
            store.open.set()
            until(lambda: not worker._busy, site, params)
            return found

        monkeypatch.setattr(worker, "take", look)
        params = site.sync(stepped(params))
        monkeypatch.setattr(worker, "take", take)
        params = site.leave(params)
    np.testing.assert_array_equal(params["w"], 5.0)


def test_parameters_may_be_donated_to_the_next_step():
    step = jax.jit(stepped, donate_argnums=0)
    with sites.join(MemoryStore(), "oslo", every=1, max_lag=5, poll=0.01) as site:
        params = site.start(PARAMS)
        for _ in range(20):
            params = site.sync(step(params))
        params = site.leave(params)
    np.testing.assert_array_equal(params["w"], 20.0)


def test_a_store_that_fails_costs_time_and_nothing_else(monkeypatch):
    """Refused requests and lost answers: what is created once is counted once."""
    # With a third of all requests failing a start may get no further five times.
    monkeypatch.setattr("curvadion_jax.sites._worker._ATTEMPTS", 10_000)
    found = {}
    for faults in ({}, {"refuse": 0.2, "lose": 0.1}):
        memory, stores = MemoryStore(), []

        def run(number, memory=memory, stores=stores, faults=faults):
            store = FaultyStore(memory, seed=number, **faults)
            options = {"every": 4, "quorum": 3, "max_lag": 0, "poll": 0.002}
            form = compressors.quantize(2, block=4)
            site = joined(store, f"site{number}", compressor=form, **options)
            stores.append(store)
            with site:
                params = train(site, number, optax.sgd(0.1))
                assert site.metrics.counted == 3
                return params

        runs = {str(n): lambda n=n: run(n) for n in range(3)}
        found[bool(faults)] = together(runs)
        assert bool(sum(store.refused for store in stores)) == bool(faults)
    for name in ("kernel", "bias"):
        for number in "012":
            np.testing.assert_array_equal(
                found[True][number][name], found[False]["0"][name]
            )


def joined(store, name, **options):
    while True:
        try:
            return sites.join(store, name, **options)
        except OSError:
            continue


def test_a_store_that_is_cut_off_is_waited_for():
    store = FaultyStore(MemoryStore())
    with sites.join(store, "oslo", every=1, max_lag=100, poll=0.01) as site:
        params = site.start(PARAMS)
        store.cut_off = True
        before = store.refused
        for _ in range(10):
            params = site.sync(stepped(params))
        until(lambda: store.refused > before + 2, site, params)
        assert store.refused < 50  # attempts are further and further apart
        store.cut_off = False
        params = site.leave(params)
        np.testing.assert_array_equal(params["w"], 10.0)


def test_a_snapshot_on_request():
    store = MemoryStore()
    keys = lambda: [x["path"] for x in store.list(prefix="snapshots").collect()]  # noqa: E731
    with sites.join(store, "oslo", every=1, max_lag=0, poll=0.01) as site:
        params = site.sync(stepped(site.start(PARAMS)))
        assert keys() == []
        site.snapshot()
        until(keys, site, params)
        assert keys() == ["snapshots/00000000"]


def test_who_leaves_does_not_wait_for_ever():
    store = FaultyStore(MemoryStore())
    with sites.join(store, "oslo", quorum=2, every=1, max_lag=9, poll=0.01) as site:
        params = site.sync(stepped(site.start(PARAMS)))
        params = site.leave(params, timeout=0.2)
        np.testing.assert_array_equal(params["w"], 1.0)


def test_sites_of_other_meshes_have_the_same_bits():
    """One of 4 devices, divided; one of 2; one of 1."""
    devices = np.array(jax.devices())
    places = {
        "four": (devices[:4], PartitionSpec(None, "fsdp")),
        "two": (devices[4:6], PartitionSpec("fsdp")),
        "one": (devices[6:7], PartitionSpec()),
    }
    memory = MemoryStore()

    def run(name):
        some, spec = places[name]
        sharding = NamedSharding(jax.sharding.Mesh(some, ("fsdp",)), spec)
        params = jax.device_put({"w": jnp.arange(32.0).reshape(4, 8)}, sharding)
        step = jax.jit(lambda p, by: stepped(p, by), donate_argnums=0)
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        form = compressors.quantize(4, block=8)
        options = {"outer": outer, "compressor": form, "quorum": 3, "poll": 0.002}
        with sites.join(memory, name, every=2, max_lag=0, **options) as site:
            params = site.start(params)
            for index in range(6):
                params = site.sync(step(params, 0.1 * index + len(some)), tokens=8)
            assert params["w"].sharding == sharding
            return np.asarray(site.leave(params)["w"])

    found = together({name: lambda name=name: run(name) for name in places})
    np.testing.assert_array_equal(found["four"], found["one"])
    np.testing.assert_array_equal(found["two"], found["one"])


def test_bytes_are_those_of_the_store(tmp_path):
    """Up: all that lies in the folder. A post: what the payload says, and a head."""
    form = compressors.quantize(2)
    params = {"w": jnp.zeros((64, 64))}
    with sites.join(str(tmp_path), "oslo", every=1, compressor=form, poll=0.01) as site:
        site.leave(site.sync(stepped(site.start(params))))
        up = site.metrics.bytes_up
    sizes = {p: p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()}
    assert up == sum(sizes.values())
    (post,) = [size for path, size in sizes.items() if "rounds" in path.parts]
    payload = form.payload(params, {})
    assert 0 < post - payload.averaged - payload.gathered < 1000


class Reading:
    """A store that takes down how many bytes were read of what."""

    def __init__(self, store):
        self._store, self.read = store, []
        self.put, self.list, self.delete = store.put, store.list, store.delete

    def get(self, key):
        data = bytes(self._store.get(key).bytes())
        self.read.append((key, len(data)))
        return types.SimpleNamespace(bytes=lambda: data)


def test_bytes_down_are_those_of_what_was_read():
    memory = MemoryStore()
    rome, store = ByHand(memory, "rome", params=PARAMS, quorum=2), Reading(memory)
    options = {"every": 1, "max_lag": 0, "quorum": 2, "poll": 0.01}
    with sites.join(store, "oslo", **options) as site:
        params = site.start(PARAMS)
        rome.post(1.0)
        site.sync(stepped(params))
    down = site.metrics.bytes_down
    assert down == sum(size for _, size in store.read) > PARAMS["w"].nbytes
    keys = [key for key, _ in store.read if not key.startswith("initial/")]
    # Of the round one post, the other's, and the commit.
    assert keys == ["run.json", "rounds/00000000/rome", "commits/00000000.json"]


@pytest.mark.parametrize("fragments", [1, 2])
def test_who_leaves_brings_what_is_left_of_every_fragment(fragments):
    params = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
    options = {"every": 2, "max_lag": 0, "poll": 0.01, "fragments": fragments}
    with sites.join(MemoryStore(), "oslo", **options) as site:
        params = site.start(params)
        for _ in range(5):
            params = site.sync(stepped(params))
        params = site.leave(params)
        assert site.metrics.counted == 2 + fragments
        assert not any(site._tokens)
    np.testing.assert_array_equal(params["a"], 5.0)
    np.testing.assert_array_equal(params["b"], 5.0)
