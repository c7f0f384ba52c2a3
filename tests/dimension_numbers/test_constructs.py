"""What the reader says of one construct at a time, and of its variations."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from constructs import CONSTRUCTS

from curvadion_jax.dimension_numbers import PartitionWarning, _reader, from_loss


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


@each_construct
def test_what_never_reaches_the_loss_has_a_gradient_of_zero(one):
    unused = [name for name, kind in one.expected.items() if kind == "unused"]
    if not unused:
        return
    key = jax.random.key(0)
    params = {n: jax.random.normal(key, x.shape) for n, x in one.params.items()}
    gradients = jax.grad(one.loss)(params, *one.data)
    assert {name for name in unused if np.any(gradients[name])} == set()


# The same program in other words


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
    def vary(one):
        return wrap(one.loss), one.params, one.data, lambda name, said: said

    return vary


def _cast(loss):
    cast = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    return lambda params, *data: loss(jax.tree.map(cast, params), *data)


def _with_one_batch_axis_more(one):
    mean = lambda params, *data: jax.vmap(
        lambda *data: jnp.sum(one.loss(params, *data))
    )(*data).sum()
    stacked = [jnp.stack([x] * 3) for x in one.data]
    return mean, one.params, stacked, lambda name, said: said


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
ASKED_WHEN_MAPPED = "dropped_weights", "spectral_norm", "cond", "switch_over_a_stack"


@pytest.mark.parametrize("variation", VARIATIONS)
@each_construct
def test_the_same_program_in_other_words_has_the_same_matrices(one, variation):
    if variation == "vmap" and one.name in NOT_MAPPED:
        return
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


def _primitives(program):
    """All primitives of a program and of those within it."""
    for equation in program.eqns:
        yield equation.primitive.name
        for inner in _reader._inner(equation):
            yield from _primitives(inner)


@functools.cache
def _constructs_by_primitive():
    found = collections.defaultdict(list)
    for one in CONSTRUCTS:
        program = jax.make_jaxpr(one.loss)(one.params, *one.data).jaxpr
        for name in {*_primitives(program)} & {*_reader.HANDLERS}:
            found[name].append(one)
    return found


# What speaks against a product comes behind it, or is a number like others where
# multiplications are unknown.
NOT_SEEN = "segments", "distances", "masked"


@pytest.mark.parametrize("primitive", sorted(_reader.HANDLERS))
def test_of_an_unknown_primitive_no_answer_changes(primitive, monkeypatch):
    """Answers may become *asked*, and never another one."""
    monkeypatch.delitem(_reader.HANDLERS, primitive)
    for one in _constructs_by_primitive()[primitive]:
        for finding in read(one.loss, one.params, *one.data):
            if finding.path in NOT_SEEN:
                continue
            wanted, found = one.expected[finding.path], said(finding)
            is_other = not isinstance(found, tuple) and not isinstance(wanted, tuple)
            assert is_other or found in (wanted, "asked"), (one.name, finding)
