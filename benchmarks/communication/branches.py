"""What a sync brings: the same replicas go on with it and without it.

Replicas train locally and synchronise at random moments. At each of them the run
branches: both branches see the same batches, and differ in that one sync. What the
replicas looked like at that moment is written beside what the sync then brought.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import data
import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import simulate
from optimizers import AXIS, optimizer, schedule
from runs import Run, words
from sizes import Size

import curvadion_jax as cd

# Steps after a sync until the branches are compared, and steps in a recent mean.
HORIZON, RECENT = 5, 4
# Two triggers that say the same on every step that is taken.
_QUIET, _SYNC = "every 1000000", "always"


class Now(NamedTuple):
    """Replicas between two steps.

    Attributes:
        params, state: Parameters and optimizer state, with a leading replica axis.
        seen: What `observe` saw in the step before, and its training loss.
        changes: Largest relative momentum change of each step so far.
    """

    params: Any
    state: Any
    seen: dict[str, jax.Array]
    changes: tuple[jax.Array, ...]


def moments(run: Run) -> list[int]:
    """Numbers of the steps that synchronise, from 0, and one at which training ends.

    The first steps are left out: kernels that start at zero keep the momenta of others
    at zero, and relative to nothing any change is infinite.

    Args:
        run: Its trigger is 'random SHORTEST LONGEST', the smallest and the largest
            number of steps from one sync to the next.

    Raises:
        ValueError: the run is too short for one.
    """
    shortest, longest = map(int, words(run.trigger)[1])
    random = np.random.default_rng((run.seed, shortest, longest))
    gaps = random.integers(shortest, longest + 1, run.steps // shortest)
    # The very last step synchronises in every run of the study: it is not taken.
    end = run.steps - HORIZON - 1
    found = [moment for moment in (RECENT + np.cumsum(gaps)).tolist() if moment < end]
    if not found:
        raise ValueError(f"{run.steps} steps are too few for a sync: give more")
    return [*found, run.steps]


def observe(
    gradients: Any, params: Any, momentum: Any, anchor: Any
) -> dict[str, jax.Array]:
    """The candidate signals of one step, before it is taken.

    Args:
        gradients: Of this step.
        params: Before it.
        momentum: Stored, of Dion's matrices; `optax.MaskedNode` elsewhere.
        anchor: The parameters after the last sync.

    All have a leading replica axis, and matrices are on the last two axes.

    Returns:
        float32[] each. What the library's triggers look at is the largest over the
        replicas, as `adaptive_sync` would have it; `rmmc_of_mean` is of the mean
        momentum and gradient, which takes an all-reduce to know; the median is over
        replicas and matrices, divergence and agreement are ratios over the replicas,
        and the gradient norm is a mean.
    """
    changes = _momentum_changes(gradients, momentum)
    drift = jax.tree.map(jnp.subtract, params, anchor)
    mean_drift = jax.tree.map(lambda x: jnp.mean(x, axis=0), drift)
    distance = jax.vmap(optax.tree.norm)(drift)
    return {
        "rmmc_max": jnp.max(changes),
        "rmmc_median": jnp.median(changes),
        "rmmc_of_mean": jnp.max(_momentum_changes(*_means(gradients, momentum))),
        "drift": jnp.max(distance / jax.vmap(optax.tree.norm)(anchor)),
        "divergence": cd.replicas.divergence(params),
        "agreement": optax.tree.norm(mean_drift) / jnp.mean(distance),
        "gradient_norm": jnp.mean(jax.vmap(optax.tree.norm)(gradients)),
    }


def _means(*trees: Any) -> Any:
    """Their means over the replicas, as if of one replica."""
    return jax.tree.map(lambda x: jnp.mean(x, axis=0, keepdims=True), trees)


def _momentum_changes(gradients: Any, momentum: Any) -> jax.Array:
    """| |M + G| - |M| | / |M| of every matrix, [replicas, matrices]."""
    norms = lambda x: jnp.linalg.norm(x, axis=(-2, -1)).reshape(x.shape[0], -1)  # noqa: E731
    masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    kept = jax.tree.leaves(momentum, is_leaf=masked)
    pairs = zip(kept, jax.tree.leaves(gradients), strict=True)
    changes = [
        jnp.abs(norms(m + g) - norms(m)) / norms(m) for m, g in pairs if not masked(m)
    ]
    return jnp.concatenate(changes, axis=1)


class Replicas:
    """The simulated replicas of a run, of any seed, in two programs.

    Args:
        run: Inner optimizer, synchronizer and steps; `reconcile` keeps the anchor.
        size: The model and the data.
        corpus: The text.
    """

    def __init__(self, run: Run, size: Size, corpus: data.Corpus):
        self.run, self.size, self.corpus = run, size, corpus
        self.gpt = simulate.transformer(size, corpus)
        shapes = jax.eval_shape(lambda: simulate.parameters(self.gpt, run, size))
        self._optimizers = {
            sync: optimizer(run.but(trigger=_SYNC if sync else _QUIET), shapes)
            for sync in (False, True)
        }
        self._steps = {sync: self._program(sync) for sync in (False, True)}
        held_out = corpus.validation_batch(0, 1, size.evaluation, size.length)
        self._loss = jax.jit(lambda params, part: self._next_token(params, part))
        self._losses = jax.jit(
            lambda params, parts: jax.lax.map(
                lambda one: self._next_token(*one), (params, parts)
            )
        )
        self._held_out = held_out
        # To every replica an even part of the same sequences, from all over the text.
        self._parts = np.stack(
            [held_out[i :: run.replicas] for i in range(run.replicas)]
        )

    def start(self, seed: int) -> Now:
        """All replicas at the same initial parameters."""
        params = simulate.parameters(self.gpt, self.run.but(seed=seed), self.size)
        both = params, self._optimizers[False].init(params)
        return Now(*simulate.on_replicas(both, self.run.replicas), {}, ())

    def step(self, now: Now, seed: int, number: int, sync: bool = False) -> Now:
        """The replicas after step `number`, counted from 0."""
        run = self.run.but(seed=seed)
        batch = simulate.batch_of(run, self.size, self.corpus, number)
        params, state, seen = self._steps[sync](now.params, now.state, batch)
        return Now(params, state, seen, (*now.changes, seen["rmmc_max"]))

    def quiet(self, now: Now, seed: int, first: int, end: int) -> Now:
        """The replicas after steps `first` to `end - 1` without a sync."""
        for number in range(first, end):
            now = self.step(now, seed, number)
        return now

    def mean_loss(self, now: Now) -> float:
        """Held-out loss of the mean of the replicas, in nats a token."""
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), now.params)
        return float(self._loss(mean, self._held_out))

    def single_loss(self, now: Now) -> float:
        """Mean held-out loss of single replicas, each on its part of the text."""
        return float(np.mean(self._losses(now.params, self._parts)))

    def _next_token(self, params, batch):
        return model.next_token_loss(self.gpt, params, batch)

    def _program(self, sync: bool):
        update = jax.vmap(self._optimizers[sync].update, axis_name=AXIS)

        def step(params, state, batch):
            losses, gradients = simulate.losses_and_gradients(
                self.gpt, params, batch, self.size.at_once
            )
            momentum = optax.tree.get(state.inner_state, "momentum")
            seen = observe(gradients, params, momentum, state.sync_state.anchor)
            updates, state = update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            return params, state, seen | {"training_loss": jnp.mean(losses)}

        return jax.jit(step)


def measure(
    replicas: Replicas, seed: int, done: Collection[int] = ()
) -> Iterator[dict[str, Any]]:
    """A row for every sync of a run, as it comes.

    Args:
        replicas: Of the run.
        seed: Of the parameters, the order of the data and the moments.
        done: Moments whose rows are there already; training goes on through them.

    Yields:
        The run, the moment and the signals at it, and held-out losses: `single` and
        `mean` of the replicas after the step without the sync, `anchor` after the step
        with it, `mean_later` and `anchor_later` of the mean of the replicas in the two
        branches `HORIZON` quiet steps later.
    """
    run = replicas.run.but(seed=seed)
    times, rate = moments(run), schedule(run)
    now, begin, last = replicas.start(seed), 0, -1
    for moment, following in itertools.pairwise(times):
        now = replicas.quiet(now, seed, begin, moment)
        together = replicas.step(now, seed, moment, sync=True)
        begin = moment + 1
        if moment not in done:
            apart = replicas.step(now, seed, moment)
            end = begin + HORIZON
            later, apart_later = (
                replicas.quiet(each, seed, begin, end) for each in (together, apart)
            )
            yield {
                "run": dataclasses.asdict(run),
                "step": moment,
                "learning_rate": float(rate(moment)),
                "quiet_steps": moment - last - 1,
                **{name: float(value) for name, value in apart.seen.items()},
                "rmmc_recent": float(np.mean(apart.changes[-RECENT:])),
                "single": replicas.single_loss(apart),
                "mean": replicas.mean_loss(apart),
                "anchor": replicas.mean_loss(together),
                "mean_later": replicas.mean_loss(apart_later),
                "anchor_later": replicas.mean_loss(later),
            }
            if end <= following:
                together, begin = later, end
        now, last = together, moment
