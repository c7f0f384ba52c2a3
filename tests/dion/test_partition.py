"""Which parameters are matrices: the default rule by name and shape, given trees."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from flax.core import freeze

import curvadion_jax as cd
from curvadion_jax import _partition

DENSE, QUERY, OUT = (-2, -1), (-3, (-2, -1)), ((-3, -2), -1)
NORM_1, NORM_2 = {"scale": (8,)}, {"scale": (3, 8)}


def arrays(tree):
    """Abstract parameters from a tree of shapes."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x),
    )


def numbers_at(tree, *keys):
    numbers = cd.default_dimension_numbers(arrays(tree))
    for key in keys:
        numbers = numbers[key]
    return None if numbers is None else tuple(numbers)


@pytest.mark.parametrize(
    "name",
    [
        *("embedding", "embed", "tok_embeddings", "wte", "wpe", "vocab", "vocab_table"),
        *("head", "lm_head", "lmhead", "output_head", "logits", "logits_dense"),
        *("readout", "unembed", "unembedding", "LM_Head", "Embed_0"),
        *("logitdense", "decoder_logits", "classifier", "cls_head", "mlm_head"),
        *("conv", "Conv_0", "patch_conv"),
        *("ln1", "ln_2", "ln_f", "pre_ln", "layernorm", "layer_norm", "rms_norm_1"),
        *("tok_emb", "pos_emb", "emb", "pos", "pos_table", "cls_token", "heads"),
    ],
)
@pytest.mark.parametrize("place", ["itself", "above-kernel"])
def test_names_of_the_other_optimizer(name, place):
    tree = {name: (8, 4)} if place == "itself" else {"m": {name: {"kernel": (8, 4)}}}
    numbers = cd.default_dimension_numbers(arrays(tree))
    assert jax.tree.leaves(numbers) == []


@pytest.mark.parametrize(
    "name", ["kernel", "w", "weight", "mlp", "dense", "up_proj", "head_mixer", "wi"]
)
def test_other_names_are_matrices(name):
    assert numbers_at({"layer": {name: (8, 4)}}, "layer", name) == DENSE
    assert numbers_at({"layer": {name: (3, 8, 4)}}, "layer", name) == DENSE
    assert numbers_at({"layer": {name: (2, 3, 8, 4)}}, "layer", name) == DENSE


@pytest.mark.parametrize("norm", ["norm", "attention_norm", "norm1", "norm_f", "rms"])
@pytest.mark.parametrize("scale", ["weight", "w"])
def test_scales_of_a_stack_of_norms_are_no_matrix(norm, scale):
    tree = {norm: {scale: (3, 8)}, "wq": {scale: (3, 8, 8)}}
    assert numbers_at(tree, norm, scale) is None
    assert numbers_at(tree, "wq", scale) is not None
    assert numbers_at({norm: {"kernel": (8, 4)}}, norm, "kernel") == DENSE


@pytest.mark.parametrize("block", ["pre_ln", "ada_layer_norm"])
def test_a_block_named_by_its_norm_holds_matrices(block):
    tree = {block: {"dense": {"kernel": (8, 4)}}}
    assert numbers_at(tree, block, "dense", "kernel") == DENSE


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("kernel", (8,), id="vector"),
        pytest.param("kernel", (), id="scalar"),
        pytest.param("kernel", (0, 8), id="empty"),
        pytest.param("kernel", (3, 0, 8), id="empty-stack"),
        pytest.param("bias", (3, 8), id="bias-stack"),
        pytest.param("scale", (3, 8), id="scale-stack"),
        pytest.param("norm_weight", (3, 8), id="norm"),
        pytest.param("gamma", (3, 8), id="gamma"),
        pytest.param("beta", (3, 8), id="beta"),
    ],
)
def test_not_a_matrix(name, shape):
    assert numbers_at({"layer": {name: shape}}, "layer", name) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, QUERY) for name in ("query", "key", "value", "q", "k", "v")),
        *((name, QUERY) for name in ("q_proj", "k_proj", "v_proj", "query_projection")),
        *((name, OUT) for name in ("out", "o", "o_proj", "out_proj")),
    ],
)
def test_attention_names(name, expected):
    split, stacked = (8, 2, 4) if expected == QUERY else (2, 4, 8), (3, 8, 8)

    def seen(attention, *path, norm=NORM_1):
        beside = {"q": {"kernel": (8, 2, 4)}, **attention}
        return numbers_at({"attention": beside, "norm": norm}, "attention", *path)

    assert seen({name: {"kernel": split}}, name, "kernel") == expected
    assert seen({name: {"kernel": stacked}}, name, "kernel", norm=NORM_2) == DENSE
    assert seen({name: {"kernel": (3, *split)}}, name, "kernel") == expected
    assert seen({name: {"kernel": (8, 8)}}, name, "kernel") == DENSE
    assert seen({name: split}, name) == expected


@pytest.mark.parametrize("name", ["out", "o", "v", "value"])
def test_attention_names_mean_nothing_without_a_query(name):
    stack = {"experts": {name: (3, 2, 4, 8)}, "attention": {"q": (8, 2, 4)}}
    assert numbers_at({**stack, "norm": NORM_1}, "experts", name) == DENSE
    assert numbers_at({name: {"kernel": (3, 4, 8)}}, name, "kernel") == DENSE


def test_the_nearest_norm_decides():
    tree = {
        "layers": {"attention": {"query": {"kernel": (3, 8, 8)}}, "norm": NORM_2},
        "last": {"attention": {"query": {"kernel": (8, 2, 4)}}, "norm": NORM_1},
        "final_norm": NORM_1,
    }
    assert numbers_at(tree, "layers", "attention", "query", "kernel") == DENSE
    assert numbers_at(tree, "last", "attention", "query", "kernel") == QUERY


@pytest.mark.parametrize("shape", [(8, 2, 4), (3, 8, 8)], ids=str)
def test_three_axes_without_a_norm_are_ambiguous(shape):
    tree = arrays({"attention": {"query": {"kernel": shape}}, "mlp": (8, 8)})
    message = rf"'attention/query/kernel' of shape \({shape[0]}, .*dimension_numbers"
    for function in (cd.default_dimension_numbers, cd.describe_partition):
        with pytest.raises(ValueError, match=message):
            function(tree)
    with pytest.raises(ValueError, match=message):
        cd.dion(0.1).init(tree)


def test_bare_array():
    assert tuple(cd.default_dimension_numbers(jnp.ones((2, 3)))) == DENSE
    assert cd.default_dimension_numbers(jnp.ones(3)) is None


class Attention(NamedTuple):
    query: object
    value: object
    scale: object


@struct.dataclass
class AttentionModule:
    query: jax.Array
    value: jax.Array
    scale: jax.Array


@pytest.mark.parametrize("kind", [Attention, AttentionModule])
@pytest.mark.parametrize("place", ["top", "below"])
def test_a_field_called_value_is_a_name_like_others(kind, place):
    shapes = ((8, 2, 4), (8, 2, 4), (8,))
    module = kind(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    tree = module if place == "top" else {"attention": module}
    prefix = "" if place == "top" else "attention/"
    views = _partition.matrix_views(tree)
    assert list(views) == [f"{prefix}{name}" for name in ("query", "value", "scale")]
    value: Any = views[f"{prefix}value"]
    assert (value.fan_in, value.fan_out) == (8, 8)


@pytest.mark.parametrize("wrap", [dict, freeze], ids=["dict", "frozen"])
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"a": cd.DimensionNumbers(0, 1), "b": None}, id="prefix"),
        pytest.param(
            {"a": {"x": cd.DimensionNumbers(0, 1), "y": None}, "b": [None, None]},
            id="full",
        ),
        pytest.param(
            lambda params: jax.tree.map_with_path(
                lambda path, x: cd.DimensionNumbers(0, 1) if x.ndim == 2 else None,
                params,
            ),
            id="function",
        ),
    ],
)
def test_given_dimension_numbers(given, wrap):
    params = {"a": {"x": jnp.ones((2, 3))}, "b": [jnp.ones(4), jnp.ones(5)]}
    if not callable(given):
        given = wrap(given)
        if isinstance(given["a"], dict) or hasattr(given["a"], "items"):
            params["a"]["y"] = jnp.ones(3)
    params = wrap(params)
    views = _partition.matrix_views(params, given)
    taken = [name for name, view in views.items() if view is not None]
    assert taken == ["a/x"]
    tx = cd.dion(0.1, dimension_numbers=given)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_one_entry_for_the_whole_tree():
    views: dict[str, Any] = _partition.matrix_views(
        arrays({"a": (2, 3), "b": (5, 4)}), cd.DimensionNumbers(1, 0)
    )
    assert [view.fan_out for view in views.values()] == [2, 5]
    nothing = _partition.matrix_views(arrays({"a": (2, 3)}), lambda params: None)
    assert nothing == {"a": None}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        pytest.param({"a": None}, ValueError, "structure", id="key-missing"),
        pytest.param({"a": None, "b": None, "c": None}, ValueError, "tree", id="more"),
        pytest.param([None, None], ValueError, "function of the param", id="list"),
        pytest.param({"a": "dion", "b": None}, TypeError, "got 'dion'", id="string"),
        pytest.param({"a": True, "b": None}, TypeError, "got True", id="bool"),
        pytest.param({"a": (0, 1), "b": None}, ValueError, "structure", id="tuple"),
        pytest.param(lambda p: "dion", TypeError, "got 'dion'", id="function-type"),
        pytest.param(
            {"a": cd.DimensionNumbers(0, 2), "b": None},
            ValueError,
            r"parameter 'a': fan-out \(output\) axis 2 does not exist",
            id="axis",
        ),
        pytest.param(
            {"a": None, "b": cd.DimensionNumbers(0, 1)},
            ValueError,
            "parameter 'b'",
            id="vector",
        ),
    ],
)
def test_wrong_dimension_numbers(given, error, message):
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones(4)}
    with pytest.raises(error, match=message):
        _partition.matrix_views(params, given)
    with pytest.raises(error, match=message):
        cd.dion(0.1, dimension_numbers=given).init(params)


def test_labels():
    params = {"a": {"x": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "embed": jnp.ones(4)}
    assert _partition.labels(params, None) == {
        "a": {"x": "dion", "bias": "other"},
        "embed": "other",
    }


def test_description():
    params = arrays({"mlp": (3, 4, 8), "wte": (9, 4), "attention": {"q": (4, 4)}})
    assert cd.describe_partition(params, rank=2).splitlines() == [
        "parameter    shape      optimizer  matrices  fan_in  fan_out  rank",
        "attention/q  (4, 4)     matrix     1         4       4        2",
        "mlp          (3, 4, 8)  matrix     3         4       8        2",
        "wte          (9, 4)     other",
    ]
    numbers = {"mlp": cd.DimensionNumbers(-1, -2), "wte": None, "attention": None}
    lines = cd.describe_partition(params, numbers, 1.0).splitlines()
    assert lines[2].split()[-5:] == ["matrix", "3", "8", "4", "4"]


def test_description_without_ranks():
    params = arrays({"mlp": (3, 4, 8), "wte": (9, 4)})
    assert cd.describe_partition(params).splitlines() == [
        "parameter  shape      optimizer  matrices  fan_in  fan_out",
        "mlp        (3, 4, 8)  matrix     3         4       8",
        "wte        (9, 4)     other",
    ]


def test_description_of_nothing():
    assert len(cd.describe_partition({}).splitlines()) == 1


def test_numpy_arrays_are_parameters_too():
    assert tuple(cd.default_dimension_numbers(np.ones((2, 3)))) == DENSE
