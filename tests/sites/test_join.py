"""What a site is told that cannot take part, and when."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import MemoryStore

from curvadion_jax import compressors, sites
from curvadion_jax.sites import _outer_step, _run, _store

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}


def overwriting(store):
    """As stores that do not know If-None-Match, and say nothing."""
    put = lambda key, data, **_: store.put(key, data)
    return SimpleNamespace(get=store.get, list=store.list, delete=store.delete, put=put)


def started(store, name="oslo", params=PARAMS, **options):
    site = sites.Site(store, name, poll=0.01, **options)
    site.start(params)
    return site


def test_a_store_that_overwrites():
    with pytest.raises(RuntimeError, match="conditional writes"):
        started(overwriting(MemoryStore()))


def test_a_twin_that_joins_meanwhile_is_no_fault_of_the_store(monkeypatch):
    """It removes what this one has created, which joins after it, once more."""
    slower, twin = (_store.Store(store) for store in [MemoryStore()] * 2)
    create, joined = slower.create, []

    def slow(key, data):
        found = create(key, data)
        if not joined:
            joined.append(_run.join(twin, "oslo"))
        return found

    monkeypatch.setattr(slower, "create", slow)
    assert (_run.join(slower, "oslo"), joined) == (3, [2])
    assert slower.keys(_run.MEMBERS) == ["members/oslo/000003.json"]


def test_start_may_be_repeated_after_a_failure():
    def refuse(*_, **__):
        raise PermissionDeniedError("Forbidden\nAuthorization: AWS4 secret")

    store = MemoryStore()
    full = overwriting(store)
    full.put = refuse
    with sites.Site(full, "oslo", every=1, max_lag=0) as site:
        with pytest.raises(OSError, match=r"cannot write run\.json") as raised:
            site.start(PARAMS)
        assert "secret" not in str(raised.value)
        site._url = store
        site.sync(site.start(PARAMS))
        assert site.metrics.counted == 1


OTHERS = [
    ("model: .*float32', .*, 3.* here", {"params": {"w": jnp.ones((3, 3))}}),
    ("model: .*z.* here, None there", {"params": PARAMS | {"z": jnp.zeros(3)}}),
    ("quorum: 2 here, 1 there", {"quorum": 2}),
    ("compressor", {"compressor": compressors.quantize(8)}),
    ("outer optimizer", {"outer": optax.sgd(0.7, momentum=0.9)}),
    ("outer optimizer", {"outer": optax.sgd(0.6, momentum=0.9, nesterov=True)}),
]


@pytest.mark.parametrize(("message", "other"), OTHERS)
def test_another_run_than_this_sites(message, other):
    store, own = MemoryStore(), {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)}
    started(store, **own).close()
    with pytest.raises(ValueError, match=f"begun with another {message}"):
        started(store, "rome", **(own | other))
    # Nobody counts with sites that were refused.
    found = _run.members(_store.Store(store).keys(_run.MEMBERS))
    assert found.newest == {"oslo": 1}


@pytest.mark.parametrize("shape", [(10**6, 10**6), (10**4,) * 3, (10**12,)])
def test_sites_compare_outer_optimizers_without_arrays_of_the_models_size(shape):
    """Which nobody could hold here."""
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    outers = optax.sgd(1.0, momentum=0.4), optax.sgd(1.0, momentum=0.5)
    found = [_outer_step.OuterStep(params, outer).fingerprint for outer in outers]
    assert found[0] != found[1]
    assert _outer_step.OuterStep(params, outers[0]).fingerprint == found[0]


def test_a_run_of_another_version(monkeypatch):
    store = MemoryStore()
    started(store).close()
    store.put(_run.commit_key(0), bytes(_store.HEADER + 1))
    with pytest.raises(RuntimeError, match=r"not 4194304\. Use .* another URL"):
        started(store)
    monkeypatch.setattr(_store, "FORMAT", _store.FORMAT + 1)
    with pytest.raises(RuntimeError, match=r"run\.json is damaged, or of .* version"):
        started(store)


def test_two_of_one_name():
    store = MemoryStore()
    with started(store, every=1, max_lag=0) as first, started(store) as second:
        with pytest.raises(RuntimeError, match=r"nother site has joined .* 'oslo'"):
            first.sync(PARAMS)
        second.sync(PARAMS)


GIVEN = {"w": np.ones(2, np.float32), "v": np.ones((3, 1), np.float32)}
CHANGED = {
    "shape": ({"w": np.ones((2, 1), np.float32)}, r"'w'\] is float32\[2, 1\], and was"),
    # Which NumPy and JAX would broadcast.
    "one element": ({"w": np.ones(1, np.float32)}, r"'w'\] is float32\[1\], and was"),
    "float16": (
        {"w": np.ones(2, np.float16)},
        r"is float16\[2\], and was float32\[2\]",
    ),
    "integers": ({"w": np.ones(2, int)}, r"is int64\[2\], and was float32\[2\]"),
    "None": ({"w": None}, r"structure .*'w': None.*, and had .*'w': \*"),
    "a list": ({"w": [GIVEN["w"]]}, "have the structure"),
    "one more": ({"x": GIVEN["w"]}, "have the structure"),
}


@pytest.mark.parametrize("call", ["sync", "leave"])
@pytest.mark.parametrize(("change", "message"), CHANGED.values(), ids=CHANGED)
def test_parameters_that_have_become_others_are_refused(call, change, message):
    """And nothing of them is contributed: the site can go on with its own."""
    with sites.Site(MemoryStore(), "oslo", every=1, max_lag=0, poll=0.01) as site:
        site.start(GIVEN)
        with pytest.raises(ValueError, match=message):
            getattr(site, call)(GIVEN | change)
        assert site.metrics.contributions == 0
        site.leave(site.sync(GIVEN))
        assert site.metrics.counted == site.metrics.contributions > 0


def test_tensors_whose_dtype_has_changed_are_refused_once_they_are_copied():
    """NumPy does not know the dtypes of other libraries."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with sites.Site(MemoryStore(), "oslo", every=2, max_lag=0, poll=0.01) as site:
        site.start({"w": torch.ones(2)})
        site.sync({"w": torch.ones(2)})
        with pytest.raises(ValueError, match=r"is float16\[2\], and was float32"):
            site.sync({"w": torch.ones(2, dtype=torch.float16)})


def test_a_leaf_that_is_no_array_is_refused_once_it_is_needed():
    with started(MemoryStore(), every=1, max_lag=0) as site:
        with pytest.raises(TypeError, match="float is no array"):
            site.sync(PARAMS | {"w": 3.0})


def test_arrays_without_elements_are_contributed_as_others_are():
    params = {"w": np.zeros((0, 3), np.float32)}
    with sites.Site(MemoryStore(), "oslo", every=1, max_lag=0, poll=0.01) as site:
        found = site.leave(site.sync(site.start(params)))
        assert found["w"].shape == (0, 3)
        assert site.metrics.counted == 1


@pytest.mark.parametrize("params", [{}, None, {"w": None}, [], ()])
def test_a_tree_without_arrays_starts_nothing(params):
    store = MemoryStore()
    with sites.Site(store, "oslo") as site:
        with pytest.raises(
            ValueError, match=r"^params are .*, without an array\. Give"
        ):
            site.start(params)
    assert _store.Store(store).keys("") == []


def test_an_outer_optimizer_with_a_random_key_starts_nothing():
    store, outer = MemoryStore(), optax.add_noise(0.1, 0.5, jax.random.key(0))
    with sites.Site(store, "oslo", outer=outer) as site:
        with pytest.raises(ValueError, match=r"outer has an array of key.* Give an"):
            site.start(PARAMS)
    assert _store.Store(store).keys("") == []


def test_closed_while_it_waits(monkeypatch):
    with started(MemoryStore(), every=1, max_lag=0, quorum=2) as site:
        wait = site._worker.wait

        def closed_meanwhile(seconds):
            site.close()
            wait(seconds)

        monkeypatch.setattr(site._worker, "wait", closed_meanwhile)
        with pytest.raises(RuntimeError, match="has left"):
            site.sync(PARAMS)


def test_before_start_twice_and_after_leave():
    with sites.Site(MemoryStore(), "oslo", every=1, max_lag=0) as site:
        with pytest.raises(RuntimeError, match="has not started"):
            site.sync(PARAMS)
        with pytest.raises(TypeError, match=r"\['step'\] is int32"):
            site.start({"w": jnp.ones(2), "step": jnp.zeros([], int)})
        site.start(PARAMS)
        with pytest.raises(RuntimeError, match="This site has started"):
            site.start(PARAMS)
        site.leave(PARAMS)
        with pytest.raises(RuntimeError, match="has left"):
            site.sync(PARAMS)


def test_tokens():
    with started(MemoryStore(), every=1, max_lag=0) as site:
        for tokens in (0, -1, math.nan, 2e18):
            with pytest.raises(ValueError, match="tokens must be positive"):
                site.sync(PARAMS, tokens=tokens)
        for tokens in (7, 0.5, np.int32(7), np.float32(0.5), jnp.int32(7)):
            site.sync(PARAMS, tokens=tokens)
        assert site.metrics.counted == 5


EXACT = compressors.exact()
UNUSABLE = [
    ("url", [None, ""]),
    ("name", ["a/b", "", "-a", "a" * 65, "..", None, 7]),
    # A sync would contribute nothing again and again, and never return.
    ("every", [0, -1, 2.5, math.nan, "2", None]),
    ("quorum", [0, -1, 2.5, math.nan, math.inf, "2", None]),
    ("max_lag", [-1, -0.5, math.nan, -math.inf, "2"]),
    ("grace", [-1, math.nan, "2", None]),
    ("poll", [0, -1, math.nan, math.inf, 1e12, "2", None]),
    ("compressor", [EXACT._replace(codec=None), compressors.quantize, 8]),
]


@pytest.mark.parametrize(
    ("argument", "value"),
    [(argument, value) for argument, values in UNUSABLE for value in values],
)
def test_an_unusable_argument_is_named_when_a_site_is_made(argument, value):
    given = {"url": MemoryStore(), "name": "oslo"} | {argument: value}
    with pytest.raises(ValueError, match=rf"^{argument} (is|must).*\. (Give|Pass|The)"):
        sites.Site(given.pop("url"), given.pop("name"), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"max_lag": 0, "grace": 0, "poll": 1e-3, "quorum": 1},
        {"max_lag": math.inf, "grace": math.inf, "poll": np.float32(0.01)},
        {"max_lag": 2.5, "grace": 1e9, "compressor": EXACT},
    ],
)
def test_a_site_with_arguments_at_their_ends_contributes(given):
    with sites.Site(MemoryStore(), "oslo", every=1, **({"poll": 0.01} | given)) as site:
        site.leave(site.sync(site.start(PARAMS)), timeout=math.inf)
        assert site.metrics.counted == 1


@pytest.mark.parametrize("timeout", [-1, math.nan, "2", None])
def test_an_unusable_timeout_is_named_and_the_site_stays(timeout):
    with started(MemoryStore(), every=1, max_lag=0) as site:
        with pytest.raises(ValueError, match="timeout must be a number of at least 0"):
            site.leave(PARAMS, timeout=timeout)
        site.sync(PARAMS)
        assert site.metrics.counted == 1


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ImportError, match="pip install obstore"):
        started("/tmp/run")
