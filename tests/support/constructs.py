"""A table of constructs: a loss each, and what its parameters are.

A construct reads as ``@readout(w=one(shape, said))`` above a function of the parameters
and the data. `said` is ``(inputs, outputs)``, the axes of a matrix, or the kind of what
is no matrix. The data are x of shape [2, 8, 16], if no others are given.

`@construct` takes the function for the loss. `@readout` takes it for a layer, and puts
an output head after it, so that another product follows those of the layer.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

BATCH, TIME = 2, 8
WIDTH, WIDE, HEADS, SIZE = 16, 32, 4, 4  # SIZE is a head's
EXPERTS, LAYERS, RANK, VOCABULARY = 5, 3, 2, 50
X = jnp.ones((BATCH, TIME, WIDTH))
TOKENS = jnp.zeros((BATCH, TIME), jnp.int32)
P = jax.sharding.PartitionSpec

# Axes of inputs and of outputs.
IN_OUT, OUT_IN, STACKED = ((0,), (1,)), ((1,), (0,)), ((1,), (2,))


class Construct(NamedTuple):
    """A loss, and for each parameter its shape and what it is.

    Attributes:
      name: of the function.
      loss: a function of the parameters and the data.
      parameters: by name the shape, and what is said of it.
      data: the loss's other arguments.
    """

    name: str
    loss: Callable[..., jax.Array]
    parameters: dict[str, tuple[tuple[int, ...], Any]]
    data: tuple[Any, ...] = (X,)

    @property
    def params(self) -> dict[str, jax.Array]:
        return {name: jnp.ones(shape) for name, (shape, _) in self.parameters.items()}

    @property
    def expected(self) -> dict[str, Any]:
        return {name: said for name, (_, said) in self.parameters.items()}


CONSTRUCTS: list[Construct] = []


def construct(*data: Any, **parameters: Any) -> Callable:
    """Adds a loss to the table. Data come first, parameters by name."""

    def add(loss):
        name = loss.__name__.strip("_")
        CONSTRUCTS.append(Construct(name, loss, parameters, data or (X,)))
        return loss

    return add


def readout(width: int = WIDE, *data: Any, **parameters: Any) -> Callable:
    """Adds a layer whose outputs are this wide, and after it a head called `head`."""

    def add(layer):
        @functools.wraps(layer)
        def loss(params, *args):
            return jnp.sum(jnp.tanh(layer(params, *args)) @ params["head"])

        head = {"head": ((width, 7), "head")}
        construct(*data, **parameters, **head)(loss)
        return layer

    return add


one = lambda shape, said=IN_OUT: (shape, said)
MATRIX = one((WIDTH, WIDE))


# What a product makes of its parameter


@readout(w=MATRIX)
def in_out(p, x):
    return x @ p["w"]


@readout(w=one((WIDE, WIDTH), OUT_IN))
def out_in(p, x):
    return x @ p["w"].T


@readout(w=MATRIX, b=one((WIDE,), "vector"), unused=one((WIDTH, WIDTH), "unused"))
def with_a_bias_and_an_unused_array(p, x):
    return x @ p["w"] + p["b"]


@readout(w=MATRIX)
def cast_and_transposed_twice(p, x):
    return x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16).T.T


@readout(w=one((2, WIDTH, WIDE // 2), ((1,), (0, 2))))
def reshape_that_transposes(p, x):
    return x @ lax.reshape(p["w"], (WIDTH, WIDE), dimensions=(1, 0, 2))


@readout(w=one((WIDE, WIDTH), OUT_IN))
def of_one_vector_at_a_time(p, x):
    return jax.vmap(jax.vmap(lambda v: p["w"] @ v))(x)


@construct(w=MATRIX, head=one((WIDE, 7), "head"))
def penalties_in_the_loss(p, x):
    loss = jnp.sum(jnp.tanh(x @ p["w"]) @ p["head"])
    loss += sum(jnp.sum(w**2) for w in p.values())
    return loss + jnp.sum((p["w"].T @ p["w"] - jnp.eye(WIDE)) ** 2)


@construct(X, X, w=MATRIX, out=one((WIDE, WIDTH), "asked"))
def squared_error_as_a_product(p, x, y):
    error = jnp.tanh(x @ p["w"]) @ p["out"] - y
    return jnp.vdot(error, error)


@construct(w=MATRIX, out=one((WIDE, 2), "asked"))
def outputs_averaged_by_a_convolution(p, x):
    out = jnp.tanh(x @ p["w"]) @ p["out"]
    return jnp.mean(jnp.convolve(out.ravel(), jnp.ones(3)) ** 2)


@construct(w=one((WIDTH, WIDTH), "asked"), head=one((WIDTH, 3), "head"))
def penalty_alone(p, x):
    return jnp.sum(x @ p["head"]) + jnp.sum(p["w"] ** 2)


@readout(w=MATRIX)
def outputs_over_the_norm(p, x):
    return x @ p["w"] / jnp.linalg.norm(p["w"])


@readout(w=one((WIDTH, WIDE), "asked"))
def weights_and_a_change_by_data(p, x):
    change = jnp.tanh(x.mean(1))[:, :, None]
    return jnp.einsum("bti,bio->bto", x, p["w"] + change)


@readout(w=MATRIX, g=one((WIDE,), "vector"))
def weight_standardisation(p, x):
    w = (p["w"] - p["w"].mean(0)) / p["w"].std(0) * p["g"]
    return x @ w


@readout(w=MATRIX)
def quantised_weights(p, x):
    scale = jnp.abs(p["w"]).max(0)
    return x @ (p["w"] + lax.stop_gradient(jnp.round(p["w"] / scale) * scale - p["w"]))


@readout(WIDE, X, jax.random.key(0), w=MATRIX)
def dropped_weights(p, x, key):
    return x @ (p["w"] * jax.random.bernoulli(key, 0.5, p["w"].shape))


@readout(WIDTH, w=one((WIDTH, WIDTH)))
def masked_weights(p, x):
    return x @ (p["w"] * jnp.tril(jnp.ones((WIDTH, WIDTH))))


@readout(WIDE, X, jnp.ones(WIDE), w=MATRIX)
def spectral_norm(p, x, u):
    v = p["w"] @ u
    sigma = v @ p["w"] @ u / jnp.sum(v**2)
    return x @ (p["w"] / sigma)


@readout(WIDTH, w=one((WIDTH, WIDTH)))
def newton_schulz_in_the_model(p, x):
    return x @ (1.5 * p["w"] - 0.5 * p["w"] @ p["w"].T @ p["w"])


@readout(frozen=one((WIDTH, WIDE), "unused"), w=MATRIX)
def stopped_gradient(p, x):
    return x @ lax.stop_gradient(p["frozen"]) + x @ p["w"]


# Programs within programs


@readout(w=MATRIX)
def remat(p, x):
    return jax.checkpoint(lambda x: jax.nn.silu(x @ p["w"]))(x)


@jax.custom_vjp
def _linear(x, w):
    return x @ w.T


_linear.defvjp(
    lambda x, w: (_linear(x, w), (x, w)),
    lambda kept, g: (g @ kept[1], jnp.einsum("bto,bti->oi", g, kept[0])),
)


@readout(w=one((WIDE, WIDTH), OUT_IN))
def custom_vjp(p, x):
    return _linear(x, p["w"])


@readout(w=MATRIX, v=MATRIX)
def cond(p, x):
    return lax.cond(x.sum() > 0, lambda: x @ p["w"], lambda: x @ p["v"])


@readout(w=one((3, WIDTH, WIDE), STACKED))
def switch_over_a_stack(p, x):
    branches = [lambda i=i: x @ p["w"][i] for i in range(3)]
    return lax.switch(jnp.int32(x.sum()), branches)


@readout(WIDTH, w=one((WIDTH, WIDTH)))
def fori_loop(p, x):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ p["w"]), x)


@readout(WIDTH, w=one((WIDTH, WIDTH)))
def while_loop(p, x):
    goes_on = lambda state: state[0] < x.sum()
    step = lambda state: (state[0] + 1, jnp.tanh(state[1] @ p["w"]))
    return lax.while_loop(goes_on, step, (0.0, x))[1]


@readout(WIDTH, w=one((LAYERS, WIDTH, WIDTH), STACKED))
def fori_loop_over_layers(p, x):
    return lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ p["w"][i]), x)


@readout(
    WIDTH, w=one((LAYERS, WIDTH, WIDTH), STACKED), b=one((LAYERS, WIDTH), "vector")
)
def scan_over_layers(p, x):
    layer = lambda h, each: (jnp.tanh(h @ each["w"] + each["b"]), None)
    return lax.scan(layer, x, {"w": p["w"], "b": p["b"]})[0]


@readout(WIDTH, w=one((WIDTH, LAYERS, WIDTH), ((0,), (2,))))
def scan_over_layers_on_the_second_axis(p, x):
    layer = lambda h, w: (jnp.tanh(h @ w), None)
    return lax.scan(layer, x, jnp.moveaxis(p["w"], 1, 0))[0]


@readout(WIDTH, w=one((2, LAYERS, WIDTH, WIDTH), ((2,), (3,))))
def scan_in_a_scan(p, x):
    layer = lambda h, w: (jnp.tanh(h @ w), None)
    return lax.scan(lambda h, w: (lax.scan(layer, h, w)[0], None), x, p["w"])[0]


@readout(WIDTH, a=one((WIDTH, WIDTH)), b=one((WIDTH, WIDTH)))
def layers_stacked_at_run_time(p, x):
    layer = lambda h, w: (jnp.tanh(h @ w), None)
    return lax.scan(layer, x, jnp.stack([p["a"], p["b"]]))[0]


@readout(
    WIDTH,
    u=one((WIDTH, WIDTH)),
    w=one((WIDTH, WIDTH)),
    start=one((WIDTH,), "vector"),
)
def recurrence(p, x):
    step = lambda h, x: (jnp.tanh(h @ p["u"] + x @ p["w"]), h)
    start = jnp.broadcast_to(p["start"], (BATCH, WIDTH))
    return lax.scan(step, start, jnp.moveaxis(x, 1, 0))[1]


@readout(WIDTH, u=one((WIDTH, WIDTH)), w=one((WIDTH, WIDTH)))
def recurrence_unrolled_from_zeros(p, x):
    h = jnp.zeros((BATCH, WIDTH))
    for t in range(3):
        h = jnp.tanh(h @ p["u"] + x[:, t] @ p["w"])
    return h


@readout(w=MATRIX)
def loop_that_tiles_its_state(p, x):
    step = lambda h, _: (jnp.tanh(jnp.tile(h, (1, 1, 2))[..., :WIDE]), None)
    return lax.scan(step, x @ p["w"], length=3)[0]


@readout(WIDTH, w=one((WIDTH, WIDTH), "asked"))
def weights_that_a_loop_changes(p, x):
    def step(w, x):
        return w - 0.1 * jnp.outer(x.mean(0), jnp.tanh(x.mean(0) @ w)), x @ w

    return lax.scan(step, p["w"], jnp.moveaxis(x, 1, 0))[1]


@construct(w=one((3, WIDTH, WIDE), STACKED), head=one((3, WIDE, 7), "head"))
def vmap_over_models(p, x):
    of_one = lambda w, head: jnp.sum(jnp.tanh(x @ w) @ head)
    return jax.vmap(of_one)(p["w"], p["head"]).sum()


MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@construct(w=one((3, WIDTH, WIDE), STACKED), head=one((3, WIDE, 7), "head"))
def vmap_over_models_with_a_norm(p, x):
    def model(p):
        hidden = x @ p["w"]
        return (hidden - hidden.mean(-1, keepdims=True)) @ p["head"]

    return jnp.sum(jax.vmap(model)(p) ** 2)


@readout(w=MATRIX)
def shard_map(p, x):
    part = lambda x, w: lax.psum(x @ w, "d")
    specs = P(None, None, "d"), P("d", None)
    return jax.shard_map(part, mesh=MESH, in_specs=specs, out_specs=P())(x, p["w"])


@readout(w=MATRIX)
def shard_map_that_gathers_weights(p, x):
    part = lambda x, w: x @ lax.all_gather(w, "d", tiled=True)
    specs = P(), P("d", None)
    run = jax.shard_map(part, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=False)
    return run(x, p["w"])


@construct(
    w=one((WIDE, WIDTH), OUT_IN), v=one((WIDE, WIDE)), head=one((WIDE, 1), "vector")
)
def gradient_within_the_loss(p, x):
    energy = lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ p["w"].T) @ p["v"]) @ p["head"])
    return jnp.sum(jax.grad(energy)(x) ** 2)


@construct(w=one((WIDE, WIDTH), OUT_IN), head=one((WIDE, 7), "head"))
def head_of_a_gradient_within_the_loss(p, x):
    energy = lambda x: jnp.sum((jnp.tanh(x @ p["w"].T) @ p["head"]) ** 2)
    return jnp.sum(jax.grad(energy)(x) ** 2)


@readout(w=one((WIDTH, WIDE), "asked"))
def linear_transpose_alone(p, x):
    """It looks like the backward pass of a gradient, and is a layer."""
    transposed = jax.linear_transpose(lambda y: y @ p["w"].T, jnp.ones((8, WIDE)))
    return jax.vmap(lambda x: transposed(x)[0])(x)


# Tables, and what is no matrix


@readout(WIDTH, TOKENS, table=one((VOCABULARY, WIDTH), "table"))
def embedding(p, tokens):
    return p["table"][tokens]


@readout(WIDTH, TOKENS, table=one((VOCABULARY, WIDTH), "table"))
def embedding_of_one_hot_vectors(p, tokens):
    return jax.nn.one_hot(tokens, VOCABULARY) @ p["table"]


@readout(
    WIDTH,
    TOKENS,
    masked=one((VOCABULARY, WIDTH), "asked"),
    smoothed=one((VOCABULARY, WIDTH), "asked"),
    chosen=one((VOCABULARY, WIDTH), "asked"),
    scaled=one((VOCABULARY, WIDTH), "asked"),
    scales=one((VOCABULARY,), "vector"),
)
def one_hot_vectors_masked_smoothed_chosen_or_scaled(p, tokens):
    hot = jax.nn.one_hot(tokens, VOCABULARY)
    masked = hot * (tokens > 0)[..., None]
    smoothed = 0.9 * hot + 0.1 / VOCABULARY
    chosen = jnp.where(tokens[..., None] == jnp.arange(VOCABULARY), 1.0, 0.0)
    scaled = hot * p["scales"] @ p["scaled"]
    scaled += jnp.einsum("btv,v->btv", hot, p["scales"]) @ p["scaled"]
    others = smoothed @ p["smoothed"] + chosen @ p["chosen"]
    return masked @ p["masked"] + others + scaled


@readout(
    WIDTH,
    TOKENS,
    shifted=one((VOCABULARY, WIDTH), "asked"),
    rolled=one((VOCABULARY, WIDTH), "asked"),
    turned=one((VOCABULARY, WIDTH), "asked"),
)
def one_hot_vectors_that_are_moved(p, tokens):
    hot = jax.nn.one_hot(tokens, VOCABULARY)
    shifted = jnp.concatenate([jnp.zeros((BATCH, 1, VOCABULARY)), hot[:, :-1]], 1)
    rolled, turned = jnp.roll(hot, 1, 1), jnp.flip(hot, 1)
    return shifted @ p["shifted"] + rolled @ p["rolled"] + turned @ p["turned"]


@readout(
    WIDTH,
    TOKENS,
    sums=one((VOCABULARY, WIDTH), "asked"),
    largest=one((VOCABULARY, WIDTH), "asked"),
)
def bags_of_one_hot_vectors(p, tokens):
    each = jax.nn.one_hot(tokens, VOCABULARY)
    return each.sum(1) @ p["sums"] + each.max(1) @ p["largest"]


@readout(WIDTH, TOKENS, X, w=one((WIDTH, WIDTH)))
def masked_inputs(p, tokens, x):
    return (x * (tokens == 0)[..., None]) @ p["w"]


@readout(WIDTH, TOKENS, table=one((VOCABULARY, WIDTH), "table"))
def rows_taken_in_a_scan(p, tokens):
    take = lambda at: lax.dynamic_index_in_dim(p["table"], at, keepdims=False)
    step = lambda h, at: (jnp.tanh(h + take(at)), h)
    return lax.scan(step, jnp.zeros(WIDTH), tokens[0])[1]


@construct(TOKENS, table=one((VOCABULARY, WIDTH), "tied"), w=one((WIDTH, WIDTH)))
def tied_embedding(p, tokens):
    return jnp.sum(jnp.tanh(p["table"][tokens] @ p["w"]) @ p["table"].T)


@construct(w=one((WIDTH, WIDTH), "asked"))
def embedding_at_constant_places_and_a_product(p, x):
    return jnp.sum(jnp.tanh(x + p["w"][jnp.arange(TIME)]) @ p["w"])


@readout(WIDTH, positions=one((20, WIDTH), "elementwise"))
def positions_added(p, x):
    return x + p["positions"][:TIME]


@readout(WIDTH, positions=one((20, WIDTH), "table"))
def positions_looked_up(p, x):
    return x + p["positions"][jnp.arange(TIME)]


@readout(WIDTH, positions=one((4, WIDTH), "asked"))
def positions_resized(p, x):
    return x + jax.image.resize(p["positions"], (TIME, WIDTH), "linear")


@construct(
    codes=one((VOCABULARY, WIDTH), "tied"),
    w=one((WIDTH, WIDTH)),
    head=one((WIDTH, 7), "head"),
)
def codebook(p, x):
    x = x @ p["w"]
    distances = jnp.sum(p["codes"] ** 2, -1) - 2 * x @ p["codes"].T
    nearest = p["codes"][jnp.argmin(distances, -1)]
    straight = x + lax.stop_gradient(nearest - x)
    return jnp.sum(straight @ p["head"]) + jnp.sum(
        (nearest - lax.stop_gradient(x)) ** 2
    )


@readout(
    WIDTH, X, cls=one((1, 1, WIDTH), "vector"), registers=one((4, WIDTH), "elementwise")
)
def tokens_put_beside(p, x):
    several = [p["cls"], p["registers"][None]]
    return jnp.concatenate(
        [*(jnp.broadcast_to(v, (BATCH, *v.shape[1:])) for v in several), x], 1
    )


@readout(WIDTH, latents=one((6, WIDTH), "elementwise"), q=one((WIDTH, WIDTH)))
def latents_of_a_batch(p, x):
    latents = jnp.broadcast_to(p["latents"], (BATCH, 6, WIDTH))
    scores = jnp.einsum("bnd,btd->bnt", latents @ p["q"], jnp.tanh(x + 1))
    return jax.nn.softmax(scores) @ x


@readout(WIDTH, latents=one((6, WIDTH), "elementwise"), q=one((WIDTH, WIDTH)))
def latents_added_to_zeros(p, x):
    """As the queries of DETR."""
    latents = jnp.zeros((BATCH, 6, WIDTH)) + p["latents"]
    scores = jnp.einsum("bnd,btd->bnt", latents @ p["q"], jnp.tanh(x + 1))
    return jax.nn.softmax(scores) @ x


@readout(
    WIDTH,
    q=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    scale=one((WIDTH, HEADS), "elementwise"),
)
def scale_of_a_kernel_of_heads(p, x):
    kernel = p["q"] * p["scale"][..., None]
    return jnp.einsum("btd,dnh->btnh", x, kernel).reshape(BATCH, TIME, WIDTH)


@readout(
    WIDTH,
    q=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    scale=one((HEADS, SIZE), "elementwise"),
)
def scale_of_heads(p, x):
    q = jnp.einsum("btd,dnh->btnh", x, p["q"]) * p["scale"]
    return q.reshape(BATCH, TIME, WIDTH)


def convolved(x, kernel, groups=1):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


@readout(kernel=one((3, WIDTH, WIDE), "convolution"))
def convolution(p, x):
    return convolved(x, p["kernel"])


@readout(kernel=one((1, WIDTH, WIDE), "convolution"))
def convolution_of_one_place(p, x):
    return convolved(x, p["kernel"])


@readout(WIDTH, kernel=one((4, 1, WIDTH), "convolution"))
def depthwise_convolution(p, x):
    return convolved(x, p["kernel"], groups=WIDTH)


# Heads and experts


@readout(
    WIDTH,
    q=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    k=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    v=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    out=one((HEADS, SIZE, WIDTH), ((0, 1), (2,))),
)
def attention(p, x):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in "qkv")
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("btnh,nhd->btd", mixed, p["out"])


@readout(WIDTH, k=one((WIDTH, WIDTH)), v=one((WIDTH, WIDTH)))
def keys_written_to_a_cache(p, x):
    cache = jnp.zeros((BATCH, 2 * TIME, WIDTH))
    k, v = (lax.dynamic_update_slice(cache, x @ p[name], (0, 0, 0)) for name in "kv")
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", jnp.tanh(x), k)) @ v


@readout(
    WIDTH,
    q=one((HEADS, WIDTH, SIZE), ((1,), (0, 2))),
    k=one((WIDTH, SIZE), IN_OUT),
    v=one((WIDTH, SIZE), IN_OUT),
    out=one((WIDTH, WIDTH)),
)
def attention_with_one_key(p, x):
    q = jnp.einsum("btd,ndh->btnh", x, p["q"])
    k, v = x @ p["k"], x @ p["v"]
    scores = jax.nn.softmax(jnp.einsum("btnh,bsh->bnts", q, k))
    return (
        jnp.einsum("bnts,bsh->btnh", scores, v).reshape(BATCH, TIME, WIDTH) @ p["out"]
    )


@readout(WIDTH, qkv=one((3 * WIDTH, WIDTH), OUT_IN), out=one((WIDTH, WIDTH), OUT_IN))
def attention_of_a_fused_kernel(p, x):
    qkv = (x @ p["qkv"].T).reshape(BATCH, TIME, HEADS, 3 * SIZE)
    mixed = jax.nn.dot_product_attention(*jnp.split(qkv, 3, -1))
    return mixed.reshape(BATCH, TIME, WIDTH) @ p["out"].T


@readout(
    WIDTH, qkv=one((WIDTH, 3, HEADS, SIZE), ((0,), (2, 3))), out=one((WIDTH, WIDTH))
)
def attention_of_three_kernels_in_one(p, x):
    qkv = jnp.einsum("btd,dcnh->cbtnh", x, p["qkv"])
    mixed = jax.nn.dot_product_attention(qkv[0], qkv[1], qkv[2])
    return mixed.reshape(BATCH, TIME, WIDTH) @ p["out"]


@readout(
    WIDTH, qkv=one((WIDTH, 3, HEADS, SIZE), ((0,), (2, 3))), out=one((WIDTH, WIDTH))
)
def attention_of_three_kernels_gathered(p, x):
    """As haliax takes a place of a named axis."""
    qkv = jnp.einsum("btd,dcnh->btcnh", x, p["qkv"])
    mixed = jax.nn.dot_product_attention(*(jnp.take(qkv, i, 2) for i in range(3)))
    return mixed.reshape(BATCH, TIME, WIDTH) @ p["out"]


@readout(q=MATRIX, k=MATRIX)
def fused_by_concatenation(p, x):
    return jnp.split(x @ jnp.concatenate([p["q"], p["k"]], 1), 2, -1)[0]


@readout(
    WIDTH,
    router=one((WIDTH, EXPERTS)),
    up=one((EXPERTS, WIDTH, WIDE), STACKED),
    down=one((EXPERTS, WIDE, WIDTH), STACKED),
)
def experts(p, x):
    gate = jax.nn.softmax(x @ p["router"])
    weight = jax.nn.one_hot(lax.top_k(gate, 2)[1], EXPERTS).sum(-2) * gate
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->betf", x, p["up"]))
    return jnp.einsum(
        "betd,bte->btd", jnp.einsum("betf,efd->betd", hidden, p["down"]), weight
    )


@readout(
    WIDTH,
    router=one((WIDTH, EXPERTS)),
    up=one((WIDTH, EXPERTS, WIDE), ((0,), (2,))),
    down=one((EXPERTS, WIDE, WIDTH), STACKED),
)
def experts_on_the_second_axis(p, x):
    gate = jax.nn.softmax(x @ p["router"])
    hidden = jax.nn.gelu(jnp.einsum("btd,def->btef", x, p["up"]))
    return jnp.einsum("btef,efd,bte->btd", hidden, p["down"], gate)


@readout(WIDTH, up=one((4, WIDTH, WIDE), STACKED), down=one((4, WIDE, WIDTH), STACKED))
def experts_of_ragged_products(p, x):
    sizes = jnp.array([4, 4, 4, 4], jnp.int32)
    hidden = jax.nn.gelu(lax.ragged_dot(x.reshape(-1, WIDTH), p["up"], sizes))
    return lax.ragged_dot(hidden, p["down"], sizes)


@readout(
    WIDTH,
    up=one((EXPERTS, WIDTH, WIDE), STACKED),
    down=one((EXPERTS, WIDE, WIDTH), STACKED),
)
def experts_of_a_scan(p, x):
    add = lambda total, each: (total + jax.nn.gelu(x @ each[0]) @ each[1], None)
    return lax.scan(add, jnp.zeros_like(x), (p["up"], p["down"]))[0]


@readout(WIDTH, TOKENS, X, w=one((VOCABULARY, WIDTH, WIDTH), STACKED))
def matrices_looked_up(p, tokens, x):
    return jnp.einsum("btd,btdf->btf", x, p["w"][tokens])


@readout(WIDTH, jnp.zeros(BATCH, int), X, w=one((5, WIDTH, WIDTH), STACKED))
def matrices_chosen_by_one_hot_vectors(p, task, x):
    chosen = jnp.einsum("be,edf->bdf", jax.nn.one_hot(task, 5), p["w"])
    return jnp.einsum("btd,bdf->btf", x, chosen)


@jax.custom_jvp
def _hard(scores):
    return jax.nn.one_hot(scores.argmax(-1), scores.shape[-1])


_hard.defjvp(lambda primals, tangents: (_hard(*primals), tangents[0]))


@readout(
    WIDTH,
    router=one((WIDTH, EXPERTS)),
    experts=one((EXPERTS, WIDTH, WIDTH), STACKED),
)
def experts_of_a_choice_with_a_gradient(p, x):
    chosen = jnp.einsum("bte,edf->btdf", _hard(x @ p["router"]), p["experts"])
    return jnp.einsum("btd,btdf->btf", x, chosen)


@construct(
    X,
    TOKENS,
    w=one((WIDTH, HEADS, SIZE), "asked"),
    items=one((VOCABULARY, HEADS, SIZE), "elementwise"),
)
def products_by_hand_with_heads_of_a_table(p, x, tokens):
    queries = jnp.einsum("btd,dhk->bthk", x, p["w"])
    hot = jax.nn.one_hot(tokens, VOCABULARY)
    return jnp.sum(queries * jnp.einsum("btv,vhk->bthk", hot, p["items"]))


@readout(WIDTH, w=one((WIDTH, HEADS, SIZE), "asked"))
def norm_of_heads_that_are_not_followed(p, x):
    heads = jnp.einsum("btd,dhk->bthk", x, p["w"])
    heads /= heads.sum(-1, keepdims=True)
    return jnp.cumsum(heads, 1).reshape(BATCH, TIME, WIDTH)


@readout(SIZE, w=one((WIDTH, HEADS, SIZE), "asked"))
def one_place_of_each_axis(p, x):
    heads = jnp.einsum("btd,dhk->bthk", x, p["w"])
    return heads[:, :, 0] * heads[..., 0].sum(-1, keepdims=True)


@readout(
    WIDTH,
    w=one((2, WIDTH, WIDTH), STACKED),
    change=one((HEADS, SIZE, SIZE), STACKED),
)
def gates_of_which_one_is_split_into_heads(p, x):
    one, other = jnp.einsum("btd,gde->gbte", x, p["w"])
    heads = other.reshape(BATCH, TIME, HEADS, SIZE)
    heads = jnp.einsum("bthk,hkj->bthj", heads, p["change"])
    return jnp.tanh(one) * heads.reshape(BATCH, TIME, WIDTH)


@readout(w=one((EXPERTS, WIDTH, WIDE), "asked"))
def heads_or_experts(p, x):
    return jnp.einsum("btd,edf->btef", x, p["w"])


@readout(
    WIDTH,
    router=one((WIDTH, EXPERTS)),
    w=one((EXPERTS, WIDTH, WIDTH), "asked"),
)
def experts_mixed_before_the_product(p, x):
    gate = jax.nn.softmax(x.mean(1) @ p["router"])
    mixed = jnp.einsum("be,edf->bdf", gate, p["w"])
    return jnp.einsum("btd,bdf->btf", jnp.tanh(x + 1), mixed)


@construct(w=one((WIDTH, 2, 2, 5), "head"))
def head_of_several_axes(p, x):
    return jnp.einsum("btd,dpqc->btpqc", x, p["w"]).sum()


@readout(WIDTH, router=one((WIDTH, EXPERTS)), w=one((WIDTH, EXPERTS, WIDTH), "asked"))
def experts_of_one_layer(p, x):
    gate = jax.nn.softmax(x @ p["router"])
    return jnp.einsum("btef,bte->btf", jnp.einsum("btd,def->btef", x, p["w"]), gate)


@readout(WIDTH, edge=one((WIDTH, WIDTH)), w=one((WIDTH, WIDTH, WIDTH), "asked"))
def matrices_made_of_edges(p, x):
    """As of NNConv."""
    made = jnp.einsum("btk,kdf->btdf", jnp.tanh(x @ p["edge"]), p["w"])
    return jnp.einsum("btd,btdf->btf", x, made)


@construct(w=one((WIDTH, WIDTH, WIDE), "asked"), head=one((WIDE, 7), "head"))
def tensor_product(p, x):
    """As of e3nn: all pairs are inputs, though the product sums over one first."""
    vectors = x.reshape(-1, WIDTH, 1) * jnp.ones(3)
    half = jnp.einsum("uvw,nui->vwni", p["w"], vectors)
    made = jnp.einsum("vwni,nvj->nwij", half, vectors)
    made = jnp.einsum("nwij,ijk->nwk", made, jnp.ones((3, 3, 3)))
    return jnp.sum(jnp.einsum("nwk,wo->nok", made, p["head"]) ** 2)


@readout(
    WIDTH,
    bank=one((2, WIDTH, WIDE), "asked"),
    halves=one((2 * WIDTH, WIDTH), "asked"),
)
def bank_used_in_both_directions(p, x):
    x = x + jax.nn.relu(x @ p["bank"][0]) @ p["bank"][1].T
    return x + jnp.tanh(x @ p["halves"][:WIDTH]) @ p["halves"][WIDTH:].T


@readout(WIDTH, X, jnp.ones((WIDTH, WIDTH)), a=one((WIDTH, RANK)), b=one((RANK, WIDTH)))
def adapter_of_a_frozen_layer(p, x, w):
    return x @ w + x @ p["a"] @ p["b"]


@construct(
    X,
    jnp.ones((WIDTH, WIDTH)),
    a=one((WIDTH, RANK)),
    b=one((RANK, WIDTH)),
)
def adapter_before_frozen_layers(p, x, w):
    return jnp.sum(jnp.tanh(x @ p["a"] @ p["b"]) @ w)


# Factors


@readout(w=MATRIX, a=one((WIDTH, RANK)), b=one((RANK, WIDE)))
def low_rank_adapter(p, x):
    return x @ p["w"] + x @ p["a"] @ p["b"]


@readout(w=MATRIX, a=one((WIDTH, RANK), "asked"), b=one((RANK, WIDE), "asked"))
def low_rank_adapter_merged(p, x):
    return x @ (p["w"] + p["a"] @ p["b"])


@readout(
    WIDTH,
    lower=one((WIDTH, WIDTH), "asked"),
    upper=one((WIDTH, WIDTH), "asked"),
    scale=one((WIDTH,), "vector"),
)
def triangular_factors(p, x):
    lower = jnp.tril(p["lower"], -1) + jnp.eye(WIDTH)
    return x @ (lower @ (jnp.triu(p["upper"], 1) + jnp.diag(jnp.exp(p["scale"]))))


@readout(
    WIDTH,
    p=one((WIDTH, WIDTH), "asked"),
    q=one((WIDTH, WIDTH), "asked"),
    scale=one((WIDTH,), "vector"),
)
def diagonal_between_factors(p, x):
    return x @ (p["p"] @ jnp.diag(p["scale"]) @ p["q"])


@readout(
    WIDTH,
    p=one((WIDTH, WIDTH), "asked"),
    q=one((WIDTH, WIDTH), "asked"),
    scale=one((WIDTH,), "vector"),
)
def padded_columns_between_factors(p, x):
    columns = jnp.broadcast_to(p["scale"][:, None], (WIDTH, SIZE))
    columns = jnp.pad(columns, ((0, 0), (0, WIDTH - SIZE)))
    return x @ (p["p"] @ columns @ p["q"])


@readout(
    WIDTH,
    p=one((WIDTH, WIDTH), "asked"),
    q=one((WIDTH, WIDTH), "asked"),
    scale=one((WIDTH,), "vector"),
)
def diagonal_added_to_a_factor(p, x):
    return x @ (p["p"] @ (p["q"] + jnp.diag(p["scale"])))


@readout(
    WIDTH,
    TOKENS,
    table=one((VOCABULARY, RANK), "asked"),
    projection=one((RANK, WIDTH), "asked"),
)
def embedding_in_factors_multiplied_first(p, tokens):
    return (p["table"] @ p["projection"])[tokens]


@readout(
    WIDTH,
    TOKENS,
    table=one((VOCABULARY, RANK), "table"),
    projection=one((RANK, WIDTH)),
)
def embedding_in_factors(p, tokens):
    return p["table"][tokens] @ p["projection"]


@construct(
    X,
    a=one((WIDTH, WIDE)),
    b=one((WIDTH, WIDE)),
    w=one((WIDE, WIDE)),
)
def biaffine_scores(p, x):
    left, right = jnp.tanh(x @ p["a"]), jnp.tanh(x @ p["b"])
    return jnp.sum(jnp.einsum("bti,ij,bsj->bts", left, p["w"], right) ** 2)


@construct(
    X,
    TOKENS,
    w=one((WIDTH, WIDTH)),
    items=one((VOCABULARY, WIDTH), "table"),
)
def sampled_softmax(p, x, tokens):
    h = jnp.tanh(x @ p["w"])
    wrong = jnp.einsum("btd,nd->btn", h, p["items"][tokens[0]])
    return jnp.sum(wrong) - jnp.sum(h * p["items"][tokens])


@construct(
    X,
    TOKENS,
    w=MATRIX,
    head=one((WIDE, 7), "head"),
    weights=one((VOCABULARY,), "vector"),
)
def losses_with_learned_weights(p, x, tokens):
    """As of tasks. A number for each task is no layer after the head."""
    losses = jnp.sum((jnp.tanh(x @ p["w"]) @ p["head"]) ** 2, -1)
    return jnp.sum(losses * p["weights"][tokens])


@construct(
    X,
    TOKENS,
    w=MATRIX,
    head=one((WIDE, 7), "head"),
    bias=one((VOCABULARY, 7), "table"),
)
def outputs_with_looked_up_biases(p, x, tokens):
    error = jnp.tanh(x @ p["w"]) @ p["head"] + p["bias"][tokens]
    known = (tokens > 0)[..., None]
    squares = error * error * known + 0.5 * error * error + known * error * error
    return jnp.sum(squares + jax.nn.softmax(error) * jax.nn.log_softmax(error))


@construct(X, TOKENS, w=MATRIX, head=one((WIDE, 7), "head"))
def cross_entropy_as_a_product(p, x, tokens):
    chances = jax.nn.log_softmax(jnp.tanh(x @ p["w"]) @ p["head"])
    return -jnp.einsum("btv,btv->bt", chances, jax.nn.one_hot(tokens, 7)).sum()


@readout(w=MATRIX, router=one((WIDTH, EXPERTS)))
def experts_that_a_loss_balances(p, x):
    chances = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS)
    balance = jnp.dot(chosen.mean((0, 1)), chances.mean((0, 1)))
    return x @ p["w"] * chances.max(-1, keepdims=True) + balance


@readout(
    WIDTH,
    up=one((4, WIDTH, WIDE), STACKED),
    down=one((4, WIDE, WIDTH), STACKED),
)
def experts_on_a_grid(p, x):
    hidden = jnp.tanh(jnp.einsum("btd,edf->btef", x, p["up"]))
    hidden = hidden.reshape(BATCH, TIME, 2, 2, 2, WIDE // 2)
    down = p["down"].reshape(2, 2, 2, WIDE // 2, WIDTH)
    return jnp.einsum("btghcf,ghcfd->btghd", hidden, down).sum((2, 3))


@construct(
    X,
    jax.random.key(0),
    start=one((WIDTH, WIDE)),
    u=one((WIDE, WIDE)),
    choices=one((7, WIDE), "table"),
    head=one((WIDE, 7), "head"),
)
def choices_that_are_drawn_and_fed_back(p, x, key):
    """Whole numbers have no gradient, so that no layer follows the head."""

    def step(h, key):
        logits = h @ p["head"]
        chosen = jax.nn.one_hot(jax.random.categorical(key, logits), 7)
        chance = jnp.sum(chosen * jax.nn.log_softmax(logits))
        return jnp.tanh(h @ p["u"] + chosen @ p["choices"]), chance

    first = jnp.tanh(x[:, 0] @ p["start"])
    return jnp.sum(lax.scan(step, first, jax.random.split(key, 3))[1])


@jax.custom_jvp
def _spike(x):
    return (x > 0).astype(x.dtype)


_spike.defjvp(lambda x, dx: (_spike(*x), dx[0] / (1 + x[0] ** 2)))


@readout(WIDTH, w=MATRIX, v=one((WIDE, WIDTH)))
def spikes(p, x):
    """A derivative of the user's passes through a comparison."""
    return _spike(_spike(x @ p["w"]) @ p["v"])


@construct(w=MATRIX, logits=one((WIDE, 7), "asked"), values=one((WIDE, 7), "asked"))
def value_expected_of_choices(p, x):
    hidden = jnp.tanh(x @ p["w"])
    chosen = jax.nn.softmax(hidden @ p["logits"])
    return jnp.sum(jnp.einsum("bta,bta->bt", chosen, hidden @ p["values"]))


@construct(w=MATRIX)
def tied_autoencoder(p, x):
    return jnp.sum((jnp.tanh(x @ p["w"]) @ p["w"].T - x) ** 2)


# What is asked about


@readout(w=one((WIDTH, WIDE), "asked"))
def pallas_kernel(p, x):
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((BATCH * TIME, WIDE), jnp.float32)
    run = pl.pallas_call(kernel, out_shape=shape, interpret=True)
    return run(x.reshape(-1, WIDTH), p["w"])


@readout(w=one((WIDTH, WIDE), "asked"))
def callback(p, x):
    shape = jax.ShapeDtypeStruct((BATCH, TIME, WIDE), jnp.float32)
    return jax.pure_callback(lambda x, w: x @ w, shape, x, p["w"])


@readout(w=one((WIDTH, WIDE), "asked"), style=one((WIDTH, WIDTH)))
def weights_multiplied_by_an_activation(p, x):
    style = jnp.tanh(x.mean(1) @ p["style"])
    return jnp.einsum("bti,bio->bto", x, p["w"] * style[:, :, None])


@readout(w=one((WIDTH, WIDE), "asked"))
def product_by_hand(p, x):
    return (x[..., None] * p["w"]).sum(-2)


@readout(w=one((WIDTH, WIDE), "asked"))
def product_by_hand_of_repeated_numbers(p, x):
    return (jnp.broadcast_to(jnp.tanh(x)[..., None], (*x.shape, WIDE)) * p["w"]).sum(-2)


@readout(w=one((WIDTH, WIDE), "asked"))
def product_by_hand_of_an_outer_product(p, x):
    return jnp.einsum("btd,df->btdf", x, p["w"]).sum(2)


@readout(w=one((WIDTH, WIDE), "asked"))
def product_by_hand_summed_by_a_loop(p, x):
    terms = jnp.moveaxis(x[..., None] * p["w"], 2, 0)
    add = lambda total, term: (total + term, None)
    return lax.scan(add, jnp.zeros((BATCH, TIME, WIDE)), terms)[0]


@readout(w=one((WIDTH, WIDE), "asked"))
def product_by_hand_summed_in_python(p, x):
    terms = x[..., None] * p["w"]
    return sum(terms[:, :, i] for i in range(WIDTH))


@construct(v=one((WIDTH * WIDE + WIDE * 7,), "asked"))
def one_vector_of_all_weights(p, x):
    w = p["v"][: WIDTH * WIDE].reshape(WIDTH, WIDE)
    head = p["v"][WIDTH * WIDE :].reshape(WIDE, 7)
    return jnp.sum(jnp.tanh(x @ w) @ head)


@readout(WIDTH, w=one((WIDTH, SIZE), "asked"))
def block_diagonal_by_reshape(p, x):
    blocks = p["w"].reshape(HEADS, SIZE, SIZE)
    heads = x.reshape(BATCH, TIME, HEADS, SIZE)
    return jnp.einsum("btnh,nhk->btnk", heads, blocks).reshape(BATCH, TIME, WIDTH)


def attention_to_segments(choose):
    """Adds attention whose queries meet a table, of which `choose` takes the scores.

    It is given the scores [batch, heads, time, 2], and at [batch, time, key] whether
    two tokens are of one segment. XLNet has this.
    """

    def layer(p, tokens, x):
        q, k = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in "qk")
        scores = jnp.einsum("btnh,snh->bnts", q + p["bias"], p["segments"])
        is_same = tokens[:, :, None] == tokens[:, None, :]
        scores = choose(scores, is_same) + jnp.einsum("btnh,bknh->bntk", q, k)
        return jnp.einsum("bntk,bkd->btd", jax.nn.softmax(scores), x)

    layer.__name__ = choose.__name__
    side = ((0,), (1, 2))
    readout(
        WIDTH,
        TOKENS,
        X,
        q=one((WIDTH, HEADS, SIZE), side),
        k=one((WIDTH, HEADS, SIZE), side),
        bias=one((HEADS, SIZE), "elementwise"),
        segments=one((2, HEADS, SIZE), "asked"),
    )(layer)
    return choose


@attention_to_segments
def table_as_keys_and_one_hot_vectors(scores, is_same):
    same = jax.nn.one_hot(is_same.astype(int), 2)
    return jnp.einsum("btks,bnts->bntk", same, scores)


@attention_to_segments
def table_as_keys_and_a_condition(scores, is_same):
    """As keras_hub has it."""
    is_same = is_same[:, None]
    shape = scores.shape[:3] + is_same.shape[-1:]
    others, same = (
        jnp.broadcast_to(x, shape) for x in (scores[..., 1:], scores[..., :1])
    )
    return jnp.where(jnp.broadcast_to(is_same, shape), same, others)


@attention_to_segments
def table_as_keys_and_a_condition_of_places(scores, is_same):
    """As in a model of images and text, whose lengths are fixed."""
    is_text = jnp.arange(TIME) < TIME // 2
    return jnp.where(is_text, scores[..., :1], scores[..., 1:])


@attention_to_segments
def table_as_keys_and_indices(scores, is_same):
    return jnp.take_along_axis(scores, is_same[:, None].astype(int), -1)


@readout(
    WIDTH,
    q=one((WIDTH, WIDTH)),
    distances=one((2 * TIME - 1, WIDTH), "asked"),
)
def table_as_keys_and_a_shift(p, x):
    """As of relative positions in Music Transformer and BoTNet."""
    scores = x @ p["q"] @ p["distances"].T
    scores = jnp.pad(scores, ((0, 0), (0, 0), (0, 1)))
    scores = scores.reshape(BATCH, 2 * TIME * TIME)
    scores = jnp.pad(scores[:, TIME - 1 :], ((0, 0), (0, TIME - 1)))
    scores = scores.reshape(BATCH, TIME, 2 * TIME)[..., :TIME]
    return jax.nn.softmax(scores) @ x


@readout(
    WIDTH,
    q=one((WIDTH, WIDTH)),
    distances=one((2 * TIME - 1, WIDTH), "asked"),
)
def table_as_keys_and_constant_indices(p, x):
    scores = x @ p["q"] @ p["distances"].T
    distance = jnp.arange(TIME)[:, None] - jnp.arange(TIME) + TIME - 1
    scores = jnp.take_along_axis(scores, distance[None], -1)
    return jax.nn.softmax(scores) @ x


@readout(BATCH, TOKENS, X, segments=one((2, WIDTH), "asked"))
def table_as_keys_and_an_index_in_a_scan(p, tokens, x):
    def step(total, each):
        score, token = each
        return total + lax.dynamic_index_in_dim(score, token, 1)[:, 0], None

    scores = jnp.moveaxis(jnp.tanh(x) @ p["segments"].T, 1, 0)
    return lax.scan(step, jnp.zeros(BATCH), (scores, tokens[0]))[0]


@readout(WIDTH, q=one((WIDTH, WIDTH)), k=one((WIDTH, WIDTH)))
def rotary_positions_by_rolls(p, x):
    is_even = jnp.arange(WIDTH) % 2 == 0
    turn = lambda v: v + jnp.where(is_even, -jnp.roll(v, -1, -1), jnp.roll(v, 1, -1))
    q, k = turn(x @ p["q"]), turn(x @ p["k"])
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ x


@readout(WIDTH, X, TOKENS, w=one((2, WIDTH, WIDTH), STACKED))
def matrices_of_images_and_of_text(p, x, tokens):
    image, text = jnp.einsum("btd,kdf->kbtf", x, p["w"])
    return jnp.where(tokens[..., None] > 0, image, text)


@readout(WIDTH, X, jnp.ones(BATCH, jnp.int32), w=one((WIDTH, WIDTH)))
def sequences_turned_round(p, x, lengths):
    """As an RNN that reads padded sequences backwards."""
    turned = jax.vmap(lambda x, n: jnp.flip(jnp.roll(x, -n, 0), 0))
    return turned(jnp.tanh(x @ p["w"]), lengths)


@readout(
    WIDTH,
    gate=one((WIDTH, HEADS)),
    v=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
)
def heads_of_padded_sequences_in_a_row(p, x):
    """As of linear attention in chunks."""
    v = jnp.einsum("btd,dnh->btnh", x, p["v"])
    v = v * jax.nn.sigmoid(x @ p["gate"])[..., None]
    v = jnp.pad(v, ((0, 0), (0, 2), (0, 0), (0, 0)))[:, :TIME]
    return jnp.tanh(v.reshape(-1, SIZE)).reshape(BATCH, TIME, WIDTH)


@readout(
    WIDTH,
    probe=one((1, 1, WIDTH), "vector"),
    q=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    k=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    v=one((WIDTH, HEADS, SIZE), ((0,), (1, 2))),
    out=one((HEADS, SIZE, WIDTH), ((0, 1), (2,))),
)
def attention_of_a_tiled_probe(p, x):
    probe = jnp.tile(p["probe"], (BATCH, 1, 1))
    q = jnp.einsum("btd,dnh->btnh", probe, p["q"])
    k, v = (jnp.einsum("btd,dnh->btnh", x, p[name]) for name in "kv")
    mixed = jax.nn.dot_product_attention(q, k, v)
    return jnp.einsum("btnh,nhd->btd", mixed, p["out"])


@readout(
    WIDTH,
    router=one((WIDTH, EXPERTS)),
    up=one((EXPERTS, WIDTH, WIDE), STACKED),
    down=one((EXPERTS, WIDE, WIDTH), STACKED),
    after=one((WIDTH, WIDTH)),
)
def experts_of_gathered_tokens(p, x):
    x = x.reshape(-1, WIDTH)
    gate = jax.nn.softmax(x @ p["router"])
    gates, chosen = lax.top_k(gate.T, 4)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", x[chosen], p["up"]))
    mixed = jnp.einsum("ecf,efd->ecd", hidden, p["down"]) * gates[..., None]
    return jnp.zeros_like(x).at[chosen].add(mixed) @ p["after"]


@readout(z=one((WIDTH, WIDTH)), made=one((WIDTH, WIDTH * WIDE)))
def hypernetwork(p, x):
    made = jnp.tanh(x.mean(1) @ p["z"]) @ p["made"]
    return jnp.einsum("btd,bdf->btf", x, made.reshape(BATCH, WIDTH, WIDE))


@readout(WIDTH, w=one((WIDTH, WIDTH, 2), "asked"))
def complex_weights(p, x):
    return jnp.real(x @ (p["w"][..., 0] + 1j * p["w"][..., 1]))


@readout(WIDTH, w=one((3, WIDTH, WIDTH), STACKED))
def layers_unstacked(p, x):
    for w in jnp.unstack(p["w"]):
        x = jnp.tanh(x @ w)
    return x


@readout(w=one((WIDTH, WIDE)))
def mask_made_by_a_constant_matrix(p, x):
    """Data times a constant are data: here a mask."""
    mask = x.mean((0, 1)) @ jnp.ones((WIDTH, WIDTH))
    return x @ (p["w"] * mask[:, None])


@construct(X, jnp.ones((WIDE, 7)), w=one((WIDTH, WIDE)))
def layer_before_data_times_a_constant(p, x, y):
    """Data times a constant are data: here a layer that is not trained."""
    return jnp.sum(jnp.tanh(x @ p["w"] @ (y @ jnp.ones((7, 7)))))


@readout(
    WIDTH,
    q=one((WIDTH, WIDTH)),
    r=one((WIDTH, WIDTH), "asked"),
)
def product_with_constants_and_queries(p, x):
    """As of relative positions in Transformer-XL."""
    angles = jnp.sin(jnp.arange(TIME)[:, None] / jnp.arange(1, WIDTH + 1))
    scores = jax.nn.softmax((x @ p["q"]) @ (angles @ p["r"]).T)
    return scores @ x


@readout(w=one((WIDTH, WIDE), "asked"))
def product_with_rows_of_an_identity(p, x):
    return jnp.eye(WIDTH)[jnp.argmax(x, -1)] @ p["w"]
