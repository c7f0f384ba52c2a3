"""microsoft/dion in PyTorch against `presets.synchronous_dion`.

`Dion` of `dion/dion_reference.py`, at full rank with its own defaults otherwise, steps
the matrices and, by its AdamW, all other parameters, with the mean of eight replicas'
gradients. The learning rate, its schedule, both momenta, AdamW's epsilon, no weight
decay and the first Q are ours. With `--controls` all are compared with ours without the
rule that a column of P along which the momentum has next to nothing (1e-5 of the whole)
moves nothing; a second run of that starts one rounding away.

    git clone https://github.com/microsoft/dion DION         # MIT licence
    git -C DION checkout 0a059a4542e5aa74b40dcd1dce363836c7afcd48
    python -m venv ENV
    ENV/bin/python -m pip install . flax==0.12.8 torch==2.13.0 \
        --extra-index-url https://download.pytorch.org/whl/cpu
    ENV/bin/python benchmarks/peers/microsoft_dion.py --dion DION
"""

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import layouts
import measuring
import numpy as np
import race
import simulate

import curvadion_jax as cd
from curvadion_jax.matrices import _power_iteration

RATE, MOMENTUM, EPSILON = 0.04, 0.9, 1e-7


class Theirs:
    """`Dion` on the mean of the replicas' gradients."""

    def __init__(self, task: race.Task, source: Path, q: dict[str, np.ndarray]):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when torch is imported
        sys.path.insert(0, str(source))
        self._torch = torch = importlib.import_module("torch")
        dion = importlib.import_module("dion.dion_reference")
        torch.set_num_threads(1)
        torch.manual_seed(task.seed)
        self._task, self._rates = task, race.rates(RATE, task.steps)
        self._parameters = {
            name: torch.nn.Parameter(torch.from_numpy(array.copy()))
            for name, array in layouts.split(task.params).items()
        }
        matrices = _matrices(task.params)
        groups = {True: [], False: []}
        for name, parameter in self._parameters.items():
            groups[name in matrices].append(parameter)
        others = {"algorithm": "adamw", "epsilon": EPSILON}
        self._optimizer = dion.Dion(
            [{"params": groups[True]}, {"params": groups[False], **others}],
            mu=MOMENTUM,
            weight_decay=0.0,
        )
        for name in q:
            parameter = self._parameters[name]
            state = self._optimizer.state[parameter]
            self._optimizer._init_opt_state_dion(parameter, state, 1.0, 1)
            state["Q"].copy_(torch.from_numpy(q[name].copy()))
        self._everywhere()

    def _everywhere(self) -> None:
        arrays = {n: p.detach().numpy() for n, p in self._parameters.items()}
        tree = layouts.join(arrays, self._task.params)
        self.params = cd.replicas.replicate(tree, self._task.mesh)

    def step(self, number: int, batch: np.ndarray) -> None:
        """A step of all replicas together."""
        gradients = self._task.gradients(self.params, batch)
        mean = jax.tree.map(lambda x: np.mean(np.asarray(x), axis=0), gradients)
        for name, array in layouts.split(mean).items():
            self._parameters[name].grad = self._torch.from_numpy(array)
        for group in self._optimizer.param_groups:
            group["lr"] = float(self._rates[number - 1])
        self._optimizer.step()
        self._everywhere()


def _matrices(params: Any) -> set[str]:
    """Names of what Dion steps here."""
    numbers = measuring.matrices(params)
    chosen = jax.tree.map(lambda x, n: x if n is not None else None, params, numbers)
    return set(layouts.split(chosen))


def _trainers(task: race.Task, options: argparse.Namespace) -> dict[str, race.Trainer]:
    tx = cd.presets.synchronous_dion(
        simulate.schedule(RATE, task.steps),
        rank=1.0,
        momentum=MOMENTUM,
        mesh=task.mesh,
    )
    rows = cd.replicas.replicate(task.params, task.mesh)
    q = _first_q(tx.init(rows).common.sync_state[0])
    ours, theirs = race.Ours(task, tx), Theirs(task, options.dion, q)
    if options.nudged:
        nudged = race.Ours(task, tx, nudge=True)
        return {"ours": ours, "theirs": theirs, "ours, nudged": nudged}
    if not options.controls:
        return {"ours": ours, "theirs": theirs}
    return {
        "ours, every column": _EveryColumn(task, tx),
        "theirs": theirs,
        "ours, every column, nudged": _EveryColumn(task, tx, nudge=True),
        "ours": ours,
    }


class _EveryColumn(race.Ours):
    """Ours without its rule for columns that hold next to nothing."""

    def step(self, number: int, batch: np.ndarray) -> None:
        with mock.patch.object(_power_iteration, "unit_columns", _unit_columns):
            super().step(number, batch)  # traced on the first


def _unit_columns(R: jax.Array, Q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """R with unit columns; Q where all of R is zero, as in microsoft/dion."""
    length = jnp.linalg.norm(R, axis=-2, keepdims=True)
    found = jnp.any(length > 0, axis=-1, keepdims=True)
    unit = R / (length + 1e-8)
    return jnp.where(found, unit, Q), jnp.broadcast_to(found, length.shape)


def _first_q(tree: Any) -> dict[str, np.ndarray]:
    """Q by name; it is written alike in both layouts."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    names = ["/".join(key.key for key in path) for path, _ in named]
    return {
        f"{name}/{number}": np.asarray(layer)
        for name, (_, layers) in zip(names, named, strict=True)
        for number, layer in enumerate(layers)
    }


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dion", type=Path, required=True, help="their repository")
    parser.add_argument("--nudged", action="store_true", help="ours again, nudged")
    parser.add_argument("--controls", action="store_true", help="two more of ours")


if __name__ == "__main__":
    race.main(
        __doc__,
        "microsoft/dion 0a059a4, dion_reference.py",
        f"synchronous Dion, full rank, rate {RATE}, momentum {MOMENTUM}",
        ("torch", "jax", "optax", "numpy"),
        _trainers,
        _arguments,
    )
