"""Small modules in place of TensorFlow, TFDS and CLU.

The codebases read data sets with them and write metrics; neither is what is tried here.
"""

import contextlib
import importlib.machinery
import os
import sys
import types
from typing import Any

import jax


class Writer:
    """A CLU metric writer that keeps the scalars.

    Attributes:
      scalars: name -> list of (step, value).
    """

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def write_scalars(self, step: int, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            self.scalars.setdefault(name, []).append((int(step), float(value)))

    def last(self, *names: str) -> dict[str, float]:
        """The last value of these scalars, of which AdamW writes none."""
        return {x: self.scalars[x][-1][1] for x in names if x in self.scalars}

    def ignore(self, *args: Any, **arguments: Any) -> None:
        """Hyperparameters, texts and `flush` are not kept."""

    write_hparams = write_texts = flush = ignore


class Progress:
    """CLU's periodic actions, called after every step; nothing is reported here."""

    def __init__(self, **arguments: Any) -> None:
        pass

    def __call__(self, step: int, time: float | None = None) -> None:
        # CPU devices that are many steps behind each other wait until XLA gives up.
        jax.block_until_ready(jax.live_arrays())

    def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def install() -> Writer:
    """Puts the modules in place, and returns the writer that is written to."""
    import flax.io  # looks for TensorFlow before this one is there

    del flax
    writer = Writer()
    module("clu")
    module(
        "clu.metric_writers",
        create_default_writer=lambda *_, **__: writer,
        ensure_flushes=lambda _: contextlib.nullcontext(),
    )
    module("clu.periodic_actions", ReportProgress=Progress, Profile=Progress)
    files = types.SimpleNamespace(
        makedirs=lambda path: os.makedirs(path, exist_ok=True)
    )
    data = types.SimpleNamespace(Dataset=Any)
    module("tensorflow", io=types.SimpleNamespace(gfile=files), data=data)
    module("tensorflow_datasets")
    module("sentencepiece", SentencePieceProcessor=Any)
    return writer


def module(name: str, **attributes: Any) -> None:
    """A module of that name, with these attributes, as if installed."""
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(attributes)
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)
