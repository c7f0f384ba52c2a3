"""Training goes on with another number of replicas."""

import subprocess
import sys
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resized_main as run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from resized_states import ATOL, OPTIMIZERS, make_state

import curvadion_jax as cd
from curvadion_jax import checkpoint, metrics

# The loss at the end may lie half a percent above that of a run that kept its replicas.
MAX_LOSS_INCREASE = 0.005
AXIS = cd.replicas.AXIS


def parts(state):
    """What is common, what is averaged, and what is copied."""
    (params, opt), dion = state["train"], cd.DionState
    is_dion = lambda node: isinstance(node, dion)
    nodes = jax.tree.leaves(opt.rows.inner_state, is_leaf=is_dion)
    momenta = [node.momentum for node in nodes if is_dion(node)]
    others = lambda node: node._replace(momentum=()) if is_dion(node) else node
    inner = jax.tree.map(others, opt.rows.inner_state, is_leaf=is_dion)
    counters = opt.counters
    common = (opt.common, counters[:6], state["step"])
    copied = (inner, opt.rows.remembered, counters[6:-3])
    return common, (params, momenta, opt.rows.residual, opt.rows.weight), copied


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8), (4, 1)])
@pytest.mark.parametrize("name", helpers.slow_but(["residual"], OPTIMIZERS))
def test_means_stay_and_what_is_common_does(name, old, new):
    state = make_state(old, name)
    found = cd.replicas.resize(state, cd.replicas.make_mesh(new))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    first = np.arange(new) * old // new
    (common, averaged, copied), after = parts(state), parts(found)
    helpers.assert_bitwise(after[0], common)
    for x, y in zip(*map(jax.tree.leaves, (averaged, after[1])), strict=True):
        assert y.shape == (new, *x.shape[1:])
        np.testing.assert_allclose(np.mean(y, 0), np.mean(x, 0), atol=ATOL)
    for x, y in zip(*map(jax.tree.leaves, (copied, after[2])), strict=True):
        np.testing.assert_array_equal(y, np.asarray(x)[first])
    data = [np.asarray(jax.random.key_data(x["key"])) for x in (found, state)]
    if new < old:
        np.testing.assert_array_equal(data[0], data[1][first])
    assert len(np.unique(data[0], axis=0)) == new  # all draw other numbers


def test_a_state_of_ones_own():
    """Names of fields alone, such as `dion_q` and `anchor`, mean nothing."""
    keys = jax.random.split(jax.random.key(1), 6)
    rows = jnp.arange(6.0)
    state: Any = {"dion_q": rows[:, None], "c": 1j * rows, "key": keys, "anchor": rows}
    state |= {"best": jnp.full(6, jnp.inf), "same": jnp.full(6, 0.1), "step": 4}
    state |= {"count": jnp.arange(6)}
    fewer = cd.replicas.resize(state, cd.replicas.simulated(2))
    assert fewer["dion_q"].ravel().tolist() == [1, 4]
    assert fewer["anchor"].tolist() == [1, 4]
    assert fewer["c"].tolist() == [1j, 4j]
    assert fewer["best"].tolist() == [float("inf")] * 2
    assert (fewer["same"] == state["same"][0]).all()
    assert fewer["count"].tolist() == [0, 3]
    assert fewer["step"] == 4
    more = cd.replicas.resize(fewer, cd.replicas.simulated(4))
    assert more["dion_q"].ravel().tolist() == [1, 1, 4, 4]
    data = jax.random.key_data(more["key"]).tolist()
    assert len({*map(tuple, data)}) == 4  # all draw other numbers


@pytest.mark.parametrize("number", [4, 5])
def test_another_number_than_a_multiple_or_divisor_is_refused(number):
    state = {"w": jnp.ones((6, 2))}
    with pytest.raises(
        ValueError, match=f"of 6 replicas cannot become one of {number}"
    ):
        cd.replicas.resize(state, cd.replicas.simulated(number))
    with pytest.raises(ValueError, match="resize needs a mesh"):
        cd.replicas.resize(state, None)


def test_rows_in_different_numbers_are_refused():
    state = {"w": jnp.ones((8, 3)), "key": jnp.zeros(2, jnp.uint32)}
    with pytest.raises(ValueError, match="different numbers"):
        cd.replicas.resize(state, cd.replicas.simulated(4))


def test_arrays_stay_divided_within_a_replica():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    spec = P(AXIS, None, "fsdp")
    x = jax.device_put(np.ones((2, 4, 6), np.float32), NamedSharding(mesh, spec))
    found = cd.replicas.resize({"w": x}, cd.replicas.make_mesh(4, {"fsdp": 2}))["w"]
    assert found.sharding.spec == spec
    mesh = cd.replicas.make_mesh(4)
    found = cd.replicas.resize({"w": x}, mesh)["w"].sharding
    assert found.is_equivalent_to(NamedSharding(mesh, P(AXIS)), 3)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("name", helpers.slow_but(["residual"], OPTIMIZERS))
def test_a_checkpoint_of_another_number_is_restored_as_resized(
    tmp_path, name, old, new
):
    state = make_state(old, name)
    checkpoint.save(tmp_path, 3, state)
    target = make_state(new, name, seed=5)
    with pytest.raises(ValueError, match="pass resize=True to change the number"):
        checkpoint.restore(tmp_path, target)
    found = checkpoint.restore(tmp_path, target, resize=True)
    wanted = cd.replicas.resize(state, cd.replicas.make_mesh(new))
    leaves = zip(*map(jax.tree.leaves, (found, wanted, target)), strict=True)
    for x, y, place in leaves:
        assert x.sharding == place.sharding
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=ATOL)


def test_only_the_number_of_rows_may_differ(tmp_path):
    """Not that of something common, nor the rest of the shape."""
    mesh = cd.replicas.make_mesh(2)
    tx = cd.presets.local_sgd(0.1, k=2, mesh=mesh)
    _, state = helpers.start(tx, {"w": jnp.ones((4, 6))}, mesh)
    checkpoint.save(tmp_path, 1, state)
    for change in (
        state._replace(common=jax.tree.map(lambda x: x[:2], state.common)),
        state._replace(rows=jax.tree.map(lambda x: x[..., None], state.rows)),
    ):
        with pytest.raises(
            ValueError, match=r"in the target\. Build the target as the saved"
        ):
            checkpoint.restore(tmp_path, change, resize=True)


def test_a_checkpoint_lies_divided_on_another_mesh(tmp_path):
    spec = P(AXIS, "fsdp")
    four, two = (
        NamedSharding(cd.replicas.make_mesh(n, {"fsdp": 2}), spec) for n in (4, 2)
    )
    x = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(np.float32)
    checkpoint.save(tmp_path, 1, {"w": jax.device_put(x, four)})
    target = {"w": jax.device_put(jnp.zeros((2, 6, 2), jnp.float32), two)}
    found = checkpoint.restore(tmp_path, target, resize=True)["w"]
    assert found.sharding.spec == spec
    np.testing.assert_allclose(found, x.reshape(2, 2, 6, 2).mean(1), atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 1, 16])
def test_training_goes_on_with_another_number(tmp_path, number):
    """In the middle of a round; loss as in a run that kept its eight replicas."""
    checkpoint.save(tmp_path, run.MIDDLE, run.trained_by_eight(run.MIDDLE))
    if number == 16:  # more than there are devices here
        command = [sys.executable, run.__file__, str(tmp_path), "16"]
        printed = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=True
        )
        loss = float(printed.stdout.splitlines()[-1])
    else:
        state = run.restored(tmp_path, number)
        assert metrics.read(state[1])["steps"] == run.MIDDLE
        state = run.trained(state, number, range(run.MIDDLE, run.STEPS))
        loss = run.final_loss(state)
        assert "displaced" not in metrics.read(state[1])
    wanted = run.final_loss(run.trained_by_eight(run.STEPS))
    assert wanted < 1.1  # of 2 at the start, and 1 for the teacher
    # Fewer replicas may do better, as one big batch does.
    assert loss / wanted - 1 < MAX_LOSS_INCREASE


def test_numbers_that_may_be_keys_are_copied_with_a_warning():
    """Of more replicas; fewer draw other numbers as before."""
    keys = {"rng": jax.random.split(jax.random.PRNGKey(0), 2)}
    with pytest.warns(UserWarning, match=r"resize copies \['rng'\].*which is split"):
        cd.replicas.resize(keys, cd.replicas.simulated(4))
    cd.replicas.resize(keys, cd.replicas.simulated(1))
    cd.replicas.resize({"count": jnp.zeros(2, jnp.uint32)}, cd.replicas.simulated(4))


class Basis(NamedTuple):
    basis: Any
    moment: Any


def in_a_basis(rank=2):
    """As GaLore and SOAP: a momentum in the basis of the last gradient."""

    def init(params):
        basis = jax.tree.map(lambda x: jnp.eye(x.shape[0], rank), params)
        return Basis(
            basis, jax.tree.map(lambda x: jnp.zeros((rank, x.shape[1])), params)
        )

    def update(updates, state, params=None):
        basis = jax.tree.map(lambda g: jnp.linalg.qr(g)[0][:, :rank], updates)
        moment = jax.tree.map(
            lambda q, g, m: 0.9 * m + q.T @ g, basis, updates, state.moment
        )
        step = jax.tree.map(lambda q, m: -0.1 * q @ m, basis, moment)
        return step, Basis(basis, moment)

    return optax.GradientTransformation(init, update)


class Codes(NamedTuple):
    codes: Any
    scale: Any


def in_codes():
    """A momentum in 8 bits with a scale."""

    def init(params):
        codes = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int8), params)
        return Codes(codes, jax.tree.map(lambda x: jnp.float32(0), params))

    def update(updates, state, params=None):
        momentum = jax.tree.map(
            lambda c, s, g: 0.9 * s * c.astype(jnp.float32) + g,
            *(state.codes, state.scale, updates),
        )
        scale = jax.tree.map(lambda m: jnp.max(jnp.abs(m)) / 127, momentum)
        codes = jax.tree.map(
            lambda m, s: jnp.round(m / s).astype(jnp.int8), momentum, scale
        )
        return jax.tree.map(lambda m: -0.1 * m, momentum), Codes(codes, scale)

    return optax.GradientTransformation(init, update)


INNER = {
    "basis": in_a_basis,
    "codes": in_codes,
    "adam": lambda: optax.adam(0.1),
    "galore": lambda: optax.contrib.galore(0.1, rank=2),
}


@pytest.mark.parametrize("name", INNER)
def test_an_inner_state_stays_that_of_one_replica(name):
    """A mean of bases is no basis, and one of scales does not fit the codes."""
    mesh = cd.replicas.simulated(4)
    reconcile = cd.synchronizers.reconcile()
    tx = cd.adaptive_sync(INNER[name](), cd.triggers.every_k(2), reconcile, mesh)
    draw = np.random.default_rng(0)
    gradients = [
        {"w": draw.normal(size=(4, 6, 5)).astype(np.float32)} for _ in range(3)
    ]
    *_, (params, state) = helpers.run(tx, mesh, {"w": jnp.ones((6, 5))}, gradients)
    small = cd.replicas.resize({"p": params, "o": state}, cd.replicas.simulated(2))
    first = jax.tree.map(lambda x: x[::2], state.rows.inner_state)
    helpers.assert_bitwise(small["o"].rows.inner_state, first)
    pairs = params["w"].reshape(2, 2, 6, 5)
    np.testing.assert_allclose(small["p"]["w"], pairs.mean(1), atol=ATOL)


@pytest.mark.parametrize("name", ["adam", "galore"])
def test_a_lifted_state_of_optax_stays_that_of_one_replica(name):
    mesh, params = cd.replicas.simulated(4), {"w": jnp.ones((4, 6, 5))}
    tx = cd.replicas.lift(INNER[name](), mesh)
    gradients = {"w": jax.random.normal(jax.random.key(0), (4, 6, 5))}
    _, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    small = cd.replicas.resize({"s": state, "p": params}, cd.replicas.simulated(2))
    helpers.assert_bitwise(small["s"], jax.tree.map(lambda x: x[::2], state))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_mean_leaves_out_what_is_not_finite(value):
    """Else a replica that holds a NaN would spoil its neighbour's parameters."""
    x = np.array([[1.0, 2], [value, 4], [5, value], [7, 8], [value, 1], [value, 2]])
    x = x.astype(np.float32)
    found = cd.replicas.resize({"w": x}, cd.replicas.simulated(3))["w"]
    np.testing.assert_array_equal(found, [[1, 2], [7, 8], [value, 1]])
    one = cd.replicas.resize({"w": x}, cd.replicas.simulated(1))["w"]
    np.testing.assert_array_equal(one, [[4, 5]])


def test_q_of_a_lifted_dion_is_copied():
    """Columns of opposite signs would cancel in a mean."""
    mesh = cd.replicas.simulated(2)
    tx = cd.replicas.lift(cd.scale_by_dion(rank=1), mesh)
    state = tx.init(cd.replicas.replicate({"kernel": jnp.ones((4, 3))}, mesh))
    q = state.dion_q["kernel"]
    state = state._replace(dion_q={"kernel": q.at[1].multiply(-1)})
    found = cd.replicas.resize(state, cd.replicas.simulated(1))
    np.testing.assert_array_equal(found.dion_q["kernel"], q[:1])
