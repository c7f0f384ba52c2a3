"""A model for mesh axes of type Explicit trains as one for automatic axes."""

import contextlib
import functools
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from divided_replicas import put
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd

REPLICAS, ROWS, STEPS = 2, 16, 4
# Sums over rows in another order, in a few steps.
ROUNDING = 1e-5
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(size=(ROWS, 16)).astype(np.float32)}
PARAMS = {
    "w": DRAW.normal(size=(16, 32)).astype(np.float32) / 4,
    "v": DRAW.normal(size=(32, 8)).astype(np.float32) / 6,
    "bias": np.full(32, 0.1, np.float32),
}
SPECS = {"w": P("fsdp"), "v": P("fsdp"), "bias": P()}
EXACT = cd.synchronizers.reconcile(optax.sgd(0.7, 0.9, nesterov=True))
EVERY_2 = cd.triggers.every_k(2)
MATRICES: Any = {"dimension_numbers": helpers.matrices}
METHODS = {
    "local_muon": functools.partial(
        cd.local_muon, 0.02, trigger=EVERY_2, synchronizer=EXACT, **MATRICES
    ),
    "curvadion": functools.partial(
        cd.curvadion, 0.02, rank=2, synchronizer=EXACT, **MATRICES
    ),
    "synchronous_dion": functools.partial(
        cd.presets.synchronous_dion, 0.02, rank=2, **MATRICES
    ),
}


def loss_fn(params, batch, kind=None):
    """Asserts on the types that it sees, where these tell."""
    explicit = kind == AxisType.Explicit
    by_rows = {"out_sharding": P("fsdp")} if explicit else {}
    x = jnp.einsum("bi,ij->bj", batch["x"], params["w"], **by_rows)
    x = jnp.tanh(x + params["bias"][None])
    x = jnp.einsum("bi,ij->bj", x, params["v"], **by_rows)
    if explicit:
        assert jax.typeof(batch["x"]).sharding.spec[0] == "fsdp"
        assert jax.typeof(params["w"]).sharding.spec[0] == "fsdp"
    return jnp.mean((x - batch["x"][:, :8]) ** 2)


def trained(method, mesh, kind=None):
    """Losses, state, step and batch."""
    on_mesh = kind is not None
    auto = kind == AxisType.Auto
    tx = METHODS[method](mesh=mesh, specs=SPECS if auto else None)
    params = PARAMS
    if on_mesh:
        params = {x: put(PARAMS[x], mesh, SPECS[x]) for x in PARAMS}
    batch = cd.replicas.split(BATCH, mesh, P("fsdp") if on_mesh else None)
    rows = cd.replicas.replicate(params, mesh)
    loss = functools.partial(loss_fn, kind=kind)

    @jax.jit
    def train_step(state, batch):
        rows, opt_state = state
        gradient = cd.replicas.map(jax.value_and_grad(loss), mesh)
        losses, grads = gradient(rows, batch)
        if kind == AxisType.Explicit:
            assert jax.typeof(grads["w"]) == jax.typeof(rows["w"])
        updates, opt_state = tx.update(grads, opt_state, rows)
        return (optax.apply_updates(rows, updates), opt_state), losses

    state, losses = (rows, tx.init(rows)), []
    with jax.set_mesh(mesh) if on_mesh else contextlib.nullcontext():
        for _ in range(STEPS):
            state, of_step = train_step(state, batch)
            losses.append(np.asarray(of_step))
    return losses, state, train_step, batch


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_axes_inside_a_replica_train_as_a_simulation(method, kind):
    expected, (simulated, opt_state), *_ = trained(
        method, cd.replicas.simulated(REPLICAS)
    )
    mesh = cd.replicas.make_mesh(
        REPLICAS, {"fsdp": 2}, devices=jax.devices()[:4], inner_type=kind
    )
    losses, state, step, batch = trained(method, mesh, kind)
    close = functools.partial(chex.assert_trees_all_close, rtol=ROUNDING, atol=ROUNDING)
    close(losses, expected)
    close(*jax.device_get((state[0], simulated)))
    report, other = cd.metrics.read(state[1]), cd.metrics.read(opt_state)
    assert [report[x] for x in ("syncs", "votes", "since")] == [
        other[x] for x in ("syncs", "votes", "since")
    ]
    assert "displaced" not in report
    for x in (state[0]["w"], state[1].counters.value):
        assert x.sharding.mesh == mesh
    assert state[0]["w"].sharding.spec[:2] == ("replica", "fsdp")
    with jax.set_mesh(mesh):
        sent = cd.replicas.audit(step, mesh, state, batch)
    messages = [x.arrays for x in (*sent.every_step, *sent.sync)]
    # Each half of a matrix crosses once, or each half of a factor.
    assert any("f32[8,32]" in x for x in messages) == (method != "synchronous_dion")
    assert not any("f32[16,32]" in x for x in messages)
    if method != "synchronous_dion":  # which sends on every step
        assert {x.arrays for x in sent.every_step} <= {"s32[]"}


def test_a_state_made_on_a_mesh_of_explicit_axes_alone():
    """Where Flax makes a model whose parameters name their axes."""
    made_on = jax.make_mesh((2, 2), ("replica", "fsdp"), devices=jax.devices()[:4])
    mesh = cd.replicas.make_mesh(
        2, {"fsdp": 2}, devices=jax.devices()[:4], inner_type=AxisType.Explicit
    )
    place = NamedSharding(made_on, P(None, "fsdp"))
    params = jax.device_put({"w": jnp.ones((4, 6))}, place)
    rows = cd.replicas.replicate(params, mesh)
    assert rows["w"].sharding == NamedSharding(mesh, P("replica", None, "fsdp"))


def test_init_inside_of_jit_is_refused_over_explicit_axes():
    mesh = cd.replicas.make_mesh(
        2, {"fsdp": 2}, devices=jax.devices()[:4], inner_type=AxisType.Explicit
    )
    tx = cd.presets.local_sgd(0.1, k=2, mesh=mesh)
    rows = cd.replicas.replicate({"w": jnp.ones((4, 6))}, mesh)
    with pytest.raises(ValueError, match=r"Call it outside of jit"):
        jax.jit(tx.init)(rows)


def test_keys_common_arguments_and_lifted_transformations_over_explicit_axes():
    mesh = cd.replicas.make_mesh(
        2, {"fsdp": 2}, devices=jax.devices()[:4], inner_type=AxisType.Explicit
    )
    x = put(np.arange(16, dtype=np.float32).reshape(2, 8), mesh, P("replica", "fsdp"))
    keys = jax.random.split(jax.random.key(0), 2)
    shift = lambda x, key, scale: scale * x + jax.random.uniform(key)
    found = cd.replicas.map(shift, mesh)(x, keys, scale=2.0)
    draws = jnp.stack([jax.random.uniform(key) for key in keys])
    np.testing.assert_allclose(found, 2 * np.asarray(x) + draws[:, None], rtol=1e-6)
    assert found.sharding.spec[:2] == ("replica", "fsdp")
    clip = cd.replicas.lift(optax.clip_by_global_norm(1.0), mesh)
    clipped, _ = jax.jit(clip.update)(x, clip.init(x))
    np.testing.assert_allclose(np.linalg.norm(clipped, axis=1), 1, rtol=1e-5)
    assert clipped.sharding.spec[:2] == ("replica", "fsdp")
    with pytest.raises(ValueError, match="over 'replica'"):
        cd.replicas.map(lambda x: jax.lax.pmean(x, "replica"), mesh)(x)
