"""A model for mesh axes of type Explicit trains as one for automatic axes."""

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvadion_jax as cd

REPLICAS, ROWS = 2, 16
# Sums over rows in another order, in the six steps of a run.
ROUNDING = 1e-5
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(size=(ROWS, 16)).astype(np.float32)}
PARAMS = {
    "w": DRAW.normal(size=(16, 32)).astype(np.float32) / 4,
    "v": DRAW.normal(size=(32, 8)).astype(np.float32) / 6,
}


def train_step(tx, kind):
    """Asserts on the types that it sees, where these tell."""
    explicit = kind == AxisType.Explicit
    by_rows = {"out_sharding": PartitionSpec("fsdp")} if explicit else {}

    def loss_fn(params, batch):
        x = jnp.einsum("bi,ij->bj", batch["x"], params["w"], **by_rows)
        x = jnp.tanh(x + params["bias"][None])
        x = jnp.einsum("bi,ij->bj", x, params["v"], **by_rows)
        if explicit:
            assert jax.typeof(batch["x"]).sharding.spec[0] == "fsdp"
        return jnp.mean((x - batch["x"][:, :8]) ** 2)

    def train(state, batch):
        params, opt_state, mean = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        assert jax.typeof(gradients["w"]) == jax.typeof(params["w"])
        updates, opt_state = tx.update(gradients, opt_state, params)
        mean = {"mean": 0.9 * mean["mean"] + batch["x"].mean(0)}
        return (optax.apply_updates(params, updates), opt_state, mean), loss

    return train


def trained(tx, kind):
    """Losses, what was sent, the model, and messages of a sync step by size."""
    mesh = cd.replicas.make_mesh(REPLICAS, {"fsdp": 2}, inner_type=kind)
    divided = NamedSharding(mesh, PartitionSpec("fsdp"))
    rows = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
    params = jax.device_put(PARAMS, divided) | {"bias": jnp.full(32, 0.1)}
    with jax.set_mesh(mesh):
        state = (params, tx.init(params), {"mean": jnp.zeros(16)})
        state = cd.replicas.replicate(state, mesh)
        step = cd.replicas.step(train_step(tx, kind), mesh, average=["mean"])
        batch, losses = jax.device_put(BATCH, rows), []
        for _ in range(6):
            state, loss = step(state, batch)
            losses.append(np.asarray(loss))
        text = step.lower(state, batch, due=True).compile().as_text() or ""
        model = cd.replicas.anchor(state[1])
    assert state[0]["w"].sharding.spec == PartitionSpec("replica", "fsdp")
    assert jax.typeof(model["w"]).sharding.spec[0] == (
        "fsdp" if kind == AxisType.Explicit else None
    )
    program = hlo.parse(text)
    messages = sorted(
        (x.shape, x.opcode)
        for x in program.collectives([program.entry])
        if [*map(list, x.groups)] == [[0, 2], [1, 3]]
    )
    return losses, cd.metrics.read(state[1]), model, messages


@pytest.mark.slow
def test_explicit_axes_inside_a_replica():
    trigger = cd.triggers.every_k(3)
    tx = cd.local_muon(0.02, trigger=trigger, axis_name="replica")
    automatic = trained(tx, AxisType.Auto)
    explicit = trained(tx, AxisType.Explicit)
    for found, expected in zip(explicit[:3:2], automatic[:3:2], strict=True):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=ROUNDING, atol=ROUNDING),
            found,
            expected,
        )
    assert explicit[1] == automatic[1]
    assert explicit[1]["syncs"] == 2
    assert explicit[3] == automatic[3]
    assert explicit[3]


def test_a_state_made_on_a_mesh_of_explicit_axes_alone():
    """Where Flax makes a model whose parameters name their axes."""
    made_on = jax.make_mesh((2, 2), ("replica", "fsdp"), devices=jax.devices()[:4])
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2}, inner_type=AxisType.Explicit)
    place = NamedSharding(made_on, PartitionSpec(None, "fsdp"))
    params = jax.device_put({"w": jnp.ones((4, 6))}, place)
    state = cd.replicas.replicate(params, mesh)
    expected = NamedSharding(mesh, PartitionSpec("replica", None, "fsdp"))
    assert state["w"].sharding == expected
