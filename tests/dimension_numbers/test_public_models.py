"""What the reader says of layers and models of Flax, Haiku and Equinox.

Each model is traced as its users would: abstract parameters, a batch of two or more, a
loss. What is right is read from the library's code, not from what the reader says.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from haiku.experimental import layer_stack

from curvadion_jax.dimension_numbers import from_loss

KEY = jax.random.key(0)
WORDS, WIDTH, HEADS, CLASSES = 50, 16, 4, 7
TOKENS = jax.ShapeDtypeStruct((2, 6), jnp.int32)
VECTORS = jax.ShapeDtypeStruct((2, 6, WIDTH), jnp.float32)
IMAGES = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)


class Model(NamedTuple):
    """A model, and what is right.

    Attributes:
      loss: of parameters and a batch.
      params: abstract.
      batch: abstract.
      right: by patterns of paths what an array with two long axes or more is: a kind,
        or the axes of a matrix as in ``'0 -> 1,2'``.
    """

    loss: Callable
    params: Any
    batch: Any
    right: Mapping[str, str]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_word(logits, tokens):
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def first_class(outputs, batch):
    logits = outputs.reshape(-1, outputs.shape[-1])
    return cross_entropy(logits, jnp.zeros(len(logits), jnp.int32))


def squares(outputs, batch):
    return jnp.mean((outputs - 1) ** 2)


# Flax linen


def linen(module, batch, loss, right):
    """A linen module; its batch statistics are data."""
    variables = jax.eval_shape(module.init, KEY, batch)
    others = {name: x for name, x in variables.items() if name != "params"}

    def loss_fn(params, data):
        batch, others = data
        variables = {"params": params, **others}
        outputs, _ = module.apply(variables, batch, mutable=[*others])
        return loss(outputs, batch)

    return Model(loss_fn, variables["params"], (batch, others), right)


class LinenBlock(nn.Module):
    """Norms without scales, so that a scan has no vector that tells its axis."""

    @nn.compact
    def __call__(self, x, _=None):
        norm = lambda: nn.LayerNorm(use_scale=False, use_bias=False)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(
            norm()(x), mask=mask
        )
        x = x + nn.Dense(WIDTH, name="down")(
            nn.gelu(nn.Dense(24, name="up")(norm()(x)))
        )
        return x, None


class LinenGPT(nn.Module):
    layers: Callable
    is_tied: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, WIDTH)
        position = self.param("position", nn.initializers.normal(), (6, WIDTH))
        x = self.layers(embed(tokens) + position[None])
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.is_tied else nn.Dense(WORDS)(x)


def unrolled_layers(x):
    for _ in range(2):
        x, _ = LinenBlock()(x)
    return x


def scanned_layers(x):
    block = nn.remat(LinenBlock, prevent_cse=False)
    each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    x, _ = nn.scan(block, length=3, **each)()(x, None)
    return x


def linen_gpt():
    right = {
        "Embed_0/embedding": "table",
        "position": "elementwise",
        "*/query/kernel": "0 -> 1,2",
        "*/key/kernel": "0 -> 1,2",
        "*/value/kernel": "0 -> 1,2",
        "*/out/kernel": "0,1 -> 2",
        "*/up/kernel": "0 -> 1",
        "*/down/kernel": "0 -> 1",
        "Dense_0/kernel": "head",
    }
    return linen(LinenGPT(unrolled_layers, False), TOKENS, next_word, right)


def linen_gpt_scanned_and_tied():
    right = {
        "Embed_0/embedding": "tied",
        "position": "elementwise",
        "*/query/kernel": "1 -> 2,3",
        "*/key/kernel": "1 -> 2,3",
        "*/value/kernel": "1 -> 2,3",
        "*/out/kernel": "1,2 -> 3",
        "*/up/kernel": "1 -> 2",
        "*/down/kernel": "1 -> 2",
        "*/bias": "vector",
    }
    return linen(LinenGPT(scanned_layers, True), TOKENS, next_word, right)


class LinenMixture(nn.Module):
    """Experts by `nn.vmap`, weighed by a router."""

    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        each = {"in_axes": None, "axis_size": 3, **axes}
        expert = nn.vmap(LinenExpert, out_axes=-1, **each)(name="experts")
        gates = nn.softmax(nn.Dense(3, name="router")(x))
        x = jnp.einsum("btde,bte->btd", expert(x), gates)
        return nn.Dense(CLASSES, name="last")(x)


class LinenExpert(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(24, use_bias=False, name="up")(x))
        return nn.Dense(WIDTH, use_bias=False, name="down")(x)


def linen_mixture_of_experts():
    right = {
        "router/kernel": "0 -> 1",
        "experts/up/kernel": "1 -> 2",
        "experts/down/kernel": "1 -> 2",
        "last/kernel": "head",
    }
    return linen(LinenMixture(), VECTORS, first_class, right)


class LinenConvolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = x + nn.Conv(8, (3, 3), feature_group_count=8, name="depthwise")(x)
        x = nn.ConvTranspose(6, (1, 1))(x)
        x = nn.relu(nn.Dense(12)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES)(x)


def linen_convolutions():
    right = {
        "Conv_0/kernel": "convolution",
        "depthwise/kernel": "convolution",
        "ConvTranspose_0/kernel": "convolution",
        "Dense_0/kernel": "0 -> 1",
        "Dense_1/kernel": "head",
    }
    return linen(LinenConvolutions(), IMAGES, first_class, right)


class LinenRecurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden: Any = nn.RNN(nn.OptimizedLSTMCell(12))(x)
        both = nn.Bidirectional(nn.RNN(nn.GRUCell(8)), nn.RNN(nn.GRUCell(8)))
        return nn.Dense(CLASSES)(both(hidden))


def linen_recurrent():
    right = {"*Cell_*/kernel": "0 -> 1", "Dense_0/kernel": "head"}
    return linen(LinenRecurrent(), VECTORS, first_class, right)


class LinenNormalised(nn.Module):
    """Weights that are normalised before they are used."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.WeightNorm(nn.Dense(24, name="a"))(x))
        x = nn.tanh(nn.SpectralNorm(nn.Dense(WIDTH, name="b"))(x, update_stats=True))
        return nn.DenseGeneral((2, CLASSES), axis=(-2, -1), name="last")(x)


def linen_normalised_weights():
    right = {
        "a/kernel": "0 -> 1",
        "b/kernel": "0 -> 1",
        "last/kernel": "head",
        "last/bias": "elementwise",
    }
    return linen(LinenNormalised(), VECTORS, first_class, right)


# Flax nnx


def nnx_model(build, batch, loss, right, wrt=nnx.Param):
    """An nnx module; its other variables are data."""
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    graph, params, others = nnx.split(model, wrt, ...)

    def loss_fn(params, data):
        batch, others = data
        return loss(nnx.merge(graph, params, others)(batch), batch)

    return Model(loss_fn, params, (batch, others), right)


class NnxViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), rngs=rngs)
        self.first = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.places = nnx.Param(jnp.zeros((1, 17, WIDTH)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 24, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(24, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(len(x), -1, WIDTH)
        first = jnp.broadcast_to(self.first[...], (len(x), 1, WIDTH))
        x = jnp.concatenate([first, x], axis=1) + self.places[...]
        x = x + self.attention(self.norm(x))
        x = x + self.down(self.drop(nnx.gelu(self.up(x))))
        return self.last(x[:, 0])


def nnx_vit():
    right = {
        "patches/kernel*": "convolution",
        "places*": "elementwise",
        "attention/query/kernel*": "0 -> 1,2",
        "attention/key/kernel*": "0 -> 1,2",
        "attention/value/kernel*": "0 -> 1,2",
        "attention/out/kernel*": "0,1 -> 2",
        "attention/*/bias*": "elementwise",
        "up/kernel*": "0 -> 1",
        "down/kernel*": "0 -> 1",
        "last/kernel*": "head",
    }
    return nnx_model(NnxViT, IMAGES, first_class, right)


class NnxLoRA(nnx.Module):
    """Low-rank changes of frozen layers, which are data."""

    def __init__(self, rngs):
        self.first = nnx.LoRALinear(WIDTH, 24, lora_rank=2, rngs=rngs)
        self.last = nnx.LoRALinear(24, CLASSES, lora_rank=3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def nnx_lora():
    right = {
        "first/lora/lora_*": "0 -> 1",
        "last/lora/lora_a*": "0 -> 1",
        "last/lora/lora_b*": "head",
    }
    return nnx_model(NnxLoRA, VECTORS, first_class, right, wrt=nnx.LoRAParam)


class NnxEinsum(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Einsum("btd,dnh->btnh", (WIDTH, HEADS, 3), rngs=rngs)
        self.next = nnx.LinearGeneral((HEADS, 3), (2, 5), axis=(-2, -1), rngs=rngs)
        self.last = nnx.LinearGeneral((2, 5), CLASSES, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.next(nnx.relu(self.first(x)))))


def nnx_layers_of_several_axes():
    right = {
        "first/kernel*": "0 -> 1,2",
        "next/kernel*": "0,1 -> 2,3",
        "next/bias*": "elementwise",
        "last/kernel*": "head",
    }
    return nnx_model(NnxEinsum, VECTORS, first_class, right)


class NnxStack(nnx.Module):
    """Layers made by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, tokens):
        step = nnx.scan(lambda x, layer: nnx.tanh(layer(x)), out_axes=nnx.Carry)
        return self.embed.attend(step(self.embed(tokens), self.layers))


def nnx_scanned_layers():
    right = {
        "embed/embedding*": "tied",
        "layers/kernel*": "1 -> 2",
        "layers/bias*": "vector",
    }
    return nnx_model(NnxStack, TOKENS, next_word, right)


# Haiku


def haiku(forward, batch, loss, right):
    """A function of Haiku modules; its state and its randomness are data."""
    model = hk.transform_with_state(forward)
    params, state = jax.eval_shape(model.init, KEY, batch)

    def loss_fn(params, data):
        batch, state = data
        outputs, _ = model.apply(params, state, KEY, batch)
        return loss(outputs, batch)

    return Model(loss_fn, params, (batch, state), right)


def haiku_resnet():
    build = lambda x: hk.nets.ResNet18(CLASSES, resnet_v2=True)(x, is_training=True)
    right = {"*/logits/w": "head", "*conv*/w": "convolution"}
    return haiku(build, IMAGES, first_class, right)


def haiku_transformer():
    def forward(tokens):
        x = hk.Embed(WORDS, WIDTH)(tokens)

        def block(x):
            init = hk.initializers.VarianceScaling()
            attention = hk.MultiHeadAttention(HEADS, 4, w_init=init, model_size=WIDTH)
            x = x + attention(x, x, x)
            return x + hk.nets.MLP([24, WIDTH], activation=jnp.tanh)(x)

        x = layer_stack(3)(block)(x)
        return hk.Linear(WORDS)(x)

    right = {
        "embed/embeddings": "table",
        "*/multi_head_attention/*/w": "1 -> 2",
        "*/mlp/*/w": "1 -> 2",
        "*layer_stack*/b": "vector",
        "linear/w": "head",
    }
    return haiku(forward, TOKENS, next_word, right)


def haiku_recurrent():
    def forward(x):
        core = hk.DeepRNN([hk.LSTM(12), jnp.tanh, hk.GRU(8), hk.VanillaRNN(WIDTH)])
        state = core.initial_state(len(x))
        x, _ = hk.dynamic_unroll(core, x, state, time_major=False)
        return hk.Linear(CLASSES)(x)

    right = {
        "lstm/linear/w": "0 -> 1",
        "gru/w_*": "0 -> 1",
        "vanilla_rnn/*/w": "0 -> 1",
        "linear/w": "head",
    }
    return haiku(forward, VECTORS, first_class, right)


def haiku_vq_vae():
    def forward(x):
        encoded = hk.nets.MLP([12, 8], name="encoder")(x)
        nearest = hk.nets.VectorQuantizer(8, 20, 0.25)(encoded, is_training=True)
        decoded = hk.nets.MLP([12, WIDTH], name="decoder")(nearest["quantize"])
        return jnp.mean((decoded - x) ** 2) + nearest["loss"]

    right = {
        "encoder/~/linear_*/w": "0 -> 1",
        "vector_quantizer/embeddings": "tied",  # its columns are looked up
        "decoder/~/linear_0/w": "0 -> 1",
        "decoder/~/linear_1/w": "head",
    }
    return haiku(forward, VECTORS, lambda loss, _: loss, right)


# Equinox


def equinox(build, batch, loss, right):
    """An Equinox module, called under `jax.vmap`."""
    model = eqx.filter_eval_shape(build, KEY)
    is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    params, static = eqx.partition(model, is_array)

    def loss_fn(params, batch):
        return loss(jax.vmap(eqx.combine(params, static))(batch), batch)

    return Model(loss_fn, params, batch, right)


class EquinoxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    last: eqx.nn.Linear

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(WORDS, WIDTH, key=a)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=b)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 24, depth=2, key=c)
        self.last = eqx.nn.Linear(WIDTH, WORDS, key=d)

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        x = x + self.attention(x, x, x)
        return jax.vmap(self.last)(x + jax.vmap(self.mlp)(x))


def equinox_transformer():
    right = {
        "embed/weight": "table",
        "attention/*_proj/weight": "1 -> 0",
        "mlp/layers/*/weight": "1 -> 0",
        "last/weight": "head",
    }
    return equinox(EquinoxTransformer, TOKENS, next_word, right)


class EquinoxRecurrent(eqx.Module):
    lstm: eqx.nn.LSTMCell
    gru: eqx.nn.GRUCell
    last: eqx.nn.Linear

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.lstm = eqx.nn.LSTMCell(WIDTH, 12, key=a)
        self.gru = eqx.nn.GRUCell(12, 8, key=b)
        self.last = eqx.nn.Linear(8, CLASSES, key=c)

    def __call__(self, x):
        def step(states, x):
            cell, hidden = states
            cell = self.lstm(x, cell)
            hidden = self.gru(cell[0], hidden)
            return (cell, hidden), hidden

        first = (jnp.zeros(12), jnp.zeros(12)), jnp.zeros(8)
        _, x = jax.lax.scan(step, first, x)
        return self.last(x[-1])


def equinox_recurrent():
    right = {"*/weight_ih": "1 -> 0", "*/weight_hh": "1 -> 0", "last/weight": "head"}
    return equinox(EquinoxRecurrent, VECTORS, first_class, right)


class EquinoxConvolutions(eqx.Module):
    """Also a stack of layers made by `eqx.filter_vmap`."""

    picture: eqx.nn.Conv1d
    wide: eqx.nn.Linear
    stack: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        self.picture = eqx.nn.Conv1d(6, 8, 3, key=key)
        self.wide = eqx.nn.Linear(8 * (WIDTH - 2), 12, key=key)
        make = eqx.filter_vmap(lambda key: eqx.nn.Linear(12, 12, key=key))
        self.stack = make(jax.random.split(key, 3))
        self.last = eqx.nn.Linear(12, CLASSES, key=key)

    def __call__(self, x):
        x = self.wide(jax.nn.relu(self.picture(x)).reshape(-1))
        layers, static = eqx.partition(self.stack, eqx.is_array)
        step = lambda x, layer: (jnp.tanh(eqx.combine(layer, static)(x)), None)
        return self.last(jax.lax.scan(step, x, layers)[0])


def equinox_convolutions_and_a_stack():
    right = {
        "picture/weight": "convolution",
        "wide/weight": "1 -> 0",
        "stack/weight": "2 -> 1",
        "stack/bias": "vector",
        "last/weight": "head",
    }
    return equinox(EquinoxConvolutions, VECTORS, first_class, right)


MODELS = [
    linen_gpt,
    linen_gpt_scanned_and_tied,
    linen_mixture_of_experts,
    linen_convolutions,
    linen_recurrent,
    linen_normalised_weights,
    nnx_vit,
    nnx_lora,
    nnx_layers_of_several_axes,
    nnx_scanned_layers,
    haiku_resnet,
    haiku_transformer,
    haiku_recurrent,
    haiku_vq_vae,
    equinox_transformer,
    equinox_recurrent,
    equinox_convolutions_and_a_stack,
]


def said(finding):
    """The kind, or the axes of a matrix as in `'0 -> 1,2'`."""
    if finding.numbers is None:
        return finding.kind
    as_tuple = lambda axes: axes if isinstance(axes, tuple) else (axes,)
    sides = [",".join(map(str, as_tuple(side))) for side in finding.numbers]
    return " -> ".join(sides)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_a_public_model_is_read_as_its_code_says(build):
    model = build()
    with jax.numpy_rank_promotion("allow"):
        found = from_loss(model.loss, model.params, model.batch).findings
    vectors = [
        each for each in found if max(each.shape, default=1) == math.prod(each.shape)
    ]
    assert {each.path: each.kind for each in vectors} == {
        each.path: "vector" for each in vectors
    }
    others = [each for each in found if each not in vectors]
    matching = lambda path: [key for key in model.right if fnmatch.fnmatch(path, key)]
    right = {
        each.path: [model.right[key] for key in matching(each.path)] for each in others
    }
    assert {each.path: [said(each)] for each in others} == right
    used = {key for each in others for key in matching(each.path)}
    assert used == set(model.right)
