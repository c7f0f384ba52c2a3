"""Steps of the authors' PyTorch code, which `optimizer_speed.py` times beside ours.

`dion_reference.py` of a clone of microsoft/dion runs as it is and compiled by torch
(which takes a C++ compiler and a minute), with its default orthonormalisation, on
separate matrices in torch's layout.
"""

import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Turn


def turns(
    clone: Path,
    params: dict,
    gradients: dict,
    ranks: Mapping[float, str],
    threads: int,
    **settings: float,
) -> dict[str, Turn]:
    """Steps of the authors' code, of ours by rank with these names."""
    sys.path.insert(0, str(clone))
    torch = importlib.import_module("torch")
    module = importlib.import_module("dion.dion_reference")
    torch.set_num_threads(threads)
    others = [name for name in params if name in ("embed", "head")]
    groups = [name for name in params if name not in others], others

    def turn(rank: float, compiled: bool) -> Turn:
        stance = "default" if compiled else "force_eager"

        def begin():
            parameters = _groups(torch, params, gradients, *groups)
            optimizer = module.Dion(parameters, rank_fraction=rank, **settings)

            def run():
                with torch.compiler.set_stance(stance):
                    optimizer.step()

            return run

        if compiled:
            begin()()  # compiles
        return begin

    return {
        name.replace("`dion`", "microsoft/dion in PyTorch") + how: turn(rank, compiled)
        for rank, name in ranks.items()
        for how, compiled in (("", False), (", compiled", True))
    }


def _groups(
    torch: Any, params: dict, gradients: dict, matrices: list, others: list
) -> list[dict[str, Any]]:
    """New parameters that have these gradients: those of Dion, and those of AdamW."""

    def parameters(names):
        both = (_tensors(torch, x, names) for x in (params, gradients))
        for value, gradient in zip(*both, strict=True):
            parameter = torch.nn.Parameter(value)
            parameter.grad = gradient
            yield parameter

    groups: list[dict[str, Any]] = [{"params": [*parameters(matrices)]}]
    if others:
        groups.append({"params": [*parameters(others)], "algorithm": "adamw"})
    return groups


def _tensors(torch: Any, arrays: dict, names: Iterable[str]) -> list:
    """Separate matrices in torch's layout, (fan_out, fan_in)."""
    stacks = [np.asarray(arrays[n]) for n in names]
    parts = [p for x in stacks for p in x.reshape(-1, *x.shape[-2:])]
    return [torch.from_numpy(np.ascontiguousarray(p.T)) for p in parts]
