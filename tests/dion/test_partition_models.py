"""The default rule on whole Flax models: linen, linen under nn.scan, nnx."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import curvadion_jax as cd
from curvadion_jax import _muon, _partition

WIDTH, HEADS, VOCABULARY, LAYERS = 8, 2, 11, 3
QUERY, OUT, DENSE = ((-3, (-2, -1)), ((-3, -2), -1), (-2, -1))
ATTENTION = {
    **{f"attention/{name}/kernel": QUERY for name in ("query", "key", "value")},
    "attention/out/kernel": OUT,
}
MATRICES = {**ATTENTION, "up/kernel": DENSE, "down/kernel": DENSE}


class Block(nn.Module):
    """Attention and a dense part, with a norm before each."""

    normalize_qk: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=HEADS, normalize_qk=self.normalize_qk, name="attention"
        )
        h = nn.LayerNorm()(x)
        x = x + attention(h, h)
        h = nn.Dense(2 * WIDTH, name="up")(nn.RMSNorm()(x))
        return x + nn.Dense(WIDTH, name="down")(h), None


class LinenModel(nn.Module):
    """Token and position embeddings, blocks, a final norm, a head, a convolution."""

    scan: bool = False
    normalize_qk: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        shape = (tokens.shape[-1], WIDTH)
        x += self.param("pos_embedding", nn.initializers.normal(), shape)[None]
        x = nn.Conv(WIDTH, (3,))(x)
        if self.scan:
            stack = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            x, _ = stack(self.normalize_qk, name="layers")(x, None)
        else:
            x, _ = Block(self.normalize_qk, name="block")(x)
        return nn.Dense(VOCABULARY, name="lm_head")(nn.LayerNorm()(x))


class NnxModel(nnx.Module):
    """The same parts in nnx."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)


def linen_params(**settings):
    tokens = jnp.zeros((1, 5), jnp.int32)
    init = LinenModel(**settings).init
    return jax.eval_shape(init, jax.random.key(0), tokens)["params"]


def nnx_params():
    model = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0)))
    return nnx.state(model, nnx.Param)


def chosen(params):
    """Path -> dimension numbers, of the parameters that Dion takes."""
    numbers = cd.default_dimension_numbers(params)
    leaves = jax.tree.leaves_with_path(
        numbers, is_leaf=lambda x: isinstance(x, cd.DimensionNumbers)
    )
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {keystr(p).removesuffix("/value"): tuple(each) for p, each in leaves}


@pytest.mark.parametrize("qk", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(
    ("scan", "name"), [(False, "block"), (True, "layers")], ids=["unrolled", "scanned"]
)
def test_linen(scan, name, qk):
    params = linen_params(scan=scan, normalize_qk=qk)
    assert chosen(params) == {f"{name}/{key}": n for key, n in MATRICES.items()}
    views: dict[str, Any] = _partition.matrix_views(params)
    stack = (LAYERS,) if scan else ()
    for key in MATRICES:
        view = views[f"{name}/{key}"]
        dense = "attention" not in key
        assert view.batch == stack
        assert (view.rows, view.cols) == (2 * WIDTH if dense else WIDTH, WIDTH)


def test_nnx_state():
    params = nnx_params()
    assert chosen(params) == MATRICES
    # nnx puts a Variable around each array; names do not show it.
    names = [line.split()[0] for line in cd.describe_partition(params).splitlines()]
    assert "lm_head/kernel" in names


@pytest.mark.parametrize(
    ("optimizer", "node", "field"),
    [
        pytest.param(cd.dion, cd.DionState, "q", id="dion"),
        pytest.param(cd.local_muon, _muon.MuonState, "mu", id="local_muon"),
    ],
)
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_the_rule_decides_inside_of_a_partition_as_outside(
    scan, optimizer, node, field
):
    tx = optimizer(0.01)
    state = jax.eval_shape(tx.init, linen_params(scan=scan))
    is_node = lambda x: isinstance(x, node)  # noqa: E731
    (found,) = filter(is_node, jax.tree.leaves(state, is_leaf=is_node))
    assert len(jax.tree.leaves(getattr(found, field))) == len(MATRICES)
