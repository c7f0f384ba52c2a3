"""Checksums: what they notice, and that they notice nothing in a healthy run."""

import warnings
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import (
    _checksum,
    _trees,
    checkpoint,
    metrics,
    synchronizers,
    triggers,
)

TWO = cd.replicas.simulated(2)
PARAMS = {"w": jnp.arange(1.0, 5.0).reshape(2, 2), "b": jnp.ones(3)}
reconcile = synchronizers.reconcile


def optimizer(mesh=TWO, k=2) -> Any:
    inner, outer = optax.adam(0.05), optax.sgd(1.0, 0.4, nesterov=True)
    return cd.adaptive_sync(inner, triggers.every_k(k), reconcile(outer), mesh)


@pytest.fixture
def _optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("simulated", "float32"),
        ("mesh", "bfloat16"),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in ("simulated", "mesh", "alone")
            for dtype in ("bfloat16", "float16", "float32", "float64")
        ),
    ],
)
@pytest.mark.usefixtures("_optimizations")
def test_a_run_as_users_compile_it_displaces_nothing(kind, dtype):
    """With all of XLA's fusions, which may not round the sum otherwise."""
    mesh = None if kind == "alone" else helpers.mesh_of(kind, 2)
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
        params, tx = cd.replicas.replicate(params, mesh), optimizer(mesh)
        step = jax.jit(helpers.train_step(tx))
        state = params, tx.init(params)
        for _ in range(4):
            state, _ = step(state, jax.tree.map(jnp.sin, state[0]))
        report = metrics.read(state[1])
    assert report["steps"] == 4
    assert not {"displaced", "anchors_differ"} & set(report)


def test_replicas_that_are_alike_before_a_sync_are_reported_until_the_next():
    """Their gradients were averaged, or they were given the same batch."""
    tx, params = optimizer(), cd.replicas.replicate(PARAMS, TWO)
    state, update = (params, tx.init(params)), jax.jit(helpers.train_step(tx))
    same = jax.tree.map(jnp.ones_like, params)
    other = jax.tree.map(lambda x: x.at[1].mul(2), same)
    found = []
    for gradients in (same, same, other, other):
        state, _ = update(state, gradients)
        found.append("alike" in metrics.read(state[1]))
    assert found == [False, True, True, False]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [("aabb", 4), ("aaab", 3), ("abca", 2), ("aaaa", 4), ("abcd", None)],
)
def test_replicas_that_are_alike_in_part_are_reported(batches, expected):
    """As by a loader that shards by process, where a process has several replicas."""
    mesh = cd.replicas.simulated(4)
    params = cd.replicas.replicate(PARAMS, mesh)
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.every_k(3), reconcile(), mesh)
    size = jnp.array([1.0 + ord(x) for x in batches])
    gradients = jax.tree.map(
        lambda x: jnp.ones_like(x) * size.reshape(-1, *[1] * (x.ndim - 1)), params
    )
    update = jax.jit(helpers.train_step(tx))
    state = params, tx.init(params)
    for _ in range(3):  # a sync on the third
        state, _ = update(state, gradients)
    assert metrics.read(state[1]).get("alike") == expected


def test_anchors_are_compared_as_a_sync_leaves_them():
    """Not as it found them: that would tell of anchors that differ a sync late."""
    tx, params = optimizer(), cd.replicas.replicate(PARAMS, TWO)
    state, update = (params, tx.init(params)), jax.jit(helpers.train_step(tx))
    for _ in range(2):  # a sync on the second
        state, _ = update(state, jax.tree.map(jnp.sin, state[0]))
    anchor = _checksum.of(state[1].common.anchor)
    assert state[1].counters.anchor_checksum.tolist() == [anchor, anchor]


CHANGED = "Parameters were changed after the optimizer's update"


def test_who_prints_no_metrics_is_warned_of_displaced_parameters(tmp_path):
    tx, params = optimizer(), cd.replicas.replicate(PARAMS, TWO)
    update = jax.jit(helpers.train_step(tx))
    gradients = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    metrics.read(state)  # without a warning
    params = {**params, "w": params["w"].at[0].multiply(2)}
    for _ in range(2):
        (params, state), _ = update((params, state), gradients)
    uses = {
        "read": lambda: metrics.read(state),
        "read what was observed": lambda: metrics.read(metrics.observe(state)),
        "save": lambda: checkpoint.save(tmp_path, 1, {"opt_state": state}),
        "anchor": lambda: cd.replicas.anchor(state),
    }
    for use in uses.values():
        with pytest.warns(UserWarning, match=CHANGED):
            use()
    jax.jit(cd.replicas.anchor)(state)  # where nobody knows
    # A replica that was excluded may have been repaired.
    counters = state.counters._replace(excluded=state.counters.displaced)
    metrics.read(state._replace(counters=counters))


def test_replicas_that_have_not_moved_are_not_reported_as_alike():
    """On steps whose learning rate is 0, between two syncs."""
    rates = jnp.array([0.1, 0.1, 0.0, 0.0, 0.1, 0.1])
    inner = optax.sgd(lambda count: rates[count])
    tx = cd.adaptive_sync(inner, triggers.every_k(2), reconcile(), TWO)
    state, update = helpers.start(tx, PARAMS, TWO), jax.jit(helpers.train_step(tx))
    found = []
    for _ in rates:
        state, _ = update(state, jax.tree.map(jnp.ones_like, state[0]))
        found.append("alike" in metrics.read(state[1]))
    assert found == [False, True, True, False, False, True]


@pytest.mark.parametrize(
    ("step", "changed", "expected"),
    [
        (0, "w", [1, 0]),
        (2, "w", [1, 0]),
        (2, "b", [1, 0]),
        (2, "swapped", [1, 1]),
        (1, "w", None),
    ],
    ids=["start", "matrix", "vector", "two that change places", "not after a sync"],
)
def test_a_change_after_a_sync_is_counted(step, changed, expected):
    """Syncs are steps 1 and 3; what changes on another step is drift."""
    tx, params = optimizer(), cd.replicas.replicate({**PARAMS, "c": jnp.zeros(3)}, TWO)
    update, state = jax.jit(helpers.train_step(tx)), (params, tx.init(params))
    gradients = jax.tree.map(jnp.ones_like, params)
    for number in range(4):
        if number == step and changed == "swapped":
            params = {**state[0], "b": state[0]["c"], "c": state[0]["b"]}
            state = params, state[1]
        elif number == step:
            moved = state[0][changed].at[0].multiply(1.0001)
            state = {**state[0], changed: moved}, state[1]
        state, _ = update(state, gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of displaced parameters
        assert metrics.read(state[1]).get("displaced") == expected


@pytest.mark.parametrize("devices", [1, 2])
def test_a_checksum_has_every_word_with_its_place(devices, monkeypatch):
    """And is the same whether small arrays are joined or several devices hold them."""
    tree = {"a": jnp.arange(6.0), "b": jnp.ones((2, 3)), "c": jnp.ones(4, "bfloat16")}
    joined = _checksum.of(tree)
    monkeypatch.setattr(_trees, "devices", lambda x: devices)
    swapped = {**tree, "a": tree["b"].ravel(), "b": tree["a"].reshape(2, 3)}
    assert _checksum.of(tree) == joined
    assert _checksum.of(swapped) != joined


def test_a_checksum_is_the_same_on_one_device_and_on_several():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    found = []
    for each, specs in ((TWO, None), (mesh, {"w": P("fsdp"), "b": P()})):
        tx = cd.adaptive_sync(
            optax.sgd(0.1), triggers.every_k(2), reconcile(), each, specs=specs
        )
        params = cd.replicas.replicate(PARAMS, each)
        found.append(tx.init(params).counters.checksum.tolist())
    assert found[0] == found[1]
