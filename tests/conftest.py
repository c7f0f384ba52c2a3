"""Eight CPU devices, before JAX touches one; fixed numerics for every test."""

import gc
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Small factorisations are many times faster without OpenBLAS's own threads, which
# would compete with the eight devices of this process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are kept (`pytest_configure`), for the processes of the tests too. A program
# is known by all of it, the names in it included, and not by the lines of its source,
# so that what is edited compiles anew and what has moved within its file does not.
os.environ |= {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}

# Processes that tests start run this package, and no other that is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)

import jax
import pytest

# Compiled programs are run a few times here and need not be fast: without XLA's fusion
# emitters, and in one piece each, they compile in a third of the time. XLA ends the
# process when devices have waited 40 seconds for each other, which eight of them do on
# a busy machine. A deadlock is what pytest's time limit is for.
XLA_FLAGS = [
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_collective_call_terminate_timeout_seconds=280",
]


def _known(flags: list[str]) -> list[str]:
    """The flags that this jaxlib knows: it ends a process that is given another.

    Each is tried in a process of its own, once per jaxlib: answers are kept in a file.
    """
    version = importlib.metadata.version("jaxlib")
    kept = Path(tempfile.gettempdir(), f"curvadion-xla-flags-{version}-{os.getuid()}")
    try:
        known = json.loads(kept.read_text())
    except (OSError, ValueError):
        known = {}
    if missing := set(flags) - known.keys():
        start = [sys.executable, "-c", "import jax; jax.devices()"]
        tries = {
            flag: subprocess.Popen(
                start,
                env=os.environ | {"XLA_FLAGS": flag},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for flag in missing
        }
        known |= {flag: child.wait() == 0 for flag, child in tries.items()}
        part = kept.with_name(f"{kept.name}-{os.getpid()}")
        part.write_text(json.dumps(known))
        part.replace(kept)
    return [flag for flag in flags if known[flag]]


if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = " ".join(_known(XLA_FLAGS))

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling takes longer than running here.
jax.config.update("jax_disable_most_optimizations", True)


def pytest_configure(config: pytest.Config) -> None:
    """Where compiled programs are kept: with pytest's cache, from run to run.

    Without that (`-p no:cacheprovider`) for this run, whose workers share them.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        if cache := getattr(config, "cache", None):
            folder = _of_bounded_size(cache.mkdir("programs"))
        else:
            folder = Path(tempfile.mkdtemp(prefix="programs"))
            config.add_cleanup(lambda: shutil.rmtree(folder))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    jax.config.update(
        "jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"]
    )


def _of_bounded_size(folder: Path) -> Path:
    """The folder, made empty when it holds far more than the programs of one run."""
    if sum(file.stat().st_size for file in folder.iterdir()) > 2**30:
        shutil.rmtree(folder)
        folder.mkdir()
    return folder


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


@pytest.fixture(autouse=True)
def _end_reads(request):
    """What Orbax leaves behind ends with its test, whose mark says so.

    Else the collector ends it, with a warning, in some later test.
    """
    yield
    if request.node.get_closest_marker("filterwarnings"):
        gc.collect()


@pytest.fixture(scope="session")
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
