"""Optax's own contract tests for contributed optimizers, run on ours.

The wheel holds them: optax/contrib/_common_test.py. Its source is executed here under
another name, with our registries of optimizers; no case may be skipped.
"""

import ast
import functools
import inspect
import re
import sys
import types
import unittest
from pathlib import Path

import chex
import helpers
import jax
import optax
import pytest

import curvadion_jax as cd


def with_matrices(make):
    """The optimizer for the contract's parameters, which have no names."""

    @functools.wraps(make)
    def build(*args, **options):
        return make(*args, **options | {"dimension_numbers": helpers.matrices})

    # The contract compares the learning rate's type, which the library writes as text.
    build.__signature__ = inspect.signature(make, eval_str=True)
    return build


OURS = {
    name: with_matrices(getattr(cd, name))
    for name in ("dion", "curvadion", "local_muon")
}
SETTINGS = {"learning_rate": 1e-2, "weight_decay": 1e-3}
REGISTRIES = {
    "_MAIN_OPTIMIZERS_UNDER_TEST": [
        {"opt_name": name, "opt_kwargs": SETTINGS} for name in OURS
    ],
    # These are wrapped in optax.contrib.mechanize, which finds the learning rate.
    "_BASE_OPTIMIZERS": [
        {"opt_name": name, "opt_kwargs": {"learning_rate": 1.0}} for name in OURS
    ],
}


def replace_registries(tree):
    """Puts our optimizers for Optax's, and leaves out Optax's wrappers of SGD."""
    body, replaced = [], set()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.List()):
                if name in REGISTRIES:
                    node.value = ast.parse(repr(REGISTRIES[name]), mode="eval").body
                    replaced.add(name)
            case ast.AugAssign(target=ast.Name(id="_MAIN_OPTIMIZERS_UNDER_TEST")):
                continue
        body.append(node)
    assert replaced == set(REGISTRIES)
    tree.body = body
    return ast.fix_missing_locations(tree)


def load_contract():
    """Optax's module for our optimizers, as (test class, names of its test methods).

    In a tuple, because pytest would collect a class of this module by itself.
    """
    path = Path(optax.contrib.__file__).with_name("_common_test.py")
    tree = replace_registries(ast.parse(path.read_text(), str(path)))
    module = types.ModuleType("optax_contract_of_dion")
    sys.modules[module.__name__] = module
    exec(compile(tree, str(path), "exec"), module.__dict__)
    # _get_opt_factory looks here first; mechanize is found here too.
    module.__dict__["contrib"] = types.SimpleNamespace(**vars(optax.contrib), **OURS)
    [test_class] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [n.name for n in test_class.body if isinstance(n, ast.FunctionDef)]
    methods = [name for name in functions if name.startswith("test")]
    return getattr(module, test_class.name), methods


CONTRACT = load_contract()
NAMES = unittest.defaultTestLoader.getTestCaseNames(CONTRACT[0])


def label(name):
    """test_optimizers3 -> test_optimizers-dion-learning_rate-0.01-_setup_parabola."""
    text = getattr(CONTRACT[0], name).__x_params_repr__
    noise = r"opt_name|opt_kwargs|wrapper_(name|kwargs)(=None)?|<function|at 0x\w+"
    words = re.findall(r"[\w.]+", re.sub(noise, "", text))
    return "-".join([re.sub(r"\d+$", "", name), *words])


def case(name):
    """One setting is quick, but for what trains long or compiles several times."""
    words = label(name)
    slow = r"_can_be_wrapped|_schedule|test_optimizers-|float64|bfloat16"
    quick = "-dion-learning_rate-0.01-weight_decay" in words and not re.search(
        slow, words
    )
    return pytest.param(name, id=words, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize("name", [case(name) for name in NAMES])
def test_contract(name):
    try:
        CONTRACT[0](name).debug()  # raises where run() would collect
    except unittest.SkipTest as skipped:
        pytest.fail(f"the contract skipped a case: {skipped}")


def test_no_part_of_the_contract_is_left_out():
    cases = [[n for n in NAMES if re.fullmatch(rf"{m}\d+", n)] for m in CONTRACT[1]]
    assert len(cases) >= 7
    assert all(len(each) >= len(OURS) for each in cases)
    assert sorted(n for each in cases for n in each) == sorted(NAMES)


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize(
    "name", helpers.slow_but(["local_muon"], ["curvadion", "local_muon"])
)
def test_init_and_update_of_rows_are_pure_and_lower(name, kind):
    """As the contract says of one replica: same results with and without `jit`."""
    mesh = helpers.mesh_of(kind, 2)
    tx = OURS[name](**SETTINGS, mesh=mesh)
    rows = cd.replicas.replicate(helpers.make_params(), mesh)
    states = [init(rows) for init in (tx.init, jax.jit(tx.init))]
    chex.assert_trees_all_close(*states, rtol=1e-6)
    update = jax.jit(tx.update)
    first, again = (update(rows, states[0], rows) for _ in range(2))
    helpers.assert_bitwise(first, again)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, (rows, states[0]))
