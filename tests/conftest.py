"""Eight CPU devices, before JAX touches one; fixed numerics for every test."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Small factorisations are many times faster without OpenBLAS's own threads, which
# would compete with the eight devices of this process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled programs are run a few times here and need not be fast: without XLA's fusion
# emitters, and in one piece each, they compile in a third of the time. XLA ends the
# process when devices have waited 40 seconds for each other, which eight of them do on
# a busy machine. A deadlock is what pytest's time limit is for.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=280",
)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling takes longer than running here.
jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_finish() -> None:
    """What is imported stays: the collector need not look at it while JAX traces."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request):
    """Each takes some of the 65,530 memory maps that Linux gives a process."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 5_000:
        for value in vars(request.module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        jax.clear_caches()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> Path:
    """Where runs of one program that are compared keep what they have compiled."""
    base = tmp_path_factory.getbasetemp()
    # Under xdist it lies in a folder of all workers, which share this one.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (shared / "compiled").mkdir(exist_ok=True)
    return shared / "compiled"


@pytest.fixture(scope="module")
def compiled_once(compiled) -> Iterator[None]:
    """Programs that are built anew in this process are compiled once."""
    compilation_cache.set_cache_dir(str(compiled))
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)


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
