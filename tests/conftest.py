"""Eight CPU devices, before JAX touches one; fixed numerics for every test."""

import os
from pathlib import Path

# Small factorisations are many times faster without OpenBLAS's own threads, which
# would compete with the eight devices of this process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A directory of small files, some of which are held out."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = " ".join(str(number * word) for word in range(60))
        (folder / f"file{number}.txt").write_text(words)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often test_killed_saves.py kills; CI has no time for many."""
    parser.addoption("--kills", type=int, default=5, help="SIGKILLs during saves")
