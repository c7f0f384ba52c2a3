"""`from_loss` as users call it: what it takes, refuses, warns of and prints."""

import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import curvadion_jax as cd
from curvadion_jax import dimension_numbers
from curvadion_jax.dimension_numbers import DimensionNumbers, from_loss

X = jnp.ones((4, 8))
PARAMS = {"up": jnp.ones((8, 16)), "head": jnp.ones((16, 3))}


def loss_fn(params, x, scale=1.0):
    return scale * jnp.sum(jnp.tanh(x @ params["up"]) @ params["head"])


def kinds(partition):
    return {each.path: each.kind for each in partition.findings}


RIGHT = {"up": "matrix", "head": "head"}


@pytest.mark.parametrize(
    ("params", "args", "kwargs"),
    [
        (PARAMS, (X,), {}),
        (PARAMS, (X, 2.0), {}),
        (PARAMS, (X,), {"scale": jnp.ones(())}),
        (jax.eval_shape(lambda: PARAMS), (jax.eval_shape(lambda: X),), {}),
    ],
    ids=["arrays", "a number", "by keyword", "abstract"],
)
def test_arguments_are_those_of_the_loss(params, args, kwargs):
    assert kinds(from_loss(loss_fn, params, *args, **kwargs)) == RIGHT


def test_what_a_loss_returns_beside_itself_does_not_matter():
    params = PARAMS | {"probe": jnp.ones((8, 8))}
    with_aux = lambda p, x: (loss_fn(p, x), {"probe": jnp.tanh(x @ p["probe"])})
    assert kinds(from_loss(with_aux, params, X)) == RIGHT | {"probe": "unused"}


def test_the_result_is_what_optimizers_take():
    partition = from_loss(loss_fn, PARAMS, X)
    numbers = {"up": DimensionNumbers(0, 1), "head": None}
    assert partition(PARAMS) == numbers
    ours = cd.dion(0.1, dimension_numbers=partition)
    optaxs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=partition)
    grads = jax.grad(loss_fn)(PARAMS, X)
    for tx in (ours, optaxs):
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def test_a_part_of_the_parameters_has_a_part_of_the_numbers():
    assert from_loss(loss_fn, PARAMS, X)({"up": PARAMS["up"]}) == {
        "up": DimensionNumbers(0, 1)
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"down": jnp.ones((8, 16))}, "'down' has shape .* no such parameter"),
        ({"up": jnp.ones((2, 8, 16))}, r"'up' has shape \(2, 8, 16\)"),
    ],
    ids=["another name", "rows"],
)
def test_other_parameters_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        from_loss(loss_fn, PARAMS, X)(other)


def test_rows_on_a_mesh_are_refused():
    rows = cd.replicas.replicate(PARAMS, cd.replicas.make_mesh(4))
    with pytest.raises(ValueError, match="Give from_loss those of one replica"):
        from_loss(loss_fn, rows, X)


def step(params, x):
    """Of training, and no loss."""
    return jax.tree.map(jnp.subtract, params, jax.grad(loss_fn)(params, x)), x.mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (jax.grad(loss_fn), "Give the loss, and not its gradient"),
        (step, "arrays like the parameters.* nor a step of training"),
        (lambda params, x: jnp.sum(x), "No parameter reaches the loss"),
        (
            lambda params, x: jax.lax.pmean(loss_fn(params, x), "batch"),
            "over a mesh axis, 'batch', that is not there.*jax.vmap",
        ),
    ],
    ids=["gradient", "step", "closure", "mesh axis"],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        from_loss(loss, PARAMS, X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PARAMS, loss_fn, X), "loss_fn is of type dict, and no function"),
        ((loss_fn, PARAMS | {"step": 0}, X), "'step' is 0, and no array"),
    ],
    ids=["exchanged", "a number among parameters"],
)
def test_arguments_of_another_type_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        from_loss(*arguments)


def test_a_batch_that_the_loss_holds_is_hinted_at():
    with pytest.warns(dimension_numbers.PartitionWarning, match="batch that is no arg"):
        from_loss(lambda params: loss_fn(params, X), PARAMS)


def test_a_loss_over_a_mesh_axis_is_read_under_vmap():
    loss = lambda params, x: jax.lax.pmean(loss_fn(params, x), "batch")
    mapped = jax.vmap(loss, (None, 0), axis_name="batch")
    assert kinds(from_loss(mapped, PARAMS, X[None])) == RIGHT


def test_a_loss_with_sharding_constraints_is_read_under_its_mesh():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(params, x):
        x = jax.lax.with_sharding_constraint(x, jax.P("d"))
        return loss_fn(params, x)

    with jax.set_mesh(mesh):
        assert kinds(from_loss(loss, PARAMS, X)) == RIGHT


# What is asked about


def merged(params, x):
    w = params["adapter"]["a"] @ params["adapter"]["b"]
    return jnp.sum(jnp.tanh(x @ w) @ params["head"])


MERGED = {
    "adapter": {"a": jnp.ones((8, 2)), "b": jnp.ones((2, 16))},
    "head": jnp.ones((16, 3)),
}


def test_one_warning_names_what_is_asked_and_where():
    line = merged.__code__.co_firstlineno + 2
    with pytest.warns(dimension_numbers.PartitionWarning) as caught:
        partition = from_loss(merged, MERGED, X)
    (warning,) = caught
    said = str(warning.message)
    place = f"test_from_loss.py:{line}"
    for name, shape in (("adapter/a", (8, 2)), ("adapter/b", (2, 16))):
        assert f"{name} {shape}: a product after" in said
        assert place in said
    assert "answers={'adapter/a': None, 'adapter/b': None}" in said
    assert __file__ == warning.filename  # it stands at the user's line
    assert kinds(partition)["adapter/a"] == "asked"
    assert partition(MERGED)["adapter"]["a"] is None


def test_what_is_answered_is_not_asked_about():
    answers = {"adapter/a": DimensionNumbers(0, 1), "b": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition = from_loss(merged, MERGED, X, answers=answers)
    assert partition(MERGED)["adapter"] == {"a": DimensionNumbers(0, 1), "b": None}


def test_an_answer_replaces_what_is_read():
    partition = from_loss(loss_fn, PARAMS, X, answers={"up": None})
    assert partition(PARAMS)["up"] is None


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"down": None}, ValueError, "no parameter has it in its path"),
        ([("up", None)], TypeError, "Give a dictionary"),
        ({"up": (0, 1)}, TypeError, "DimensionNumbers"),
        ({"up": DimensionNumbers(0, 2)}, ValueError, "'up'"),
    ],
    ids=["no such path", "a list", "no dimension numbers", "no such axis"],
)
def test_wrong_answers_are_refused(answers, error, message):
    with pytest.raises(error, match=message):
        from_loss(loss_fn, PARAMS, X, answers=answers)


def test_a_line_is_that_of_the_call_if_a_library_jits_the_operation():
    table = jnp.ones((5, 8))
    loss = lambda table, tokens: jnp.sum(jnp.take(table, tokens, axis=0))
    for _ in range(2):  # the second time JAX has the program of jnp.take
        (found,) = from_loss(loss, table, jnp.zeros(4, int)).findings
        line = loss.__code__.co_firstlineno
        assert found.why == f"rows are looked up at test_from_loss.py:{line}"


def test_the_table_says_where_each_parameter_is_used():
    lines = str(from_loss(loss_fn, PARAMS, X)).splitlines()
    line = loss_fn.__code__.co_firstlineno + 1
    assert re.search(rf"^head .* head .*test_from_loss.py:{line}$", lines[1])
    assert re.search(rf"^up .* matrix .*test_from_loss.py:{line}$", lines[2])


# Libraries


class Block(nn.Module):
    """Attention, and a gated layer, without a norm's scales."""

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(use_scale=False, use_bias=False)(x)
        x += nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(h, h)
        h = nn.silu(nn.Dense(32, name="gate")(x)) * nn.Dense(32, name="up")(x)
        return x + nn.Dense(16, name="down")(h), None


class Scanned(nn.Module):
    """Blocks in a stack: query kernels are [layers, D, heads, size]."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 16, name="embed")(tokens)
        stack = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(11, name="last")(x)


def test_linen_under_a_scan():
    model, tokens = Scanned(), jnp.zeros((2, 5), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens)
        targets = jnp.roll(tokens, -1, 1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    numbers = from_loss(loss, params, tokens)(params)
    layers, last = numbers["layers"], numbers["last"]
    heads, dense = DimensionNumbers(1, (2, 3)), DimensionNumbers(1, 2)
    assert [
        layers["attention"][name]["kernel"] for name in ("query", "key", "value")
    ] == [heads] * 3
    assert layers["attention"]["out"]["kernel"] == DimensionNumbers((1, 2), 3)
    assert [layers[name]["kernel"] for name in ("gate", "up", "down")] == [dense] * 3
    assert last["kernel"] is None
    assert numbers["embed"]["embedding"] is None


class Network(nnx.Module):
    """A convolution, batch statistics, dropout and two layers."""

    def __init__(self, rngs):
        self.convolution = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.up = nnx.Linear(4 * 64, 16, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.convolution(x))).reshape(len(x), -1)
        return self.last(nnx.relu(self.drop(self.up(x))))


def test_nnx_with_statistics_and_dropout():
    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest)
        value = jnp.mean(model(x) ** 2)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    partition = from_loss(loss, params, rest, jnp.ones((2, 8, 8, 1)))
    assert {
        path: kind for path, kind in kinds(partition).items() if "kernel" in path
    } == {
        "convolution/kernel": "convolution",
        "last/kernel": "head",
        "up/kernel": "matrix",
    }
    assert partition(params)["up"]["kernel"] is not None
