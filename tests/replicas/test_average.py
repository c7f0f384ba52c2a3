"""State beside the optimizer's that is averaged at syncs, with names like its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd

pytestmark = pytest.mark.slow  # many programs
REPLICAS, EVERY = 4, 2
MESH = cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS])
TX = cd.presets.local_sgd(0.02, k=EVERY, axis_name="replica")
# One mean for each replica, 0.5 * 0 + 0.5 * x in two steps.
X = np.array([1.0, 2.0, 4.0, 1000.0], np.float32)


def run(weights=None, spoil=None, dtype=jnp.float32, tx=TX, average=("metrics",)):
    """The state after a local step and a sync."""
    params = {"kernel": jnp.ones((8, 8))}

    def train(state, batch):
        gradient = {
            "kernel": 1e-3 * jnp.cos(state["params"]["kernel"]) * batch["x"].mean()
        }
        updates, opt_state = tx.update(
            gradient, state["opt_state"], state["params"], weight=batch["weight"][0]
        )
        mean = 0.5 * state["metrics"]["mean"] + 0.5 * batch["x"].mean().astype(dtype)
        params = optax.apply_updates(state["params"], updates)
        stats = {"mean": mean, "seen": state["metrics"]["seen"] + 1}
        new = {"params": params, "opt_state": opt_state, "metrics": stats}
        return new | {"copy": {"metrics": cd.metrics.observe(opt_state)}}, {}

    step = cd.replicas.step(train, MESH, average=average, local=["metrics"])
    stats = {"mean": jnp.zeros([], dtype), "seen": 0}
    state = {"params": params, "opt_state": tx.init(params), "metrics": stats}
    state["copy"] = {"metrics": cd.metrics.observe(state["opt_state"])}
    state = cd.replicas.replicate(state, MESH)
    batch = {"x": X, "weight": np.array(weights or [1.0] * REPLICAS, np.float32)}
    state, _ = step(state, batch)
    if spoil:
        tree, name = state[spoil[0]], spoil[1]
        spoilt = tree[name].at[3].set(jnp.nan)
        tree[name] = jax.device_put(spoilt, tree[name].sharding)
    state, _ = step(state, batch)
    assert state["metrics"]["seen"].tolist() == [EVERY] * REPLICAS
    return state


@pytest.mark.parametrize(
    ("weights", "spoil", "right"),
    [
        (None, None, 0.75 * X.mean()),
        ([3.0, 1, 0, 0], None, 0.75 * 1.25),
        ([0.0] * REPLICAS, None, 0.75 * X),
        (None, ("params", "kernel"), 0.75 * X[:3].mean()),
        (None, ("metrics", "mean"), 0.75 * X[:3].mean()),
    ],
    ids=["all", "weights", "nobody", "excluded", "not finite"],
)
def test_replicas_count_as_in_the_sync(weights, spoil, right):
    state = run(weights, spoil, average=("metrics/mean",))
    expected = np.broadcast_to(right, REPLICAS)
    np.testing.assert_allclose(state["metrics"]["mean"], expected, rtol=1e-6)


@pytest.mark.parametrize("measured", [False, True])
def test_bytes_are_counted_as_they_are_sent(measured):
    """A number and its weight, in float32, also where the devices decide."""
    trigger = cd.triggers.relative_momentum_change(1e-9)
    tx = cd.adaptive_sync(
        optax.sgd(0.02, 0.9),
        trigger if measured else cd.triggers.always(),
        cd.synchronizers.reconcile(),
        "replica",
    )
    state = run(dtype=jnp.bfloat16, tx=tx, average=["metrics/mean"])
    other = run(dtype=jnp.bfloat16, tx=tx, average=())
    assert state["metrics"]["mean"].dtype == jnp.bfloat16
    more, less = (cd.metrics.read(x["opt_state"])["bytes"] for x in (state, other))
    assert more - less == EVERY * 2 * (REPLICAS - 1) / REPLICAS * 8


@pytest.mark.parametrize("average", ["statistics", ["etrics"]])
def test_names_of_nothing_are_rejected(average):
    with pytest.raises(ValueError, match="and no such array"):
        run(average=average)
