"""Checkpoints of a training run: common arrays once, and the same bits afterwards."""

import json
from typing import Any

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import curvadion_jax as cd
from curvadion_jax import checkpoint

REPLICAS, SAVED, STEPS = 2, 3, 6
MESH = cd.replicas.make_mesh(REPLICAS)
X = np.random.default_rng(0).normal(size=(STEPS, 8, 6)).astype(np.float32)
METHODS: dict[str, Any] = {
    "local_muon": lambda: cd.local_muon(0.02, budget=0.2, bits=2, mesh=MESH),
    "curvadion": lambda: cd.curvadion(0.02, budget=0.5, rank=2, mesh=MESH),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.02, rank=2, mesh=MESH),
    "MultiSteps": lambda: optax.MultiSteps(
        cd.presets.diloco(0.02, k=2, mesh=MESH), 2
    ).gradient_transformation(),
}
MODEL = nn.Sequential([nn.Dense(16), jnp.tanh, nn.Dense(6)])


def start(method: str) -> dict[str, Any]:
    """A TrainState, and a key of each replica."""
    params = MODEL.init(jax.random.key(0), X[0])["params"]
    rows = cd.replicas.replicate(params, MESH)
    state = TrainState.create(apply_fn=MODEL.apply, params=rows, tx=METHODS[method]())
    keys = jax.random.split(jax.random.key(1), REPLICAS)
    return cd.replicas.place({"train": state, "keys": keys}, MESH)


@jax.jit
def step(state, batch):
    def loss_fn(params, batch, key):
        noise = 0.1 * jax.random.normal(key, batch.shape)
        return jnp.mean((MODEL.apply({"params": params}, batch + noise) - batch) ** 2)

    keys = cd.replicas.map(lambda key: jax.random.fold_in(key, 1), MESH)(state["keys"])
    grads = cd.replicas.map(jax.grad(loss_fn), MESH)(state["train"].params, batch, keys)
    return {"train": state["train"].apply_gradients(grads=grads), "keys": keys}


def trained(state, steps):
    for index in steps:
        state = step(state, cd.replicas.split(X[index], MESH))
    return state


def raw(state):
    return jax.device_get((state["train"], jax.random.key_data(state["keys"])))


@pytest.mark.parametrize("method", helpers.slow_but(["local_muon"], METHODS))
def test_a_run_that_is_restored_has_the_bits_of_one_that_is_not(tmp_path, method):
    state = trained(start(method), range(SAVED))
    checkpoint.save(tmp_path, SAVED, state, extra={"position": SAVED})
    found = checkpoint.restore(tmp_path, start(method))
    assert int(found["train"].step) == SAVED
    helpers.assert_bitwise(raw(found), raw(state))
    later = range(checkpoint.read_extra(tmp_path)["position"], STEPS)
    found = trained(found, later)
    helpers.assert_bitwise(raw(found), raw(trained(state, later)))
    report = cd.metrics.read(found["train"].opt_state)
    assert report["syncs"] > 0
    assert "displaced" not in report


def test_what_is_common_is_stored_once(tmp_path):
    state = start("local_muon")
    checkpoint.save(tmp_path, 1, state)
    info = json.loads((tmp_path / "1/info/metadata").read_text())
    shapes = {name: x["shape"] for name, x in info["notes"]["arrays"].items()}
    kernel = [6, 16]
    named = lambda part: [
        shape
        for name, shape in shapes.items()
        if part in name and name.endswith("layers_0/kernel")
    ]
    for common in ("anchor", "sync_state"):
        assert named(f"opt_state/common/{common}") == [kernel]
    for rows in ("inner_state", "residual"):
        assert named(f"opt_state/rows/{rows}") == [[REPLICAS, *kernel]]
    assert shapes["train/step"] == []
    counters = {len(shape) for name, shape in shapes.items() if "counters" in name}
    assert counters == {0, 1, 2}  # numbers, rows of them, and the costs
