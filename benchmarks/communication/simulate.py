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

    `loss` is that of the mean of the replicas after the last step, in nats a token, or
    of their averages over the steps where the run keeps them, `losses` that on other
    texts (`texts.py`), and `curve` always of the mean of the replicas after a step;
    `bytes` and `synchronous_bytes` are those of `curvadion_jax.metrics.read`. None if
    the piece of the run that is to be trained ended before the run did.
    """
    gpt = transformer(size, corpus)
    params = parameters(gpt, run, size)
    tx = optimizer(run, params)
    step = _train_step(gpt, tx, size, averaged(run))
    evaluate = evaluation(gpt, size, corpus)
    start = (params, tx.init(params), averaged(run).init(params))
    training = on_replicas(start, run.replicas)
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
        # Who takes part if this step synchronises.
        there = np.random.default_rng((run.seed, number, 1)).random(run.replicas)
        training = step(*training, batch, np.float32(there >= run.dropped))
        jax.block_until_ready(training)  # so that a piece ends when its time is over
        if number % size.every == 0 or number == run.steps:
            progress.curve[number] = evaluate(training[0])
    params, state, average = training
    loss, kept = progress.curve[run.steps], params
    if run.weight_average:
        kept = weights_average(average, run)
        loss = evaluate(kept)
    seconds = round(time.process_time() - began, 1)
    losses = {
        name: evaluation(gpt, size, other)(kept)
        for name, other in texts.others(corpus, size.data).items()
    }
    sent = cd.metrics.read(state)
    return {
        "loss": loss,
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


def averaged(run: Run) -> optax.GradientTransformation:
    """Keeps an average of the weights over the steps, each replica its own."""
    return optax.ema(_decay(run)) if run.weight_average else optax.identity()


def weights_average(state: optax.EmaState, run: Run) -> Any:
    """What all steps together count is 1, and not what is left of it from zeros."""
    return optax.tree.bias_correction(state.ema, _decay(run), run.steps)


def _decay(run: Run) -> float:
    if (age := run.weight_average * run.steps) < 1:
        raise ValueError(f"an average needs an age of at least a step, got {age}")
    return 1 - 1 / age


def _train_step(
    gpt: model.GPT,
    tx: optax.GradientTransformationExtraArgs,
    size: Size,
    averaged: optax.GradientTransformation,
) -> Callable:
    def update(gradient, state, params, weight):
        return tx.update(gradient, state, params, weight=weight)

    def step(params, state, average, batch, weights):
        _, gradients = losses_and_gradients(gpt, params, batch, size.at_once)
        updates, state = jax.vmap(update, axis_name=AXIS)(
            gradients, state, params, weights
        )
        params = optax.apply_updates(params, updates)
        _, average = jax.vmap(averaged.update)(params, average)
        return params, state, average

    return jax.jit(step, donate_argnums=(0, 1, 2))


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
