"""One run, its replicas simulated on one device.

The optimizer has ``mesh=cd.replicas.simulated(8)``, so rows are ordinary arrays, and
the bytes are those of its counters. A small model trains so several times faster than
on as many CPU devices, and one process of it fills one core.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import data
import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
from rows import METHODS

import curvadion_jax as cd

KEPT_EVERY = 120.0  # seconds between the copies that a stopped run resumes from
_WARMUP, _LAST_RATE = 0.05, 0.05


@dataclasses.dataclass(frozen=True)
class Size:
    """What is the same in all runs that are compared.

    Attributes:
        layers, width, heads: The model's size.
        length: Tokens in a sequence.
        sequences: Sequences per replica and step.
        evaluation: Held-out sequences in an evaluation.
        at_once: Whether the replicas' gradients are taken together, which suits small
            models on accelerators, or one by one.
        replicas: Their number.
        half: Whether activations are bfloat16 too, and not products alone.
        attention: Implementation of `jax.nn.dot_product_attention`; "cudnn" needs
            `half`, and the empty name leaves it to JAX.
    """

    layers: int = 4
    width: int = 128
    heads: int = 2
    length: int = 128
    sequences: int = 16
    evaluation: int = 1024
    at_once: bool = False
    replicas: int = 8
    half: bool = False
    attention: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """What differs between runs: a method of `rows.py`, its peak learning rate, the
    seed of parameters and data, and the number of steps."""

    method: str
    rate: float
    seed: int
    steps: int


def simulate(
    run: Run,
    corpus: data.Corpus,
    folder: Path,
    size: Size = Size(),
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Trains, and returns the run's results, ready for JSON; None if it was stopped.

    `loss` is that of the mean of the replicas after the last step, in nats per byte,
    `curve` that after each quarter; `bytes` and `synchronous_bytes` are those of
    `curvadion_jax.metrics.read`. The run is kept in `folder` every two minutes and when
    `stopped` says so, and resumes from there; the caller removes it when it has the
    result.
    """
    training = begin(run, corpus, size)
    state, batches, step = training.state, training.batches, training.step
    evaluate = evaluation(training.gpt, size, corpus)
    done, curve = 0, {}
    if cd.checkpoint.latest_step(folder) is not None:
        state = cd.checkpoint.restore(folder, state)
        kept = cd.checkpoint.read_extra(folder)
        done, curve = kept["step"], kept["curve"]
    kept_at, began = time.monotonic(), None
    while done < run.steps:
        state = jax.block_until_ready(step(*state, batches.of(done)))
        done += 1
        began = began or (time.monotonic(), done)  # after the step that compiles
        if done % max(1, run.steps // 4) == 0 or done == run.steps:
            curve[str(done)] = evaluate(state[0])
        last = stopped() and done < run.steps
        if last or time.monotonic() - kept_at >= KEPT_EVERY:
            extra = {"step": done, "curve": curve}
            cd.checkpoint.save(folder, done, state, keep=1, extra=extra)
            kept_at = time.monotonic()
        if last:
            return None
    params, opt_state = state
    sent = cd.metrics.read(opt_state)
    return {
        "loss": curve[str(run.steps)],
        "curve": curve,
        **{key: sent[key] for key in ("syncs", "bytes", "synchronous_bytes")},
        "divergence": float(cd.replicas.divergence(params)),
    } | _speed(began, done, size)


def _speed(began: tuple[float, int] | None, done: int, size: Size) -> dict[str, float]:
    """Tokens a second of all replicas since the first step of this process."""
    if began is None or done == began[1]:
        return {}
    start, first = began
    tokens = (done - first) * size.replicas * size.sequences * size.length
    return {"tokens_a_second": round(tokens / (time.monotonic() - start))}


@dataclasses.dataclass(frozen=True)
class Training:
    """What a run begins with.

    Attributes:
        gpt: The model.
        step: (parameters, optimizer state, batch) -> the next parameters and state, all
            of them rows.
        state: Parameters and optimizer state.
        batches: What the replicas see.
    """

    gpt: model.GPT
    step: Callable[..., tuple[Any, Any]]
    state: tuple[Any, Any]
    batches: "Batches"


def begin(run: Run, corpus: data.Corpus, size: Size) -> Training:
    """Model, step, rows of parameters and optimizer state, and batches."""
    mesh = cd.replicas.simulated(size.replicas)
    gpt = transformer(size, corpus)
    tx = METHODS[run.method](schedule(run.rate, run.steps), run.steps, mesh)
    params = cd.replicas.replicate(parameters(gpt, run.seed), mesh)
    state = params, tx.init(params)
    step = train_step(gpt, tx, size)
    return Training(gpt, step, state, Batches(corpus, run.seed, size))


def schedule(peak: float, steps: int) -> optax.Schedule:
    """A linear warmup, and cosine decay to a twentieth."""
    warmup = round(_WARMUP * steps)
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, steps, peak * _LAST_RATE
    )


class Batches:
    """What the replicas see: each window of the text once, in an order of the seed."""

    def __init__(self, corpus: data.Corpus, seed: int, size: Size):
        (self._text,) = corpus.training
        self._size = size
        windows = (self._text.size - 1) // size.length
        self._order = np.random.default_rng(seed).permutation(windows)

    def of(self, step: int) -> np.ndarray:
        """Those of a step, int32 [replicas, sequences, length + 1]."""
        replicas, length = self._size.replicas, self._size.length
        number = replicas * self._size.sequences
        windows = self._order[step * number : (step + 1) * number]
        if len(windows) < number:
            raise ValueError(f"The text ends at step {step}.")
        places = windows[:, None] * length + np.arange(length + 1)
        return self._text[places].astype(np.int32).reshape(replicas, -1, length + 1)


def transformer(size: Size, corpus: data.Corpus) -> model.GPT:
    """The example's model, of this size and for these tokens."""
    return model.GPT(
        corpus.vocabulary,
        *(size.layers, size.width, size.heads),
        unroll=size.layers,
        dtype=jnp.bfloat16 if size.half else jnp.float32,
        dot_general=None if size.half else product,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x, w, dimension_numbers, precision=None):
    """[..., i] @ [i, j] of bfloat16 operands, summed in float32, backward too.

    As mixed precision has it on accelerators; the newer CPUs have units for it, which
    XLA uses where the result is float32. The others emulate it, slowly: there the
    operands are rounded, and multiplied in float32, which gives the same numbers up to
    the order of sums.
    """
    return _product(x, w, dimension_numbers)


def _forward(x, w, dimension_numbers, precision):
    return _product(x, w, dimension_numbers), (x, w)


def _backward(dimension_numbers, precision, operands, of_result):
    x, w = operands
    others = tuple(range(x.ndim - 1))
    of_x = _product(of_result, w, (((x.ndim - 1,), (1,)), ((), ())))
    return of_x, _product(x, of_result, ((others, others), ((), ())))


def _product(x, y, dimension_numbers):
    if _emulates_bfloat16():
        x, y = (jax.lax.reduce_precision(each, 8, 7) for each in (x, y))
    else:
        x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return jax.lax.dot_general(
        x, y, dimension_numbers, preferred_element_type=jnp.float32
    )


@functools.cache
def _emulates_bfloat16() -> bool:
    """Whether this is a CPU without products of bfloat16 numbers."""
    flags = Path("/proc/cpuinfo")  # Linux has it; x86 and ARM list bf16 there
    if jax.default_backend() != "cpu" or not flags.exists():
        return False
    return "bf16" not in flags.read_text()


product.defvjp(_forward, _backward)


def parameters(gpt: model.GPT, seed: int) -> Any:
    """The parameters that a run starts with, of one replica."""
    tokens = jnp.zeros((1, 8), jnp.int32)
    return jax.jit(gpt.init)(jax.random.key(seed), tokens)["params"]


def gradients_of(
    gpt: model.GPT, params: Any, batch: jax.Array, size: Size = Size()
) -> Any:
    """Each replica's gradient on its part of the batch."""
    of_batch = jax.grad(functools.partial(model.next_token_loss, gpt))
    if size.attention:
        of_batch = _with_attention(of_batch, size.attention)
    if size.at_once:
        return cd.replicas.map(of_batch, cd.replicas.simulated(len(batch)))(
            params, batch
        )
    in_pieces = functools.partial(_gradient_in_pieces, of_batch)
    return jax.lax.map(lambda of_one: in_pieces(*of_one), (params, batch))


# Sequences that are differentiated together on a CPU. All 16 take twice the time of
# pieces of two, which fit its cache; gradients differ by 2e-4 of their norm, since
# bfloat16 operands are rounded after sums in another order.
_PIECE = 2


def _gradient_in_pieces(of_batch: Callable, params: Any, batch: jax.Array) -> Any:
    """One replica's gradient, the mean of those of equal pieces of its batch."""
    pieces = batch.reshape(-1, math.gcd(_PIECE, len(batch)), batch.shape[-1])
    total, _ = jax.lax.scan(
        lambda total, piece: (optax.tree.add(total, of_batch(params, piece)), None),
        *(optax.tree.zeros_like(params), pieces),
    )
    return optax.tree.scale(1 / len(pieces), total)


def _with_attention(function: Callable, implementation: str) -> Callable:
    """The function, traced with this implementation of attention."""
    attention = functools.partial(
        jax.nn.dot_product_attention, implementation=implementation
    )

    def run(*arguments):
        with mock.patch.object(jax.nn, "dot_product_attention", attention):
            return function(*arguments)

    return run


def train_step(
    gpt: model.GPT, tx: optax.GradientTransformationExtraArgs, size: Size = Size()
) -> Callable[..., tuple[Any, Any]]:
    """A function from parameters, state and batch of all replicas to the next ones."""

    def step(params, state, batch):
        gradients = gradients_of(gpt, params, batch, size)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def evaluation(gpt: model.GPT, size: Size, corpus: data.Corpus) -> Callable:
    """A function from all replicas' parameters to the loss of their mean."""
    batch = corpus.validation_batch(0, 1, size.evaluation, size.length)
    parts = np.split(batch, max(1, size.evaluation // 16))
    loss = jax.jit(functools.partial(model.next_token_loss, gpt))

    def evaluate(params) -> float:
        mean = cd.replicas.consensus(params)
        return float(np.mean([loss(mean, part) for part in parts]))

    return evaluate
