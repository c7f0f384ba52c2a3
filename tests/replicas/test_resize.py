"""The state of some replicas for another number of them, in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from resized_states import ATOL, AXIS, make_state

import curvadion_jax as cd
from curvadion_jax.replicas import _recover

NUMBERS = [(8, 4), (4, 8), (8, 1), (1, 8), (6, 2), (8, 8)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(*x, marks=() if x in NUMBERS[:2] else pytest.mark.slow)
        for x in NUMBERS
    ],
)
def test_the_mean_over_the_replicas_stays(old, new):
    state = make_state(old, "dion")
    found = cd.replicas.resize(state, cd.replicas.make_mesh(new))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    first = np.arange(new) * old // new
    averaged = _recover.is_averaged(state)
    assert 0 < sum(averaged) < len(averaged)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(found), averaged, strict=True)
    for before, after, is_mean in leaves:
        assert after.shape == (new, *before.shape[1:])
        assert after.dtype == before.dtype
        if jnp.issubdtype(before.dtype, jax.dtypes.prng_key):
            continue
        before, after = np.asarray(before), np.asarray(after)
        if not is_mean:
            np.testing.assert_array_equal(after, before[first])
        else:
            np.testing.assert_allclose(after.mean(0), before.mean(0), atol=ATOL)


def test_by_hand():
    state = {"w": jnp.arange(6.0).reshape(6, 1), "c": 1j * jnp.arange(6.0)}
    fewer = cd.replicas.resize(state, cd.replicas.make_mesh(2))
    assert fewer["w"].ravel().tolist() == [1, 4]
    assert fewer["c"].tolist() == [1j, 4j]
    more = cd.replicas.resize(fewer, cd.replicas.make_mesh(4))
    assert more["w"].ravel().tolist() == [1, 1, 4, 4]


@pytest.mark.parametrize("new", [4, 5])
def test_neither_number_divides_the_other(new):
    with pytest.raises(ValueError, match=f"of 6 replicas cannot become one of {new}"):
        cd.replicas.resize({"w": jnp.ones(6)}, cd.replicas.make_mesh(new))


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2)])
def test_a_best_loss_that_is_still_infinite_stays_so(old, new):
    """As in `optax.contrib.reduce_on_plateau` before the first value."""
    best = jnp.full((old,), jnp.inf)
    found = cd.replicas.resize({"best": best}, cd.replicas.make_mesh(new))["best"]
    assert found.tolist() == [float("inf")] * new


def test_equal_replicas_keep_their_bits():
    x = np.broadcast_to(np.float32(0.1) * np.arange(7, dtype=np.float32), (6, 7))
    for new in (1, 2, 3):
        mesh = cd.replicas.make_mesh(new)
        found = cd.replicas.resize({"w": jnp.asarray(x)}, mesh)["w"]
        np.testing.assert_array_equal(found, x[:new])


def test_copies_of_a_random_key_are_others():
    keys = cd.replicas.resize(make_state(2), cd.replicas.make_mesh(6))["key"]
    data = np.asarray(jax.random.key_data(keys))
    assert len({tuple(row) for row in data.tolist()}) == 6
    before = np.asarray(jax.random.key_data(make_state(2)["key"]))
    np.testing.assert_array_equal(data[[0, 3]], before)


def test_what_is_averaged_and_what_is_taken():
    tx = cd.adaptive_sync(
        cd.dion(0.1, 2),
        cd.triggers.every_k(3),
        cd.synchronizers.reconcile(
            optax.sgd(0.7, 0.9), compressor=cd.compressors.quantize(2)
        ),
        AXIS,
    )
    params = {"q": {"kernel": jnp.ones((4, 8))}, "momentum": jnp.ones((8, 4))}
    state = cd.replicas.replicate((params, tx.init(params)), cd.replicas.make_mesh(2))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    averaged = dict(zip(paths, _recover.is_averaged(state), strict=True))
    # Parameters, momenta and residuals, whatever the names of parameters are.
    for name in ("['q']['kernel']", "['momentum']"):
        assert averaged["[0]" + name]
        assert averaged["[1].sync_state.residual" + name]
        assert not averaged["[1].sync_state.anchor" + name]
        inner = [path for path in paths if ".inner_state" in path and name in path]
        momenta = [path for path in inner if ".momentum" + name in path]
        assert momenta
        assert all(averaged[path] for path in momenta)
        factors = [path for path in inner if ".q" + name in path]
        assert factors
        assert not any(averaged[path] for path in factors)
    assert not any(averaged[path] for path in paths if ".metrics" in path)
    assert not any(averaged[path] for path in paths if "outer_state" in path)


def test_arrays_stay_divided_within_a_replica():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    x = jax.device_put(
        np.ones((2, 4, 6), np.float32),
        NamedSharding(mesh, PartitionSpec(AXIS, None, "fsdp")),
    )
    found = cd.replicas.resize({"w": x}, cd.replicas.make_mesh(4, {"fsdp": 2}))["w"]
    assert found.sharding.spec == PartitionSpec(AXIS, None, "fsdp")
    found = cd.replicas.resize({"w": x}, cd.replicas.make_mesh(4))["w"]
    assert found.sharding.is_equivalent_to(
        NamedSharding(cd.replicas.make_mesh(4), PartitionSpec(AXIS)), 3
    )
