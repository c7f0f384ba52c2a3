"""The default rule on whole Flax models: linen, linen under nn.scan, nnx."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import curvadion_jax as cd
from curvadion_jax import _two_optimizers

WIDTH, HEADS, VOCABULARY, LAYERS = 8, 2, 11, 3
QUERY, OUT, DENSE = ((-3,), (-2, -1)), ((-3, -2), (-1,)), ((-2,), (-1,))
ATTENTION = {
    **{f"attention/{name}/kernel": QUERY for name in ("query", "key", "value")},
    "attention/out/kernel": OUT,
}
MATRICES = {**ATTENTION, "up/kernel": DENSE, "down/kernel": DENSE}


class Block(nn.Module):
    """Attention and a dense part, with a norm before each."""

    @nn.compact
    def __call__(self, x, _=None):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=HEADS, normalize_qk=True, name="attention"
        )
        h = nn.LayerNorm()(x)
        x = x + attention(h, h)
        h = nn.Dense(2 * WIDTH, name="up")(nn.RMSNorm()(x))
        return x + nn.Dense(WIDTH, name="down")(h), None


class LinenModel(nn.Module):
    """Token and position embeddings, blocks, a final norm, a head, a convolution."""

    scan: bool = False

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
            x, _ = stack(name="layers")(x, None)
        else:
            x, _ = Block(name="block")(x)
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
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)


def chosen(params):
    """Path -> axes of both sides from the last, of the parameters that Dion takes."""
    from_last = lambda view, axes: tuple(axis - len(view.shape) for axis in axes)
    return {
        name: (from_last(view, view.fan_in_axes), from_last(view, view.fan_out_axes))
        for name, view in _two_optimizers.matrix_views(params).items()
        if view is not None
    }


@pytest.mark.parametrize(
    ("scan", "name"), [(False, "block"), (True, "layers")], ids=["unrolled", "scanned"]
)
def test_linen(scan, name):
    init, tokens = LinenModel(scan).init, jnp.zeros((1, 5), jnp.int32)
    params = jax.eval_shape(init, jax.random.key(0), tokens)["params"]
    assert chosen(params) == {f"{name}/{key}": n for key, n in MATRICES.items()}
    # Inside of `optax.partition` as well, where each part sees its own leaves.
    for tx, node in (
        (cd.dion(0.01), cd.DionState),
        (cd.local_muon(0.01), optax.contrib.MuonState),
    ):
        state = jax.eval_shape(tx.init, params)
        nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, node))  # noqa: B023
        (found,) = [x for x in nodes if isinstance(x, node)]
        assert len(jax.tree.leaves(found[1])) == len(MATRICES)


def test_nnx_state():
    model = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    assert chosen(params) == MATRICES
    # nnx puts a Variable around each array; names do not show it.
    names = [line.split()[0] for line in cd.describe_partition(params).splitlines()]
    assert "lm_head/kernel" in names
