"""SparseLoCo as its authors' `templar` runs it, against our parts set up alike.

`prepare_gradient_dict` and `outer_step` of `src/tplr/neurons.py`, with the chunks, the
largest elements and the 2 bits of `src/tplr/compress.py`, run as they are: error
feedback, compression, the mean, the clip at the median norm, and SGD as the outer step.
The messages, which go through a bucket there, are handed over in memory, and what only
logs or talks to a network (`wandb`, `tplr/__init__.py`) is left out. PyTorch's AdamW
steps the replicas; its rate and schedule are ours, and gradients are not clipped.

    git clone https://github.com/tplr-ai/templar TEMPLAR       # MIT licence
    git -C TEMPLAR checkout c2397ac524c9d9de550a2a126ed37505d090d69f
    python -m venv ENV
    ENV/bin/python -m pip install . flax==0.12.8 torch==2.13.0 einops==0.8.2 \
        --extra-index-url https://download.pytorch.org/whl/cpu
    ENV/bin/python benchmarks/peers/templar_sparseloco.py --templar TEMPLAR

`--settings` chooses: 'theirs' has the values of our row (128 of each 4,096 elements,
and nothing of error feedback forgotten); two more forget 5% of the error feedback at
each sync, as they do, and keep their 64 elements. In these an element's mean is over
the replicas that sent it. 'theirs, mean of all' divides the sum by the number of
replicas instead, as the paper's formula and ours do.
"""

import argparse
import importlib
import logging
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import optax
import race
from modules import Modules

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

PERIOD, CHUNK, BINS, RANGE = 6, 64, 4, 6
OURS = {"kept": 128, "decay": 1.0}
SETTINGS = {
    "theirs": OURS,
    "theirs, error feedback times 0.95": OURS | {"decay": 0.95},
    "theirs, that and 64 kept": {"kept": 64, "decay": 0.95},
    "theirs, mean of all": OURS | {"of_all": True},
}


def load(source: Path) -> tuple[Any, Any, Any]:
    """torch, and their `compress` and `neurons` without their package's rest."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    package = types.ModuleType("tplr")
    package.__path__ = [str(source / "src" / "tplr")]
    package.logger = logging.getLogger("tplr")
    wandb = types.ModuleType("wandb.sdk.wandb_run")
    wandb.Run = object
    sys.modules |= {"tplr": package, "wandb.sdk.wandb_run": wandb}
    compress = importlib.import_module("tplr.compress")
    package.compress = compress
    return torch, compress, importlib.import_module("tplr.neurons")


class Theirs:
    """Miners, a replica each, and the outer step that all of them take."""

    def __init__(
        self,
        task: race.Task,
        source: Path,
        rate: float,
        kept: int,
        decay: float,
        of_all: bool = False,
    ):
        self._torch, compress, self._neurons = load(source)
        torch = self._torch
        compressor = compress.TopKCompressor
        if of_all:
            compressor = _of_all(compressor)
        self._own = Modules(task, rate)
        self._miners, self._anchors = [], []
        hparams = types.SimpleNamespace(
            outer_learning_rate=1.0,
            use_dct=False,
            topk_compression=kept,
            momentum_decay=decay,
        )
        for model in self._own.modules:
            names = [name for name, _ in model.named_parameters()]
            self._miners.append(
                types.SimpleNamespace(
                    model=model,
                    hparams=hparams,
                    owned_params=set(names),
                    error_feedback=dict.fromkeys(names),
                    transformer=compress.ChunkingTransformer(model, CHUNK),
                    compressor=compressor(
                        use_quantization=True,
                        quantization_bins=BINS,
                        quantization_range=RANGE,
                    ),
                    outer=torch.optim.SGD(model.parameters(), lr=1.0),
                )
            )
            self._anchors.append(_copies(model))
        self.params = self._own.params()

    def step(self, number: int, batch: np.ndarray) -> None:
        """A step of every replica, and what follows on every sixth."""
        self._own.give(self.params, number, batch)
        for adam in self._own.adams:
            adam.step()
        if number % PERIOD == 0:
            self._synchronise(number)
        self.params = self._own.params()

    def _synchronise(self, number: int) -> None:
        messages = []
        for miner, anchor in zip(self._miners, self._anchors, strict=True):
            with self._torch.no_grad():  # the pseudo-gradient, and back to the anchor
                for name, parameter in miner.model.named_parameters():
                    parameter.grad = anchor[name] - parameter
                    parameter.copy_(anchor[name])
            messages.append(self._neurons.prepare_gradient_dict(miner, number))
        keys = messages[0][0].keys() - {"metadata"}
        together = {key: [sent[key] for sent, _, _ in messages] for key in keys}
        for index, (miner, (_, shapes, sizes)) in enumerate(
            zip(self._miners, messages, strict=True)
        ):
            self._neurons.outer_step(
                miner.model,
                miner.outer,
                gather_result=types.SimpleNamespace(state_dict=together),
                transformer=miner.transformer,
                compressor=miner.compressor,
                xshapes=shapes,
                totalks=sizes,
                device="cpu",
                is_master=True,
                world_size=1,
            )
            self._anchors[index] = _copies(miner.model)


def _of_all(compressor: type) -> type:
    """Theirs, with the mean over all replicas in place of that over the senders."""

    class OfAll(compressor):
        def batch_decompress(self, p, idx, val, xshape, totalk, **unused):
            del unused
            of_each = [
                self.decompress(p, i, v, xshape, totalk)
                for i, v in zip(idx, val, strict=True)
            ]
            return sum(of_each) / len(of_each)

    return OfAll


def _copies(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def ours(task: race.Task, rate: float) -> race.Ours:
    """The study's SparseLoCo-style row, with the same period."""
    rates = race.schedule(rate, task.run.steps)
    tx = cd.adaptive_sync(
        optax.adamw(rates, b1=0.9, b2=0.95, weight_decay=0.0),
        triggers.every_k(PERIOD),
        synchronizers.reconcile(
            compressor=compressors.top_k(1 / 32, 2), momentum=False
        ),
        race.AXIS,
    )
    return race.Ours(task, tx)


def _trainers(task: race.Task, options: argparse.Namespace) -> dict[str, race.Trainer]:
    trainers: dict[str, race.Trainer] = {"ours": ours(task, options.rate)}
    for name in options.settings:
        trainers[name] = Theirs(task, options.templar, options.rate, **SETTINGS[name])
    return trainers


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--templar", type=Path, required=True, help="their repository")
    parser.add_argument("--rate", type=float, default=0.04, help="AdamW's")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["theirs"])


if __name__ == "__main__":
    race.main(
        __doc__,
        "tplr-ai/templar c2397ac, src/tplr",
        lambda options: (
            f"SparseLoCo, AdamW {options.rate}, every {PERIOD}, top 1/32 in 2 bits, "
            "outer rate 1"
        ),
        ("torch", "einops", "jax", "optax", "numpy"),
        _trainers,
        _arguments,
    )
