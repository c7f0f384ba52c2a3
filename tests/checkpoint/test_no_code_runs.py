"""No file that is read runs code: not a checkpoint, not data, not a run's own files."""

import ast
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

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
def saved(tmp_path) -> Path:
    checkpoint.save(tmp_path / "saved", 3, STATE, extra={"epoch": 4})
    return tmp_path / "saved"


# In a process of its own: orbax leaves reads behind when something beside them fails.
RESTORES = """
import json, sys
import jax.numpy as jnp
from curvadion_jax import checkpoint

state, said = {"w": jnp.ones((2, 4, 5))}, {}
for folder in sys.argv[1:]:
    said[folder] = []
    for read in (
        lambda: checkpoint.restore(folder, state),
        lambda: checkpoint.read_extra(folder),
    ):
        try:
            read()
        except ValueError as error:
            said[folder].append(str(error))
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_pickle_in_place_of_any_file_of_a_checkpoint(saved, tmp_path):
    mark, names = tmp_path / "it-ran", {}
    payload = pickle.dumps(Mark(mark))
    files = [path for path in saved.rglob("*") if path.is_file()]
    for path in (
        *files,
        saved / "3/state/checkpoint",
    ):  # the last in orbax's old format
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
        assert all(f"Step 3 in {folder} cannot be read" in text for text in messages)
    assert not mark.exists()
    pickle.loads(payload)  # it would have left a mark
    assert mark.exists()


def test_names_of_classes_in_a_checkpoint_are_not_imported(
    saved, tmp_path, monkeypatch
):
    # Orbax notes which class wrote an item.
    (tmp_path / "marking_module.py").write_text("class Handler: pass")
    file = saved / "3" / "_CHECKPOINT_METADATA"
    notes = json.loads(file.read_text())
    handlers = dict.fromkeys(notes["item_handlers"], "marking_module.Handler")
    file.write_text(json.dumps({**notes, "item_handlers": handlers}))
    monkeypatch.syspath_prepend(tmp_path)
    for read in (
        lambda: checkpoint.restore(saved, STATE),
        lambda: checkpoint.read_extra(saved),
    ):
        try:
            read()
        except ValueError:
            continue
    assert "marking_module" not in sys.modules


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
