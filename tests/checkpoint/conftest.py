"""Reads that Orbax leaves behind end with the test that made them."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _end_reads(request):
    """Else the collector ends them, with a warning, in some later test."""
    yield
    if request.node.get_closest_marker("filterwarnings"):
        gc.collect()
