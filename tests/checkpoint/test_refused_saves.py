"""No room and no right to write: an error, and what was saved stays."""

import errno
import os
import resource
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from stored_states import assert_same

from curvadion_jax import checkpoint


def state(seed: int):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.random((2, 90_000))) for name in "abcdef"}


# The first file of a checkpoint is refused, or one of its arrays. Orbax leaves other
# writes behind, which say so when nobody waits for them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("size", [0, 100_000])
def test_a_refused_save_leaves_the_others(tmp_path, size):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(OSError, match=r"Step 3 cannot be written to .* too large"):
            checkpoint.save(tmp_path, 3, state(3), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
    # As orbax names what a crash left, with a time in some versions.
    shutil.copytree(tmp_path / "3", tmp_path / "4.orbax-checkpoint-tmp-1700000000")
    assert checkpoint.latest_step(tmp_path) == 3
    checkpoint.save(tmp_path, 4, state(4), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
