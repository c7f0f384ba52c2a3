"""Equinox models on replicas: a step under `filter_jit`, with state and without.

python examples/ports/equinox/main.py --optimizer local_muon --model batchnorm

The steps are written as in Equinox's examples `parallelism` and `stateful`.
"""

import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
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


def find_matrices(params, static, state):
    """Which parameters Muon trains: the program of the loss tells."""

    def loss_fn(params, state, x, y):
        return compute_loss(eqx.combine(params, static), state, x, y)

    x = jax.ShapeDtypeStruct((2, CONTEXT), jnp.int32)
    y = jax.ShapeDtypeStruct((2,), jnp.int32)
    return cd.dimension_numbers.from_loss(loss_fn, params, state, x, y)


def make_train_step(optim, static, mesh, replicas):
    """As in Equinox's examples, but for `split` and `map`.

    With ``replicas=None`` these two do nothing.
    """
    data_sharding = NamedSharding(mesh, P("batch"))

    def loss_fn(params, state, x, y):
        x, y = eqx.filter_shard((x, y), data_sharding)
        return compute_loss(eqx.combine(params, static), state, x, y)

    @eqx.filter_jit(donate="all")
    def train_step(params, state, opt_state, x, y):
        x, y = cd.replicas.split((x, y), replicas, P("batch"))
        differentiate = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        differentiate = cd.replicas.map(differentiate, replicas)
        (loss, state), grads = differentiate(params, state, x, y)
        updates, opt_state = optim.update(grads, opt_state, params)
        params = eqx.apply_updates(params, updates)
        return params, state, opt_state, loss

    return train_step


def batches(held_out):
    for crop in tokens.batches(ROWS, CONTEXT + 1, held_out=held_out):
        yield crop[:, :-1], crop[:, -1]


def main(arguments: list[str] | None = None) -> dict:
    parser = command.parser(__doc__, "local_muon", width=256)
    parser.add_argument("--model", choices=("layernorm", "batchnorm"), required=True)
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 8)
    ours = options.optimizer == "local_muon"
    rate = options.rate or (0.02 if ours else 0.002)
    schedule = optax.cosine_decay_schedule(rate, options.steps, 0.1)
    make = eqx.nn.make_with_state(Model)
    model, state = make(options.width, options.model == "batchnorm", jr.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    if ours:
        mesh = replicas = cd.replicas.make_mesh(REPLICAS, {"batch": 2})
        optim = cd.local_muon(
            schedule,
            budget=0.02,
            dimension_numbers=find_matrices(params, static, state),
            mesh=replicas,
            specs=P(),
        )
    else:
        mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
        replicas, optim = None, optax.adamw(schedule)

    params, state = cd.replicas.replicate((params, state), replicas)
    opt_state = optim.init(params)
    train_step = make_train_step(optim, static, mesh, replicas)
    for _, (x, y) in zip(range(options.steps), batches(False), strict=False):
        params, state, opt_state, loss = train_step(params, state, opt_state, x, y)
        jax.block_until_ready(loss)  # CPU devices must not be many steps behind
    if ours:  # of BatchNorm's statistics too
        params, state = cd.replicas.consensus((params, state))

    model = eqx.nn.inference_mode(eqx.combine(params, static))
    evaluate = eqx.filter_jit(lambda x, y: compute_loss(model, state, x, y)[0])
    held_out = batches(True)
    losses = [float(evaluate(*next(held_out))) for _ in range(20)]
    sent = cd.metrics.read(opt_state) if ours else {}
    loss = sum(losses) / len(losses)
    return command.report(options, sent, model=options.model, loss=loss)


if __name__ == "__main__":
    main()
