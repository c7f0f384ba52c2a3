"""The default rule on the parameters of codebases that people train with.

`parameter_trees` holds, of a small model of each, where its names and shapes are from,
and for each path `[shape]` of what is no matrix: vectors, tables, heads, convolutions;
or `[shape, [[reduction, output], ...]]` with the axes that its own products sum over
and produce, several where a fused kernel is one matrix or more. `"either"` after them
says that a matrix or none is right: routers, adapters, output layers of few classes.
`{0..2}` in a path stands for 0, 1 and 2. `modules` are nodes with attributes, not keys.
"""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import curvadion_jax as cd
from curvadion_jax import _two_optimizers, dimension_numbers

TREES = sorted((Path(__file__).parents[1] / "support/parameter_trees").glob("*.json"))
# Matrices that nothing tells: they are named in a warning, and AdamW trains them.
UNKNOWN = {
    "alphafold2": "outer_product_mean/output_w feat_2d_weights",
    "alphafold3_trunk": "msa_attention1/v_projection outer_product_mean/output_w",
    "axlearn_rnnt": "rnn/input_proj",
    "bv_uvim": "bottleneck_downsample bottleneck_upsample",
    "deepqmc_transpsiformer": "multi_head_attention Backflow electron_embedding",
    "deepseek_r1_jax": "attn/q_a attn/kv_a attn/k_pe",
    "dreamerv3": "dec/sp0 dyn/dyngru dyn/dynhid0",
    "fitvid": "decoder/Dense_0",
    "flowjax_maf": "weight/args/1",
    "gemma3_gm": "mlp/gating_einsum",
    "gemma3n": "mlp/gating_einsum",
    "gemma3n_audio_scanned": "feature/input_proj post/kernel",
    "globe": "wave_function/embedding",
    "gnome": "FullyConnectedTensorProductE3nn_0/w",
    "keras_gemma4": "lconv_linear /dense/kernel",
    "keras_paligemma": "image_classifier",
    "keras_rwkv7": "RWKV_TIME_MIX",
    "keras_sam3": "final_proj",
    "levanter_backpack": "kq_selfattention/c_attn/weight",
    "lra_linformer": "lr_kernel",
    "maxtext_deepseek4_scanned": "o_a_proj pre_alpha post_alpha res_alpha hc_fn",
    "maxtext_qwen3_omni": "conv_out",
    "mistral_jax_lists": "0/1",  # a list has no names
    "mmv": "final_projection",
    "modula_gpt": "1 2 3 4 5 6 7 8 9",  # a list has no names
    "nemotron3_jax": "ffw/o",
    "nequip_jax": "skip_tp/w",
    "nequix": "skip/_weights",
    "nest_mq": "proj_kernel",
    "penzai_tuples": "value/data_array",  # which have no names
    "ott_icnn": "quad_kernel",
    "protein_mpnn": "edge_embedding/w",
    "recml_hstu": "_output_weight _uvqk_weight",
    "savi": "general_dense_k_0 general_dense_v_0",
    "scenic_reveal": "img_encoder/head",
    "seqax": "transformer",
    "sparse_mixers": "expert_1 expert_2",
    "symphony": "skip_tp",
    "tacotrons_pax": "0 1 2 4 5 6 7 12 13 14",  # nor have submodules of pax
    "trax_reformer": "lsh sparse",  # nor have trax's combinators
    "ttt_linear": "ttt_dense_0",
    "unified_io2": "vision_transformer/embedding/kernel",
}


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A node with attributes, as of Equinox."""

    def __init__(self, attributes):
        self.attributes = attributes

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return [(key(k), v) for k, v in self.attributes.items()], [*self.attributes]

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(dict(zip(names, values, strict=True)))


def expanded(path):
    """`a/{0..1}` -> `a/0`, `a/1`."""
    if not (found := re.search(r"\{0\.\.(\d+)\}", path)):
        return [path]
    start, end = path[: found.start()], path[found.end() :]
    every = range(int(found[1]) + 1)
    return [full for i in every for full in expanded(f"{start}{i}{end}")]


def read(path):
    """A tree of abstract arrays, and what is right by the paths of its leaves."""
    found = json.loads(path.read_text())
    right = {
        p: each for key, each in found["parameters"].items() for p in expanded(key)
    }
    modules = {p for key in found.get("modules", {}) for p in expanded(key)}
    root: dict[str, Any] = {}
    for name, (shape, *_) in right.items():
        *above, last = name.split("/")
        inner = root
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = jax.ShapeDtypeStruct(shape, jnp.float32)

    def with_modules(node, above):
        if not isinstance(node, dict):
            return node
        node = {k: with_modules(inner, (*above, k)) for k, inner in node.items()}
        return Module(node) if "/".join(above) in modules else node

    return with_modules(root, ()), right


def longer_than_1(axes, shape):
    """Axes of length 1 belong to either side."""
    return {axis for axis in axes if shape[axis] > 1}


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_no_parameter_is_mistaken(path):
    params, right = read(path)
    findings = dimension_numbers.explain(params)
    assert {found.path for found in findings} == set(right)
    views = _two_optimizers.matrix_views(params)
    for name, shape, _, why, unknown in findings:
        axes = right[name][1] if len(right[name]) > 1 else []
        either = "either" in right[name]
        view = views[name]
        if unknown:
            assert view is None, name
            continue
        if view is None:
            assert either or not axes, f"{name} {shape} is a matrix, not {why}"
            continue
        assert either or axes, f"{name} {shape} is no matrix, though {why}"
        sides = [longer_than_1(s, shape) for s in (view.fan_in_axes, view.fan_out_axes)]
        every = [[longer_than_1(side, shape) for side in each] for each in axes]
        assert not axes or sides in every, f"{name} {shape} is {every}, not {sides}"


def test_unknown_matrices():
    """Few, and each for a reason; more would be noise that nobody reads."""
    found = {}
    for path in TREES:
        params, right = read(path)
        for each in dimension_numbers.explain(params):
            if each.unknown and len(right[each.path]) == 2:
                found.setdefault(path.stem, []).append(each.path)
    assert set(found) == set(UNKNOWN)
    for stem, paths in found.items():
        for path in paths:
            assert any(part in path for part in UNKNOWN[stem].split()), path


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


RULES = {"default": None, "equinox": dimension_numbers.equinox}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equinox_weights_are_fan_out_by_fan_in(rule):
    views = _two_optimizers.matrix_views(equinox_params(), rule)
    sides = {k: (v.batch, v.fan_in, v.fan_out) for k, v in views.items() if v}
    assert sides == {
        "wide/weight": ((), 8, 24),
        "normalised/layer/weight": ((), 8, 24),
        "cell/weight_ih": ((), 8, 15),
        "cell/weight_hh": ((), 5, 15),
        "stack/weight": ((3,), 8, 24),
    }


def test_equinox_without_biases():
    """The name `weight` tells the order; of a stack, only the class tells."""
    linear = lambda key: eqx.nn.Linear(8, 24, use_bias=False, key=key)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"one": linear(keys[0]), "stack": eqx.filter_vmap(linear)(keys)}
    params = eqx.filter(params, eqx.is_inexact_array)
    views = _two_optimizers.matrix_views(params)
    assert views["one/weight"] is not None
    assert views["one/weight"].fan_out == 24
    assert views["stack/weight"] is None
    views = _two_optimizers.matrix_views(params, dimension_numbers.equinox)
    assert views["stack/weight"] is not None
    assert views["stack/weight"].fan_out_axes == (1,)


class InOutLinear(eqx.Module):
    """Of a codebase's own, whose name happens to begin as a norm's."""

    weight: jax.Array


class NormalLinear(InOutLinear):
    pass


class OwnNorm(InOutLinear):
    pass


def test_modules_of_a_codebase_are_left_to_the_rule_but_for_norms():
    """A gated MLP tells that these weights are (in, out); Equinox's own are not."""
    of = lambda kind, *shape: kind(jnp.ones(shape))
    params = {
        "norm": of(OwnNorm, 3, 8),
        "mlp": {
            "gate": of(NormalLinear, 3, 8, 24),
            "up": of(InOutLinear, 3, 8, 24),
            "down": of(NormalLinear, 3, 24, 8),
        },
    }
    views = _two_optimizers.matrix_views(params, dimension_numbers.equinox)
    sides = {k: (v.fan_in_axes, v.fan_out_axes) for k, v in views.items() if v}
    assert sides == dict.fromkeys(
        [f"mlp/{name}/weight" for name in ("gate", "up", "down")], ((1,), (2,))
    )


class NamedArray(eqx.Module):
    """As of Haliax: an array and the names of its axes."""

    array: jax.Array
    axes: tuple[str, ...] = eqx.field(static=True)


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    """As Haliax's own class: its array has no name."""

    def __init__(self, array):
        self.array = array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, arrays):
        return cls(*arrays)


def test_an_array_in_an_object_is_named_as_the_object():
    of = lambda *shape: WithoutKeys(jnp.ones(shape))
    params = {"norm": {"weight": of(4, 8), "bias": of(4, 8)}}
    params |= {"up": {"weight": of(4, 16, 8), "bias": of(4, 16)}}
    views = _two_optimizers.matrix_views(params)
    (view,) = [view for view in views.values() if view]
    assert (view.batch, view.fan_in, view.fan_out) == ((4,), 8, 16)


class HaliaxLinear(eqx.Module):
    """As of Haliax: `In` and `Out` are an axis or several."""

    weight: NamedArray
    bias: NamedArray | None
    In: Any = eqx.field(static=True)
    Out: Any = eqx.field(static=True)


def test_haliax_says_its_axes():
    of = lambda *axes: NamedArray(jnp.ones([len(axis) for axis in axes]), axes)
    params = {
        "stack": HaliaxLinear(of("LLL", "DD", "FFFF"), of("LLL", "FFFF"), "DD", "FFFF"),
        "out": HaliaxLinear(of("HHH", "dd", "DD"), None, ("HHH", "dd"), "DD"),
        "lm_head": HaliaxLinear(of("DD", "VVVVV"), None, "DD", "VVVVV"),
        "weight": jnp.ones((8, 4)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        views = _two_optimizers.matrix_views(params, dimension_numbers.haliax)
    sides = {k: (v.fan_in_axes, v.fan_out_axes) for k, v in views.items() if v}
    assert sides == {
        "stack/weight/array": ((1,), (2,)),
        "out/weight/array": ((0, 1), (2,)),
        "weight": ((0,), (1,)),
    }


class HaliaxConv(HaliaxLinear):
    """Its input is an axis of the layer, and not of a grouped weight."""

    kernel_size: int = eqx.field(static=True, default=3)


def test_convolutions_of_haliax_are_left_to_the_rule():
    of = lambda *axes: NamedArray(jnp.ones([len(axis) for axis in axes]), axes)
    in_groups = of("OOOOOO", "i", "kkk"), of("OOOOOO")
    whole = of("OOOOOO", "IIII", "kkk"), of("OOOOOO")
    params = {
        "short_filter": HaliaxConv(*in_groups, "IIIIII", "OOOOOO"),
        "filter": HaliaxConv(*whole, "IIII", "OOOOOO"),
        "up": HaliaxLinear(of("DD", "FFFF"), None, "DD", "FFFF"),
    }
    with pytest.warns(dimension_numbers.PartitionWarning, match=r"filter.*filter"):
        views = _two_optimizers.matrix_views(params, dimension_numbers.haliax)
    assert [name for name, view in views.items() if view] == ["up/weight/array"]


def test_the_default_rule_may_be_named():
    params = {"kernel": jnp.ones((8, 4))}
    views = _two_optimizers.matrix_views(params, cd.default_dimension_numbers)
    assert views == _two_optimizers.matrix_views(params)
