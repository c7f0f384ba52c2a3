"""Pauses between requests are noted, and take no time; tests set the rounds' clock."""

from types import SimpleNamespace

import pytest

from curvadion_jax.sites import _follower, _store, _worker


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The seconds of every pause."""
    found = []
    monkeypatch.setattr(_store, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture
def clock(monkeypatch):
    """What `time.monotonic` is to the package's rounds, in seconds."""
    found = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: found.now)
    monkeypatch.setattr(_follower, "time", fake)
    monkeypatch.setattr(_worker, "time", fake)
    return found
