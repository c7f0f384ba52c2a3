"""No room and no right to write: one clear error, and what was saved stays."""

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import journal
import launch
import numpy as np
import pytest
import refused_main
import report

from curvadion_jax import checkpoint

NAMESPACE = ["unshare", "--map-root-user", "--mount"]


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


# The first file of a checkpoint is refused, or one of its arrays.
@pytest.mark.parametrize("size", [0, 100_000])
def test_refused_save_is_one_error_and_leaves_the_others(tmp_path, capfd, caplog, size):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    with limited(size), pytest.raises(OSError, match="step 3 was not saved") as error:
        checkpoint.save(tmp_path, 3, state(3), keep=2)
    assert error.value.errno == errno.EFBIG
    said = f"saved in {tmp_path}: File too large. Its steps [1, 2] are as they were."
    assert said in str(error.value)
    assert "The arrays have 4.3 MB: make room, or save to another" in str(error.value)
    assert str(errno.EFBIG) in repr(error.value.__cause__)
    assert capfd.readouterr() == ("", "")
    assert [line for line in caplog.records if line.levelname == "ERROR"] == []
    assert checkpoint.latest_step(tmp_path) == 2
    assert_same(checkpoint.restore(tmp_path, state(0)), state(2))
    checkpoint.save(tmp_path, 3, state(3), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert_same(checkpoint.restore(tmp_path, state(0)), state(3))


# Orbax leaves the other writes behind, which say so when nobody waits for them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_refusal_in_the_middle_is_one_error_too(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1), keep=2)
    monkeypatch.setattr(checkpoint._storage, "_ask_for_room", lambda *arguments: None)
    with (
        limited(100_000),
        pytest.raises(OSError, match="step 2 was not saved") as error,
    ):
        checkpoint.save(tmp_path, 2, state(2), keep=2)
    assert error.value.errno == errno.EFBIG
    assert "Its steps [1] are as they were. The arrays have 4.3 MB" in str(error.value)
    assert isinstance(error.value.__cause__, ValueError)  # TensorStore's
    assert_same(checkpoint.restore(tmp_path, state(0)), state(1))
    checkpoint.save(tmp_path, 2, state(2), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_disk_with_less_room_than_the_arrays_is_not_begun(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1))
    size = sum(array.nbytes for array in state(1).values())
    for free, enough in ((size, True), (size - 1, False)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        if enough:
            checkpoint.save(tmp_path, 2, state(2))
            continue
        with pytest.raises(OSError, match="No space left") as error:
            checkpoint.save(tmp_path, 3, state(3))
        assert error.value.errno == errno.ENOSPC
        assert "The arrays have 4.3 MB, and 4.3 MB are free: make" in str(error.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_old_steps_that_stay_are_named(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), keep=2)

    def refuse(path):
        os.remove(next(Path(path).rglob("manifest.ocdbt")))
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint._storage.shutil, "rmtree", refuse)
        with pytest.raises(OSError, match=r"step 3 is complete in .* not be removed"):
            checkpoint.save(tmp_path, 3, state(3), keep=2)
    # The one that is half removed counts no more.
    for step in (2, 3):
        assert_same(checkpoint.restore(tmp_path, state(0), step), state(step))
    with pytest.raises(FileNotFoundError, match=r"its steps: \[2, 3\]"):
        checkpoint.restore(tmp_path, state(0), 1)
    checkpoint.save(tmp_path, 4, state(4), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def may_mount() -> bool:
    """Whether this user may have mounts of its own."""
    with contextlib.suppress(FileNotFoundError):
        mount = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(mount, capture_output=True).returncode == 0
    return False


FULL = ("No space left on device", "MB are free: make room")
READ_ONLY = "Give a directory that this process may write to"
WAYS = {"permissions": [(errno.EACCES, "Permission denied", READ_ONLY)]}
if may_mount():  # else `limited` above and permissions stand for such disks
    read_only_disk = (errno.EROFS, "Read-only file system", READ_ONLY)
    WAYS["mounts"] = [(errno.ENOSPC, *FULL), (errno.ENOSPC, *FULL), read_only_disk]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_full_and_read_only_disks(tmp_path, way):
    prefix = NAMESPACE if way == "mounts" else []
    command = [*prefix, sys.executable, refused_main.__file__, tmp_path, way]
    ended = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=launch.SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    for step, (found, expected) in enumerate(zip(lines, WAYS[way], strict=True), 2):
        number, reason, advice = expected
        assert found["errno"] == number
        kept = f"Its steps [{step - 2}, {step - 1}] are as they were. "
        said = f"step {step} was not saved in {tmp_path}: {reason}. {kept}"
        assert said in found["message"]
        assert advice in found["message"]
        assert reason in found["cause"]
        assert (found["latest"], found["same"]) == (step - 1, True)
        assert found["steps"] == [str(step - 1), str(step)]


def test_a_journal_that_does_not_fit_is_named_and_keeps_its_lines(tmp_path):
    file = tmp_path / "m.jsonl"
    lines = journal.Journal(file, 0)
    for step in range(1, 5):
        lines.write({"step": step})
    before = file.read_text()
    with limited(len(before) + 5):
        with pytest.raises(OSError, match=r"m\.jsonl cannot be written: File too la"):
            lines.write({"step": 5})
        lines.close()
    assert [line["step"] for line in journal.read_journal(file)] == [1, 2, 3, 4]
    # A run that goes on rewrites the journal, and has no room for that either.
    with limited(20), pytest.raises(OSError, match=r"m\.jsonl cannot be written"):
        journal.Journal(file, 3)
    assert [line["step"] for line in journal.read_journal(file)] == [1, 2, 3, 4]
    journal.Journal(file, 3).close()
    assert [line["step"] for line in journal.read_journal(file)] == [1, 2, 3]


def test_a_summary_that_does_not_fit_keeps_the_former(tmp_path):
    file = tmp_path / "summary.json"
    report.write_json(file, ["former"])
    with limited(20), pytest.raises(OSError, match=r"summary\.json cannot be written"):
        report.write_json(file, ["former", "and more than fits into twenty bytes"])
    assert report.read_json(file, None) == ["former"]
