"""MaxText's DiLoCo, with drjax, against `presets.diloco`.

`build_diloco_state` and `build_diloco_train_step` of `trainers/diloco/diloco.py` run as
they are: replicas, the period, the pseudo-gradient, its mean and the outer step are
theirs. The step that they wrap is the user's there too: the study's gradient and
AdamW (`nnx.Optimizer`) with our preset's values. No mesh, all replicas on one device.

MaxText takes Python >= 3.12, and its wheel names none of what it imports. Make the
environment that `examples/ports/maxtext/README.md` lists (it has drjax 0.2.1), then

    ENV/bin/python -m pip install . flax==0.12.8
    ENV/bin/python -m pip install --no-deps maxtext==0.2.5      # Apache 2.0
    ENV/bin/python benchmarks/peers/maxtext_diloco.py

With `--source` the package is taken from a directory instead.
"""

import argparse
import importlib
import logging
import sys
import types
from pathlib import Path

import jax
import numpy as np
import optax
import race
import simulate
from flax import nnx

import curvadion_jax as cd

RATE, PERIOD, OUTER_RATE, OUTER_MOMENTUM = 0.01, 30, 0.7, 0.9
SETTING = f"DiLoCo, AdamW {RATE}, every {PERIOD}, outer {OUTER_RATE} {OUTER_MOMENTUM}"


class _Parameters(nnx.Module):
    """A model of which only the parameters matter."""

    def __init__(self, params):
        self.tree = nnx.data(jax.tree.map(nnx.Param, params))


class Theirs:
    """`DiLoCoTrainState` and the step that MaxText makes of a local one."""

    def __init__(self, task: race.Task, source: Path | None):
        if source is not None:
            sys.path.insert(0, str(source))
        logging.getLogger("absl").setLevel(logging.ERROR)  # drjax's, on the mesh
        theirs = importlib.import_module("maxtext.trainers.diloco.diloco")
        states = importlib.import_module("maxtext.common.train_state_nnx")
        config = types.SimpleNamespace(
            num_diloco_replicas=task.mesh.replicas,
            diloco_sync_period=PERIOD,
            diloco_outer_lr=OUTER_RATE,
            diloco_outer_momentum=OUTER_MOMENTUM,
            enable_streaming_diloco=False,
        )
        rate = simulate.schedule(RATE, task.steps)
        adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
        model = _Parameters(task.params)
        start = states.TrainStateNNX(model, nnx.Optimizer(model, adamw, wrt=nnx.Param))
        graph, leaves = nnx.split(start)
        self._state, _ = theirs.build_diloco_state(config, lambda: leaves)

        def local_step(leaves, batch, key):
            del key
            state = nnx.merge(graph, leaves)
            params = nnx.to_pure_dict(nnx.state(state.model, nnx.Param))["tree"]
            one = jax.tree.map(lambda x: x[None], params)
            gradient = jax.tree.map(lambda x: x[0], task.gradients(one, batch[None]))
            of_model = nnx.state(state.model, nnx.Param)
            nnx.replace_by_pure_dict(of_model, {"tree": gradient})
            state.apply_gradients(of_model)
            return nnx.state(state), {}

        self._step = jax.jit(theirs.build_diloco_train_step(config, local_step))

    @property
    def params(self):
        """Those of all replicas."""
        of_model = nnx.state(self._state.inner_state.model, nnx.Param)
        return nnx.to_pure_dict(of_model)["tree"]

    def step(self, number: int, batch: np.ndarray) -> None:
        """A step of every replica."""
        del number
        self._state, _ = self._step(self._state, batch, None)


def _ours(task: race.Task) -> race.Ours:
    rate = simulate.schedule(RATE, task.steps)
    tx = cd.presets.diloco(
        rate,
        k=PERIOD,
        outer_learning_rate=OUTER_RATE,
        outer_momentum=OUTER_MOMENTUM,
        mesh=task.mesh,
    )
    return race.Ours(task, tx)


def _trainers(task: race.Task, options: argparse.Namespace) -> dict[str, race.Trainer]:
    return {"ours": _ours(task), "theirs": Theirs(task, options.source)}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, help="directory with `maxtext` in it")


if __name__ == "__main__":
    race.main(
        __doc__,
        "MaxText 0.2.5, trainers/diloco/diloco.py",
        SETTING,
        ("drjax", "flax", "jax", "optax", "numpy"),
        _trainers,
        _arguments,
    )
