"""No file that is read runs code: not a checkpoint, not data, not a run's own files."""

import ast
import pickle
from pathlib import Path

import jax.numpy as jnp
import pytest

from curvadion_jax import checkpoint

ROOT = Path(__file__).parents[2]
# Its objects go from one process of a running program to the others, over its devices.
WITHIN_ONE_PROGRAM = ROOT / "curvadion_jax" / "sites" / "_processes.py"
SOURCES = [
    path
    for folder in ("curvadion_jax", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != WITHIN_ONE_PROGRAM
]
# Modules of which loading runs code, or may.
UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}


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
    for path in (
        *files,
        folder / "3/state/checkpoint",
    ):  # the last in orbax's old format
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
