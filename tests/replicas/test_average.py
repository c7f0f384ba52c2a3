"""State beside the optimizer's that is averaged at syncs, as BatchNorm's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd

REPLICAS, EVERY = 4, 2
TX = cd.local_muon(0.02, trigger=cd.triggers.every_k(EVERY), axis_name="replica")
# One mean for each replica, 0.5 * 0 + 0.5 * x in two steps.
X = np.array([1.0, 2.0, 4.0, 1000.0], np.float32)


def run(weights=None, spoil=None, dtype=jnp.float32, tx=TX, average=("stats",)):
    """The state after a local step and a sync."""
    params = {"kernel": jnp.ones((8, 8))}

    def train(state, batch):
        gradient = {"kernel": jnp.cos(state["params"]["kernel"]) * batch["x"].mean()}
        extra = {} if weights is None else {"weight": batch["weight"][0]}
        updates, opt_state = tx.update(
            gradient, state["opt_state"], state["params"], **extra
        )
        mean = 0.5 * state["stats"]["mean"] + 0.5 * batch["x"].mean().astype(dtype)
        params = optax.apply_updates(state["params"], updates)
        stats = {"mean": mean, "seen": state["stats"]["seen"] + 1}
        return {"params": params, "opt_state": opt_state, "stats": stats}, {}

    mesh = cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS])
    step = cd.replicas.step(train, mesh, average=average, local=["stats"])
    stats = {"mean": jnp.zeros([], dtype), "seen": 0}
    state = {"params": params, "opt_state": tx.init(params), "stats": stats}
    state = cd.replicas.replicate(state, mesh)
    batch = {"x": X, "weight": np.array(weights or [1.0] * REPLICAS, np.float32)}
    for index in range(EVERY):
        if index == EVERY - 1 and spoil:
            spoil(state)
        state, _ = step(state, batch)
    assert state["stats"]["seen"].tolist() == [EVERY] * REPLICAS
    return state


def put(state, path, replica):
    """Makes a number of one replica NaN."""
    tree, name = state[path[0]], path[-1]
    x = tree[name]
    row = x[replica].at[(0,) * (x.ndim - 1)].set(jnp.nan)
    tree[name] = jax.device_put(x.at[replica].set(row), x.sharding)


@pytest.mark.parametrize(
    ("weights", "spoilt", "right"),
    [
        (None, None, 0.75 * X.mean()),
        ([1.0, 1, 1, 0], None, 0.75 * X[:3].mean()),
        ([3.0, 1, 0, 0], None, 0.75 * 1.25),
        (None, ("params", "kernel"), 0.75 * X[:3].mean()),
        (None, ("stats", "mean"), 0.75 * X[:3].mean()),
    ],
    ids=["all", "absent", "weights", "excluded", "not finite"],
)
def test_replicas_count_as_in_the_sync(weights, spoilt, right):
    spoil = (lambda state: put(state, spoilt, 3)) if spoilt else None
    state = run(weights, spoil)
    np.testing.assert_allclose(state["stats"]["mean"], [right] * REPLICAS, rtol=1e-6)


def test_without_anybody_it_stays():
    state = run([0.0] * REPLICAS)
    np.testing.assert_allclose(state["stats"]["mean"], 0.75 * X, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("measured", [False, True])
def test_bytes_are_counted_as_they_are_sent(dtype, measured):
    """A number in float32 at every sync, also where the devices decide."""
    trigger = cd.triggers.always()
    if measured:
        trigger = cd.triggers.relative_momentum_change(1e-9)
    tx = cd.local_muon(0.02, trigger=trigger, axis_name="replica")
    state, other = run(dtype=dtype, tx=tx), run(dtype=dtype, tx=tx, average=())
    assert state["stats"]["mean"].dtype == dtype
    more, less = (cd.metrics.read(x["opt_state"])["bytes"] for x in (state, other))
    assert more - less == EVERY * 2 * (REPLICAS - 1) / REPLICAS * 4


@pytest.mark.parametrize(
    ("tx", "average", "message"),
    [
        (TX, "statistics", "'s', and no floating"),
    ],
)
def test_what_cannot_be_averaged(tx, average, message):
    mesh = cd.replicas.make_mesh(2)
    step = cd.replicas.step(lambda state, _: (state, {}), mesh, average=average)
    params = {"w": jnp.ones((4, 4))}
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    with pytest.raises(ValueError, match=message):
        step(state, np.ones(2))
