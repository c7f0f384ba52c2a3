"""A partition wherever dimension numbers go; answers, descriptions, the warning."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import curvadion_jax as cd
from curvadion_jax.dimension_numbers import (
    DimensionNumbers,
    Finding,
    Partition,
    PartitionWarning,
    _partition,
)
from curvadion_jax.matrices import _two_optimizers

DENSE, STACK = DimensionNumbers(0, 1), DimensionNumbers(2, 1)
QUERY = DimensionNumbers(0, (1, 2))
FINDINGS = (
    Finding("mix/cube", (3, 4, 8), "asked", None, "enters pallas_call at model.py:88"),
    Finding("mix/query", (8, 2, 4), "matrix", QUERY, "model.py:63"),
    Finding("up/bias", (16,), "vector", None, "added at model.py:64"),
    Finding("up/kernel", (8, 16), "matrix", DENSE, "model.py:64"),
)
PARTITION = Partition(FINDINGS)


def params_of(findings=FINDINGS) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for path, shape, *_ in findings:
        module, _, name = path.partition("/")
        params.setdefault(module, {})[name] = jnp.ones(shape)
    return params


PARAMS = params_of()
NUMBERS = {
    "mix": {"cube": None, "query": QUERY},
    "up": {"bias": None, "kernel": DENSE},
}


def test_a_partition_is_a_function_to_dimension_numbers():
    assert PARTITION(PARAMS) == NUMBERS
    assert PARTITION({"up": PARAMS["up"]}) == {"up": NUMBERS["up"]}
    masked = {"mix": optax.MaskedNode(), "up": {"kernel": PARAMS["up"]["kernel"]}}
    assert PARTITION(masked) == {"mix": optax.MaskedNode(), "up": {"kernel": DENSE}}


def test_a_partition_of_other_parameters_is_refused():
    for other, match in (
        ({"up": {"kernel": jnp.ones((8, 4))}}, r"'up/kernel'.*\(8, 4\).*\(8, 16\)"),
        ({"up": {"kernel": jnp.ones((2, 8, 16))}}, "without rows"),
        ({"down": jnp.ones((8, 16))}, "'down'.*no such parameter"),
    ):
        with pytest.raises(ValueError, match=match):
            PARTITION(other)


@pytest.mark.parametrize("build", [cd.dion, cd.curvadion, cd.local_muon])
def test_optimizers_take_a_partition_as_they_take_its_tree(build):
    by_partition = build(0.1, dimension_numbers=PARTITION).init(PARAMS)
    by_tree = build(0.1, dimension_numbers=NUMBERS).init(PARAMS)
    assert jax.tree.structure(by_partition) == jax.tree.structure(by_tree)


def test_optaxs_own_muon_takes_a_partition():
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=PARTITION)
    same = optax.contrib.muon(0.1, muon_weight_dimension_numbers=NUMBERS)
    found, expected = (x.update(PARAMS, x.init(PARAMS), PARAMS)[0] for x in (tx, same))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_partition_is_a_static_argument_of_injected_optimizers():
    build = optax.inject_hyperparams(cd.dion, static_args=("dimension_numbers",))
    state = build(0.1, dimension_numbers=PARTITION).init(PARAMS)
    plain = cd.dion(0.1, dimension_numbers=PARTITION).init(PARAMS)
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain)


def test_boxes_of_nnx_stay_around_the_numbers():
    params = nnx.state(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Param)
    partition = cd.dimension_numbers.by_name(params)
    views = _two_optimizers.matrix_views(params, partition)
    assert {name: view and view.fan_in for name, view in views.items()} == {
        "bias": None,
        "kernel": 8,
    }


# Answers


def test_answers_replace_what_was_found_and_what_was_asked():
    answers = {"mix/cube": STACK, "kernel": None}
    found = _partition.with_answers(FINDINGS, answers)
    assert found == (
        Finding("mix/cube", (3, 4, 8), "matrix", STACK, "given"),
        *FINDINGS[1:3],
        Finding("up/kernel", (8, 16), "other", None, "given"),
    )
    assert _partition.with_answers(FINDINGS, None) == FINDINGS
    _partition.warn(found)  # of nothing


@pytest.mark.parametrize(
    ("answers", "error", "match"),
    [
        ({"cubes": None}, ValueError, "'cubes'.*print"),
        ({"cub": None}, ValueError, "'cub'"),  # a part of a name is none of a path
        ({"mix/cube": "muon"}, TypeError, "'muon'.*reduction_axis"),
        ({"mix/cube": (1, 2)}, TypeError, r"\(1, 2\)"),
        ({"mix": DimensionNumbers(0, 3)}, ValueError, "'mix/cube'"),
        ({"mix/cube": DimensionNumbers(1, 1)}, ValueError, "not a matrix"),
    ],
)
def test_answers_that_fit_no_parameter_are_refused(answers, error, match):
    with pytest.raises(error, match=match):
        _partition.with_answers(FINDINGS, answers)


# The warning


def message_of(*arguments):
    with pytest.warns(PartitionWarning) as caught:
        _partition.warn(*arguments)
    (warning,) = caught
    return str(warning.message)


def test_one_warning_names_what_is_asked_what_was_seen_and_what_to_paste():
    more = Finding("gate", (8, 8), "asked", None, "multiplied at model.py:9")
    message = message_of((*FINDINGS, more))
    assert "43.5% of the parameters" in message  # (96 + 64) / 368
    assert "mix/cube (3, 4, 8): enters pallas_call at model.py:88" in message
    assert "gate (8, 8): multiplied at model.py:9" in message
    assert "answers={'mix/cube': None, 'gate': None}" in message
    for known in ("query", "bias", "kernel"):
        assert known not in message


def test_the_line_to_paste_answers_all_layers_of_one_kind_and_no_other_parameter():
    layers = [
        Finding(f"{i}/mix/cube", (3, 4, 8), "asked", None, "model.py:8") for i in (0, 1)
    ]
    assert "answers={'mix/cube': None}" in message_of(layers)
    known = Finding("2/mix/cube", (3, 4, 8), "matrix", STACK, "model.py:9")
    answers = "answers={'0/mix/cube': None, '1/mix/cube': None}"
    assert answers in message_of([*layers, known])


@pytest.mark.parametrize("build", [cd.dion, cd.curvadion, cd.local_muon])
def test_without_dimension_numbers_a_tree_is_warned_of_once(build):
    """At the first init: every update asks the rule again, and a restart inits."""
    params = {"dense": {"kernel": jnp.ones((8, 4))}, "cube": jnp.ones((2, 3, 4))}
    tx = build(0.1)
    with pytest.warns(PartitionWarning) as caught:
        state = tx.init(params)
    (warning,) = caught
    message = str(warning.message)
    assert "42.9% of the parameters" in message
    assert "cube (2, 3, 4)" in message
    assert "dense" not in message
    assert (
        "dimension_numbers=cd.dimension_numbers.from_loss(loss_fn, params, batch)"
        in message
    )
    for _ in range(2):
        jax.eval_shape(tx.update, params, state, params)
        jax.eval_shape(tx.init, params)


# Trees and functions of the user's own


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"a": DENSE, "b": None}, id="prefix"),
        pytest.param(
            lambda params: jax.tree.map(
                lambda x: DENSE if x.ndim == 2 else None, params
            ),
            id="function",
        ),
    ],
)
def test_given_dimension_numbers(given):
    params = freeze({"a": {"x": jnp.ones((2, 3))}, "b": [jnp.ones(4), jnp.ones(5)]})
    given = given if callable(given) else freeze(given)
    views = _two_optimizers.matrix_views(params, given)
    assert [name for name, view in views.items() if view is not None] == ["a/x"]
    tx = cd.dion(0.1, dimension_numbers=given)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_a_function_may_return_a_partition():
    params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
    views = _two_optimizers.matrix_views(params, cd.dimension_numbers.by_name)
    assert [name for name, view in views.items() if view] == ["up/kernel"]


def test_one_entry_for_the_whole_tree():
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((5, 4))}
    views: dict[str, Any] = _two_optimizers.matrix_views(params, DimensionNumbers(1, 0))
    assert [view.fan_out for view in views.values()] == [2, 5]
    nothing = _two_optimizers.matrix_views(params, lambda params: None)
    assert nothing == {"a": None, "b": None}


class Callable(eqx.Module):
    """A module that can be called, as most can."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __call__(self, x):
        return self.last(self.first(x))


def test_dimension_numbers_as_an_equinox_tree():
    net = Callable(*(eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in (0, 1)))
    params = eqx.filter(net, eqx.is_inexact_array)
    numbers = jax.tree.map(lambda x: DENSE if x.ndim == 2 else None, params)
    numbers = eqx.tree_at(lambda n: n.last.weight, numbers, None)
    views = _two_optimizers.matrix_views(params, numbers)
    assert [name for name, view in views.items() if view] == ["first/weight"]


class Attention(NamedTuple):
    query: object
    value: object
    scale: object


def test_a_field_called_value_is_a_name_like_others():
    tree = {"attention": Attention(jnp.ones((8, 8)), jnp.ones((8, 4)), jnp.ones(8))}
    views = _two_optimizers.matrix_views(tree, lambda params: None)
    assert list(views) == [f"attention/{name}" for name in Attention._fields]


@pytest.mark.parametrize("params", [{}, (), {"bias": np.ones(3)}], ids=repr)
@pytest.mark.parametrize(
    "build",
    [
        *(cd.dion, cd.curvadion, cd.local_muon),
        *(cd.presets.synchronous_dion, cd.presets.authors_code),
    ],
)
def test_no_matrices_or_no_parameters_at_all(build, params):
    """As in a part of `optax.partition`."""
    tx = build(0.1)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("make", [cd.dion, cd.local_muon, cd.curvadion])
def test_a_parameter_that_is_no_array_is_refused(make):
    with pytest.raises(TypeError, match=r"'scale' is 1\.0, and no array"):
        make(0.1).init({"kernel": jnp.ones((8, 4)), "scale": 1.0})


def test_a_leaf_without_elements_is_no_matrix():
    params = {"kernel": jnp.ones((3, 4)), "none": jnp.ones((0, 4))}
    tx = cd.dion(0.1)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert updates["none"].shape == (0, 4)


# Descriptions


def test_description_of_a_partition():
    assert cd.describe_partition(PARAMS, PARTITION).splitlines() == [
        "parameter  shape      kind    matrices  fan_in  fan_out  why",
        "mix/cube   (3, 4, 8)  asked                              "
        "enters pallas_call at model.py:88",
        "mix/query  (8, 2, 4)  matrix  1         8       8        model.py:63",
        "up/bias    (16,)      vector                             added at model.py:64",
        "up/kernel  (8, 16)    matrix  1         8       16       model.py:64",
    ]
    assert cd.describe_partition(PARAMS, PARTITION) == str(PARTITION)
    part = cd.describe_partition({"up": PARAMS["up"]}, PARTITION).splitlines()
    assert [line.split()[0] for line in part[1:]] == ["up/bias", "up/kernel"]
    stack = DimensionNumbers(-1, -2)
    (answered, *_) = _partition.with_answers(FINDINGS, {"mix/cube": stack})
    assert str(Partition((answered,))).split()[-5:] == "matrix 3 8 4 given".split()


def test_description_without_a_partition():
    lines = cd.describe_partition(PARAMS).splitlines()
    assert lines[1].endswith(
        "asked                              name and shape do not tell"
    )
    assert lines[4].endswith("a kernel, by its name")
    given = {"mix": None, "up": {"bias": None, "kernel": DENSE}}
    kinds = [x.split()[-1:] for x in cd.describe_partition(PARAMS, given).splitlines()]
    assert kinds[1:] == [["given"]] * 4
    assert "kernel  (8, 16)    matrix  1 " in cd.describe_partition(PARAMS, given)
    assert len(cd.describe_partition({}).splitlines()) == 1
