"""What every preset does in 20 steps is what it did when its file was made."""

import json
import math

import jax
import make_golden
import numpy as np
import pytest

import curvadion_jax as cd

# Relative to the largest number of an entry. Another machine may sum in another order;
# measured: 5e-7 between the same programs with and without XLA's optimisations.
SAME_VERSIONS = 1e-5
# Other versions may compute a function or a factorisation in another way.
OTHER_VERSIONS = 1e-3
HOW = (
    "If numerics were changed on purpose, write the file anew, `python "
    "tests/support/make_golden.py {}`, and explain the change in CHANGELOG.md"
)
QUICK = ("local_sgd", "diloco")
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in make_golden.OPTIMIZERS
]


def read(name):
    return json.loads((make_golden.FOLDER / f"{name}.json").read_text())


def differences(found, golden) -> dict[str, float]:
    """The largest of every entry, relative to its largest number."""
    pairs = zip(
        jax.tree.leaves_with_path(found, is_leaf=lambda x: isinstance(x, list)),
        jax.tree.leaves(golden, is_leaf=lambda x: isinstance(x, list)),
        strict=True,
    )
    return {
        jax.tree_util.keystr(path): float(np.max(np.abs(np.subtract(x, y))))
        / float(np.max(np.abs(y)))
        for (path, x), y in pairs
    }


@pytest.mark.parametrize("name", NAMES)
def test_numerics_are_those_of_the_file(name):
    golden = read(name)
    same = golden.pop("versions") == make_golden.versions()
    limit = SAME_VERSIONS if same else OTHER_VERSIONS
    found = make_golden.run(name)
    assert found["synced"] == golden["synced"], HOW.format(name)
    too_large = {
        key: x for key, x in differences(found, golden).items() if not x <= limit
    }
    assert not too_large, HOW.format(name)


def test_every_preset_has_a_file():
    presets = {
        name
        for name, value in vars(cd.presets).items()
        if getattr(value, "__module__", "").startswith(cd.presets.__name__)
        and not name.startswith("_")
    }
    assert presets <= set(make_golden.OPTIMIZERS)
    files = {path.stem for path in make_golden.FOLDER.glob("*.json")}
    assert files == set(make_golden.OPTIMIZERS)


@pytest.mark.parametrize("name", make_golden.OPTIMIZERS)
def test_files_hold_finite_numbers_and_several_syncs(name):
    golden = read(name)
    numbers = jax.tree.leaves([golden[key] for key in ("losses", "norms", "elements")])
    assert all(map(math.isfinite, numbers))
    assert len(golden["losses"]) == make_golden.STEPS
    assert sum(golden["synced"]) >= 3


def test_a_change_is_seen():
    golden = read("local_sgd")
    del golden["versions"]
    changed = json.loads(json.dumps(golden))
    changed["norms"]["tall"][2] *= 1 + 2 * SAME_VERSIONS
    found = differences(changed, golden)
    assert [key for key, x in found.items() if x > 0] == ["['norms']['tall']"]
