"""No file of a checkpoint runs code. (Ruff looks for what would, in all sources.)"""

import pickle
from pathlib import Path

import jax.numpy as jnp
import pytest

from curvadion_jax import checkpoint


class Mark:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


# Orbax leaves reads behind when something beside them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_pickle_in_place_of_any_file_of_a_checkpoint(tmp_path):
    mark, folder, refused = tmp_path / "it-ran", tmp_path / "run", set()
    state = {"w": jnp.ones((2, 4, 5))}
    payload = pickle.dumps(Mark(mark))
    checkpoint.save(folder, 3, state, extra={"epoch": 4})
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    in_old_format = folder / "3/state/checkpoint"
    for path in (*files, in_old_format):
        path.write_bytes(payload)
        for read in (checkpoint.restore, checkpoint.read_extra):
            try:
                read(folder, *[state] * (read is checkpoint.restore))
            except ValueError:
                refused.add(path.relative_to(folder).as_posix())
        path.write_bytes(files.get(path, b""))
    # What orbax does not need is left unread.
    assert {"3/info/metadata", "3/state/manifest.ocdbt"} <= refused
    assert not mark.exists()
    pickle.loads(payload)  # it would have left a mark
    assert mark.exists()
