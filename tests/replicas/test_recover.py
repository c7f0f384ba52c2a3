"""Rows of parameters that are not finite, and what a sync makes of them."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd

REPLICAS, BAD = 4, 2
PARAMS = helpers.make_params()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("anchor", [None, PARAMS], ids=["first", "anchor"])
def test_a_row_that_is_not_finite_is_replaced_and_no_other(value, anchor):
    rng = np.random.default_rng(0)
    rows = {
        name: rng.normal(size=(REPLICAS, *shape)).astype(np.float32)
        for name, shape in helpers.SHAPES.items()
    }
    rows["tall/kernel"][BAD, 1, 1] = value
    rows["bias"][0, 0] = value
    found = jax.device_get(cd.replicas.repair(rows, anchor))
    for name, x in found.items():
        wanted = rows[name][1] if anchor is None else anchor[name]
        np.testing.assert_array_equal(x[[0, BAD]], np.stack([wanted] * 2))
        np.testing.assert_array_equal(x[[1, 3]], rows[name][[1, 3]])
    helpers.assert_bitwise(cd.replicas.repair(found), found)


def test_repaired_rows_stay_where_they_are_and_keep_their_dtypes():
    mesh = cd.replicas.make_mesh(REPLICAS, {"fsdp": 2})
    place = NamedSharding(mesh, P("replica", "fsdp"))
    x = np.arange(32, dtype=np.float32).reshape(REPLICAS, 8)
    x[BAD, 5] = np.nan
    rows = jax.device_put({"w": x, "half": x.astype(jnp.bfloat16)}, place)
    rows["count"] = jnp.arange(REPLICAS)
    rows["keys"] = jax.random.split(jax.random.key(0), REPLICAS)
    found = cd.replicas.repair(cd.replicas.place(rows, mesh))
    assert found["w"].sharding.is_equivalent_to(place, 2)
    np.testing.assert_array_equal(found["w"][BAD], x[0])
    assert found["half"].dtype == jnp.bfloat16
    assert found["count"].tolist() == [0, 1, 0, 3]
    assert (found["keys"] == rows["keys"]).all()  # each draws its own numbers


def test_an_anchor_of_another_dtype_is_cast():
    rows = {"w": jnp.ones((3, 2), jnp.bfloat16).at[1, 0].set(jnp.nan)}
    found = cd.replicas.repair(rows, {"w": np.float32([2, 3])})["w"]
    assert found.dtype == jnp.bfloat16
    assert found[1].tolist() == [2, 3]


@pytest.mark.parametrize("shape", [(1,), (3, 2), (1, 3, 2)])
def test_an_anchor_that_would_be_broadcast_is_refused(shape):
    rows = {"w": np.float32([[1, 2], [np.nan, 2], [3, 4]])}
    with pytest.raises(ValueError, match=r"anchor 'w' is .*, expected \(2,\)"):
        cd.replicas.repair(rows, {"w": jnp.ones(shape)})


def test_where_no_row_is_finite_the_anchor_is_needed():
    rows = {"w": np.full((3, 2), np.nan, np.float32)}
    rows["w"][1, 0] = 7
    np.testing.assert_array_equal(cd.replicas.repair(rows)["w"], rows["w"])
    found = cd.replicas.repair(rows, {"w": jnp.ones(2)})
    assert (found["w"] == 1).all()
    assert cd.replicas.repair({"n": jnp.arange(3)})["n"].tolist() == [0, 1, 2]


# By the test, which puts the NaN there.
@pytest.mark.filterwarnings("ignore:Parameters were changed after")
@pytest.mark.parametrize(
    "name", helpers.slow_but(["local_sgd"], ["local_sgd", "local_muon", "curvadion"])
)
def test_a_repaired_replica_takes_part_in_the_next_sync(name):
    """Until then it is excluded, and the others train."""
    mesh = cd.replicas.simulated(REPLICAS)
    always = {"trigger": cd.triggers.every_k(2), "mesh": mesh}
    tx = {
        "local_sgd": lambda: cd.presets.local_sgd(0.1, k=2, mesh=mesh),
        "local_muon": lambda: cd.local_muon(0.02, **always),
        "curvadion": lambda: cd.curvadion(0.02, threshold=0.0, mesh=mesh),
    }[name]()
    gradients = helpers.make_gradients(6, REPLICAS)
    params, state = helpers.start(tx, PARAMS, mesh)
    params = params | {"tall/kernel": params["tall/kernel"].at[BAD, 0, 0].set(jnp.nan)}
    step = helpers.quick(jax.jit(helpers.train_step(tx)), (params, state), gradients[0])
    pair = (params, state)
    for each in gradients[:2]:
        pair, _ = step(pair, each)
    counts = [0] * REPLICAS
    counts[BAD] = cd.metrics.read(pair[1])["syncs"]
    assert cd.metrics.read(pair[1])["excluded"] == counts
    assert np.isnan(pair[0]["tall/kernel"][BAD, 0, 0])
    assert np.isfinite(np.delete(pair[0]["tall/kernel"], BAD, 0)).all()
    repaired = cd.replicas.repair(pair[0], cd.replicas.anchor(pair[1]))
    pair = (repaired, pair[1])
    for each in gradients[2:]:
        pair, _ = step(pair, each)
    report = cd.metrics.read(pair[1])
    assert report["excluded"] == counts
    assert float(cd.replicas.divergence(pair[0])) < 1e-6
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(pair[0]))
