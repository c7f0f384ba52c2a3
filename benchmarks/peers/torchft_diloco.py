"""torchft's DiLoCo in PyTorch against `presets.diloco`.

`torchft.local_sgd.DiLoCo` runs as it is, one object a replica: it saves the parameters,
counts the local steps, makes the pseudo-gradient and takes the outer step. Its manager,
which makes process groups of machines, is replaced by one that averages over threads of
this process. Both optimizers are PyTorch's, with our preset's values.

    python -m venv ENV
    ENV/bin/python -m pip install . flax==0.12.8 torch==2.13.0 \
        torchft-nightly==2026.10.26 --extra-index-url https://download.pytorch.org/whl/cpu
    ENV/bin/python benchmarks/peers/torchft_diloco.py         # BSD 3-clause licence
"""

import argparse
import concurrent.futures
import importlib
import threading
from typing import Any

import diloco
import numpy as np
import race
from modules import Modules


class _Together:
    """What the managers of all replicas share: one mean at a time."""

    def __init__(self, replicas: int):
        self._barrier = threading.Barrier(replicas)
        self._parts: list[Any] = [None] * replicas

    def average(self, rank: int, tensor: Any) -> None:
        """Puts the mean over replicas into the tensor; all replicas call it."""
        self._parts[rank] = tensor.clone()
        self._barrier.wait(timeout=60)
        tensor.copy_(sum(self._parts) / len(self._parts))
        self._barrier.wait(timeout=60)


class _Done:
    def wait(self) -> None:
        pass


class _Manager:
    """What DiLoCo asks of `torchft.manager.Manager`, where nobody fails."""

    _use_async_quorum = False

    def __init__(self, rank: int, together: _Together):
        self._rank, self._together, self._step = rank, together, 0

    def allreduce(self, tensor: Any, should_quantize: bool = False) -> _Done:
        del should_quantize
        self._together.average(self._rank, tensor)
        return _Done()

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def start_quorum(self) -> None:
        pass

    def allow_state_dict_read(self) -> None:
        pass

    def disallow_state_dict_read(self) -> None:
        pass

    def register_state_dict_fn(self, *args: Any, **kwargs: Any) -> None:
        pass


class Theirs:
    """Replicas of torchft's DiLoCo, each stepped in a thread of its own."""

    def __init__(self, task: race.Task):
        torch = importlib.import_module("torch")
        local_sgd = importlib.import_module("torchft.local_sgd")
        torch.set_num_threads(1)
        self._own, replicas = Modules(task, diloco.RATE), task.run.replicas
        together = _Together(replicas)
        self._pool = concurrent.futures.ThreadPoolExecutor(replicas)
        pairs = zip(self._own.modules, self._own.adams, strict=True)
        for rank, (module, adam) in enumerate(pairs):
            outer = torch.optim.SGD(
                module.parameters(),
                diloco.OUTER_RATE,
                diloco.OUTER_MOMENTUM,
                nesterov=True,
            )
            manager = _Manager(rank, together)
            local_sgd.DiLoCo(manager, [module], adam, outer, diloco.PERIOD).__enter__()
        self.params = self._own.params()

    def step(self, number: int, batch: np.ndarray) -> None:
        """A step of every replica; every thirtieth ends with a sync."""
        self._own.give(self.params, number, batch)
        for _ in self._pool.map(lambda adam: adam.step(), self._own.adams):
            pass
        self.params = self._own.params()


def _trainers(task: race.Task, options: argparse.Namespace) -> dict[str, race.Trainer]:
    trainers = {"ours": diloco.ours(task), "theirs": Theirs(task)}
    if options.nudged:
        trainers["ours, nudged"] = diloco.ours(task, nudge=True)
    return trainers


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nudged", action="store_true", help="ours again, from one rounding away"
    )


if __name__ == "__main__":
    race.main(
        __doc__,
        "torchft-nightly 2026.10.26, local_sgd.DiLoCo",
        diloco.SETTING,
        ("torch", "torchft-nightly", "jax", "optax", "numpy"),
        _trainers,
        _arguments,
    )
