"""What the optimizers made of Dion reject, and with which words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

import curvadion_jax as cd

BUILDERS = [
    pytest.param(cd.scale_by_dion, id="scale_by_dion"),
    pytest.param(lambda *args, **kw: cd.dion(0.1, *args, **kw), id="dion"),
    pytest.param(lambda **kw: cd.curvadion(0.1, **kw), id="curvadion"),
]
# These take no rank.
ALL = [*BUILDERS, pytest.param(lambda **kw: cd.local_muon(0.1, **kw), id="local_muon")]
KERNELS = {"small": jnp.ones((2, 5)), "large": jnp.ones((6, 4))}


def init(tx, params):
    """The state's shapes: what is rejected, is rejected before anything is computed."""
    return jax.eval_shape(tx.init, params)


def update(tx, gradients, params):
    return jax.eval_shape(tx.update, gradients, init(tx, params), params)


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        (0, ValueError, "rank must be at least 1, got 0"),
        (-1, ValueError, "rank must be at least 1, got -1"),
        (1.5, ValueError, r"fraction of the smaller side .* got 1\.5"),
        (0.0, ValueError, r"\(0, 1\], got 0\.0"),
        (True, TypeError, "got True"),
        ("a", TypeError, "got 'a'"),
        (np.ones(()), TypeError, "plain int or float"),
    ],
    ids=str,
)
def test_bad_rank(build, rank, error, message):
    with pytest.raises(error, match=message):
        build(rank=rank)


@pytest.mark.parametrize("build", BUILDERS)
def test_traced_rank(build):
    with pytest.raises(TypeError, match="static_args"):
        jax.jit(lambda rank: build(rank=rank).init(KERNELS))(2)


def test_rank_under_inject_hyperparams():
    with pytest.raises(TypeError, match="static_args"):
        optax.inject_hyperparams(cd.dion)(learning_rate=0.1, rank=2).init(KERNELS)
    inject = optax.inject_hyperparams(cd.dion, static_args=("rank",))
    state = init(inject(learning_rate=0.1, rank=2), KERNELS)
    assert optax.tree.get(state, "q")["large"].shape == (4, 2)


@pytest.mark.parametrize("build", BUILDERS)
def test_rank_above_every_matrix(build):
    message = r"rank 5 exceeds the smaller side of every matrix \(the largest is 4\)"
    with pytest.raises(ValueError, match=message):
        init(build(rank=5), KERNELS)
    state = init(build(rank=4), KERNELS)
    state = getattr(state, "inner_state", state)  # what a sync keeps may have a Q too
    shapes = jax.tree.map(lambda q: q.shape, optax.tree.get(state, "q"))
    assert shapes == {"small": (2, 2), "large": (4, 4)}


def test_rank_of_no_matrices_is_never_too_large():
    init(cd.dion(0.1, rank=10**6), {"bias": jnp.ones(3)})


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("momentum", [1.0, 1, -0.1, 2.0, float("nan"), float("inf")])
def test_bad_momentum(build, momentum):
    with pytest.raises(ValueError, match=rf"\[0, 1\), got {momentum}"):
        build(momentum=momentum)


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("momentum", [0, 0.0, 0.999, jnp.float32(0.5)])
def test_good_momentum(build, momentum):
    init(build(momentum=momentum), KERNELS)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_only_real_floating_point(dtype):
    message = f"real floating-point arrays, got {dtype} for 'layer/w'"
    bad = {"layer": {"w": jnp.ones((3, 4), dtype)}}
    good = {"layer": {"w": jnp.ones((3, 4))}}
    for tx in (cd.scale_by_dion(), cd.dion(0.1)):
        with pytest.raises(TypeError, match=message):
            init(tx, bad)
        with pytest.raises(TypeError, match=f" {dtype}"):
            update(tx, bad, good)


@pytest.mark.parametrize("shape", [(4,), (), (0, 4), (3, 0)], ids=str)
def test_scale_by_dion_takes_matrices_only(shape):
    params = {"mlp": jnp.ones((3, 4)), "other": jnp.ones(shape)}
    with pytest.raises(ValueError, match=r"'other' of shape .* not a matrix: .*dion"):
        init(cd.scale_by_dion(), params)


def test_parameters_that_the_rule_leaves_out():
    with pytest.raises(ValueError, match="'embedding' of shape"):
        init(cd.scale_by_dion(), {"embedding": jnp.ones((3, 4))})
    every = cd.scale_by_dion(dimension_numbers=cd.DimensionNumbers(0, 1))
    assert init(every, {"embedding": jnp.ones((3, 4))}).q["embedding"].shape == (3, 1)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4)], ids=str)
def test_empty_leaf_that_is_called_a_matrix(shape):
    tx = cd.dion(0.1, dimension_numbers=cd.DimensionNumbers(-2, -1))
    with pytest.raises(ValueError, match=r"'w': .* has no elements: .*None"):
        init(tx, {"w": jnp.ones(shape)})


def test_empty_leaf_goes_to_the_other_optimizer():
    params = {"w": jnp.ones((3, 4)), "none": jnp.ones((0, 4))}
    updates, _ = update(cd.dion(0.1), params, params)
    assert updates["none"].shape == (0, 4)


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize(
    "gradients",
    [
        pytest.param({"a": (3, 4)}, id="leaf-missing"),
        pytest.param({"a": (3, 4), "b": (3, 4), "c": (3, 4)}, id="leaf-too-many"),
        pytest.param({"a": (3, 4), "c": (3, 4)}, id="another-name"),
        pytest.param([(3, 4), (3, 4)], id="list"),
    ],
)
def test_gradients_of_another_tree(build, gradients):
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    gradients = jax.tree.map(jnp.ones, gradients, is_leaf=is_shape)
    with pytest.raises(ValueError, match=r"initialise|structure"):
        update(build(), gradients, params)


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("shape", [(4, 3), (1, 4), (2, 3, 4)], ids=str)
def test_gradients_of_another_shape(build, shape):
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
    gradients = params | {"b": jnp.ones(shape)}
    with pytest.raises((ValueError, TypeError), match="shape"):
        update(build(), gradients, params)


@struct.dataclass
class Vectors:
    """A custom node, as models of Flax's struct or Equinox are."""

    bias: jax.Array
    scale: jax.Array


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="empty-dict"),
        pytest.param((), id="empty-tuple"),
        pytest.param({"bias": jnp.ones(3)}, id="vectors"),
        pytest.param(jnp.ones(3), id="bare-vector"),
        pytest.param(Vectors(jnp.ones(3), jnp.ones(3)), id="dataclass-of-vectors"),
    ],
)
@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(cd.dion(0.1), id="dion"),
        pytest.param(cd.curvadion(0.1), id="curvadion"),
        pytest.param(cd.local_muon(0.1), id="local_muon"),
    ],
)
def test_no_matrices_at_all(tx, params):
    updates, new_state = update(tx, params, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(new_state) == jax.tree.structure(init(tx, params))


def test_learning_rate_is_annotated_for_optax():
    for build in (cd.dion, cd.curvadion, cd.local_muon):
        annotation = build.__annotations__["learning_rate"]
        assert annotation == optax.ScalarOrSchedule
