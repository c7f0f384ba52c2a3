"""One sketch: replicas of local Muon that come together by plain means of arrays.

Nothing of the library's syncs is used: replicas are the leading axis of every array,
and whatever is exchanged between them is written out here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import simulate
from runs import Run
from sizes import Size
from sketches import Sketch

import curvadion_jax as cd

RATE, MOMENTA, SLOW = 0.08, (0.8, 0.95), 0.98
Part = Any  # a tree of bools like the parameters


class Replicas(NamedTuple):
    """All arrays of the first two have a leading axis of replicas.

    Attributes:
        params: The replicas' own parameters.
        state: Of their local optimizers.
        anchor: Where they were together, each part at its last sync.
        velocity: The outer momentum.
    """

    params: Any
    state: Any
    anchor: Any
    velocity: Any


def train(sketch: Sketch, size: Size, corpus: data.Corpus) -> dict[str, Any]:
    """Trains; returns the loss, the percent of the bytes, and syncs of each part."""
    run = Run("muon", RATE, steps=sketch.steps, seed=sketch.seed)
    run = run.but(replicas=sketch.replicas)
    gpt = simulate.transformer(size, corpus)
    params = simulate.parameters(gpt, run, size)
    tx = local_optimizer(sketch, params)
    start = simulate.on_replicas((params, tx.init(params)), sketch.replicas)
    replicas = Replicas(*start, params, optax.tree.zeros_like(params))

    @jax.jit
    def step(replicas: Replicas, batch: jax.Array) -> Replicas:
        _, gradients = simulate.losses_and_gradients(
            gpt, replicas.params, batch, size.at_once
        )
        if sketch.synchronous:
            gradients = mean(gradients)
        updates, state = jax.vmap(tx.update)(gradients, replicas.state, replicas.params)
        params = optax.apply_updates(replicas.params, updates)
        return replicas._replace(params=params, state=state)

    exchange = Exchange(sketch, params)
    for number in range(1, sketch.steps + 1):
        replicas = step(replicas, simulate.batch_of(run, size, corpus, number))
        replicas = exchange(replicas, number)
    return {
        "loss": simulate.evaluation(gpt, size, corpus)(replicas.params),
        "percent": 100 * exchange.sent / sketch.steps,
        "syncs": exchange.syncs,
    }


def local_optimizer(
    sketch: Sketch, params: optax.Params
) -> optax.GradientTransformation:
    """Muon for one replica, of two momenta where the sketch has a slow one."""
    rate = optimizers.schedule(Run("muon", RATE, steps=sketch.steps))
    rising = optax.linear_schedule(*MOMENTA, sketch.steps)
    numbers = cd.default_dimension_numbers(params)
    muon = functools.partial(
        optax.contrib.muon,
        rate,
        adam_b2=0.95,
        adam_learning_rate=rate,
        muon_weight_dimension_numbers=numbers,
    )
    if not sketch.slow:
        return optax.inject_hyperparams(lambda beta: muon(beta=beta))(beta=rising)
    matrices = jax.tree.map(lambda _, found: found is not None, params, numbers)
    mixed = optax.masked(two_momenta(rising, sketch.slow), matrices)
    return optax.chain(mixed, muon(beta=0.0, nesterov=False))


class TwoMomenta(NamedTuple):
    """Two averages of the gradients, and the weight of zero in the first."""

    count: jax.Array
    fast: Any
    slow_momentum: Any
    left: jax.Array


def two_momenta(decay: optax.Schedule, share: float) -> optax.GradientTransformation:
    """A fast momentum with Nesterov's step, and a share of a slow one."""

    def init(params):
        zeros = optax.tree.zeros_like(params)
        return TwoMomenta(jnp.zeros([], jnp.int32), zeros, zeros, jnp.ones([]))

    def update(gradients, state, params=None):
        del params
        beta, count = decay(state.count), state.count + 1
        fast = optax.incremental_update(gradients, state.fast, 1 - beta)
        slow = optax.incremental_update(gradients, state.slow_momentum, 1 - SLOW)
        left = beta * state.left
        unbiased = optax.tree.scale(1 / (1 - left), fast)
        ahead = optax.incremental_update(gradients, unbiased, 1 - beta)
        slowly = optax.tree.bias_correction(slow, SLOW, count)
        mixed = optax.incremental_update(slowly, ahead, share)
        return mixed, TwoMomenta(count, fast, slow, left)

    return optax.GradientTransformation(init, update)


def mean(tree: Any) -> Any:
    """Every replica with the mean over all."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.mean(x, 0), x.shape), tree)


class Exchange:
    """What replicas send each other after a step, and how much that is.

    Args:
        sketch: Says when.
        params: Of one replica.

    Attributes:
        sent: So far, as a share of an all-reduce of everything.
        syncs: Of each part.
    """

    def __init__(self, sketch: Sketch, params: optax.Params):
        self.sketch = sketch
        self.parts = [jax.tree.map(lambda _: True, params)]
        if sketch.fragments != "none":
            self.parts = parts_by_kind(params)
        everything = optax.tree.size(params)
        self.shares = [_size(part, params) / everything for part in self.parts]
        self.sent, self.syncs, self.paid = 0.0, [0] * len(self.parts), 0.0
        self._together = [self._sync_of(part) for part in self.parts]
        self._apart = jax.jit(functools.partial(signals, self.parts))

    def __call__(self, replicas: Replicas, number: int) -> Replicas:
        """The replicas after the exchanges of a step, counted from 1."""
        sketch = self.sketch
        if sketch.synchronous:
            self.sent += 1
            return replicas
        if number == sketch.steps:
            for part in range(len(self.parts)):
                replicas = self._sync(replicas, part)
            return replicas
        if sketch.fragments != "none":
            self.paid += 1 / sketch.every
            while (part := self._wanted(replicas)) is not None:
                replicas = self._sync(replicas, part)
                self.paid -= self.shares[part]
            return replicas
        if sketch.every and number % sketch.every == 0:
            return self._sync(replicas, 0)
        if sketch.pairs and number % sketch.pairs == 0:
            return replicas._replace(params=self._in_pairs(replicas.params, number))
        return replicas

    def _wanted(self, replicas: Replicas) -> int | None:
        """The part that is next, if its bytes are paid for."""
        if self.sketch.fragments == "in turn":
            part = sum(self.syncs) % len(self.parts)
        else:
            found = self._apart(replicas.params, replicas.anchor)
            part = int(np.argmax(found[self.sketch.fragments]))
        return part if self.paid >= self.shares[part] else None

    def _sync(self, replicas: Replicas, part: int) -> Replicas:
        self.sent += self.shares[part] * (2 if self.sketch.shared else 1)
        self.syncs[part] += 1
        return self._together[part](replicas)

    def _sync_of(self, part: Part) -> Callable[[Replicas], Replicas]:
        together = functools.partial(sync, part, self.sketch.outer_momentum)
        shared = self.sketch.shared

        def sync_part(replicas):
            replicas = together(replicas)
            if not shared:
                return replicas
            slow = mean(optax.tree.get(replicas.state, "slow_momentum"))
            state = optax.tree.set(replicas.state, slow_momentum=slow)
            return replicas._replace(state=state)

        return jax.jit(sync_part)

    def _in_pairs(self, params: Any, number: int) -> Any:
        """Each replica with its partner's mean; partners differ in one binary digit."""
        replicas, digit = self.sketch.replicas, 0
        if self.sketch.partners == "changing":
            digit = (number // self.sketch.pairs - 1) % (replicas.bit_length() - 1)
            # Once what it has, and of an all-reduce 2 (n - 1) / n.
            self.sent += replicas / (2 * (replicas - 1))
        partner = np.arange(replicas) ^ (1 << digit)
        return jax.tree.map(lambda x: (x + x[partner]) / 2, params)


def sync(part: Part, momentum: float, replicas: Replicas) -> Replicas:
    """A part's anchor takes Nesterov's step by the mean drift, and all go there."""

    def move(inside, x, anchor, velocity):
        if not inside:
            return x, anchor, velocity
        drift = jnp.mean(x, 0) - anchor
        velocity = momentum * velocity + drift
        anchor = anchor + drift + momentum * velocity
        return jnp.broadcast_to(anchor, x.shape), anchor, velocity

    moved = jax.tree.map(move, part, *replicas[:1], *replicas[2:])
    params, anchor, velocity = jax.tree.transpose(
        jax.tree.structure(part), jax.tree.structure((0, 0, 0)), moved
    )
    return Replicas(params, replicas.state, anchor, velocity)


def parts_by_kind(params: optax.Params) -> list[Part]:
    """Attention, feed-forward, and the rest."""
    wanted = lambda *words: jax.tree.map_with_path(  # noqa: E731
        lambda path, _: any(word in jax.tree_util.keystr(path) for word in words),
        params,
    )
    attention, forward = wanted("['attention']"), wanted("['up']", "['down']")
    rest = jax.tree.map(lambda x, y: not (x or y), attention, forward)
    return [attention, forward, rest]


def _size(part: Part, params: optax.Params) -> int:
    inside = jax.tree.map(lambda inside, x: x.size * inside, part, params)
    return sum(jax.tree.leaves(inside))


def signals(parts: list[Part], params: Any, anchor: Any) -> dict[str, jax.Array]:
    """How far replicas are from the anchor and from each other, of each part.

    Returns:
        'drift' and 'divergence', root mean squares over the replicas relative to the
        anchor's norm, float32 [parts].
    """

    def squares(part):
        def of_one(inside, x, anchor):
            if not inside:
                return jnp.zeros(3)
            apart = x - jnp.mean(x, 0, keepdims=True)
            each = [jnp.sum((x - anchor[None]) ** 2), jnp.sum(apart**2)]
            return jnp.stack([*each, len(x) * jnp.sum(anchor**2)])

        return sum(jax.tree.leaves(jax.tree.map(of_one, part, params, anchor)))

    found = jnp.sqrt(jnp.stack([squares(part) for part in parts]))
    return {
        "drift": found[:, 0] / found[:, 2],
        "divergence": found[:, 1] / found[:, 2],
    }
