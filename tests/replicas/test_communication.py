"""What a training step sends besides the optimizer is named, or rejected."""

import contextlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax.replicas._stray_collectives import groups as groups_of

pytestmark = pytest.mark.slow  # many programs
REPLICAS = 4
AXIS = helpers.AXIS
TX = cd.presets.local_sgd(0.1, k=2, axis_name=AXIS)


def averaged(gradients):
    return jax.tree.map(lambda g: lax.pmean(g, AXIS), gradients)


def with_noise(gradients, params):
    del params
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS))
    return jax.tree.map(
        lambda g: g + 1e-3 * jax.random.normal(key, g.shape), averaged(gradients)
    )


def clipped(gradients, params):
    del params
    norm = lax.pmean(optax.tree.norm(gradients), AXIS)
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), gradients)


def in_a_loop(gradients):
    def body(total, gradient):
        return total + lax.psum(gradient, AXIS), ()

    return jax.tree.map(
        lambda g: lax.scan(body, jnp.zeros(g.shape), g[None])[0], gradients
    )


def gathered(gradients):
    return jax.tree.map(lambda g: lax.all_gather(g, AXIS).mean(0), gradients)


def step_of(function, tx=TX):
    """A training step whose gradients go through the function first."""

    def train(state, gradients):
        params, opt_state = state
        gradients = jax.tree.map(lambda g: g[0], gradients)
        given = function(gradients, params)
        updates, opt_state = tx.update(given, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    return cd.replicas.step(train, cd.replicas.make_mesh(REPLICAS), donate=False)


def arguments(tx=TX):
    mesh = cd.replicas.make_mesh(REPLICAS)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    return helpers.start(tx, helpers.make_params(), mesh), gradients


@pytest.mark.parametrize("function", [with_noise, clipped])
def test_it_is_named(function):
    with pytest.warns(UserWarning, match="step itself communicates.* psum") as found:
        step_of(function).lower(*arguments())
    assert [each.filename for each in found] == [__file__]


@pytest.mark.parametrize(
    ("function", "injected"),
    [(averaged, False), (averaged, True), (gathered, False), (in_a_loop, True)],
)
@pytest.mark.filterwarnings("ignore:The training step itself communicates")
def test_averaged_gradients_are_rejected(function, injected):
    def build(learning_rate):
        return cd.presets.local_sgd(learning_rate, k=2, axis_name=AXIS)

    tx = optax.inject_hyperparams(build)(0.1) if injected else TX
    step = step_of(lambda gradients, params: function(gradients), tx)
    with pytest.raises(ValueError, match="Remove the pmean or psum"):
        step.lower(*arguments(tx))


def test_the_optimizers_own_is_not_named():
    tx = cd.curvadion(0.1, axis_name=AXIS)
    step_of(lambda gradients, params: gradients, tx).lower(*arguments(tx))


def test_a_contrastive_step_may_have_parameters_without_a_gradient():
    """What it sends is named, and zeros are no averaged gradient."""

    def contrastive(gradients, params):
        mixed = {name: gradients[name] for name in helpers.MATRICES}
        mixed = jax.tree.map(lambda g: g + lax.pmean(g, AXIS), mixed)
        return gradients | mixed | {"embed": jnp.zeros_like(params["embed"])}

    with pytest.warns(UserWarning, match="step itself communicates"):
        step_of(contrastive).lower(*arguments())


@pytest.mark.parametrize("constrained", [False, True])
def test_messages_that_the_compiler_adds(constrained):
    """Labels looked up in logits that are sharded by rows and by words at once.

    On the second batch: nothing is done with the first.
    """
    mesh = cd.replicas.make_mesh(4, {"fsdp": 2})
    tx = cd.presets.local_sgd(0.02, k=2, axis_name=AXIS)

    def train(state, batch):
        params, opt_state = state
        if len(batch) == 1:
            return state, {}

        def loss_fn(params):
            logits = params["embed"][batch] @ params["head"]
            if constrained:
                by_rows = NamedSharding(mesh, PartitionSpec("fsdp"))
                logits = lax.with_sharding_constraint(logits, by_rows)
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels
            return cross_entropy(logits, batch).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def place(x):
        spec = PartitionSpec(AXIS, None, "fsdp") if x.ndim == 3 else PartitionSpec(AXIS)
        return jax.device_put(x, NamedSharding(mesh, spec))

    params = {"embed": jnp.eye(64, 32), "dense": jnp.eye(32), "head": jnp.eye(32, 64)}
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    rows = NamedSharding(mesh, PartitionSpec((AXIS, "fsdp")))
    tokens = jax.device_put(np.arange(512).reshape(32, 16) % 64, rows)
    step = cd.replicas.step(train, mesh)
    state, _ = step(jax.tree.map(place, state), tokens[::8])
    with contextlib.ExitStack() as stack:
        if not constrained:
            match = "XLA added .*take_along_axis"
            stack.enter_context(pytest.warns(UserWarning, match=match))
        step(state, tokens)


def test_convolutions_are_gathered_and_warned_of():
    def train(w, images):
        loss = lambda w: jnp.sum(lax.conv(images, w, (1, 1), "SAME") ** 2)
        return w, {"gradient": jax.grad(loss)(w)}

    mesh = cd.replicas.make_mesh(REPLICAS)
    weights = cd.replicas.replicate(jnp.ones((2, 3, 3, 3)), mesh)
    with pytest.warns(UserWarning, match="XLA added .*all-gather of f32"):
        cd.replicas.step(train, mesh)(weights, jnp.ones((8, 3, 4, 4)))


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2,'c'=1] {'c','a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_devices_that_a_collective_joins(written, groups):
    """As versions of XLA write them."""
    assert groups_of(f"channel_id=1, replica_groups={written}") == groups
