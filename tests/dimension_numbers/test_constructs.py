"""What the reader says of one construct at a time, and of its variations."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs import CONSTRUCTS
from jax.extend.core import jaxprs_in_params

from curvadion_jax.dimension_numbers import (
    PartitionWarning,
    _backward,
    _primitives,
    from_loss,
)


@pytest.fixture(autouse=True)
def _programs_as_people_write_them():
    with jax.numpy_rank_promotion("allow"):
        yield


each_construct = pytest.mark.parametrize("one", CONSTRUCTS, ids=lambda one: one.name)


def read(loss, params, *data):
    """The findings, without the warning of those that are asked about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartitionWarning)
        return from_loss(loss, params, *data).findings


def said(finding):
    """Axes of inputs and outputs, or the kind of what is no matrix."""
    if finding.numbers is None:
        return finding.kind
    as_tuple = lambda axes: axes if isinstance(axes, tuple) else (axes,)
    return tuple(map(as_tuple, finding.numbers))


def all_said(loss, params, *data):
    return {each.path: said(each) for each in read(loss, params, *data)}


@each_construct
def test_a_construct_is_right_or_asked(one):
    assert all_said(one.loss, one.params, *one.data) == one.expected


@pytest.mark.parametrize(
    "one",
    [one for one in CONSTRUCTS if "unused" in one.expected.values()],
    ids=lambda one: one.name,
)
def test_what_never_reaches_the_loss_has_a_gradient_of_zero(one):
    key = jax.random.key(0)
    params = {n: jax.random.normal(key, x.shape) for n, x in one.params.items()}
    gradients = jax.grad(one.loss)(params, *one.data)
    unused = {name for name, kind in one.expected.items() if kind == "unused"}
    assert {name for name in unused if np.any(gradients[name])} == set()
    assert any(np.any(gradient) for gradient in gradients.values())


# The same program in other words


# Each makes another program of a construct: its loss, parameters and data, and what is
# right, a function of a parameter's name and the axes that the construct has.
def _reversed(one):
    """All axes of all parameters in the reverse order, turned back in the loss."""
    turn = lambda params: {name: x.T for name, x in params.items()}
    loss = lambda params, *data: one.loss(turn(params), *data)

    def expect(name, said):
        rank = one.params[name].ndim
        sides = [tuple(sorted(rank - 1 - axis for axis in side)) for side in said]
        return tuple(sides)

    return loss, turn(one.params), one.data, expect


def _same(wrap):
    """The loss in other words, with the same parameters."""

    def vary(one):
        return wrap(one.loss), one.params, one.data, lambda name, said: said

    return vary


def _cast(loss):
    cast = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    return lambda params, *data: loss(jax.tree.map(cast, params), *data)


def _with_one_batch_axis_more(one):
    """The sum of three losses under `jax.vmap`."""
    total = lambda params, *data: jax.vmap(
        lambda *data: jnp.sum(one.loss(params, *data))
    )(*data).sum()
    stacked = [jnp.stack([x] * 3) for x in one.data]
    return total, one.params, stacked, lambda name, said: said


VARIATIONS = {
    "reversed": _reversed,
    "jit": _same(jax.jit),
    "remat": _same(jax.checkpoint),
    "bfloat16": _same(_cast),
    "vmap": _with_one_batch_axis_more,
}
# JAX cannot map these.
NOT_MAPPED = "callback", "experts_of_ragged_products"
# Each example has its own mask, vector or branch, so that each has its own matrix.
ASKED_WHEN_MAPPED = {
    *("dropped_weights", "mask_made_by_a_constant_matrix", "spectral_norm"),
    *("cond", "switch_over_a_stack"),
}
VARIED = [
    pytest.param(one, variation, id=f"{one.name}-{variation}")
    for one in CONSTRUCTS
    for variation in VARIATIONS
    if not (variation == "vmap" and one.name in NOT_MAPPED)
]


@pytest.mark.parametrize(("one", "variation"), VARIED)
def test_the_same_program_in_other_words_has_the_same_matrices(one, variation):
    """Matrices are the same, and what is asked about; the rest is still no matrix."""
    loss, params, data, expect = VARIATIONS[variation](one)
    found = all_said(loss, params, *data)
    for name, wanted in one.expected.items():
        if variation == "vmap" and one.name in ASKED_WHEN_MAPPED:
            assert found[name] in (wanted, "asked")
        elif isinstance(wanted, tuple):
            assert found[name] == expect(name, wanted), name
        else:
            assert not isinstance(found[name], tuple), name
            assert (found[name] == "asked") == (wanted == "asked"), name


def test_names_do_not_matter():
    for one in CONSTRUCTS:
        loss = lambda params, *data, one=one: one.loss(
            dict(zip(sorted(one.params), params, strict=True)), *data
        )
        renamed = [one.params[name] for name in sorted(one.params)]
        found = [said(each) for each in read(loss, renamed, *one.data)]
        assert found == [one.expected[name] for name in sorted(one.params)], one.name


# What an unknown primitive does


def names_in(program):
    """All primitives of a program and of those within it."""
    for equation in program.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from names_in(inner)


@functools.cache
def _constructs_by_primitive():
    found = collections.defaultdict(list)
    for one in CONSTRUCTS:
        program = jax.make_jaxpr(one.loss)(one.params, *one.data).jaxpr
        for name in {*names_in(program)} & {*_primitives.HANDLERS}:
            found[name].append(one)
    return found


def test_every_handler_is_that_of_a_primitive_that_a_construct_has():
    tested = {_primitives.HANDLERS[name] for name in _constructs_by_primitive()}
    assert tested == {*_primitives.HANDLERS.values()}


# These are no matrices for what is done with the outputs of their product: these are
# chosen from, or are one-hot vectors. If the primitive that does so is unknown, nothing
# tells them from a matrix.
TOLD_LATER = "segments", "distances", "masked"


@pytest.mark.parametrize("primitive", sorted(_primitives.HANDLERS))
def test_without_a_handler_answers_become_asked_and_no_other_answer(
    primitive, monkeypatch
):
    """A matrix stays as it is or is asked about, and nothing else becomes a matrix."""
    monkeypatch.delitem(_primitives.HANDLERS, primitive)
    for one in _constructs_by_primitive()[primitive]:
        for finding in read(one.loss, one.params, *one.data):
            if finding.path in TOLD_LATER:
                continue
            wanted, found = one.expected[finding.path], said(finding)
            is_matrix = isinstance(found, tuple) or isinstance(wanted, tuple)
            assert not is_matrix or found in (wanted, "asked"), (one.name, finding)


@each_construct
def test_where_jax_marks_no_backward_pass_all_products_are_asked_about(
    one, monkeypatch
):
    monkeypatch.setattr(_backward, "_MARK", "no name stack has this")
    found = all_said(one.loss, one.params, *one.data)
    for name, wanted in one.expected.items():
        is_product = isinstance(wanted, tuple) or wanted == "head"
        assert found[name] in (("asked",) if is_product else (wanted, "asked")), name
