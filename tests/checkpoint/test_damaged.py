"""A damaged checkpoint, or one of another program, is refused and names its step."""

import json
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from stored_states import assert_same

import curvadion_jax as cd
from curvadion_jax import checkpoint

# Orbax leaves reads behind when something beside them fails.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
# Enough elements to lie in a file of their own.
STATE = {"w": jax.random.normal(jax.random.key(0), (2, 32, 32))}


def halve(pattern):
    """Cuts off the largest of the files."""

    def damage(folder: Path):
        file = max(folder.glob(pattern), key=lambda file: file.stat().st_size)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def noted(folder: Path):
    """Changes a number in the notes."""
    file = folder / "info" / "metadata"
    info = json.loads(file.read_text())
    info["notes"]["extra"]["position"] += 1
    file.write_text(json.dumps(info))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(noted, id="another note"),
        pytest.param(lambda at: shutil.rmtree(at / "info"), id="no notes"),
        pytest.param(halve("info/metadata"), id="notes cut off"),
        pytest.param(lambda at: shutil.rmtree(at / "state"), id="no arrays"),
        pytest.param(halve("state/manifest.ocdbt"), id="list of arrays cut off"),
        pytest.param(halve("state/**/d/*"), id="arrays cut off"),
        pytest.param(lambda at: at.rename(at.parent / "4"), id="renamed"),
    ],
)
def test_damaged_checkpoint_is_refused(tmp_path, damage):
    checkpoint.save(tmp_path, 3, STATE, extra={"position": 7})
    damage(tmp_path / "3")
    with pytest.raises(ValueError, match=r"Step [34] in .* Restore another step"):
        checkpoint.restore(tmp_path, STATE)


def test_no_flipped_bit_is_restored(tmp_path):
    """Each is refused, or was nowhere that is read."""
    checkpoint.save(tmp_path / "run", 3, STATE, extra={"position": 7})
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    rng, refused = random.Random(0), 0
    for _ in range(20):
        file = rng.choices(files, [path.stat().st_size for path in files])[0]
        before = file.read_bytes()
        changed = bytearray(before)
        changed[rng.randrange(len(before))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        try:
            assert_same(checkpoint.restore(tmp_path / "run", STATE), STATE)
            assert checkpoint.read_extra(tmp_path / "run") == {"position": 7}
        except ValueError:
            refused += 1
        file.write_bytes(before)
    assert refused > 10


def test_an_array_that_is_not_what_was_saved_is_named(tmp_path, monkeypatch):
    state = {**STATE, "v": STATE["w"][..., 0]}
    checkpoint.save(tmp_path, 3, state)
    read = checkpoint._read_arrays

    def flipped(*arguments):
        arrays = read(*arguments)
        bits = np.array(arrays["v"]).view(np.uint32)
        bits[1, 17] ^= 1
        return arrays | {"v": jax.numpy.asarray(bits.view(np.float32))}

    monkeypatch.setattr(checkpoint, "_read_arrays", flipped)
    with pytest.raises(ValueError, match=r"differs in 1 arrays \['v"):
        checkpoint.restore(tmp_path, state)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "complex64", "bool"])
def test_a_digest_is_of_the_numbers_and_not_of_their_places(dtype):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 2, size=(2, 4, 6))
    numbers[1, 2] = np.eye(6)[0]
    x = np.asarray(jax.numpy.asarray(numbers).astype(dtype))
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    spec = PartitionSpec(cd.replicas.AXIS, "fsdp")
    digests = lambda x: checkpoint._digests({"x": x})["x"]
    found = digests(jax.device_put(x, NamedSharding(mesh, spec)))
    assert found == digests(jax.device_put(x))
    moved = np.array(x)
    moved[1, 2] = np.roll(moved[1, 2], 1)
    assert found != digests(jax.device_put(moved))
