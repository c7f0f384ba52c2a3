"""The programs that are measured: the example's model and data, under each method.

The loop is that of `examples/char_lm/train.py` without what would send something
between the steps that are timed: checkpoints, and the losses of other processes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import data
import jax
import messages
import model
import numpy as np
import optax
import processes
import train
from config import PRESETS, Config
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from job import EVALUATE_EVERY, MESSAGES, STEPS, Job, Part

import curvadion_jax as cd
from curvadion_jax import _partition, compressors, synchronizers

AXIS = cd.replicas.AXIS
# The example's names of this library's methods. What stored results call 'curvadion' is
# `local_muon`.
LIBRARY = {"dion": "synchronous_dion", "diloco": "diloco", "curvadion": "local_muon"}
# What these synchronise with.
_SYNCHRONIZERS = {
    "dion": synchronizers.average_factors(),
    "diloco": synchronizers.reconcile(momentum=False),
    "curvadion": synchronizers.reconcile(
        compressor=compressors.quantize(2), momentum=False
    ),
}


def run(job: Job, write: Callable[..., None]) -> None:
    """Do the parts; `write` gets what is known at the start, and after each step."""
    number, index = (job.processes, job.process) if job.coordinator else (None, None)
    processes.start(
        job.replicas, job.coordinator, number, index, heartbeat=job.heartbeat
    )
    if job.coordinator:
        # gloo waits for others 30 seconds at its first message, and one may compile
        # that much longer than another.
        multihost_utils.sync_global_devices("started")
    mesh = cd.replicas.make_mesh(job.replicas)
    for part in job.parts:
        if part.method == MESSAGES:
            messages.measure(mesh, part.steps, write)
        else:
            _train(part, mesh, job.evaluate, write)


def _train(part: Part, mesh: Mesh, evaluated: bool, write: Callable[..., None]) -> None:
    config = dataclasses.replace(
        PRESETS["tiny"],
        replicas=mesh.size,
        steps=STEPS,
        learning_rate=part.learning_rate,
        rank=0.25,
    )
    corpus = data.load(config.data)
    gpt = train.make_model(config, corpus)
    step_fn, state = build(part.method, gpt, config, mesh)
    evaluate = _evaluation(gpt, config, corpus)
    sequences = mesh.size * config.batch
    divided = NamedSharding(mesh, PartitionSpec(AXIS))
    rows = processes.rows(divided, sequences)

    def batch(step: int) -> jax.Array:
        seed, length = (config.seed, step), config.sequence_length
        local = corpus.training_batch(seed, sequences, length, rows)
        return processes.divided(local, divided, sequences)

    known: dict[str, Any] = {"payload": payload(part.method, state)}
    if evaluated:
        known_sync = {"sync": True} if part.method in LIBRARY else {}
        program = step_fn.lower(state, batch(0), **known_sync).compile().as_text()
        known["messages"] = messages.in_program(program)
    write(part=part.method, step=0, **known)
    for step in range(1, part.steps + 1):
        state, metrics = step_fn(state, batch(step))
        jax.block_until_ready((state, metrics))
        row = _observed(metrics)
        if evaluated and step % EVALUATE_EVERY == 0:
            row["validation_loss"] = evaluate(_one_model(part.method, state))
        write(part=part.method, step=step, **row)


def build(
    name: str, gpt: model.GPT, config: Config, mesh: Mesh
) -> tuple[Any, TrainState]:
    """The step and the state of a method.

    * 'adamw': all gradients and the loss in one all-reduce, without this library.
    * 'adamw_jit': the usual `jit` over a divided batch, where the compiler averages
      each gradient where it comes up.
    * 'dion', 'diloco', 'curvadion': the example's.

    Raises:
        ValueError: the method is none of them.
    """
    if name in LIBRARY:
        state = train.initial_state(gpt, LIBRARY[name], config)
        state = cd.replicas.replicate(state, mesh)
        return cd.replicas.step(train.make_train_step(gpt), mesh), state
    if name not in ("adamw", "adamw_jit"):
        raise ValueError(
            f"method {name!r} is none of adamw, adamw_jit, {', '.join(LIBRARY)}"
        )
    # As the inner steps of DiLoCo, the example's schedule included.
    peak, warmup = config.learning_rate, round(0.05 * STEPS)
    rate = optax.warmup_cosine_decay_schedule(
        peak / warmup, peak, warmup, STEPS, 0.05 * peak
    )
    params = train.initial_state(gpt, "diloco", config).params
    tx = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    state = TrainState.create(apply_fn=gpt.apply, params=params, tx=tx)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    step = _in_one_message(gpt, mesh) if name == "adamw" else _by_compiler(gpt)
    return jax.jit(step, donate_argnums=0), state


def _by_compiler(gpt: model.GPT) -> Callable[..., Any]:
    def step(state: TrainState, tokens_BxT: jax.Array):
        def loss_fn(params):
            return model.next_token_loss(gpt, params, tokens_BxT)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


def _in_one_message(gpt: model.GPT, mesh: Mesh) -> Callable[..., Any]:
    def step(state: TrainState, tokens_BxT: jax.Array):
        def loss_fn(params):
            return model.next_token_loss(gpt, params, tokens_BxT)

        # Gradients of what is the same everywhere would be summed on the way.
        own = jax.lax.pcast(state.params, AXIS, to="varying")
        flat, restore = ravel_pytree(jax.value_and_grad(loss_fn)(own))
        loss, grads = restore(jax.lax.pmean(flat, AXIS))
        return state.apply_gradients(grads=grads), {"loss": loss}

    whole, divided = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(step, mesh=mesh, in_specs=(whole, divided), out_specs=whole)


def payload(name: str, state: TrainState) -> dict[str, int]:
    """Bytes that are averaged and gathered at a sync."""
    if name not in LIBRARY:
        size = cd.cost_model.model_size(state.params)
        return {"averaged": cd.cost_model.gradient_payload(size), "gathered": 0}
    params, inner_state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),  # of one replica
        (state.params, state.opt_state.inner_state),
    )
    views = _partition.matrix_views(params)
    found = _SYNCHRONIZERS[name].payload(params, inner_state, views)
    return {"averaged": found.averaged, "gathered": found.gathered}


def _observed(metrics: dict[str, Any]) -> dict[str, Any]:
    """What this process knows of a step without asking the others."""
    losses = [shard.data for shard in metrics["loss"].addressable_shards]
    row: dict[str, Any] = {"loss": float(np.mean(losses))}
    if "sync" in metrics:
        sync = cd.metrics.read(metrics["sync"])
        row |= {key: sync[key] for key in ("synced", "syncs", "bytes")}
    return row


def _one_model(name: str, state: TrainState) -> Any:
    """The model as of the last sync."""
    if name not in LIBRARY:
        return state.params
    return cd.replicas.consensus(state.params, state.opt_state)


def _evaluation(
    gpt: model.GPT, config: Config, corpus: data.Corpus
) -> Callable[[Any], float]:
    """The mean loss on fixed held-out batches, in one process."""
    loss_fn = jax.jit(lambda params, batch: model.next_token_loss(gpt, params, batch))
    count, sequences = 4, 32

    def evaluate(params: Any) -> float:
        batches = [
            corpus.validation_batch(index, count, sequences, config.sequence_length)
            for index in range(count)
        ]
        return float(np.mean([loss_fn(params, batch) for batch in batches]))

    return evaluate
