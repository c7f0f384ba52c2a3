"""A small GPT in Flax linen, written for one replica.

Linen rather than NNX, for two reasons: `nn.scan` gives every kernel of the blocks as
one stacked array [layers, fan_in, fan_out] in a plain dict, which is the layout that
the low-rank algebra batches best, and `flax.training.train_state.TrainState` is what
most Flax programs that exist already carry.

The architecture follows modded-nanogpt: RMSNorm before each part, rotary positions,
normalised queries and keys, a squared ReLU, and an output head of its own that starts
at zero, so that the first loss is log(vocabulary). The norms have scales.

Shapes are in the names: B sequences, T tokens, D width, H heads, K head width,
V vocabulary.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

_ROTARY_BASE = 10_000.0

Dense = Callable[..., nn.Dense]  # without a bias, of one type for all products


def rotary(x_BxTxHxK: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + K/2) of each head by an angle proportional to position.

    The product of a rotated query at position s with a rotated key at position t
    depends on s - t alone.

    Args:
        x_BxTxHxK: Queries or keys; the position is the index on axis T, K is even.

    Returns:
        The same shape and dtype; norms are kept.

    References:
        Su et al., RoFormer, https://arxiv.org/abs/2104.09864
    """
    length, half = x_BxTxHxK.shape[1], x_BxTxHxK.shape[-1] // 2
    frequency = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_TxK = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos = jnp.cos(angle_TxK)[None, :, None, :]
    sin = jnp.sin(angle_TxK)[None, :, None, :]
    first, second = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return jnp.concatenate(turned, axis=-1).astype(x_BxTxHxK.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    heads: int
    dense: Dense
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        B, T, D = x_BxTxD.shape
        shape = (B, T, self.heads, D // self.heads)

        def project(name: str) -> jax.Array:
            return self.dense(D, name=name)(x_BxTxD).reshape(shape)

        normalize = nn.RMSNorm(use_scale=False, dtype=self.dtype)
        query, key = (rotary(normalize(project(name))) for name in ("query", "key"))
        mixed = jax.nn.dot_product_attention(
            query, key, project("value"), is_causal=True
        )
        out = self.dense(D, kernel_init=nn.initializers.zeros, name="out")
        return out(mixed.reshape(x_BxTxD.shape))


class Block(nn.Module):
    """Attention and a squared-ReLU MLP, each added to the residual stream."""

    heads: int
    dense: Dense
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, _: None) -> tuple[jax.Array, None]:
        D = x_BxTxD.shape[-1]
        attention = Attention(self.heads, self.dense, self.dtype, name="attention")
        attention_norm = nn.RMSNorm(dtype=self.dtype, name="attention_norm")
        x_BxTxD = x_BxTxD + attention(attention_norm(x_BxTxD))
        up = self.dense(4 * D, name="up")
        down = self.dense(D, kernel_init=nn.initializers.zeros, name="down")
        mlp_norm = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")
        return x_BxTxD + down(jnp.square(nn.relu(up(mlp_norm(x_BxTxD))))), None


class GPT(nn.Module):
    """A decoder over tokens.

    Args:
        vocabulary: Number of tokens, V.
        layers: Number of blocks; their parameters are stacked on a leading axis.
        width: Width of the residual stream, D.
        heads: Attention heads; they divide `width` into even parts.
        dtype: Type of the matrix products. Parameters and logits are float32.
        unroll: Blocks in a turn of the loop over them. All of them compile longer and
            run faster: on a CPU the backward pass of 2 small blocks took 0.7 times
            as long.
        remat: Keep of a block what goes in, and compute the rest again in the backward
            pass: less memory, more time.
        dot_general: Computes the products with kernels; None is Flax's own.

    Examples:
        >>> gpt = GPT(vocabulary=256, layers=3, width=32, heads=2)
        >>> tokens = jnp.zeros((1, 8), jnp.int32)
        >>> params = gpt.init(jax.random.key(0), tokens)["params"]
        >>> print(params["blocks"]["up"]["kernel"].shape)
        (3, 32, 128)
        >>> print(gpt.apply({"params": params}, tokens).shape)
        (1, 8, 256)
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    dtype: jnp.dtype = jnp.float32
    unroll: int = 1
    remat: bool = False
    dot_general: Callable[..., jax.Array] | None = None

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=self.dtype, dot_general=self.dot_general
        )
        embed = nn.Embed(
            self.vocabulary,
            self.width,
            embedding_init=nn.initializers.normal(1.0),
            dtype=self.dtype,
            name="embed",
        )
        # The loop keeps the compiler from merging the two computations.
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
            unroll=self.unroll,
        )(self.heads, dense, self.dtype, name="blocks")
        x_BxTxD, _ = blocks(embed(tokens_BxT), None)
        zeros = nn.initializers.zeros
        head = dense(self.vocabulary, kernel_init=zeros, name="lm_head")
        final_norm = nn.RMSNorm(dtype=self.dtype, name="final_norm")
        return head(final_norm(x_BxTxD)).astype(jnp.float32)


def next_token_loss(gpt: GPT, params: dict, tokens_BxT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of every token but the first, given those before.

    Args:
        gpt: The model.
        params: Its parameters.
        tokens_BxT: Integers, one more on axis T than the model is to see.

    Returns:
        A float32 scalar.
    """
    logits_BxTxV = jnp.asarray(gpt.apply({"params": params}, tokens_BxT[:, :-1]))
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxTxV, tokens_BxT[:, 1:]
    )
    return jnp.mean(losses_BxT)
