"""What a site is told that cannot take part, and when."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import MemoryStore

from curvadion_jax import compressors, sites
from curvadion_jax.sites import _rounds, _store

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}


class ReadOnly:
    def __init__(self, store):
        self.list, self.get = store.list, store.get

    def put(self, *_, **__):
        raise PermissionDeniedError("Forbidden\nAuthorization: AWS4 secret")


class Overwriting:
    """As stores that do not know If-None-Match, and say nothing."""

    def __init__(self, store):
        self._store, self.list, self.get = store, store.list, store.get

    def put(self, key, data, **_):
        self._store.put(key, data)


class Full:
    """A store in which there is room for small objects only."""

    def __init__(self, store):
        self._store, self.list, self.get = store, store.list, store.get

    def put(self, key, data, **options):
        if len(data) > 100:
            raise OSError(28, "No space left on device")
        self._store.put(key, data, **options)


def started(store, name="oslo", params=PARAMS, **options):
    site = sites.join(store, name, poll=0.01, **options)
    site.start(params)
    return site


def test_a_folder_by_its_path(tmp_path):
    with sites.join(tmp_path / "run", "oslo", every=1) as site:
        site.leave(site.sync(site.start(PARAMS)))
    assert site.metrics.contributors == 1
    assert any((tmp_path / "run").iterdir())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot use the folder"):
        sites.join(f"file://{tmp_path}/file/run", "oslo")


def test_a_bucket_that_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key")
    monkeypatch.setitem(_store._RETRIES, "max_retries", 0)
    with pytest.raises(OSError, match="the store s3://bucket/run cannot") as raised:
        sites.join("s3://bucket/run", "oslo")
    assert "hidden" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_bucket_that_cannot_be_written():
    with pytest.raises(OSError, match="cannot write members/oslo") as raised:
        sites.join(ReadOnly(MemoryStore()), "oslo")
    assert "secret" not in str(raised.value)


def test_a_store_without_room_for_the_model():
    with sites.join(Full(MemoryStore()), "oslo", poll=0.01) as site:
        with pytest.raises(OSError, match="No space left"):
            site.start(PARAMS)


def test_a_store_that_overwrites():
    with pytest.raises(RuntimeError, match="conditional writes"):
        sites.join(Overwriting(MemoryStore()), "oslo")


def test_credentials_in_the_url():
    with pytest.raises(ValueError, match="must hold no credentials") as raised:
        sites.join("https://me:secret@host/run", "oslo")
    assert "secret" not in str(raised.value)


def test_a_kind_of_store_that_there_is_not():
    with pytest.raises((OSError, ValueError), match="ftp"):
        sites.join("ftp://host/run", "oslo")


def test_another_model():
    store = MemoryStore()
    with started(store):
        pass
    with sites.join(store, "rome") as site:
        with pytest.raises(
            ValueError, match=r"w float32\[3, 3\] here, .*\[2, 3\] ther"
        ):
            site.start({"w": jnp.ones((3, 3)), "b": jnp.zeros(3)})
    with sites.join(store, "bonn") as site:
        with pytest.raises(ValueError, match=r"3 parameters here, 2 there"):
            site.start({**PARAMS, "z": jnp.zeros(3)})
    # Nobody counts with those that were refused.
    found = _rounds.members(_store.Store(store).keys(_rounds.MEMBERS))
    assert sorted(found.gone) == ["bonn", "rome"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 2}, "another quorum: 2 here, 1 there"),
        ({"compressor": compressors.quantize(8)}, "another compressor and fragments"),
        ({"fragments": 2}, "another compressor and fragments"),
        ({"outer": optax.sgd(1.0, momentum=0.5)}, "another outer optimizer"),
    ],
    ids=["quorum", "compressor", "fragments", "outer"],
)
def test_other_settings(options, message):
    store = MemoryStore()
    with started(store):
        pass
    with sites.join(store, "rome", **options) as site:
        with pytest.raises(ValueError, match=message):
            site.start(PARAMS)


def test_a_run_of_a_newer_format():
    store = MemoryStore()
    store.put(_rounds.RUN, json.dumps({"format": 9}).encode())
    with sites.join(store, "oslo") as site:
        with pytest.raises(RuntimeError, match=r"format 9, .* reads 1: upgrade it"):
            site.start(PARAMS)


def test_two_of_one_name():
    store = MemoryStore()
    with started(store, every=1, max_lag=0) as first, started(store) as second:
        with pytest.raises(RuntimeError, match=r"another site has joined .* 'oslo'"):
            first.sync(PARAMS)
        second.sync(PARAMS)


def test_parameters_of_another_structure():
    with started(MemoryStore()) as site:
        with pytest.raises(ValueError, match="must be a tree of the structure"):
            site.sync([PARAMS])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (PARAMS | {"w": jnp.ones((1, 2, 3))}, r"'w'\] is float32\[1, 2, 3\], and was"),
        (
            PARAMS | {"b": jnp.zeros(3, jnp.bfloat16)},
            r"'b'\] is bfloat16\[3\], and was",
        ),
    ],
    ids=["shape", "dtype"],
)
def test_parameters_that_have_become_others(params, message):
    with started(MemoryStore(), every=1) as site:
        with pytest.raises(ValueError, match=message):
            site.sync(params)


def test_parameters_on_different_devices():
    first, second = jax.devices()[:2]
    apart = {
        "w": jax.device_put(PARAMS["w"], first),
        "b": jax.device_put(PARAMS["b"], second),
    }
    with started(MemoryStore(), params=apart, every=1, max_lag=0) as site:
        site.sync(apart)
        assert site.metrics.counted == 1


def test_closed_while_it_waits(monkeypatch):
    with started(MemoryStore(), every=1, max_lag=0, quorum=2) as site:
        wait = site._worker.wait

        def closed_meanwhile(seconds):
            site.close()
            wait(seconds)

        monkeypatch.setattr(site._worker, "wait", closed_meanwhile)
        with pytest.raises(RuntimeError, match="has left the run"):
            site.sync(PARAMS)


def test_parameters_that_are_none():
    with sites.join(MemoryStore(), "oslo") as site:
        with pytest.raises(TypeError, match=r"\['step'\] is int32"):
            site.start({"w": jnp.ones(2), "step": jnp.zeros([], int)})
        with pytest.raises(ValueError, match="no arrays"):
            site.start({})


def test_after_it_has_left():
    with started(MemoryStore(), every=1, max_lag=0) as site:
        site.leave(PARAMS)
        with pytest.raises(RuntimeError, match="has left the run"):
            site.sync(PARAMS)


def test_before_start_and_twice():
    with sites.join(MemoryStore(), "oslo") as site:
        with pytest.raises(RuntimeError, match="has not started"):
            site.sync(PARAMS)
        site.start(PARAMS)
        with pytest.raises(RuntimeError, match="join once for each start"):
            site.start(PARAMS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "a/b"}, ValueError, "name must be"),
        ({"name": ""}, ValueError, "name must be"),
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"quorum": 1.5}, TypeError, "quorum must be an int"),
        ({"keep": 1.5}, ValueError, "keep"),
        ({"grace": "long"}, TypeError, "grace must be a number"),
        ({"max_lag": -1}, ValueError, "max_lag"),
        ({"poll": 0}, ValueError, "poll must be positive"),
        ({"poll": math.inf}, ValueError, "poll must be positive and finite"),
        ({"max_norm": 0.5}, ValueError, "max_norm must be at least 1, got 0.5"),
        ({"outer": 0.7}, TypeError, "outer must be"),
        ({"compressor": 8}, TypeError, "compressor is 8"),
        (
            {"compressor": compressors.exact()._replace(codec=None)},
            ValueError,
            "codec",
        ),
    ],
)
def test_arguments(options, error, message):
    given = {"name": "oslo"} | options
    with pytest.raises(error, match=message):
        sites.join(MemoryStore(), **given)


def test_tokens_that_are_no_number():
    with started(MemoryStore()) as site:
        for tokens in (0, -1, float("nan"), 2e18):
            with pytest.raises(ValueError, match="tokens must be positive"):
                site.sync(PARAMS, tokens=tokens)


def test_tokens_of_any_kind_of_number():
    with started(MemoryStore(), every=1, max_lag=0) as site:
        for tokens in (7, 0.5, np.int32(7), np.float32(0.5), jnp.int32(7)):
            site.sync(PARAMS, tokens=tokens)
        assert site.metrics.counted == 5


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ImportError, match=r"curvadion-jax\[sites\]"):
        sites.join("/tmp/run", "oslo")


def test_nothing_of_a_credential_is_in_the_run(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key")
    with caplog.at_level("DEBUG"), started(str(tmp_path)) as site:
        jax.block_until_ready(site.leave(site.sync(PARAMS)))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(b"hidden-key" in path.read_bytes() for path in files)
    assert "hidden-key" not in caplog.text
