"""What every preset does in 20 steps is what it did when its file was made."""

import json

import helpers
import jax
import make_golden
import numpy as np
import pytest

import curvadion_jax as cd

# Relative to the largest number of an entry. Another machine may sum in another order;
# measured: 5e-7 between the same programs with and without XLA's optimisations.
SAME_VERSIONS = 1e-5
# OpenBLAS's kernels for AVX2 and for AVX-512, whose QR makes Dion's bases, move
# `curvadion` by 2e-5, and no other preset.
OTHER_KERNELS = {"curvadion": 1e-4}
# Other versions may compute a function or a factorisation in another way.
OTHER_VERSIONS = 1e-3
HOW = (
    "If numerics were changed on purpose, write the file anew, `python "
    "tests/support/make_golden.py {}`, and explain the change in CHANGELOG.md"
)
QUICK = ("local_sgd", "diloco")


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, make_golden.OPTIMIZERS))
def test_numerics_are_those_of_the_file(name):
    golden = json.loads((make_golden.FOLDER / f"{name}.json").read_text())
    same = golden.pop("versions") == make_golden.versions()
    limit = OTHER_KERNELS.get(name, SAME_VERSIONS) if same else OTHER_VERSIONS
    found = make_golden.run(name)
    assert found["synced"] == golden["synced"], HOW.format(name)
    assert 3 <= sum(found["synced"])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x, y, rtol=0, atol=limit * np.max(np.abs(y)), err_msg=HOW.format(name)
        ),
        found,
        golden,
        is_leaf=lambda x: isinstance(x, list),
    )


def test_every_preset_has_a_file():
    assert set(cd.presets.__all__) <= set(make_golden.OPTIMIZERS)
