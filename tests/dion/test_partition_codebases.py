"""The default rule on the parameters of codebases that people train with.

`parameter_trees` holds, of a small model of each, path -> [shape, axes]: the axes that
its own einsums sum over and produce, or null for embeddings, heads and vectors. Those
of MaxText are what its `get_muon_weight_dimension_numbers` says.
"""

import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from curvadion_jax import _partition

TREES = sorted((Path(__file__).parents[1] / "support/parameter_trees").glob("*.json"))


def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        *above, last = path.split("/")
        inner = tree
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return tree


def resolved(axes, ndim):
    return tuple(sorted(axis % ndim for axis in axes))


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_each_matrix_is_one(path):
    found = json.loads(path.read_text())
    params = nested({k: jnp.zeros(shape) for k, (shape, _) in found.items()})
    views = _partition.matrix_views(params)
    assert len(views) == len(found) > 8
    for name, (shape, axes) in found.items():
        view = views[name]
        if axes is None:
            assert view is None, name
            continue
        assert view is not None, name
        fan_in, fan_out = (resolved(each, len(shape)) for each in axes)
        assert (view.fan_in_axes, view.fan_out_axes) == (fan_in, fan_out), name


class EquinoxModel(eqx.Module):
    """A layer of each kind, and a stack of layers."""

    embedding: eqx.nn.Embedding
    wide: eqx.nn.Linear
    normalised: eqx.nn.SpectralNorm
    picture: eqx.nn.Conv1d
    cell: eqx.nn.GRUCell
    norm: eqx.nn.LayerNorm
    stack: eqx.nn.Linear

    def __init__(self, key):
        linear = lambda key: eqx.nn.Linear(8, 24, key=key)
        self.embedding = eqx.nn.Embedding(11, 8, key=key)
        self.wide = linear(key)
        self.normalised = eqx.nn.SpectralNorm(linear(key), "weight", key=key)
        self.picture = eqx.nn.Conv1d(4, 6, 3, key=key)
        self.cell = eqx.nn.GRUCell(8, 5, key=key)
        self.norm = eqx.nn.LayerNorm((3, 8))
        self.stack = eqx.filter_vmap(linear)(jax.random.split(key, 3))


def equinox_params():
    model = EquinoxModel(jax.random.key(0))
    return eqx.filter(model, eqx.is_inexact_array)


def test_equinox_weights_are_fan_out_by_fan_in():
    views = _partition.matrix_views(equinox_params())
    sides = {k: (v.batch, v.fan_in, v.fan_out) for k, v in views.items() if v}
    assert sides == {
        "wide/weight": ((), 8, 24),
        "normalised/layer/weight": ((), 8, 24),
        "cell/weight_ih": ((), 8, 15),
        "cell/weight_hh": ((), 5, 15),
        "stack/weight": ((3,), 8, 24),
    }
    assert (views["wide/weight"].fan_in, views["wide/weight"].fan_out) == (8, 24)
