"""What is used of JAX's insides still is what it was; a failure says what broke."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import _jax_internals as internals

AXIS = cd.replicas.AXIS
X = jnp.ones((2, 3))


def on_replicas(function, types=True):
    """The program of a function of one replica's float32[3]."""
    found = []

    def body(x):
        found.append(internals.trace(function, x[0]))
        return x

    mesh = cd.replicas.make_mesh(2)
    specs = {"in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": types}
    jax.eval_shape(jax.shard_map(body, mesh=mesh, **specs), X)
    return found[0].program.jaxpr


def vary(x):
    return lax.pcast(x, AXIS, to="varying")


def mean(x):
    return vary(lax.pmean(x, AXIS))


def with_rule(function, define, *rules):
    getattr(function, define)(*rules)
    return function


NESTED = {
    "alone": mean,
    "jit": jax.jit(mean),
    "remat": jax.checkpoint(mean),
    "scan": lambda x: lax.scan(lambda c, _: (mean(c), ()), x, length=2)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] > 0, mean, x),
    "cond": lambda x: lax.cond(True, mean, lambda x: x, x),
    "vmap": lambda x: jax.vmap(mean)(x[None])[0],
    "custom_jvp": with_rule(jax.custom_jvp(mean), "defjvp", mean),
    "custom_vjp": with_rule(jax.custom_vjp(mean), "defvjp", mean, mean),
    "deep": jax.jit(jax.checkpoint(jax.jit(mean))),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_collective_is_found_inside(name):
    (found,) = internals.collectives_in(on_replicas(NESTED[name]), AXIS)
    assert found.primitive.name.startswith("psum")


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.pmax(x, AXIS),
        lambda x: lax.pmin(x, AXIS),
        lambda x: lax.all_gather(x, AXIS),
        lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]),
        lambda x: lax.all_to_all(x[:2], AXIS, 0, 0),
        lambda x: lax.psum_scatter(x[:2], AXIS, tiled=True),
    ],
)
@pytest.mark.parametrize("types", [True, False])
def test_every_collective_names_its_axis(collective, types):
    program = on_replicas(collective, types)
    (found,) = internals.collectives_in(program, AXIS)
    assert internals.communicates(found, AXIS)
    assert internals.collectives_in(program, "another") == []


def test_a_result_is_an_input_through_copies_alone():
    traced = internals.trace(lambda x, y: (x, -x, y.reshape(3, 2)), X, X)
    (*results,), _ = internals.sources(traced.program.jaxpr)
    assert results == [{0}, {internals.COMPUTED}, {1}]


def test_results_are_followed_through_long_programs_and_kernels():
    def function(x, y, z):
        for _ in range(400):  # recursion would be too deep
            y = lax.select(y > 0, y, x)
        kernel = lambda z_ref, out_ref: out_ref.__setitem__(..., z_ref[...])
        z = jax.jit(pallas.pallas_call(kernel, out_shape=z, interpret=True))(z)
        held = lax.while_loop(lambda c: c[0] < z.sum(), lambda c: c, (0.0, x))[1]
        return y, z, held, lax.cond(z.sum() > 0, lambda x, y: x, lambda x, y: y, x, z)

    (*results,), _ = internals.sources(internals.trace(function, X, X, X).program.jaxpr)
    mixed, computed = internals.MIXED, internals.COMPUTED
    assert results == [{0, 1, mixed}, {computed}, {0}, {0, computed, mixed}]


def test_what_is_silent_sends_nothing():
    silent = lambda x: vary(jnp.zeros(3)) + lax.axis_index(AXIS) + x
    assert internals.collectives_in(on_replicas(silent), AXIS) == []


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["cond", "while"])
def test_a_decision_of_one_replica_is_seen(kind, own):
    def decide(x):
        number = x.sum() if own else lax.pmax(x.sum(), AXIS)
        if kind == "cond":
            return lax.cond(number > 0, jnp.negative, lambda x: x, x)
        count = (number > 0).astype(int)
        return lax.fori_loop(0, count, lambda _, x: -x, x)

    found = [x for x in on_replicas(decide).eqns if x.primitive.name == kind]
    assert [internals.decides_alone(x, AXIS) for x in found] == [own]
