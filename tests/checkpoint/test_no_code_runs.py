"""No file that is read runs code: not a checkpoint, not data, not a run's own files.

A pickle is put in the place of every file. Unpickled, it would leave a mark.
"""

import ast
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import data
import jax.numpy as jnp
import journal
import numpy as np
import pytest
import report

from curvadion_jax import checkpoint

ROOT = Path(__file__).parents[2]
STATE = {"w": jnp.ones((2, 4, 5))}
SOURCES = [
    path
    for folder in ("curvadion_jax", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Modules of which loading runs code, or may.
UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}


class Mark:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def payload(mark) -> bytes:
    return pickle.dumps(Mark(mark))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    checkpoint.save(folder, 3, STATE, extra={"epoch": 4})
    return folder


def attempt(*reads) -> list[BaseException]:
    """What the reads raise."""
    errors = []
    for read in reads:
        try:
            read()
        except Exception as error:
            errors.append(error)
    return errors


def test_the_payload_works(mark, payload):
    pickle.loads(payload)
    assert mark.exists()


# In a process of its own: orbax leaves reads behind when something beside them fails.
RESTORES = """
import json, sys
import jax.numpy as jnp
from curvadion_jax import checkpoint

said = {}
for folder in sys.argv[1:]:
    said[folder] = []
    for read in (
        lambda: checkpoint.restore(folder, {"w": jnp.ones((2, 4, 5))}),
        lambda: checkpoint.read_extra(folder),
    ):
        try:
            read()
        except ValueError as error:
            said[folder].append(str(error))
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_pickle_in_place_of_any_file_of_a_checkpoint(saved, tmp_path, mark, payload):
    names = {}
    for path in saved.rglob("*"):
        if path.is_file():
            folder = tmp_path / str(len(names))
            shutil.copytree(saved, folder)
            names[str(folder)] = path.relative_to(saved).as_posix()
            (folder / path.relative_to(saved)).write_bytes(payload)
    command = [sys.executable, "-c", RESTORES, *names]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    # What orbax does not need is left unread.
    refused = {names[folder] for folder, messages in said.items() if messages}
    assert {"3/info/metadata", "3/state/manifest.ocdbt"} <= refused
    for folder, messages in said.items():
        assert all(f"step 3 in {folder} cannot be read" in text for text in messages)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["3/x.pkl", "3/state/x.npy"])
def test_a_pickle_beside_the_files_of_a_checkpoint(
    saved, tmp_path, mark, payload, name
):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / name).write_bytes(payload)
    restored = checkpoint.restore(folder, STATE)
    np.testing.assert_array_equal(restored["w"], STATE["w"])
    assert checkpoint.read_extra(folder) == {"epoch": 4}
    assert not mark.exists()


def test_a_pickle_in_orbaxs_old_format(saved, tmp_path, mark, payload):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / "3" / "state" / "checkpoint").write_bytes(payload)
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.restore(folder, STATE)
    assert not mark.exists()


def test_names_of_classes_in_a_checkpoint_are_not_imported(saved, tmp_path, mark):
    # Orbax notes which class wrote an item.
    folder, module = tmp_path / "run", tmp_path / "marking_module.py"
    module.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    shutil.copytree(saved, folder)
    file = folder / "3" / "_CHECKPOINT_METADATA"
    notes = json.loads(file.read_text())
    handlers = dict.fromkeys(notes["item_handlers"], "marking_module.Handler")
    file.write_text(json.dumps({**notes, "item_handlers": handlers}))
    sys.path.insert(0, str(tmp_path))
    try:
        attempt(
            lambda: checkpoint.restore(folder, STATE),
            lambda: checkpoint.read_extra(folder),
        )
    finally:
        sys.path.remove(str(tmp_path))
    assert "marking_module" not in sys.modules
    assert not mark.exists()


@pytest.mark.parametrize("name", ["a.txt", "a.pkl", "a.npy", "val_0.bin"])
def test_a_pickle_as_data(tmp_path, mark, payload, name):
    folder = tmp_path / "data"
    folder.mkdir()
    if name == "a.npy":
        np.save(folder / name, np.array([Mark(mark)], object), allow_pickle=True)
    else:
        (folder / name).write_bytes(payload)
    if name.endswith(".bin"):
        (folder / "train_0.bin").write_bytes(payload + bytes(2000))
    (error,) = attempt(lambda: data.load(str(folder)))
    assert isinstance(error, data.UserError)
    assert not mark.exists()


@pytest.mark.parametrize("read", [report.read_json, journal.read_journal])
def test_a_pickle_in_place_of_what_a_run_wrote(tmp_path, mark, payload, read):
    file = tmp_path / "config.json"
    file.write_bytes(payload)
    arguments = (file, None) if read is report.read_json else (file,)
    (error,) = attempt(lambda: read(*arguments))
    assert isinstance(error, data.UserError)
    assert f"{file} cannot be read" in str(error)
    assert not mark.exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_unpickles_or_evaluates_is_used(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names.append(getattr(node, "module", None) or "")
            assert not {name.split(".")[0] for name in names} & UNSAFE
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert ast.unparse(node.value) == "False"
