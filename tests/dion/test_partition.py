"""Which parameters are matrices: the default rule by name and shape, given trees."""

import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import curvadion_jax as cd
from curvadion_jax import _two_optimizers

DENSE, QUERY, OUT = (0, 1), (0, (1, 2)), ((0, 1), 2)
STACK = (1, 2)
NORM_1, NORM_2 = {"scale": (8,)}, {"scale": (3, 8)}


def arrays(tree):
    """Abstract parameters from a tree of shapes."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: type(x) is tuple,
    )


def numbers_at(tree, *keys):
    numbers = cd.default_dimension_numbers(arrays(tree))
    for key in keys:
        numbers = numbers[key]
    return None if numbers is None else tuple(numbers)


OTHERS = (
    "embedding tok_embeddings wte wpe vocab_table tok_emb pos_emb emb pos cls_token "
    "head lm_head lmhead output_head logits readout unembedding LM_Head Embed_0 heads "
    "decoder_logits classifier cls_head conv Conv_0 ln1 ln_f pre_ln layernorm "
    "rms_norm_1 latents codebook register_tokens hash_table LMHead_0 "
    "ClassificationHead classifier_1 PolicyHead_0 value_head_0 ObjectClassPredictor_0"
).split()


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_the_other_optimizer(name):
    assert numbers_at({name: (8, 4)}, name) is None
    assert numbers_at({"m": {name: {"weight": (8, 4)}}}, "m", name, "weight") is None
    # A module's name says nothing of what is in its parts.
    tree = {name: {"query": {"kernel": (8, 4)}}}
    assert numbers_at(tree, name, "query", "kernel") == DENSE
    # Nor where a name is a path: Haiku's, PyTorch's, of a flattened tree.
    for path in (f"m/~/{name}", f"m.{name}.weight", ("m", name, "table")):
        assert numbers_at({path: (8, 4)}, path) is None
    assert numbers_at({f"{name}/~/query/w": (8, 4)}, f"{name}/~/query/w") == DENSE


def test_of_a_list_without_names_and_biases_nothing_tells():
    """Whether it is x @ W or W @ x, and which array is a table."""
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="100.0%"):
        found = cd.default_dimension_numbers(arrays([(65, 8), (32, 8), (8, 32)]))
    assert found == [None] * 3
    # Pairs have biases; a single array has nothing beside it.
    (pair,) = cd.default_dimension_numbers(arrays([[(8, 4), (4,)]]))
    assert tuple(pair[0]) == DENSE
    assert tuple(cd.default_dimension_numbers(arrays([(8, 4)]))[0]) == DENSE


@pytest.mark.parametrize("name", ["ln_f", "unembedding"])
def test_kernels_of_norms_and_heads_are_none(name):
    assert numbers_at({"m": {name: {"kernel": (8, 4)}}}, "m", name, "kernel") is None


TABLE_MODULES = ["embedding", "tok_embed", "Embed_0", "codebook", "position_encoder"]


@pytest.mark.parametrize("name", TABLE_MODULES)
def test_a_kernel_in_a_module_named_after_a_table_is_asked_about(name):
    """Of a Dense on patches or positions, or a table."""
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match=name):
        assert numbers_at({name: {"kernel": (8, 4)}}, name, "kernel") is None
    tree = {name: {"kernel": (8, 4), "bias": (4,)}}
    assert numbers_at(tree, name, "kernel") == DENSE


MATRICES = (
    "kernel w weight mlp up_proj wi attn_wo beta_proj embed_proj value w1".split()
)
MODULES = "head_mixer attention_heads multi_head upscale normaliser_in pre_logits"


@pytest.mark.parametrize("name", MATRICES)
def test_names_of_matrices(name):
    assert numbers_at({"layer": {name: (8, 4)}}, "layer", name) == DENSE


@pytest.mark.parametrize("name", [*MATRICES, *MODULES.split()])
def test_other_modules_have_matrices(name):
    tree = {name: {"kernel": (8, 4), "bias": (4,)}}
    assert numbers_at(tree, name, "kernel") == DENSE


@pytest.mark.parametrize("name", ["image_classifier", "head", "lm_head"])
def test_a_head_between_two_widths_is_asked_about(name):
    """It may lead from an encoder to a decoder."""
    norms = {"encoder_norm": NORM_1, "decoder_norm": {"scale": (16,)}}
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match=name):
        numbers_at(norms | {name: {"kernel": (8, 16)}})
    assert numbers_at(norms | {name: {"kernel": (8, 10)}}, name, "kernel") is None


@pytest.mark.parametrize("name", ["dense_biases", "proj_scales", "ttt_bias_0", "b1"])
def test_several_vectors_are_no_matrix(name):
    assert numbers_at({"m": {name: (8, 4), "kernel": (4, 4)}}, "m", name) is None


def test_an_embedding_has_no_bias():
    tree = {"embeddings_project": {"kernel": (4, 8), "bias": (8,)}}
    assert numbers_at(tree, "embeddings_project", "kernel") == DENSE


def test_an_only_side_as_long_as_the_vocabulary_is_a_head():
    name = "output_layer"
    tree = {"token_emb": {"embedding": (11, 4)}, name: {"kernel": (4, 11)}}
    tree |= {"tgt_emb": (7, 4), "output": {"w": (4, 7)}}  # another, with its own head
    assert numbers_at(tree, name, "kernel") is None
    assert numbers_at(tree, "output", "w") is None
    # A vocabulary as long as the dense layers are wide tells nothing.
    tree |= {"down": {"kernel": (11, 4)}}
    assert numbers_at(tree, "down", "kernel") == DENSE
    # A table of positions has no vocabulary.
    tree = {"pos_embedding": (11, 4), name: {"kernel": (4, 11)}}
    assert numbers_at(tree, name, "kernel") == DENSE


def test_a_side_as_long_as_a_vocabulary_of_bytes_may_be_a_width():
    """Of the only such array in a scan over layers, and of a projection."""
    scan = {
        "norm": {"scale": (4, 64)},
        "wkv": {"kernel": (4, 64, 256)},
        "mlp": {"kernel": (4, 64, 64)},
        "gate_logits": {"kernel": (4, 64, 8)},
    }
    tree = {"embed": {"embedding": (256, 64)}, "layers": scan}
    assert numbers_at(tree, "layers", "gate_logits", "kernel") == STACK  # no head
    assert numbers_at(tree, "layers", "wkv", "kernel") == STACK
    tree = {"embed": {"embedding": (256, 64)}, "attention": {"wkv": (64, 256)}}
    assert numbers_at(tree, "attention", "wkv") == DENSE


def test_the_last_layer_of_a_head_is_one():
    tree = {"classifier": {"dense": {"kernel": (8, 8)}, "out_proj": {"kernel": (8, 5)}}}
    tree |= {"norm": NORM_1}
    assert numbers_at(tree, "classifier", "out_proj", "kernel") is None
    # Between two widths of norms it is a hidden layer.
    assert numbers_at(tree, "classifier", "dense", "kernel") == DENSE


@pytest.mark.parametrize(
    ("norm", "scale"), [("norm", "w"), ("attention_norm", "weight"), ("rms", "w")]
)
def test_scales_of_a_stack_of_norms_are_no_matrix(norm, scale):
    tree = {norm: {scale: (3, 8)}, "wq": {scale: (3, 8, 8)}}
    assert numbers_at(tree, norm, scale) is None
    assert numbers_at(tree, "wq", scale) == STACK
    assert numbers_at({norm: {"kernel": (8, 4)}}, norm, "kernel") == DENSE


def test_what_is_beside_the_scales_of_a_stack_is_a_stack():
    layers = {"norm": NORM_2, "up": {"kernel": (3, 8, 16)}, "skip": (3, 16)}
    assert numbers_at({"blocks": layers}, "blocks", "skip") is None
    assert numbers_at({"blocks": layers}, "blocks", "up", "kernel") == STACK
    # As in MaxText, layers may be second.
    layers = {"norm": {"scale": (8, 3)}, "up": {"kernel": (8, 3, 16)}, "skip": (16, 3)}
    layers |= {"down": {"kernel": (16, 3, 8)}}
    assert numbers_at({"blocks": layers}, "blocks", "skip") is None
    assert numbers_at({"blocks": layers}, "blocks", "up", "kernel") == (0, 2)


VECTORS = [
    *(("kernel", shape) for shape in ((8,), (0, 8), (3, 0, 8))),
    *(("kernel", shape) for shape in ((1, 1, 8), (8, 1), (1, 3, 1))),
    *((x, (3, 8)) for x in ("bias", "scale", "norm_weight", "gamma", "ln_beta")),
    *((x, (3, 8)) for x in ("b", "offset", "A_log", "time_decay", "lambda_1", "D")),
]


@pytest.mark.parametrize(("name", "shape"), VECTORS)
def test_not_a_matrix(name, shape):
    assert numbers_at({"layer": {name: shape}}, "layer", name) is None


BIASES = [
    pytest.param((8, 4), (4,), DENSE, id="in, out"),
    pytest.param((8, 4), (8,), (1, 0), id="out, in"),
    pytest.param((8, 3, 4), (3, 4), QUERY, id="in, several out"),
    pytest.param((8, 3, 2, 4), (3, 2, 4), (0, (1, 2, 3)), id="fused"),
    pytest.param((3, 8, 4), (3, 4), STACK, id="stack"),
    pytest.param((3, 8, 4), (3, 8), (2, 1), id="stack of out, in"),
    pytest.param((3, 8, 2, 4), (3, 2, 4), (1, (2, 3)), id="stack, several out"),
    pytest.param((7, 7, 3, 16), (16,), None, id="window"),
    pytest.param((16, 3, 7), (16, 1), None, id="window of Equinox"),
]


@pytest.mark.parametrize(("kernel", "bias", "expected"), BIASES)
@pytest.mark.parametrize(
    ("weight", "of_bias"), [("kernel", "bias"), ("w", "b"), ("wi", "wi_bias")]
)
def test_a_bias_tells_the_axes(kernel, bias, expected, weight, of_bias):
    assert numbers_at({"m": {weight: kernel, of_bias: bias}}, "m", weight) == expected


def test_the_second_of_several_without_names_is_no_bias():
    """A table and the scale of a norm, as in a tuple of Penzai's parameters."""
    tree = [(99, 24), (24,), (24, 48), (48, 24)]
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match=r"0 \(99, 24\)"):
        found = cd.default_dimension_numbers(arrays(tree))
    assert found == [None] * 4


def test_pairs_of_a_matrix_and_a_bias():
    """As in JAX's own tutorials."""
    params = [(jnp.ones((8, 4)), jnp.ones(4)), (jnp.ones((4, 3)), jnp.ones(3))]
    views = _two_optimizers.matrix_views(params)
    assert [view and view.fan_in for view in views.values()] == [8, None, 4, None]


def test_most_biases_tell_the_order_of_the_rest():
    tree = {
        "up": {"kernel": (16, 8), "bias": (16,)},
        "down": {"kernel": (8, 16), "bias": (8,)},
        "mix": {"kernel": (8, 8), "bias": (8,)},
        "other": {"up_proj": (8, 8)},
        "last": {"weight_v": (8, 16), "weight_g": (8, 1), "bias": (8,)},
    }
    assert numbers_at(tree, "mix", "kernel") == (1, 0)
    assert numbers_at(tree, "other", "up_proj") == DENSE
    # Of a WeightNorm in PyTorch's order.
    assert numbers_at(tree, "last", "weight_v") == (1, 0)


def test_experts_are_a_stack_by_the_transpose_beside_them():
    experts = {"wi": (5, 8, 16), "wo": (5, 16, 8), "fused": (2, 8, 16), "down": (16, 8)}
    for name in ("wi", "wo", "fused"):
        assert numbers_at({"moe": experts}, "moe", name) == STACK
    # Without it they may be heads.
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="moe/wi"):
        assert numbers_at({"moe": {"wi": (5, 8, 16)}}, "moe", "wi") is None


@pytest.mark.parametrize("name", ["query", "v", "q_proj", "in_proj_q"])
def test_a_side_as_long_as_a_norm_is_the_input_of_heads(name):
    seen = lambda tree: numbers_at(tree, "attention", name, "kernel")
    assert seen({"attention": {name: {"kernel": (8, 2, 4)}}, "norm": NORM_1}) == QUERY
    assert seen({"attention": {name: {"kernel": (3, 8, 8)}}, "norm": NORM_2}) == STACK
    assert seen({"attention": {name: {"kernel": (8, 8)}}, "norm": NORM_1}) == DENSE
    # The fused projections of an attention, and with layers.
    assert seen({"attention": {name: {"kernel": (8, 3, 2, 4)}}, "norm": NORM_1}) == (
        (0, (1, 2, 3))
    )
    tree = {"attention": {name: {"kernel": (3, 8, 2, 4)}}, "norm": NORM_2}
    assert seen(tree) == (1, (2, 3))


@pytest.mark.parametrize("name", ["out", "attn_out_proj", "c_proj"])
def test_heads_beside_a_query_are_the_input_of_an_output(name):
    attention = {"q": {"kernel": (8, 2, 4)}, name: {"kernel": (2, 4, 8)}}
    tree = {"attention": attention, "norm": NORM_1}
    assert numbers_at(tree, "attention", name, "kernel") == OUT


def test_an_output_may_be_kept_as_width_heads_and_head_dim():
    attention = {"query": {"w": (8, 2, 4)}, "post": {"w": (8, 2, 4)}}
    tree = {"attention": attention, "norm": NORM_1}
    assert numbers_at(tree, "attention", "query", "w") == QUERY
    assert numbers_at(tree, "attention", "post", "w") == ((1, 2), 0)


def test_the_nearest_norm_decides():
    tree = {
        "layers": {"attention": {"query": {"kernel": (3, 8, 8)}}, "norm": NORM_2},
        "last": {"attention": {"query": {"kernel": (8, 2, 4)}}, "norm": NORM_1},
        "final_norm": NORM_1,
    }
    assert numbers_at(tree, "layers", "attention", "query", "kernel") == STACK
    assert numbers_at(tree, "last", "attention", "query", "kernel") == QUERY


def test_experts_as_many_as_a_norm_is_wide_are_no_heads():
    """128 experts, and norms of queries whose heads have 128: as in Qwen 3."""
    tree = {"q_norm": {"scale": (16,)}, "norm": {"scale": (32,)}}
    tree |= {"moe": {"gate_up": (16, 32, 48), "down": (16, 24, 32)}}
    assert numbers_at(tree, "moe", "gate_up") == STACK
    assert numbers_at(tree, "moe", "down") == STACK
    del tree["moe"]["gate_up"]
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="down"):
        assert numbers_at(tree, "moe", "down") is None


def test_critics_under_a_vmap_of_flax_are_a_stack():
    critics = {"Dense_0": {"kernel": (2, 8, 16)}, "scaler": {"scaler": (2, 16)}}
    tree = {"VmapCritic_0": critics}
    path = "VmapCritic_0", "Dense_0", "kernel"
    assert numbers_at(tree, *path) == STACK
    # They have heads, as no layer of a scan has.
    critics["head"] = {"kernel": (2, 16, 5)}
    assert numbers_at(tree, "VmapCritic_0", "head", "kernel") is None
    del critics["head"]
    # Parameters that all of them share have no such axis.
    critics |= {"Dense_0": {"kernel": (8, 16)}, "Dense_1": {"kernel": (16, 4)}}
    critics["scaler"] = {"scaler": (16,)}
    assert numbers_at(tree, *path) == DENSE


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        pair.split()
        for pair in (
            *("Wi bi", "W b", "w1 b1", "w_in b_in", "weight_i bias_i", "Wq Bq"),
            *("kernel_h bias_h", "weights1 biases1", "W_ih b_ih"),
            "dense_kernels dense_biases",
        )
    ],
)
def test_a_bias_of_the_same_ending_tells_which_side_is_out(weight, bias):
    tree = {"m": {weight: (16, 8), bias: (16,)}}
    assert numbers_at(tree, "m", weight) == (1, 0)


def test_one_matrix_with_a_bias_tells_for_others_of_its_style():
    tree = {"gru": {"Wi": (24, 5), "bi": (24,), "Wh": (24, 8), "bh_n": (8,)}}
    assert numbers_at(tree, "gru", "Wh") == (1, 0)


def test_cells_side_by_side_are_no_stack():
    """They share the number of their outputs."""
    cell = {"weight_ih": (128, 10), "weight_hh": (128, 32), "bias": (128,)}
    tree = {f"cell_{i}": cell for i in range(3)}
    assert numbers_at(tree, "cell_0", "weight_hh") is not None


def test_models_made_under_a_vmap_are_a_stack():
    layer = {"query": (3, 8, 16), "mlp": (3, 8, 24), "mlp_bias": (3, 24)}
    tree = {f"layer_{i}": layer for i in range(3)} | {"scalar": (3,)}
    assert numbers_at(tree, "layer_0", "query") == STACK


@pytest.mark.parametrize("name", ["basis", "r_k", "variable_1", "pi", "grid", "c_sum"])
def test_an_array_of_another_name_without_a_bias_is_asked_about(name):
    """It may be a table, or vectors of several heads, critics or layers."""
    tree = {"norm": NORM_1, "up": {"kernel": (8, 16)}, name: (16, 8)}
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match=name):
        assert numbers_at(tree, name) is None
    tree |= {f"{name}_bias": (8,)}
    assert numbers_at(tree, name) == DENSE


def test_bare_array():
    assert tuple(cd.default_dimension_numbers(np.ones((2, 3)))) == DENSE
    assert cd.default_dimension_numbers(jnp.ones(3)) is None


def test_paths_of_the_same_parts_have_shapes_of_their_own():
    assert numbers_at({"a": {"w": (8, 4)}, "a.w": (8,)}, "a", "w") == DENSE


UNTOLD = {"dense": {"kernel": (8, 4)}, "mix": {"cube": (2, 3, 4)}}


@pytest.mark.parametrize("build", [cd.dion, cd.curvadion, cd.local_muon])
def test_what_nothing_tells_is_named_once(build):
    """At the first init: every update asks the rule again, and a restart inits."""
    params = jax.tree.map(lambda x: jnp.ones(x.shape), arrays(UNTOLD))
    tx = build(0.1)
    with pytest.warns(cd.dimension_numbers.PartitionWarning) as caught:
        state = tx.init(params)
    (warning,) = caught
    message = str(warning.message)
    assert "42.9% of the parameters" in message
    assert "mix/cube (2, 3, 4)" in message
    assert "dense" not in message
    for _ in range(2):
        jax.eval_shape(tx.update, params, state, params)
        jax.eval_shape(tx.init, params)
    # The line that it prints is silent.
    (line,) = re.findall(r"dimension_numbers=(.*?), with", message)
    numbers = eval(line, {"curvadion_jax": cd})
    assert _two_optimizers.matrix_views(params, numbers)["mix/cube"] is None
    build(0.1, dimension_numbers=numbers).init(params)


def test_the_line_to_paste_names_no_other_parameter():
    tree = arrays({"a": {"m": {"w": (2, 3, 4)}}, "b": {"m": {"w": (3, 4)}}})
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="{'a/m/w': None}"):
        cd.default_dimension_numbers(tree)


def test_given_numbers_replace_those_of_the_rule():
    given = {"mix/cube": cd.DimensionNumbers(1, 2), "dense": None}
    numbers = cd.default_dimension_numbers(arrays(UNTOLD), given)
    assert numbers == {"dense": {"kernel": None}, "mix": {"cube": (1, 2)}}
    with pytest.raises(ValueError, match="'cubes'"):
        cd.default_dimension_numbers(arrays(UNTOLD), {"cubes": None})


class Attention(NamedTuple):
    query: object
    value: object
    scale: object


def test_a_field_called_value_is_a_name_like_others():
    tree = arrays({"attention": Attention((8, 2, 4), (8, 2, 4), (8,))})
    views = _two_optimizers.matrix_views(tree)
    assert list(views) == [f"attention/{name}" for name in Attention._fields]
    value: Any = views["attention/value"]
    assert (value.fan_in, value.fan_out) == (8, 8)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"a": cd.DimensionNumbers(0, 1), "b": None}, id="prefix"),
        pytest.param(
            lambda params: jax.tree.map(
                lambda x: cd.DimensionNumbers(0, 1) if x.ndim == 2 else None, params
            ),
            id="function",
        ),
    ],
)
def test_given_dimension_numbers(given):
    params = freeze({"a": {"x": jnp.ones((2, 3))}, "b": [jnp.ones(4), jnp.ones(5)]})
    given = given if callable(given) else freeze(given)
    views = _two_optimizers.matrix_views(params, given)
    assert [name for name, view in views.items() if view is not None] == ["a/x"]
    tx = cd.dion(0.1, dimension_numbers=given)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_one_entry_for_the_whole_tree():
    params = arrays({"a": (2, 3), "b": (5, 4)})
    views: dict[str, Any] = _two_optimizers.matrix_views(
        params, cd.DimensionNumbers(1, 0)
    )
    assert [view.fan_out for view in views.values()] == [2, 5]
    nothing = _two_optimizers.matrix_views(params, lambda params: None)
    assert nothing == {"a": None, "b": None}


class Callable(eqx.Module):
    """A module that can be called, as most can."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __call__(self, x):
        return self.last(self.first(x))


def test_dimension_numbers_as_an_equinox_tree():
    net = Callable(*(eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in (0, 1)))
    params = eqx.filter(net, eqx.is_inexact_array)
    numbers = cd.default_dimension_numbers(params)
    numbers = eqx.tree_at(lambda n: n.last.weight, numbers, None)
    views = _two_optimizers.matrix_views(params, numbers)
    assert [name for name, view in views.items() if view] == ["first/weight"]


@pytest.mark.parametrize("params", [{}, (), {"bias": np.ones(3)}], ids=repr)
@pytest.mark.parametrize(
    "build",
    [
        *(cd.dion, cd.curvadion, cd.local_muon),
        *(cd.presets.synchronous_dion, cd.presets.authors_code),
    ],
)
def test_no_matrices_or_no_parameters_at_all(build, params):
    """As in a part of `optax.partition`."""
    tx = build(0.1)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("make", [cd.dion, cd.local_muon, cd.curvadion])
def test_a_parameter_that_is_no_array_is_refused(make):
    with pytest.raises(TypeError, match=r"'scale' is 1\.0, and no array"):
        make(0.1).init({"kernel": jnp.ones((8, 4)), "scale": 1.0})


def test_a_leaf_without_elements_is_no_matrix():
    params = {"w": jnp.ones((3, 4)), "none": jnp.ones((0, 4))}
    tx = cd.dion(0.1)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert updates["none"].shape == (0, 4)


def test_description():
    params = arrays({"mlp": (3, 4, 8), "mlp_bias": (3, 8), "wte": (9, 4), "q": (4, 4)})
    assert cd.describe_partition(params).splitlines() == [
        "parameter  shape      optimizer  matrices  fan_in  fan_out  why",
        "mlp        (3, 4, 8)  matrix     3         4       8        "
        "a stack, like its bias",
        "mlp_bias   (3, 8)     other                                 a bias",
        "q          (4, 4)     matrix     1         4       4        two axes",
        "wte        (9, 4)     other                                 "
        "an embedding, by its name",
    ]
    numbers = {"mlp": cd.DimensionNumbers(-1, -2), "mlp_bias": None, "wte": None}
    lines = cd.describe_partition(params, numbers | {"q": None}).splitlines()
    assert lines[1].split()[-5:] == ["matrix", "3", "8", "4", "given"]
    assert lines[3].split()[-2:] == ["other", "given"]
    assert lines[4].endswith("an embedding, by its name")
    assert len(cd.describe_partition({}).splitlines()) == 1


def test_description_of_what_nothing_tells():
    params = arrays(UNTOLD)
    assert cd.describe_partition(params).splitlines()[2].endswith("nothing tells")
    numbers = {"dense": cd.DimensionNumbers(0, 1), "mix": None}
    assert cd.describe_partition(params, numbers).splitlines()[2].endswith("given")


def test_a_layer_with_a_bias_is_a_matrix_whatever_its_name():
    """Tables have no bias."""
    for name in ("latent_proj", "to_token", "vocab_map", "actor_ln1", "slot"):
        tree = {name: {"kernel": (8, 4), "bias": (4,)}}
        assert numbers_at(tree, name, "kernel") == DENSE


def test_the_last_layer_of_a_head_alone_is_the_head():
    layer = lambda *shape: {"kernel": shape, "bias": shape[-1:]}
    layers = {"0": layer(8, 16), "3": layer(16, 16), "6": layer(16, 5)}
    found = [
        numbers_at({"classifier": layers}, "classifier", n, "kernel") for n in "036"
    ]
    assert found == [DENSE, DENSE, None]
    # One output, and so a bias of one number.
    one = {"classifier": {"0": layer(8, 16), "1": layer(16, 1)}}
    assert numbers_at(one, "classifier", "0", "kernel") == DENSE
    # Heads side by side are all heads.
    beside = {"heads": {"0": layer(8, 5), "1": layer(8, 3)}}
    assert numbers_at(beside, "heads", "0", "kernel") is None


def test_heads_that_are_transposed_turn_no_other_kernels():
    """Two of [heads, head_dim, D] say nothing of kernels of two axes."""
    tree = {
        "norm": {"scale": (24,)},
        "q_projection": {"weights": (2, 4, 24)},
        "k_projection": {"weights": (2, 4, 24)},
        "transition": {"weights": (24, 48)},
    }
    found = {x.path: x.numbers for x in cd.dimension_numbers.explain(arrays(tree))}
    assert found["transition/weights"] == cd.DimensionNumbers(*DENSE)


def test_a_head_stored_like_its_embedding_turns_no_other_kernels():
    """Queries [D, heads, head_dim] of the same name say that others are (in, out)."""
    tree = {
        "norm": {"scale": (24,)},
        "embed": {"table": (99, 24)},
        "q_proj": {"w": (24, 2, 8)},
        "router": {"w": (24, 6)},
        "unembed_linear": {"w": (99, 24)},
    }
    assert numbers_at(tree, "router", "w") == DENSE
    # Without them it is the only one that tells.
    del tree["q_proj"]
    assert numbers_at(tree, "router", "w") == DENSE[::-1]


ASKED = {
    "expand and contract of three steps": {
        "expand": {"kernel": (3, 24, 48)},
        "contract": {"kernel": (3, 48, 24)},
    },
    "three steps of as many channels": {"layer": {"kernel": (3, 24, 24)}},
    "[D, experts, F]": {"moe": {"w1": (24, 4, 48)}},
    "a Dense of a graph, or a long window": {
        "GraphConv_0": {"kernel": (24, 48), "bias": (48,)}
    },
    "a table of another name": {"words": {"weight": (50_000, 24)}},
    "a head, or the last layer of a module": {"final_proj": {"kernel": (24, 16)}},
    "an embedding's Dense": {"embedding": {"dense_0": {"kernel": (16, 24)}}},
    "a weight beside kernels": {"output_tokens_2": {"weight": (9, 24)}},
    "prototypes, or a Dense": {"prototypes": {"kernel": (24, 300)}},
    "vectors of an ensemble": {"fast": {"kernel_alpha": (12, 24)}},
    "a projection as long as the vocabulary": {
        "embed": {"embedding": (65, 24)},
        "w_out": (24, 65),
    },
    "tokens for all of a batch": {"cls": {"query": (1, 7, 24)}},
    "nested lists": {"layers": [[(24, 48), (48, 24)], [(24, 24)]]},
    "queries beside kernels": {"pooler": {"query_weight": (9, 24)}},
    "a head of another name": {"fc": {"kernel": (24, 50_000), "bias": (50_000,)}},
}


@pytest.mark.parametrize("tree", ASKED.values(), ids=[*ASKED])
def test_what_may_be_something_else_is_asked_about(tree):
    mlp = {"kernel": (24, 48), "bias": (48,)}
    tree = {"norm": {"scale": (24,)}, "mlp": mlp} | tree
    found = cd.dimension_numbers.explain(arrays(tree))
    asked = {each.path for each in found if each.unknown}
    kernels = {each.path for each in found if len(each.shape) > 1}
    assert asked == kernels - {"mlp/kernel", "embed/embedding"}


NOT_ASKED = {
    "keys and values of few dimensions": {"kv_b_proj": {"kernel": (512, 32768)}},
    "a cell's": {"lstm": {"recurrent_kernel": (24, 96)}},
    "factors": {"q": {"kernel_lora_a": (24, 4), "kernel_lora_b": (4, 24)}},
    "WeightNorm's": {"last": {"weight_v": (48, 24), "weight_g": (48, 1)}},
    "attention of an expert": {"action_expert": {"query": {"kernel": (24, 4, 12)}}},
}


@pytest.mark.parametrize("tree", NOT_ASKED.values(), ids=[*NOT_ASKED])
def test_what_is_a_matrix_by_its_name_is_not_asked_about(tree):
    mlp = {"kernel": (24, 48), "bias": (48,)}
    tree = {"norm": {"scale": (24,)}, "mlp": mlp} | tree
    found = cd.dimension_numbers.explain(arrays(tree))
    kernels = [each for each in found if len(each.shape) > 1 and min(each.shape) > 1]
    assert all(each.numbers for each in kernels)


def test_a_head_as_deep_as_a_scan_has_layers_is_a_head():
    """Of two critics, beside two layers."""
    scan = {
        "norm": {"scale": (2, 64)},
        "fc1": {"kernel": (2, 64, 256)},
        "fc2": {"kernel": (2, 256, 64)},
    }
    tree = {"layers": scan, "q_head": {"kernel": (2, 64, 6), "bias": (2, 6)}}
    assert numbers_at(tree, "layers", "fc1", "kernel") == STACK
    assert numbers_at(tree, "q_head", "kernel") is None


def test_a_window_on_the_last_axis_is_asked_about():
    """(out, in, window) of a convolution of another name, in PyTorch's order."""
    model = {
        "norm": {"scale": jnp.ones(24)},
        "mixer": eqx.nn.Conv1d(48, 24, 3, use_bias=False, key=jax.random.key(0)),
    }
    found = cd.dimension_numbers.explain(eqx.filter(model, eqx.is_array))
    assert [each.path for each in found if each.unknown] == ["mixer/weight"]


def test_a_w_of_an_embedding_is_asked_for():
    """It may be a Linear of Haiku's without a bias."""
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="edge_embedding"):
        numbers_at({"m/~/edge_embedding": {"w": (8, 4)}})


MODULES = [
    ("softmax_embedding", "projection_0_1000"),
    *(("latent_attention", "wq"), ("position_wise_ffn", "kernel"), ("token", "w1")),
    *(("conv_tp_weights", "weight"), ("unconventional", "kernel")),
    *(("convnext_mlp", "kernel"), ("rwkv", "time_decay_w1"), ("m", "log_mlp")),
]


@pytest.mark.parametrize(("module", "name"), MODULES)
def test_a_part_of_a_name_tells_no_table_vector_or_convolution(module, name):
    assert numbers_at({module: {name: (8, 4)}}, module, name) == DENSE


TABLES = [
    *(("embed", "value"), ("embedding", "in"), ("embeddings", "w_1"), ("m", "b_norm")),
    *(("m", "cross_attention_latents"), ("m", "attn_pos_embed"), ("m", "norm_mlp")),
    *(("m", "attention_bias_table"), ("m", "token_wise_embedding"), ("head", "value")),
    *(
        ("m", "conv_weight"),
        ("m", "q_conv_weight"),
        ("convs_0", "kernel"),
    ),
    *(("ConvBNAct_0", "kernel"), ("conv1d_weights", "w")),
]


@pytest.mark.parametrize(("module", "name"), TABLES)
def test_a_name_with_a_projection_in_it_may_be_of_a_table(module, name):
    assert numbers_at({module: {name: (8, 4)}}, module, name) is None


def test_heads_with_queries_and_keys_are_those_of_attention():
    tree = {"heads": {"0": {"query": (8, 4), "key": (8, 4)}}}
    assert numbers_at(tree, "heads", "0", "query") == DENSE
    assert (
        numbers_at({"heads": {"value": (8, 4), "policy": (8, 4)}}, "heads", "value")
        is None
    )


def test_an_array_as_long_as_its_bias_is_a_scale():
    """As of a stack of Equinox's LayerNorms, whatever their name."""
    assert (
        numbers_at({"n": {"weight": (3, 16), "bias": (3, 16)}}, "n", "weight") is None
    )


def test_a_window_of_two_axes_is_a_short_one():
    for shape in ((4, 128), (1, 1, 128, 256), (3, 128, 256)):
        assert numbers_at({"conv": {"kernel": shape}}, "conv", "kernel") is None
    # Also where each layer has a name of its own.
    assert numbers_at({"conv": {"w1": (3, 128, 256)}}, "conv", "w1") is None
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="conv/kernel"):
        numbers_at({"conv": {"kernel": (128, 256)}})


def test_a_short_window_with_one_input_is_asked_about():
    """(window, 1, out) of a depthwise convolution, but a key may have one head."""
    tree = {"mixer_up": {"w": (3, 1, 128), "b": (128,)}}
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="mixer_up/w"):
        found = numbers_at(tree, "mixer_up", "w")
    assert found is None
    assert numbers_at({"key": {"kernel": (48, 1, 16)}}, "key", "kernel") == (0, 2)


FACTORS = [
    pytest.param((8, 2), (2, 6), DENSE, DENSE, id="two axes"),
    pytest.param((3, 8, 2), (3, 2, 6), STACK, STACK, id="stack"),
    pytest.param((3, 2, 8), (3, 6, 2), STACK, STACK, id="stack of PyTorch's order"),
    pytest.param((2, 8, 2), (2, 2, 6), STACK, STACK, id="as many layers as the rank"),
    pytest.param((8, 2), (2, 3, 6), DENSE, QUERY, id="of a query"),
    pytest.param((3, 6, 2), (2, 8), OUT, DENSE, id="of an output"),
    pytest.param((3, 7, 2), (3, 8, 6), None, None, id="not a pair"),
]


@pytest.mark.parametrize(("a", "b", "of_a", "of_b"), FACTORS)
@pytest.mark.parametrize("name", ["q/lora_a", "q/w_LoRA_A", "lora/A", "lora_A/weight"])
@pytest.mark.filterwarnings("ignore::curvadion_jax.dimension_numbers.PartitionWarning")
def test_factors_of_lora_have_their_rank_in_common(a, b, of_a, of_b, name):
    other = name.replace("_a", "_b").replace("A", "B").replace("LoRB", "LoRA")
    tree = {name: a, other: b}
    assert (numbers_at(tree, name), numbers_at(tree, other)) == (of_a, of_b)


@pytest.mark.parametrize(
    ("a", "b", "asked"),
    [
        *(((8, 2), (2, 8), True), ((3, 8, 2), (3, 2, 8), True), ((2, 6), (8, 2), True)),
        ((8, 8), (8, 4), False),
    ],
)
def test_a_and_b_of_a_low_rank_are_asked_for(a, b, asked):
    """LoRA has them, and so have state spaces, of a state that is larger."""
    found = cd.dimension_numbers.explain(arrays({"A": a, "B": b}))
    assert [each.unknown for each in found] == [asked, asked]
    # Beside the matrix that they change, `b` would be its bias.
    lower = {"w": (a[-2], b[-1]), "a": a, "b": b}
    found = {x.path: x.unknown for x in cd.dimension_numbers.explain(arrays(lower))}
    assert found["b"] == asked


def test_layers_of_another_scan_do_not_tell_the_axis():
    """At the root the scales [6, 64] and [4, 64] are alike along the width alone."""

    def tower(layers):
        return {"norm/scale": (layers, 64), "in_proj/kernel": (layers, 64, 128)}

    shapes = {
        f"{name}/layers/{path}": shape
        for name, layers in {"encoder": 6, "decoder": 4}.items()
        for path, shape in tower(layers).items()
    }
    views = _two_optimizers.matrix_views(arrays(shapes))
    for name in ("encoder", "decoder"):
        view = views[f"{name}/layers/in_proj/kernel"]
        assert (view.fan_in, view.fan_out) == (64, 128)
