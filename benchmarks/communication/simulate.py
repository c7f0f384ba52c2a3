"""One run, with the replicas simulated on one device.

Gradients are taken replica by replica, and the optimizer runs under `vmap` with the
replica axis's name: its collectives compute there what they compute between devices,
and the bytes are those of its counters. A small model trains so several times faster
than on as many CPU devices, and one process of it fills one core.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import data
import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import pieces
import texts
from optimizers import AXIS, optimizer
from runs import Run
from sizes import Size

import curvadion_jax as cd


def simulate(
    run: Run, size: Size, corpus: data.Corpus, piece: pieces.Piece | None = None
) -> dict[str, Any] | None:
    """Trains, and returns what there is to say about it, ready for JSON.

    `loss` is that of the mean of the replicas after the last step, in nats a token,
    `losses` that on other texts (`texts.py`), and `curve` that after other steps;
    `bytes` and `synchronous_bytes` are those of `curvadion_jax.metrics.read`. None if
    the piece of the run that is to be trained ended before the run did.
    """
    gpt = transformer(size, corpus)
    params = parameters(gpt, run, size)
    tx = optimizer(run, params)
    step = _train_step(gpt, tx, size)
    evaluate = evaluation(gpt, size, corpus)
    training = on_replicas((params, tx.init(params)), run.replicas)
    progress = pieces.Progress()
    if piece is not None:
        training, progress = piece.begin(training)
    began = time.process_time() - progress.seconds
    while progress.step < run.steps:
        if piece is not None and piece.is_over():
            progress.seconds = time.process_time() - began
            piece.keep(training, progress)
            return None
        number = progress.step = progress.step + 1
        batch = batch_of(run, size, corpus, number)
        training = step(*training, batch)
        jax.block_until_ready(training)  # so that a piece ends when its time is over
        if number % size.every == 0 or number == run.steps:
            progress.curve[number] = evaluate(training[0])
    params, state = training
    seconds = round(time.process_time() - began, 1)
    losses = {
        name: evaluation(gpt, size, other)(params)
        for name, other in texts.others(corpus, size.data).items()
    }
    sent = cd.metrics.read(state)
    return {
        "loss": progress.curve[run.steps],
        "losses": losses,
        "text": corpus.fingerprint,
        "curve": progress.curve,
        **{key: sent[key] for key in ("syncs", "bytes", "synchronous_bytes")},
        "divergence": float(cd.replicas.divergence(params)),
        "cpu_seconds": seconds,
    }


def transformer(size: Size, corpus: data.Corpus) -> model.GPT:
    """The model of a size, for the tokens of these data."""
    return model.GPT(
        corpus.vocabulary,
        *(size.layers, size.width, size.heads),
        dtype=jnp.dtype(size.products),
        unroll=size.layers,
    )


def parameters(gpt: model.GPT, run: Run, size: Size) -> Any:
    """The parameters that a run starts with, of one replica."""
    tokens = jnp.zeros((1, size.length), jnp.int32)
    return jax.jit(gpt.init)(jax.random.key(run.seed), tokens)["params"]


def on_replicas(tree: Any, replicas: int) -> Any:
    """A tree with a leading axis of so many equal copies."""
    return jax.tree.map(
        lambda x: jnp.array(jnp.broadcast_to(x, (replicas, *x.shape))), tree
    )


def batch_of(run: Run, size: Size, corpus: data.Corpus, number: int) -> np.ndarray:
    """What the replicas see on a step; here steps are counted from 1.

    Returns:
        int32 [replicas, sequences of a replica, length + 1].
    """
    sequences = size.tokens // size.length
    batch = corpus.training_batch((run.seed, number), sequences, size.length)
    return batch.reshape(run.replicas, -1, size.length + 1)


def losses_and_gradients(
    gpt: model.GPT, params: Any, batch: jax.Array, at_once: int | None = None
) -> tuple[jax.Array, Any]:
    """Each replica's own loss and gradient; all arrays have a leading axis of replicas.

    Args:
        gpt: The model.
        params: Of each replica.
        batch: int32 [replicas, sequences, length + 1].
        at_once: Sequences of a replica in one backward pass; None is all of them.
    """
    of_batch = jax.value_and_grad(functools.partial(model.next_token_loss, gpt))

    def of_one(replica):
        params, batch = replica
        if at_once is None or at_once >= len(batch):
            return of_batch(params, batch)
        parts = batch.reshape(-1, at_once, batch.shape[-1])
        total, _ = jax.lax.scan(
            lambda total, part: (optax.tree.add(total, of_batch(params, part)), None),
            (jnp.zeros([]), optax.tree.zeros_like(params)),
            parts,
        )
        return optax.tree.scale(1 / len(parts), total)

    return jax.lax.map(of_one, (params, batch))


def _train_step(
    gpt: model.GPT, tx: optax.GradientTransformationExtraArgs, size: Size
) -> Callable:
    def step(params, state, batch):
        _, gradients = losses_and_gradients(gpt, params, batch, size.at_once)
        updates, state = jax.vmap(tx.update, axis_name=AXIS)(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def evaluation(gpt: model.GPT, size: Size, corpus: data.Corpus) -> Callable:
    """A function from all replicas' parameters to the loss of their mean."""
    batch = corpus.validation_batch(0, 1, size.evaluation, size.length)
    at_once = min(256, size.at_once or 256)
    parts = np.split(batch, max(1, size.evaluation // at_once))
    loss = jax.jit(lambda params, part: model.next_token_loss(gpt, params, part))

    def evaluate(params) -> float:
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), params)
        return float(np.mean([loss(mean, part) for part in parts]))

    return evaluate
