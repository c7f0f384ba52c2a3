"""No room and no right to write: one clear error, and what was saved stays."""

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax import checkpoint


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """No file may grow above so many bytes; Python ignores the signal that comes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def state(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.random((2, 90_000))) for name in "abcdef"}


def assert_same(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    for name, array in expected.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()


# The first file of a checkpoint is refused, or one of its arrays. Orbax leaves other
# writes behind, which say so when nobody waits for them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("size", [0, 100_000])
def test_a_refused_save_is_one_error_and_leaves_the_others(tmp_path, size):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    with limited(size), pytest.raises(OSError, match="too large"):
        checkpoint.save(tmp_path, 3, state(3), keep=2)
    assert_same(checkpoint.restore(tmp_path, state(0)), state(2))
    checkpoint.save(tmp_path, 3, state(3), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert_same(checkpoint.restore(tmp_path, state(0)), state(3))


def test_an_old_step_that_is_half_removed_counts_no_more(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), keep=2)

    def refuse(path, *arguments, **options):
        os.remove(next(Path(path).rglob("manifest.ocdbt")))
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(OSError, match="no"):
            checkpoint.save(tmp_path, 3, state(3), keep=2)
    for step in (2, 3):
        assert_same(checkpoint.restore(tmp_path, state(0), step), state(step))
    checkpoint.save(tmp_path, 4, state(4), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


@pytest.mark.parametrize("stamp", ["", "-1700000000"], ids=["plain", "with time"])
def test_a_partial_step_of_a_crash_is_ignored(tmp_path, stamp):
    checkpoint.save(tmp_path, 1, state(1))
    partial = tmp_path / f"2.orbax-checkpoint-tmp{stamp}"
    shutil.copytree(tmp_path / "1", partial)
    assert checkpoint.latest_step(tmp_path) == 1
    checkpoint.save(tmp_path, 2, state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
