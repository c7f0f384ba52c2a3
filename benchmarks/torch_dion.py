"""Steps of the authors' PyTorch code, which `optimizer_speed.py` times beside ours.

`dion_reference.py` of a clone of microsoft/dion runs compiled by torch (which takes a
C++ compiler and a minute) and as it is, with its default orthonormalisation, on
separate matrices in torch's layout.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Turn = Callable[[], Callable[[], None]]
"""Makes new arrays, and returns a function that takes one step and waits for it."""


def torch_names(ours: str) -> tuple[str, str]:
    """As it is and compiled, by the name of ours of the same rank."""
    name = ours.replace("`dion`", "microsoft/dion in PyTorch")
    return name, f"{name}, compiled"


def torch_turns(
    clone: Path,
    params: dict,
    gradients: dict,
    ranks: dict[str, float],
    threads: int,
    **settings: float,
) -> dict[str, Turn]:
    """Steps of the authors' code: name -> turn.

    Args:
      clone: folder of their repository.
      params: arrays by name; what is named embed or head goes to AdamW.
      gradients: of the parameters.
      ranks: name of ours -> fraction of the full rank.
      threads: that torch may use.
      **settings: other arguments of their `Dion`.
    """
    sys.path.insert(0, str(clone))
    torch = importlib.import_module("torch")
    module = importlib.import_module("dion.dion_reference")
    torch.set_num_threads(threads)
    others = [name for name in params if name in ("embed", "head")]
    taken = [name for name in params if name not in others]
    start = [_tensors(torch, params, names) for names in (taken, others)]
    given = [_tensors(torch, gradients, names) for names in (taken, others)]

    def turn(rank: float, compiled: bool) -> Turn:
        def begin():
            groups = _groups(torch, start, given)
            optimizer = module.Dion(groups, rank_fraction=rank, **settings)
            return lambda: _step(torch, optimizer, compiled)

        if compiled:
            begin()()  # compiles
        return begin

    return {
        name: turn(rank, compiled)
        for ours, rank in ranks.items()
        for name, compiled in zip(torch_names(ours), (False, True), strict=True)
    }


def _tensors(torch: Any, arrays: dict, names: Iterable[str]) -> list:
    """Separate matrices in torch's layout, (fan_out, fan_in)."""
    stacks = [np.asarray(arrays[n]) for n in names]
    parts = [p for x in stacks for p in x.reshape(-1, *x.shape[-2:])]
    return [torch.from_numpy(np.ascontiguousarray(p.T)) for p in parts]


def _groups(torch: Any, start: list, given: list) -> list[dict[str, Any]]:
    """New parameters that have these gradients: those of Dion, and those of AdamW."""
    copies = [[torch.nn.Parameter(x.clone()) for x in group] for group in start]
    for group, grads in zip(copies, given, strict=True):
        for parameter, gradient in zip(group, grads, strict=True):
            parameter.grad = gradient
    matrices, others = copies
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if others:
        groups.append({"params": others, "algorithm": "adamw"})
    return groups


def _step(torch: Any, optimizer: Any, compiled: bool) -> None:
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        optimizer.step()
