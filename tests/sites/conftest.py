"""Pauses between requests are noted, and take no time."""

from types import SimpleNamespace

import pytest

from curvadion_jax.sites import _store


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The seconds of every pause."""
    found = []
    monkeypatch.setattr(_store, "time", SimpleNamespace(sleep=found.append))
    return found
