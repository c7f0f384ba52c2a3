"""Which parameters are matrices: the default rule by name and shape, given trees."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    "rms_norm_1"
).split()


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_the_other_optimizer(name):
    assert numbers_at({name: (8, 4)}, name) is None
    assert numbers_at({"m": {name: {"kernel": (8, 4)}}}, "m", name, "kernel") is None
    # A module's name says nothing of what is in its parts.
    tree = {name: {"query": {"kernel": (8, 4)}}}
    assert numbers_at(tree, name, "query", "kernel") == DENSE
    # Nor where a name is a path: Haiku's, PyTorch's, of a flattened tree.
    for path in (f"m/~/{name}/w", f"m.{name}.weight", ("m", name, "kernel")):
        assert numbers_at({path: (8, 4)}, path) is None
    assert numbers_at({f"{name}/~/linear/w": (8, 4)}, f"{name}/~/linear/w") == DENSE


MATRICES = (
    "kernel w weight mlp up_proj head_mixer wi attention_heads multi_head beta_proj "
    "upscale normaliser_in"
).split()


@pytest.mark.parametrize("name", MATRICES)
def test_other_names_are_matrices(name):
    assert numbers_at({"layer": {name: (8, 4)}}, "layer", name) == DENSE
    assert numbers_at({name: {"kernel": (3, 8, 4)}}, name, "kernel") == DENSE
    assert numbers_at({"layer": {name: (2, 3, 8, 4)}}, "layer", name) == DENSE


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


@pytest.mark.parametrize(
    ("norm", "scale"), [("norm", "w"), ("attention_norm", "weight"), ("rms", "w")]
)
def test_scales_of_a_stack_of_norms_are_no_matrix(norm, scale):
    tree = {norm: {scale: (3, 8)}, "wq": {scale: (3, 8, 8)}}
    assert numbers_at(tree, norm, scale) is None
    assert numbers_at(tree, "wq", scale) is not None
    assert numbers_at({norm: {"kernel": (8, 4)}}, norm, "kernel") == DENSE


VECTORS = [
    *(("kernel", shape) for shape in ((8,), (0, 8), (3, 0, 8))),
    *((x, (3, 8)) for x in ("bias", "scale", "norm_weight", "gamma", "ln_beta")),
]


@pytest.mark.parametrize(("name", "shape"), VECTORS)
def test_not_a_matrix(name, shape):
    assert numbers_at({"layer": {name: shape}}, "layer", name) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, QUERY) for name in ("query", "v", "q_proj")),
        *((name, OUT) for name in ("out", "attn_out_proj")),
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
    # Without a query the names mean nothing.
    tree = {"experts": {name: (3, 2, 4, 8)}, "norm": NORM_1}
    if not name.startswith("q"):
        assert numbers_at(tree, "experts", name) == DENSE


def test_the_nearest_norm_decides():
    tree = {
        "layers": {"attention": {"query": {"kernel": (3, 8, 8)}}, "norm": NORM_2},
        "last": {"attention": {"query": {"kernel": (8, 2, 4)}}, "norm": NORM_1},
        "final_norm": NORM_1,
    }
    assert numbers_at(tree, "layers", "attention", "query", "kernel") == DENSE
    assert numbers_at(tree, "last", "attention", "query", "kernel") == QUERY


def test_bare_array():
    assert tuple(cd.default_dimension_numbers(np.ones((2, 3)))) == DENSE
    assert cd.default_dimension_numbers(jnp.ones(3)) is None


def test_paths_of_the_same_parts_have_shapes_of_their_own():
    assert numbers_at({"a": {"b": (8, 4)}, "a.b": (8,)}, "a", "b") == DENSE


class Attention(NamedTuple):
    query: object
    value: object
    scale: object


def test_a_field_called_value_is_a_name_like_others():
    tree = arrays({"attention": Attention((8, 2, 4), (8, 2, 4), (8,))})
    views = _partition.matrix_views(tree)
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
    views = _partition.matrix_views(params, given)
    assert [name for name, view in views.items() if view is not None] == ["a/x"]
    tx = cd.dion(0.1, dimension_numbers=given)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_one_entry_for_the_whole_tree():
    params = arrays({"a": (2, 3), "b": (5, 4)})
    views: dict[str, Any] = _partition.matrix_views(params, cd.DimensionNumbers(1, 0))
    assert [view.fan_out for view in views.values()] == [2, 5]
    nothing = _partition.matrix_views(params, lambda params: None)
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
    views = _partition.matrix_views(params, numbers)
    assert [name for name, view in views.items() if view] == ["first/weight"]


@pytest.mark.parametrize("params", [{}, ()], ids=str)
@pytest.mark.parametrize("build", [cd.dion, cd.curvadion, cd.local_muon])
def test_no_parameters_at_all(build, params):
    """As in a part of `optax.partition`."""
    tx = build(0.1)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_leaf_without_elements_is_no_matrix():
    params = {"w": jnp.ones((3, 4)), "none": jnp.ones((0, 4))}
    tx = cd.dion(0.1)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert updates["none"].shape == (0, 4)


def test_description():
    params = arrays({"mlp": (3, 4, 8), "wte": (9, 4), "attention": {"q": (4, 4)}})
    assert cd.describe_partition(params).splitlines() == [
        "parameter    shape      optimizer  matrices  fan_in  fan_out",
        "attention/q  (4, 4)     matrix     1         4       4",
        "mlp          (3, 4, 8)  matrix     3         4       8",
        "wte          (9, 4)     other",
    ]
    numbers = {"mlp": cd.DimensionNumbers(-1, -2), "wte": None, "attention": None}
    lines = cd.describe_partition(params, numbers).splitlines()
    assert lines[2].split()[-4:] == ["matrix", "3", "8", "4"]
    assert len(cd.describe_partition({}).splitlines()) == 1
