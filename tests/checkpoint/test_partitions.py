"""A checkpoint keeps which parameters are matrices; another partition is refused."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import checkpoint

DENSE, TURNED = cd.DimensionNumbers(0, 1), cd.DimensionNumbers(1, 0)
NUMBERS = {"bias": None, "down": DENSE, "up": DENSE}
PARAMS = {"bias": jnp.ones(8), "down": jnp.ones((8, 8)), "up": jnp.ones((8, 8))}
TWO, FOUR = cd.replicas.make_mesh(2), cd.replicas.make_mesh(4)

BUILDS = {
    "dion": lambda numbers, _: cd.dion(0.1, rank=2, dimension_numbers=numbers),
    "local_muon": lambda numbers, mesh: cd.local_muon(
        0.1, dimension_numbers=numbers, mesh=mesh
    ),
    "curvadion": lambda numbers, mesh: cd.curvadion(
        0.1, dimension_numbers=numbers, mesh=mesh
    ),
    "preset in a chain": lambda numbers, mesh: optax.chain(
        optax.identity(),
        cd.presets.synchronous_dion(0.1, dimension_numbers=numbers, mesh=mesh),
    ),
}


def state_of(name, numbers, mesh=TWO):
    rows = cd.replicas.replicate(PARAMS, None if name == "dion" else mesh)
    opt_state = BUILDS[name](numbers, mesh).init(rows)
    return cd.replicas.place({"params": rows, "opt_state": opt_state}, mesh)


@pytest.mark.parametrize("name", BUILDS)
def test_another_partition_is_refused_and_the_same_restored(name, tmp_path):
    state = state_of(name, NUMBERS)
    checkpoint.save(tmp_path, 1, state)
    found = checkpoint.restore(tmp_path, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for change, now in (
        ({"up": TURNED}, r"a matrix \(1 -> 0\)"),
        ({"up": None}, "left to the other optimizer"),
    ):
        other = state_of(name, NUMBERS | change)
        was = rf"Step 1 in .*: up was a matrix \(0 -> 1\) of \(8, 8\) and is now {now}"
        with pytest.raises(ValueError, match=was) as error:
            checkpoint.restore(tmp_path, other)
        assert "answers={'up': cd.DimensionNumbers(0, 1)}" in str(error.value)
        assert "down" not in str(error.value)


def test_the_partition_is_that_of_other_numbers_of_replicas_and_of_parts(tmp_path):
    checkpoint.save(tmp_path, 1, state_of("local_muon", NUMBERS))
    four = state_of("local_muon", NUMBERS, FOUR)
    found = checkpoint.restore(tmp_path, four, resize=True)
    assert jax.tree.structure(found) == jax.tree.structure(four)
    turned = state_of("local_muon", NUMBERS | {"up": TURNED}, FOUR)
    with pytest.raises(ValueError, match="up was a matrix"):
        checkpoint.restore(tmp_path, turned, resize=True)
    # Parameters have no partition, and a part of the state has its own.
    two = state_of("local_muon", NUMBERS | {"up": TURNED})
    checkpoint.restore(tmp_path, {"params": two["params"]}, partial=True)
    with pytest.raises(ValueError, match="up was a matrix"):
        checkpoint.restore(tmp_path, {"opt_state": two["opt_state"]}, partial=True)


def test_a_state_of_another_optimizer_has_none(tmp_path):
    state = {"opt_state": optax.adamw(0.1).init(PARAMS)}
    checkpoint.save(tmp_path, 1, state)
    checkpoint.restore(tmp_path, state)
    (notes,) = tmp_path.glob("1/info/metadata")
    assert json.loads(notes.read_text())["notes"]["partitions"] == {}
