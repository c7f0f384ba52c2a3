"""Equinox models on replicas: a step under `filter_jit`, with state and without.

python examples/ports/equinox/main.py --optimizer local_muon --model batchnorm

The steps are written as in Equinox's examples `parallelism` and `stateful`.
"""

import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.random as jr
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import command
import tokens

import curvadion_jax as cd

CONTEXT, ROWS, REPLICAS = 16, 512, 4


class Model(eqx.Module):
    """The next byte from some bytes before it."""

    embedding: eqx.nn.Embedding
    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm | eqx.nn.LayerNorm
    middle: eqx.nn.Linear
    lm_head: eqx.nn.Linear

    def __init__(self, width: int, stateful: bool, key: jax.Array):
        keys = jr.split(key, 4)
        self.embedding = eqx.nn.Embedding(tokens.VOCABULARY, 16, key=keys[0])
        self.up = eqx.nn.Linear(16 * CONTEXT, width, key=keys[1])
        if stateful:
            self.norm = eqx.nn.BatchNorm(width, axis_name="batch", mode="batch")
        else:
            self.norm = eqx.nn.LayerNorm(width)
        self.middle = eqx.nn.Linear(width, width, key=keys[2])
        self.lm_head = eqx.nn.Linear(width, tokens.VOCABULARY, key=keys[3])

    def __call__(self, x, state):
        x = self.up(jax.vmap(self.embedding)(x).reshape(-1))
        x = self.norm(x, state)
        x, state = x if isinstance(x, tuple) else (x, state)
        x = self.middle(jax.nn.relu(x))
        return self.lm_head(jax.nn.relu(x)), state


def compute_loss(model, state, x, y):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = run(x, state)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses.mean(), state


def make_train_step(optim, mesh):
    """As in Equinox's example: what is changed is in its last lines."""
    model_sharding = NamedSharding(mesh, P())
    data_sharding = NamedSharding(mesh, P("batch"))

    @eqx.filter_jit
    def train_step(model, state, opt_state, x, y):
        model, opt_state = eqx.filter_shard((model, opt_state), model_sharding)
        x, y = eqx.filter_shard((x, y), data_sharding)
        differentiate = eqx.filter_value_and_grad(compute_loss, has_aux=True)
        (loss, state), grads = differentiate(model, state, x, y)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optim.update(grads, opt_state, params)
        model = eqx.apply_updates(model, updates)
        return model, state, opt_state, loss

    return train_step


def batches(held_out):
    for crop in tokens.batches(ROWS, CONTEXT + 1, held_out=held_out):
        yield crop[:, :-1], crop[:, -1]


def main(arguments: list[str] | None = None) -> dict:
    parser = command.parser(__doc__, "local_muon", width=256)
    parser.add_argument("--model", choices=("layernorm", "batchnorm"), required=True)
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 8)
    make = eqx.nn.make_with_state(Model)
    model, state = make(options.width, options.model == "batchnorm", jr.key(0))
    run = train_adamw if options.optimizer == "adamw" else train_replicas
    rate = options.rate or (0.02 if options.optimizer == "local_muon" else 0.002)
    schedule = optax.cosine_decay_schedule(rate, options.steps, 0.1)
    model, state, opt_state = run(model, state, schedule, options.steps)
    model, held_out = eqx.nn.inference_mode(model), batches(True)
    evaluate = eqx.filter_jit(lambda x, y: compute_loss(model, state, x, y)[0])
    losses = [float(evaluate(*next(held_out))) for _ in range(20)]
    loss = sum(losses) / len(losses)
    return command.report(options, opt_state, model=options.model, loss=loss)


def train_adamw(model, state, schedule, steps):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    optim = optax.adamw(schedule)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    train_step = make_train_step(optim, mesh)
    for _, (x, y) in zip(range(steps), batches(False), strict=False):
        model, state, opt_state, _ = train_step(model, state, opt_state, x, y)
    return model, state, opt_state


def train_replicas(model, state, schedule, steps):
    mesh = cd.replicas.make_mesh(REPLICAS, {"batch": 2})
    optim = cd.local_muon(schedule, budget=0.02, axis_name="replica")
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    train_step = make_train_step(optim, mesh)
    params, static = eqx.partition(model, eqx.is_array)

    def of_replica(whole, batch):
        model = eqx.combine(whole["params"], static)
        model, state, opt_state, loss = train_step(
            model, whole["state"], whole["opt_state"], *batch
        )
        params = eqx.filter(model, eqx.is_array)
        whole = {"params": params, "state": state, "opt_state": opt_state}
        return whole, {"loss": loss}

    whole = {"params": params, "state": state, "opt_state": opt_state}
    whole = cd.replicas.replicate(whole, mesh)
    average = ["state"] if jax.tree.leaves(state) else []
    step = cd.replicas.step(of_replica, mesh, average=average)
    for _, batch in zip(range(steps), batches(False), strict=False):
        whole, metrics = step(whole, batch)
        jax.block_until_ready(metrics)  # CPU devices must not be many steps behind
    opt_state = whole.pop("opt_state")
    model = cd.replicas.consensus(whole)
    return eqx.combine(model["params"], static), model["state"], opt_state


if __name__ == "__main__":
    main()
