"""Dion over a replica axis: factors are averaged, the momentum stays where it is."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from dion_runs import MU, close, normal, random_state, rank_of, same_columns, zeros
from jax import lax
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd

REPLICAS, STEPS = 8, 3
SHAPES = {"wide": (5, 9), "tall": (9, 5), "stack": (2, 5, 9)}
# Ranks 1, 2, 3 and 5 of 5; (9 + 5) r < 45 up to r = 3.
RANKS = [
    pytest.param(1, marks=pytest.mark.slow),
    0.25,
    pytest.param(0.5, marks=pytest.mark.slow),
    1.0,
]
# Float64 against float64; a mean over replicas is summed in another order. Measured
# 5e-15, at full rank.
FLOAT64_ATOL = 1e-13

MESH = cd.replicas.make_mesh(REPLICAS)
shard_map = functools.partial(jax.shard_map, mesh=MESH, out_specs=P("replica"))


def sends_factors(rank):
    """Full rank sends the matrix itself, which is then common to all replicas."""
    return rank_of((5, 9), rank) < 5


def kernels(name):
    """Indices of the plain kernels in a leaf."""
    return [np.s_[0], np.s_[1]] if name == "stack" else [np.s_[:]]


def first_state(rank, dtype: Any = np.float64):
    r = rank_of((5, 9), rank)
    q_shapes = {"wide": (5, r), "tall": (5, r), "stack": (2, 5, r)}
    return random_state(zeros(SHAPES, dtype), q_shapes)


@functools.lru_cache(maxsize=None, typed=True)  # 1 is rank one, 1.0 is full rank
def compiled(rank, how, error_feedback=True):
    """(state, gradients [replicas, steps, ...]) -> updates, states, by replica."""
    tx = cd.scale_by_dion(rank, MU, axis_name="replica", error_feedback=error_feedback)

    def body(state, gradients):
        def one(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state)

        return lax.scan(one, state, gradients)[1]

    if how == "vmap":
        return jax.jit(jax.vmap(body, axis_name="replica"))

    def strip(*args):
        result = body(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], result)

    return jax.jit(shard_map(strip, in_specs=P("replica")))


def run(rank, how, gradients, **settings):
    """Updates and states [replicas, steps, ...] from equal first states."""
    state = first_state(rank, gradients["wide"].dtype)
    copies = jax.tree.map(lambda x: np.stack([x] * REPLICAS), state)
    updates, states = compiled(rank, how, **settings)(copies, gradients)
    return state, jax.tree.map(np.asarray, updates), jax.tree.map(np.asarray, states)


def local_gradients(seed=0, dtype: Any = np.float64):
    """[replicas, steps, ...]: a common part, and as much of each replica's own."""
    own = normal(SHAPES, REPLICAS * STEPS, seed, dtype)
    own = {n: g.reshape(REPLICAS, STEPS, *SHAPES[n]) for n, g in own.items()}
    return {name: g + g.mean(axis=0) for name, g in own.items()}


CASES = [
    pytest.param(1, "shard_map", marks=pytest.mark.slow),
    (0.25, "shard_map"),
    pytest.param(0.5, "shard_map", marks=pytest.mark.slow),
    pytest.param(1.0, "shard_map", marks=pytest.mark.slow),
    pytest.param(0.25, "vmap", marks=pytest.mark.slow),
    pytest.param(1.0, "vmap", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rank", "how"), CASES, ids=lambda value: f"{value}")
def test_equals_the_reference_and_dion_on_the_mean_gradient(rank, how):
    gradients = local_gradients()
    with jax.enable_x64(True):
        first, updates, states = run(rank, how, gradients)
    for name in SHAPES:
        for part in kernels(name):
            index = (slice(None), slice(None), part)
            g, u = gradients[name][index], updates[name][index]
            m, q = states.momentum[name][index], states.q[name][index]
            momenta, qs = [np.zeros(g.shape[2:])] * REPLICAS, [first.q[name][part]] * 8
            mean_momentum, mean_q = momenta[0], qs[0]
            for t in range(STEPS):
                what = (name, part, t)
                directions, momenta, qs = ref.dion_step_average_factors(
                    list(g[:, t]), momenta, qs, mu=MU
                )
                direction, mean_momentum, mean_q = ref.dion_step(
                    g[:, t].mean(axis=0), mean_momentum, mean_q, mu=MU
                )
                for k in range(REPLICAS):
                    close(u[k, t], directions[k], FLOAT64_ATOL, what)
                    close(u[k, t], direction, FLOAT64_ATOL, what)
                    same_columns(q[k, t], qs[k], FLOAT64_ATOL, what)
                    if sends_factors(rank):
                        close(m[k, t], momenta[k], FLOAT64_ATOL, what)
                close(m[:, t].mean(axis=0), mean_momentum, FLOAT64_ATOL, what)


@pytest.mark.parametrize(("rank", "how"), CASES, ids=lambda value: f"{value}")
def test_what_is_shared_is_equal_to_the_bit(rank, how):
    with jax.enable_x64(True):
        _, updates, states = run(rank, how, local_gradients())
    for name in SHAPES:
        for array in (updates[name], states.q[name]):
            np.testing.assert_array_equal(array, np.stack([array[0]] * REPLICAS))
        if sends_factors(rank):
            momentum = states.momentum[name][:, -1]
            for k in range(1, REPLICAS):
                assert np.abs(momentum[k] - momentum[0]).max() > 0.1


@pytest.mark.slow
def test_paper_momentum_equals_dion_on_the_mean_gradient():
    gradients = local_gradients()
    with jax.enable_x64(True):
        first, updates, _ = run(0.25, "vmap", gradients, error_feedback=False)
    momentum, q = np.zeros((9, 5)), first.q["tall"]
    for t in range(STEPS):
        direction, momentum, q = ref.dion_step(
            gradients["tall"][:, t].mean(axis=0),
            momentum,
            q,
            mu=MU,
            error_feedback=False,
        )
        close(updates["tall"][3, t], direction, FLOAT64_ATOL, t)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_bad_gradient_of_one_replica_shows_on_all(bad):
    gradients = local_gradients()
    gradients["wide"][5, 0, 2, 3] = bad
    with jax.enable_x64(True):
        _, updates, _ = run(0.25, "shard_map", gradients)
    assert np.isnan(updates["wide"]).all()
    assert np.isfinite(updates["tall"]).all()


def all_reduces(hlo):
    """Elements of each all-reduce in compiled HLO, those of a tuple together."""
    found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", hlo)
    sizes = [re.findall(r"[a-z0-9]+\[([\d,]*)\]", shapes) for shapes in found]
    return [
        sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)
        for shapes in sizes
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_what_is_sent(rank):
    """(rows + cols) r elements a matrix in two rounds, or the matrix itself."""
    with jax.enable_x64(True):
        state = jax.tree.map(lambda x: np.stack([x] * REPLICAS), first_state(rank))
        step = compiled(rank, "shard_map")
        hlo = step.lower(state, local_gradients()).compile().as_text()
    matrices, r = 4, rank_of((5, 9), rank)
    sizes = [9 * r, 5 * r] if sends_factors(rank) else [9 * 5]
    assert all_reduces(hlo) == [matrices * size for size in sizes]


@pytest.mark.slow
def test_reduce_fn_takes_the_place_of_the_axis():
    gradients = jax.tree.map(lambda g: g[:, 0], local_gradients(dtype=np.float32))
    state = first_state(1, np.float32)

    def unit(a):  # an orthonormal basis of one column, and quick to compile
        return a / jnp.linalg.norm(a, axis=-2, keepdims=True)

    def scale(axis_name=None):
        return cd.scale_by_dion(1, MU, orthonormalize=unit, axis_name=axis_name)

    def with_axis(gradient):
        return scale("replica").update(gradient, state)

    def with_function(gradient):
        def mean(arrays):
            return jax.tree.map(lambda a: lax.pmean(a, "anything"), arrays), None

        return scale().update(gradient, state, reduce_fn=mean)

    by_axis = jax.vmap(with_axis, axis_name="replica")
    by_function = jax.vmap(with_function, axis_name="anything")
    results = [jax.jit(f)(gradients) for f in (by_axis, by_function)]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow
def test_other_leaves_take_the_mean_gradient():
    params = {"kernel": np.ones((5, 9), np.float32), "bias": np.ones(9, np.float32)}
    tx = cd.dion(0.1, 1, axis_name="replica", other_optimizer=optax.sgd(1.0))
    state = tx.init(params)
    rng = np.random.default_rng(0)
    gradients = {
        "kernel": rng.normal(size=(REPLICAS, 5, 9)).astype(np.float32),
        "bias": rng.normal(size=(REPLICAS, 9)).astype(np.float32),
    }

    @jax.jit
    @functools.partial(shard_map, in_specs=(P(), P("replica")))
    def update(params, gradients):
        gradients = jax.tree.map(lambda x: x[0], gradients)
        updates, _ = tx.update(gradients, state, params)
        return jax.tree.map(lambda x: x[None], updates)

    updates = update(params, gradients)
    mean = -gradients["bias"].mean(axis=0)
    # A mean of eight float32 numbers of order one.
    close(updates["bias"], np.stack([mean] * REPLICAS), 1e-6)
