"""`optax.inject_hyperparams` takes every optimizer; ranks and budgets are static."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd

# The numbers of an optimizer are arrays of its state, and no constants of the program,
# which then may round otherwise: five steps of parameters of order 1. Measured: 2.4e-7.
ATOL = 1e-6
STEPS, RATE = 5, 0.01


def problem(replicas):
    """Parameters and gradients."""
    return helpers.make_params(), helpers.make_gradients(STEPS, replicas)


def close(trajectory, expected):
    for (params, _), (others, _) in zip(trajectory, expected, strict=True):
        for name, value in others.items():
            np.testing.assert_allclose(params[name], value, rtol=0, atol=ATOL)


def test_a_scheduled_momentum_is_no_coarser_than_a_number():
    """0.999 is 1 in bfloat16, in which nothing would move."""
    params = {"kernel": jnp.ones((8, 8), jnp.bfloat16)}
    tx = cd.local_muon(RATE, momentum=lambda step: 0.999)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, new = update(params, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        assert np.any(np.asarray(updates["kernel"], np.float32))
        state = new


def test_a_scheduled_momentum_is_one_that_is_injected():
    """On replicas, which take the same steps and syncs."""
    params, gradients = problem(2)
    rising = optax.linear_schedule(0.5, 0.9, STEPS)
    mesh = cd.replicas.simulated(2)
    options = {"momentum": rising, "budget": 0.5, "bits": 2, "mesh": mesh}
    static = "budget", "bits", "mesh"
    inject = optax.inject_hyperparams(cd.local_muon, static_args=static)
    injected: Any = inject(RATE, **options)
    expected = list(helpers.run(injected, mesh, params, gradients))
    run = list(helpers.run(cd.local_muon(RATE, **options), mesh, params, gradients))
    close(run, expected)
    decided = helpers.decisions(run)
    assert decided == helpers.decisions([(p, s.inner_state) for p, s in expected])
    assert 2 <= sum(decided) < STEPS
    momentum = expected[-1][1].hyperparams["momentum"]
    np.testing.assert_allclose(momentum, rising(STEPS - 1), rtol=1e-6)  # float32


def test_a_learning_rate_that_is_set_is_taken():
    params, (gradients, *_) = problem(1)
    gradients = jax.tree.map(lambda g: g[0], gradients)
    tx: Any = optax.inject_hyperparams(cd.dion)(RATE)
    update, norms = jax.jit(tx.update), []
    for factor in (1.0, 3.0):
        state = tx.init(params)
        state.hyperparams["learning_rate"] *= factor
        updates, _ = update(gradients, state, params)
        norms.append(optax.tree.norm({n: updates[n] for n in helpers.MATRICES}))
    np.testing.assert_allclose(norms[1], 3 * norms[0], rtol=1e-5)  # float32


# A function that is taken for a schedule is given a step number, and finds one leaf.
def only_tall(params):
    numbers = {"tall/kernel": cd.DimensionNumbers(0, 1)}
    of_path = lambda path, x: numbers.get(jax.tree_util.keystr(path, simple=True))
    return jax.tree.map_with_path(of_path, params)


def all_but_embed(params):
    def numbers(path, x):
        is_matrix = x.ndim != 1 and "embed" not in jax.tree_util.keystr(path)
        return cd.DimensionNumbers(0, 1) if is_matrix else None

    return jax.tree.map_with_path(numbers, params)


PARTITION = cd.dimension_numbers.from_loss(
    lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"]),
    {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 2))},
    jnp.ones((2, 4)),
)
OPTIMIZERS = {
    "local_muon": cd.local_muon,
    "curvadion": cd.curvadion,
    "dion": cd.dion,
    "muloco": cd.presets.muloco,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "rule", [only_tall, all_but_embed, helpers.matrices, PARTITION]
)
def test_a_rule_that_is_taken_for_a_schedule_is_refused(name, rule):
    """The default rule, or all parameters as matrices, would be in its place."""
    static = ("k",) if name == "muloco" else ()
    inject = optax.inject_hyperparams(OPTIMIZERS[name], static_args=static)
    tx: Any = inject(RATE, dimension_numbers=rule)
    with pytest.raises(TypeError, match=r"dimension_numbers is .* static_args"):
        tx.init(helpers.make_params())


def test_a_rule_that_is_static_or_a_tree_is_taken():
    params = helpers.make_params()
    plain = cd.dion(RATE, dimension_numbers=only_tall).init(params)
    static = optax.inject_hyperparams(cd.dion, static_args="dimension_numbers")
    tree = optax.inject_hyperparams(cd.dion)
    for tx in (
        static(RATE, dimension_numbers=only_tall),
        tree(RATE, dimension_numbers=only_tall(params)),
    ):
        state: Any = tx.init(params)
        assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain)


@pytest.mark.parametrize(
    "mask",
    [
        lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        lambda params: jax.tree.map(lambda x: jnp.ndim(x) != 1, params),
        lambda params: jax.tree.map(lambda x: jnp.array(x.ndim > 1), params),
    ],
    ids=["False", "True", "array"],
)
@pytest.mark.parametrize("name", ["local_muon", "dion", "curvadion"])
def test_a_mask_that_is_taken_for_a_schedule_is_refused(name, mask):
    """Nothing would decay, or all matrices."""
    inject = optax.inject_hyperparams(OPTIMIZERS[name])
    tx: Any = inject(RATE, weight_decay=0.1, weight_decay_mask=mask)
    with pytest.raises(TypeError, match=r"weight_decay_mask is .* static_args"):
        tx.init(helpers.make_params())


def test_an_injected_threshold_is_not_traced_anew():
    def factory(learning_rate, threshold):
        return cd.adaptive_sync(
            optax.sgd(learning_rate, 0.9),
            cd.triggers.relative_momentum_change(threshold),
            cd.synchronizers.average_gradients(),
        )

    tx: Any = optax.inject_hyperparams(factory)(0.1, threshold=1e6)
    params, gradients = problem(1)
    state, traces, decided = tx.init(params), [], []

    @jax.jit
    def update(gradients, state):
        traces.append(0)
        return tx.update(gradients, state, params)[1]

    for tree, threshold in zip(gradients, (1e6, 1e6, 0, 1e6), strict=False):
        state.hyperparams["threshold"] = jnp.float32(threshold)
        state = update(jax.tree.map(lambda g: g[0], tree), state)
        decided.append(int(optax.tree.get(state, "since")) == 0)
    assert decided == [True, False, True, False]
    assert len(traces) == 1
