"""What the optimizers of matrices reject."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
@pytest.mark.parametrize("rank", [0, -1, 1.5, 0.0, "a", np.ones(())], ids=str)
def test_bad_rank(build, rank):
    with pytest.raises((TypeError, ValueError), match="rank"):
        build(rank=rank)


def test_rank_is_static_under_inject_hyperparams():
    with pytest.raises(TypeError, match="static_args"):
        optax.inject_hyperparams(cd.dion)(learning_rate=0.1, rank=2).init(KERNELS)
    inject = optax.inject_hyperparams(cd.dion, static_args=("rank",))
    state = init(inject(learning_rate=0.1, rank=2), KERNELS)
    assert optax.tree.get(state, "q")["large"].shape == (4, 2)


def test_a_leaf_without_elements_is_no_matrix():
    params = {"w": jnp.ones((3, 4)), "none": jnp.ones((0, 4))}
    updates, _ = update(cd.dion(0.1), params, params)
    assert updates["none"].shape == (0, 4)
    with pytest.raises(ValueError, match="'none'"):
        init(cd.dion(0.1, dimension_numbers=cd.DimensionNumbers(-2, -1)), params)


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize(
    "gradients",
    [
        pytest.param({"a": jnp.ones((3, 4))}, id="leaf-missing"),
        pytest.param({n: jnp.ones((3, 4)) for n in "abc"}, id="leaf-too-many"),
        pytest.param([jnp.ones((3, 4)), jnp.ones((3, 4))], id="list"),
        pytest.param({"a": jnp.ones((3, 4)), "b": jnp.ones((4, 3))}, id="transposed"),
        pytest.param({"a": jnp.ones((3, 4)), "b": jnp.ones((1, 4))}, id="broadcast"),
    ],
)
def test_gradients_of_another_tree(build, gradients):
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
    with pytest.raises(ValueError, match="expected"):
        update(build(), gradients, params)


@pytest.mark.parametrize("params", [{}, ()], ids=str)
@pytest.mark.parametrize("build", ALL[1:])
def test_no_parameters_at_all(build, params):
    tx = build()
    updates, new_state = update(tx, params, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(new_state) == jax.tree.structure(init(tx, params))


def test_learning_rate_is_annotated_for_optax():
    for build in (cd.dion, cd.curvadion, cd.local_muon):
        annotation = build.__annotations__["learning_rate"]
        assert annotation == optax.ScalarOrSchedule
