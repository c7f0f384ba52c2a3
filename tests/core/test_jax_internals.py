"""What is used of JAX's insides still is what it was; a failure says what broke."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
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
    assert internals.bytes_given(found) == 4 * math.prod(X.shape[1:])


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
    assert AXIS in internals.named_axes(found)
    assert internals.collectives_in(program, "another") == []


def test_what_is_silent_sends_nothing():
    silent = lambda x: vary(jnp.zeros(3)) + lax.axis_index(AXIS) + x  # noqa: E731
    assert internals.collectives_in(on_replicas(silent), AXIS) == []


def test_a_scope_is_left_out():
    def inside(x):
        with jax.named_scope("ours"):
            x = jax.jit(mean)(x)
        return x

    program = on_replicas(lambda x: mean(inside(x)))
    assert len(internals.collectives_in(program, AXIS)) == 2
    assert len(internals.collectives_in(program, AXIS, outside="ours")) == 1


def test_types_say_what_may_differ():
    seen = {}

    def look(x):
        seen.update(own=internals.varying(x), same=internals.varying(lax.psum(x, AXIS)))
        return x

    on_replicas(look)
    assert seen == {"own": {AXIS}, "same": frozenset()}
    assert internals.varying(X) == frozenset()


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


@jax.custom_batching.custom_vmap
def update(x):
    return -x


update.def_vmap(lambda size, batched, x: (-x, batched[0]))


def updating(x):
    with jax.named_scope("ours"):
        return update(x)


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: x, 0),
        (update, 0),  # in no scope
        (updating, 1),
        (jax.jit(lambda x: updating(updating(x))), 2),
        (lambda x: lax.scan(lambda c, _: (updating(c), ()), x, length=4)[0], 4),
    ],
)
def test_updates_are_counted(function, number):
    program = internals.trace(function, X).program
    assert internals.updates_in(program.jaxpr, "ours") == number


def test_a_program_runs_as_its_function_with_other_primitives():
    def function(tree):
        negative = lambda x: jnp.sin(x)  # noqa: E731
        a = jax.jit(negative)(tree["a"])
        b = lax.cond(True, negative, lambda x: x, tree["b"])
        c, _ = lax.scan(lambda c, _: (negative(c), ()), tree["c"], length=2)
        return {"a": a, "b": b, "c": c}

    given = {"a": X, "b": 2 * X, "c": 3 * X}
    traced = internals.trace(function, given)
    assert internals.trace(traced) is traced
    assert jax.tree.map(jnp.shape, traced(given)) == jax.tree.map(jnp.shape, given)
    assert jnp.array_equal(traced(given)["c"], jnp.sin(jnp.sin(3 * X)))
    other = internals.replaced(traced.program, "sin", lambda equation: jnp.negative)
    found = traced._replace(program=other)(given)
    assert {k: float(x[0, 0]) for k, x in found.items()} == {"a": -1, "b": -2, "c": 3}


def test_traces_are_kept_apart_by_the_user_context():
    context, traces = internals.user_context(), []

    @jax.jit
    def function(x):
        traces.append(context.value)
        return x

    for value in ("first", "second", "first"):
        with context(value):
            function(X)
    assert traces == ["first", "second"]


def test_results_that_are_chosen_from_others():
    def chosen(x, y):
        new = jax.tree.map(lambda x: jnp.where(y > 0, x, 0 * x), x)
        return jax.jit(lambda x: (x, 2 * x))(new), lax.cond(y > 0, jnp.sin, jnp.cos, y)

    def function(x, y):
        looped, _ = lax.scan(lambda x, _: (chosen(x, y)[0][0], None), x, None, 2)
        return chosen(x, y), looped, x * y, y

    program = internals.trace(function, jnp.ones([]), jnp.ones([])).program
    found = internals.selected_results(program.jaxpr, "scope")
    # A product of two operands is a new number, whatever made them.
    assert found == [True, False, True, True, False, False]
