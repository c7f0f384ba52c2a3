"""The parameters as PyTorch has them: one array a layer, kernels (fan_out, fan_in)."""

from typing import Any

import jax
import numpy as np

_STACKED, _TURNED = "blocks", "kernel"


def split(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by path of the parameter, and number of the layer where it has several.

    Examples:
        >>> split({"blocks": {"up": {"kernel": np.zeros((1, 2, 3))}}})["blocks/up/kernel/0"].shape
        (3, 2)
    """  # noqa: E501
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        layers = np.asarray(leaf)
        if not name.startswith(_STACKED):
            found[name] = _turned(name, layers)
            continue
        for number, layer in enumerate(layers):
            found[f"{name}/{number}"] = _turned(name, layer)
    return found


def join(arrays: dict[str, np.ndarray], like: Any) -> Any:
    """The tree of which `split` made these arrays."""

    def leaf(path, old):
        name = _name(path)
        if not name.startswith(_STACKED):
            return _turned(name, arrays[name])
        layers = [arrays[f"{name}/{number}"] for number in range(len(old))]
        return np.stack([_turned(name, layer) for layer in layers])

    return jax.tree_util.tree_map_with_path(leaf, like)


def _name(path: Any) -> str:
    return "/".join(key.key for key in path)


def _turned(name: str, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T) if name.endswith(_TURNED) else array
