"""The short rule: right or asked, never wrong (`codebases.py` has the trees)."""

import codebases
import jax
import jax.numpy as jnp
import pytest

import curvadion_jax as cd

TREES = sorted(codebases.TREES.glob("*.json"))
DENSE = cd.DimensionNumbers(0, 1)
# What is asked about in any tree: so every call warns.
BESIDE = {"beside": jax.ShapeDtypeStruct((2, 3), jnp.float32)}


def kinds(shapes):
    """What each parameter is, by its path; and all matrices are (fan_in, fan_out)."""
    params = {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in shapes.items()}
    with pytest.warns(cd.dimension_numbers.PartitionWarning, match="beside"):
        findings = cd.dimension_numbers.by_name(params | BESIDE).findings
    for found in findings:
        assert found.numbers == (DENSE if found.kind == "matrix" else None)
    return {found.path: found.kind for found in findings if found.path in shapes}


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_no_parameter_of_a_codebase_is_mistaken(path):
    right = codebases.read(path)
    found = kinds({name: tuple(shape) for name, (shape, *_) in right.items()})
    assert codebases.mistaken(found, right) == []


def test_half_of_the_trees_have_matrices_that_it_knows():
    """A rule that asks about everything would never be wrong."""
    known = [
        sum(kind == "matrix" for kind in kinds(shapes).values())
        for path in TREES
        for shapes in [{name: tuple(x[0]) for name, x in codebases.read(path).items()}]
    ]
    assert len(known) == 25
    assert sum(number > 0 for number in known) >= 13
    assert sum(known) >= 100


def dense(fan_in=8, fan_out=16):
    return {"kernel": (fan_in, fan_out), "bias": (fan_out,)}


def flat(tree, *above):
    """Shapes by path, of nested dictionaries."""
    if isinstance(tree, tuple):
        return {"/".join(above): tree}
    return {k: v for name, x in tree.items() for k, v in flat(x, *above, name).items()}


KNOWN = {
    "kernel": flat({"Dense_0": dense()}),
    "kernel without a bias": {"mlp/up/kernel": (8, 16)},
    "kernel of equal sides": {"mlp/mix/kernel": (8, 8)},
    "kernel alone": {"kernel": (8, 16)},
    "w and b": {"mlp/~/linear_0/w": (8, 16), "mlp/~/linear_0/b": (16,)},
    "query of two axes": {"attention/query/kernel": (8, 8), "norm/scale": (8,)},
}


@pytest.mark.parametrize("shapes", KNOWN.values(), ids=KNOWN)
def test_kernels_of_dense_layers_are_matrices(shapes):
    found = kinds(shapes)
    assert [kind for kind in found.values() if kind != "vector"] == ["matrix"]


VECTORS = [(), (8,), (1, 8), (8, 1), (1, 1, 8), (0, 8), (3, 0, 8)]


@pytest.mark.parametrize("shape", VECTORS)
@pytest.mark.parametrize("name", ["dense/kernel", "embed/embedding", "beta"])
def test_at_most_one_axis_longer_than_1_is_a_vector(name, shape):
    assert kinds({name: shape}) == {name: "vector"}


@pytest.mark.parametrize("name", ["embedding", "embeddings"])
def test_tables_of_flax_and_haiku_are_no_matrices(name):
    assert kinds({f"tokens/{name}": (99, 8)}) == {f"tokens/{name}": "table"}


# One reason each, beside a layer that is a matrix but for it.
ASKED = {
    "another name": {"up/weight": (8, 16)},
    "no name": {"0": (8, 16)},
    "three axes": {"query/kernel": (8, 2, 4)},
    "w without a bias": {"linear/w": (8, 16)},
    "w of equal sides": {"linear/w": (8, 8), "linear/b": (8,)},
    "w of the other order": {"linear/w": (16, 8), "linear/b": (16,)},
    "a scale, as its bias is": {"n/kernel": (3, 8), "n/bias": (3, 8)},
    "raw inputs": {"stem/kernel": (3, 32)},
    "many classes": {"fc/kernel": (8, 80)},
    "as long as a vocabulary": {"fc/kernel": (8, 11), "tok_emb/embedding": (11, 8)},
    **{
        name: {f"{name}/kernel": (8, 16)}
        for name in (
            *("token_embed", "Embed_0", "pos_table", "codebook", "quantizer"),
            *("ln_1", "LayerNorm_0", "rms", "Conv_0", "GraphConv_0", "lm_head"),
            *("heads", "logits", "classifier", "ObjectClassPredictor_0", "readout"),
            *("output", "final_proj", "score", "positions", "vocab"),
        )
    },
}


@pytest.mark.parametrize("shapes", ASKED.values(), ids=ASKED)
def test_what_may_be_something_else_is_asked_about(shapes):
    found = kinds(shapes)
    assert found.pop(next(iter(shapes))) == "asked"
    assert set(found.values()) <= {"vector", "table", "asked"}


def test_one_kernel_of_the_other_order_makes_all_doubtful():
    """As in Hugging Face's GPT-2, whose square ones look like any other."""
    shapes = flat({"c_attn": {"kernel": (24, 8), "bias": (24,)}, "c_proj": dense(8, 8)})
    found = kinds(shapes)
    assert found["c_attn/kernel"] == found["c_proj/kernel"] == "asked"
    del shapes["c_attn/bias"]
    assert kinds(shapes)["c_proj/kernel"] == "matrix"


@pytest.mark.parametrize("axis", [0, 1])
def test_vectors_of_the_layers_of_a_scan_are_asked_about(axis):
    """Where all arrays of a module are as long on one axis, which are the layers."""

    def stacked(*shape):
        return (*shape[:axis], 3, *shape[axis:])

    layers = {"gain": {"kernel": stacked(8)}, "up": {"kernel": stacked(8, 16)}}
    shapes = flat({"layers": layers, "out": {"kernel": (8, 8)}})
    assert set(kinds(flat({"layers": layers})).values()) == {"asked"}
    assert kinds(shapes)["layers/gain/kernel"] == "asked"
    assert kinds(shapes)["out/kernel"] == "matrix"
    # Heads of an attention are no layers.
    block = {"query": {"kernel": (8, 2, 4)}, "out": {"kernel": (2, 4, 8)}}
    block |= {"norm": {"scale": (8,)}, "mlp": {"kernel": (8, 16)}}
    assert kinds(flat({"block": block}))["block/mlp/kernel"] == "matrix"
