"""Optimizers side by side on the model, the data and the steps of the study.

What is compared starts with the same parameters and sees the same batches, and
gradients are JAX's for all of them: only the optimizer and what joins the replicas
differ. The model is smaller than that of `benchmarks/study`, and all of it float32.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_ROOT = Path(__file__).parents[2]
sys.path[1:1] = [
    str(_ROOT / place)
    for place in (".", "examples/char_lm", "benchmarks", "benchmarks/study")
]

import data  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import model  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import simulate  # noqa: E402
from simulate import Size  # noqa: E402

import curvadion_jax as cd  # noqa: E402

RESULTS = Path(__file__).with_name("results.jsonl")
SIZES = {"test": Size(1, 16, 1, 16, 2, 8), "cpu": Size(2, 64, 2, 64, 16)}
_AT = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200)


class Task:
    """What all that is compared have in common.

    Attributes:
        seed, steps: Of the run.
        mesh: Of the replicas, which share a device.
        params: What every replica starts with.
        gradients: (parameters, batch) -> gradients, all of them rows.
        loss: Held-out loss of the mean of all replicas' parameters.
    """

    def __init__(self, seed: int, steps: int, size: Size, corpus: data.Corpus):
        self.seed, self.steps = seed, steps
        self.mesh = cd.replicas.simulated(size.replicas)
        shape = (size.layers, size.width, size.heads)
        gpt = model.GPT(corpus.vocabulary, *shape, unroll=size.layers)
        self.params = simulate.parameters(gpt, seed)
        self.gradients = jax.jit(lambda p, batch: simulate.gradients_of(gpt, p, batch))
        self.loss = simulate.evaluation(gpt, size, corpus)
        self._batches = simulate.Batches(corpus, seed, size)

    def batch(self, number: int) -> np.ndarray:
        """What the replicas see on a step, counted from 1."""
        return self._batches.of(number - 1)


class Trainer(Protocol):
    """An optimizer with the parameters of all replicas."""

    params: Any  # rows

    def step(self, number: int, batch: np.ndarray) -> None:
        """A step of every replica, the steps counted from 1."""
        ...


class Ours:
    """An optimizer of this library for the mesh of the task.

    Args:
        task: The task.
        tx: The optimizer.
        nudge: Start with parameters that are one rounding away: how far such a run
            ends from one that is not nudged is how far two programs may end that
            differ in nothing but rounding.
    """

    def __init__(self, task: Task, tx: Any, nudge: bool = False):
        params = task.params
        if nudge:
            params = jax.tree.map(lambda x: x * np.float32(1 + 2.0**-23), params)
        self.params = cd.replicas.replicate(params, task.mesh)
        self._state = tx.init(self.params)

        def step(params, state, batch):
            updates, state = tx.update(task.gradients(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def step(self, number: int, batch: np.ndarray) -> None:
        """A step of every replica."""
        del number
        self.params, self._state = self._step(self.params, self._state, batch)


def race(
    task: Task, trainers: Mapping[str, Trainer], until: int | None = None
) -> dict[str, Any]:
    """Trains all; the first is what the others are compared with.

    Args:
        task: What they have in common.
        trainers: Optimizers by name.
        until: Step after which to stop; None is the last.

    Returns:
        'loss' by name; and 'distance' by name and step: the norm of the difference of
        the mean parameters over the norm of the first's.
    """
    first, *others = trainers
    distance: dict[str, dict[int, float]] = {name: {} for name in others}
    until = until or task.steps
    for number in range(1, until + 1):
        batch = task.batch(number)
        for trainer in trainers.values():
            trainer.step(number, batch)
        if number in {*_AT, until}:
            for name in others:
                distance[name][number] = relative_distance(
                    trainers[name].params, trainers[first].params
                )
            print(number, {n: f"{d[number]:.1e}" for n, d in distance.items()})
    loss = {name: task.loss(trainer.params) for name, trainer in trainers.items()}
    return {"loss": loss, "distance": distance}


def relative_distance(params: Any, reference: Any) -> float:
    """Norm of the difference of two means over replicas, over the reference's.

    Examples:
        >>> params = {"w": np.array([[3.0, 1.0], [1.0, 1.0]])}
        >>> print(f"{relative_distance(params, {'w': np.array([[1.0, 1.0]])}):.4f}")
        0.7071
    """
    mean = lambda x: np.mean(np.asarray(x, np.float64), axis=0)
    ours = jax.tree.map(mean, reference)
    apart = jax.tree.map(lambda x, y: mean(x) - y, params, ours)
    squares = lambda tree: sum(float(np.sum(x**2)) for x in jax.tree.leaves(tree))
    return (squares(apart) / squares(ours)) ** 0.5


def main(
    description: str,
    peer: str,
    setting: str,
    packages: Sequence[str],
    trainers: Callable[[Task, argparse.Namespace], dict[str, Trainer]],
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The program of a script: a line of results a seed.

    Args:
        description: Its help.
        peer: Whose code runs.
        setting: In words, what of it.
        packages: Whose versions are noted.
        trainers: What is compared, ours first.
        add_arguments: Adds the script's own; `source` is where the peer's code is.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--until", type=int, help="stop there; the rate is as before")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    add_arguments(parser)
    options = parser.parse_args()
    corpus = data.load(None)
    for seed in options.seeds:
        task = Task(seed, options.steps, SIZES[options.size], corpus)
        row = {
            "peer": peer,
            "setting": setting,
            "size": options.size,
            "seed": seed,
            "steps": options.steps,
            "until": options.until or options.steps,
            "replicas": task.mesh.replicas,
            **race(task, trainers(task, options), options.until),
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "python": platform.python_version(),
            "data": corpus.fingerprint,
            "date": datetime.date.today().isoformat(),
        }
        print(json.dumps(row["loss"]), flush=True)
        with options.results.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def rates(peak: float, steps: int) -> np.ndarray:
    """The study's learning rates, a number a step, float32."""
    return np.asarray(simulate.schedule(peak, steps)(jnp.arange(steps)))
