"""A damaged checkpoint, or one of another program, is refused and names its step."""

import json
import shutil
from pathlib import Path

import jax
import pytest

from curvadion_jax import checkpoint

# Enough elements to lie in a file of their own.
STATE = {"w": jax.random.normal(jax.random.key(0), (2, 32, 32))}


def halve(pattern):
    """Cuts off the largest of the files."""

    def damage(folder: Path):
        file = max(folder.glob(pattern), key=lambda file: file.stat().st_size)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def noted(**entries):
    """Changes what is noted of a checkpoint; None takes an entry out."""

    def damage(folder: Path):
        file = folder / "info" / "metadata"
        info = {**json.loads(file.read_text()), **entries}
        file.write_text(json.dumps({k: x for k, x in info.items() if x is not None}))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(noted(format=2), id="another format"),
        pytest.param(noted(replicas=None), id="notes that lack an entry"),
        pytest.param(lambda at: shutil.rmtree(at / "info"), id="no notes"),
        pytest.param(halve("info/metadata"), id="notes cut off"),
        pytest.param(lambda at: shutil.rmtree(at / "state"), id="no arrays"),
        pytest.param(halve("state/manifest.ocdbt"), id="list of arrays cut off"),
        pytest.param(halve("state/**/d/*"), id="arrays cut off"),
    ],
)
def test_damaged_checkpoint_is_refused(tmp_path, damage):
    checkpoint.save(tmp_path, 3, STATE)
    damage(tmp_path / "3")
    with pytest.raises(ValueError, match="step 3 in"):
        checkpoint.restore(tmp_path, STATE)
