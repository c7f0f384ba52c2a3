"""Averaged weights: an exponential average of them, GPA, and schedule-free.

    python benchmarks/study/averaged.py local ema 0.04 0        # side, kind, rate, seed
    python benchmarks/study/averaged.py muon ema 0.08 0 1040    # and steps, else 260
    python benchmarks/study/averaged.py local gpa 0.04 0        # or schedule-free

`ema` trains with a learning rate that ends at half of its peak (else a twentieth), and
prints the loss of the weights and of their averages over the last 3, 7 and 15% of the
steps. `gpa` (https://arxiv.org/abs/2512.17131, 0.8 and 0.9) and `schedule-free` average
in every step of the local optimizer, which then has no momentum of its own.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import corpus
import data
import jax
import jax.numpy as jnp
import optax
import rows
import simulate

import curvadion_jax as cd
from curvadion_jax import _local_muon, _muon, _partition, triggers

SHARES = (0.03, 0.07, 0.15)


class Ahead(NamedTuple):
    """How far the iterate z that takes the updates is ahead of the average x."""

    count: Any
    ahead: Any
    total: Any


def primal_averaging(mu_y, keep, weights=None):
    """Gradients are taken at y = mu_y x + (1 - mu_y) z; x averages z.

    In terms of e = z - x, which is local like a momentum: e <- keep (e + u), and y
    moves by (1 - keep) (e + u) + (1 - mu_y) times the change of e.
    """

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Ahead(jnp.zeros([], jnp.int32), zeros, jnp.zeros([]))

    def update(updates, state, params=None):
        total, share = state.total, 1 - keep
        if weights is not None:
            weight = weights(state.count) ** 2
            total += weight
            share = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), 0)
        z = jax.tree.map(jnp.add, state.ahead, updates)
        new = jax.tree.map(lambda z: (1 - share) * z, z)
        moved = jax.tree.map(
            lambda z, n, e: share * z + (1 - mu_y) * (n - e), z, new, state.ahead
        )
        return moved, Ahead(state.count + 1, new, total)

    return optax.GradientTransformation(init, update)


def method(side: str, kind: str, peak: float):
    """A row of the study."""

    def make(rate, steps, params):
        warmup = round(0.05 * steps)
        if kind == "ema":
            rate = optax.warmup_cosine_decay_schedule(0, peak, warmup, steps, peak / 2)
            own = "`local_muon`" if side == "local" else "Muon, synchronous"
            return rows.METHODS[own](rate, steps, params)
        average = primal_averaging(0.8, 0.9)
        if kind == "schedule-free":
            rate = optax.linear_schedule(0.0, peak, warmup)
            average = primal_averaging(0.9, 0.0, rate)
        if side == "muon":
            return rows._synchronous(
                optax.chain(rows._muon(rate, params, 0.0), average)
            )
        other = optax.adamw(rate, 0.0, 0.95, 1e-7, weight_decay=0.0, nesterov=True)
        inner = _partition.optimizer(
            lambda numbers: _muon.muon(rate, numbers, beta=0.0, eps=1e-7), other, None
        )
        return cd.adaptive_sync(
            optax.chain(inner, average),
            triggers.evenly(0.01),
            _local_muon.default_sync(None, None, rows.AXIS),
            rows.AXIS,
        )

    return make


def main() -> None:
    """Run the program."""
    side, kind, rate, seed, *more = sys.argv[1:]
    steps, name = int(more[0]) if more else 260, f"{side} {kind}"
    rows.METHODS[name] = method(side, kind, float(rate))
    text, size = data.load(str(corpus.TEXT)), simulate.Size()
    run = simulate.Run(name, float(rate), int(seed), steps)
    gpt, step, training, batches = simulate.begin(run, text, size)
    evaluate = simulate.evaluation(gpt, size, text)

    @jax.jit
    def follow(averages, params, done):
        mean = jax.tree.map(lambda x: jnp.mean(x, 0, keepdims=True), params)
        if averages is None:
            return [mean] * len(SHARES)
        return [
            optax.incremental_update(
                mean, x, jnp.maximum(1 / (share * steps), 1 / done)
            )
            for x, share in zip(averages, SHARES, strict=True)
        ]

    averages = None
    for done in range(1, steps + 1):
        training = jax.block_until_ready(step(*training, batches.of(done - 1)))
        averages = follow(averages, training[0], jnp.float32(done))
    params, state = training
    is_ahead = lambda x: isinstance(x, Ahead)
    share = 0.2 if kind == "gpa" else 0.1
    for found in filter(is_ahead, jax.tree.leaves(state, is_leaf=is_ahead)):
        params = jax.tree.map(lambda y, e: y - share * e, params, found.ahead)
    print(f"{name} {rate} {seed} {steps}: {evaluate(params):.4f}", end="; averages")
    print(*(f" {evaluate(x):.4f}" for x in averages))


if __name__ == "__main__":
    main()
