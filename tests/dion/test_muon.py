"""Muon's steps: Optax's own, wherever the matrices lie."""

import collections

import chex
import helpers
import hlo
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from curvadion_jax.matrices import _muon

SHAPES = {"down": (5, 48, 32), "one": (32, 32), "query": (2, 32, 4, 8), "two": (32, 32)}
QUERY = optax.contrib.MuonDimensionNumbers(1, (2, 3))
# Axes inside a replica, and how the last axes of an array are divided.
PLACES = {
    "both": ({"fsdp": 2, "tensor": 2}, ("fsdp", "tensor")),
    "both_along_one": ({"fsdp": 2, "tensor": 2}, (("fsdp", "tensor"), None)),
    "one_of_two": ({"fsdp": 2, "data": 2}, ("fsdp", None)),
    "whole": ({"data": 4}, (None, None)),
}
# Sums in another order, through five iterations that multiply errors.
CLOSE = 5e-5
# Products of a stack round as they like; elements are about 1.
ROUNDED = 2e-6
# One number through five iterations, each of which multiplies errors by four at most.
SHORT = 1e-4


def numbers(params):
    return {
        name: QUERY
        if name == "query"
        else optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
        for name, x in params.items()
    }


def trees(steps):
    rng = np.random.default_rng(0)
    return [
        {n: rng.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}
        for _ in range(steps)
    ]


def optaxs(rate=0.1, **options):
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=numbers, **options)


def run(tx, params, gradients):
    update, state = jax.jit(tx.update), tx.init(params)
    for each in gradients:
        updates, state = update(each, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.8, "eps": 1e-3, "weight_decay": 0.1, "mu_dtype": "bfloat16"}],
)
def test_one_device_takes_optaxs_steps(options):
    params, *gradients = trees(4)
    rate = optax.linear_schedule(0.1, 0.0, 5)
    found = run(_muon.muon(rate, numbers, **options), params, gradients)
    expected = run(optaxs(rate, **options), params, gradients)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=ROUNDED)


def place(mesh, divided, tree):
    """On the mesh, with the last axes divided; of a query the width and the heads."""

    def put(name, x):
        spec = [None] * x.ndim
        first = 1 if name == "query" else x.ndim - 2
        spec[first : first + 2] = divided
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return {name: put(name, x) for name, x in tree.items()}


@pytest.mark.parametrize("name", helpers.slow_but(["both"], PLACES))
def test_sharded_matrices_move_there_and_back(name):
    inner, divided = PLACES[name]
    mesh, params = cd.replicas.make_mesh(2, inner), trees(1)[0]
    given, *gradients = trees(3)
    placed = place(mesh, divided, given)
    specs = {key: x.sharding.spec for key, x in placed.items()}
    tx = cd.adaptive_sync(
        _muon.muon(0.1, numbers),
        triggers.never(),
        synchronizers.reconcile(),
        mesh,
        specs=specs,
    )
    state = helpers.start(tx, placed, mesh)
    step = jax.jit(helpers.train_step(tx))
    first = cd.replicas.replicate(place(mesh, divided, params), mesh)
    step = helpers.quick(step, state, first)
    program = hlo.parse(step.as_text())
    inside = program.collectives([program.entry])
    kinds = 2  # of matrices: leaves of one kind are worked on in one stack
    along = len(jax.tree.leaves(divided))
    shared = along < len(inner)
    expected = {"all-to-all": 2 * along * kinds, "all-gather": shared * kinds}
    sent = collections.Counter(each.opcode for each in inside)
    found = {key: number for key, number in sent.items() if key != "all-reduce"}
    assert collections.Counter(found) == collections.Counter(expected)
    # Whether gradients are finite, and checksums: numbers, and no matrix.
    for each in inside:
        assert each.opcode != "all-reduce" or each.bytes <= 64
    for each in gradients:
        rows = cd.replicas.replicate(place(mesh, divided, each), mesh)
        state, _ = step(state, rows)
    expected = run(optaxs(), given, gradients)
    for path, x in jax.device_get(state[0]).items():
        np.testing.assert_array_equal(x[0], x[1])
        np.testing.assert_allclose(x[0], expected[path], rtol=0, atol=CLOSE)


def test_matrices_of_one_shape_are_iterated_on_together():
    layers = {
        f"layer_{number}": {
            "up/kernel": np.ones((8, 32)),
            "down/kernel": np.ones((32, 8)),
        }
        for number in range(6)
    }
    tx = cd.local_muon(0.1)

    def products(params):
        program = jax.jit(tx.update).lower(params, tx.init(params), params)
        return program.as_text().count("dot_general")

    two = {name: layers[name] for name in ("layer_0", "layer_1")}
    assert products(two) == products(layers) > 0


@pytest.mark.parametrize(
    ("make", "given", "meant", "other"),
    [
        ("local_muon", {}, {"budget": 0.03}, {"budget": 0.02}),
        ("curvadion", {}, {"budget": 0.01}, {"budget": 0.02}),
        ("local_muon", {"budget": 0.12}, {"bits": 2}, {"bits": 4}),
        ("local_muon", {"budget": 0.13}, {"bits": 4}, {"bits": 2}),
        (
            "local_muon",
            {"trigger": triggers.evenly(0.14)},
            {"trigger": triggers.evenly(0.14), "bits": 2},
            {"bits": 4},
        ),
    ],
    ids=["local_muon", "curvadion", "2 bits", "4 bits", "own trigger"],
)
def test_default_budget_and_bits(make, given, meant, other):
    """The program is that of the numbers which are meant, and no other's."""
    mesh = cd.replicas.simulated(2)
    params = cd.replicas.replicate({"kernel": np.ones((8, 8))}, mesh)

    def program(**options):
        tx = getattr(cd, make)(0.1, mesh=mesh, **options)
        return jax.jit(tx.update).lower(params, tx.init(params), params).as_text()

    assert program(**given) == program(**given | meant) != program(**given | other)


def divided(specs, axis_type):
    """Gradients of stacks of layers on four devices, with these specs."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    zeros = np.ones((4, 16, 16), np.float32)
    return {
        f"layers_{number}": jax.device_put(zeros, NamedSharding(mesh, spec))
        for number, spec in enumerate(specs)
    }


def updated(gradients):
    never = cd.triggers.never()
    tx = cd.local_muon(
        0.1, trigger=never, dimension_numbers=cd.DimensionNumbers(-2, -1)
    )
    step = jax.jit(tx.update)
    state = jax.jit(tx.init)(gradients)
    return step.lower(gradients, state, gradients).compile(), state


def test_layers_on_several_devices_stay_where_they_are():
    """Under `jit` nobody says how they lie."""
    compiled, _ = updated(divided([PartitionSpec("x")] * 3, AxisType.Auto))
    text = compiled.as_text()
    for name in ("all-gather", "all-to-all", "collective-permute"):
        assert f"{name}(" not in text
        assert f"{name}-start(" not in text


def test_layers_that_lie_apart_by_their_types():
    gradients = divided([PartitionSpec("x"), PartitionSpec()], AxisType.Explicit)
    # JAX 0.12 divides zeros of a program like `zeros_like`'s argument only there.
    with jax.set_mesh(gradients["layers_0"].sharding.mesh):
        compiled, state = updated(gradients)
        updates, _ = compiled(gradients, state, gradients)
    # Roundings of float32: 2e-6 on JAX 0.12, where the two are fused differently.
    np.testing.assert_allclose(*jax.device_get(list(updates.values())), rtol=1e-5)


def test_epsilon_in_the_norm_is_1e_7():
    """By hand: one element is a singular value, which each iteration maps by itself."""
    size = 1e-9
    params = {"kernel": np.zeros((4, 6), np.float32)}
    gradient = {"kernel": np.zeros((4, 6), np.float32)}
    gradient["kernel"][1, 2] = size
    tx = cd.local_muon(1.0, momentum=0.0)
    updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
    singular = size / (size + 1e-7)
    for _ in range(5):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    assert singular > 0.5
    expected = -np.sqrt(6 / 4) * singular
    np.testing.assert_allclose(updates["kernel"][1, 2], expected, rtol=SHORT)


@pytest.mark.parametrize("size", [3e2, 1e-5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_norm_of_a_gradient_need_not_fit_into_its_dtype(dtype, size):
    """In float16 the squares of 300 are infinite together, and those of 1e-5 are 0."""
    gradient = {"kernel": size * np.random.default_rng(0).normal(size=(16, 16))}
    params = {"kernel": np.zeros((16, 16))}
    gradient, params = jax.tree.map(lambda x: x.astype(dtype), (gradient, params))
    tx = cd.local_muon(1.0)
    updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
    # Newton-Schulz leaves singular values between 0.7 and 1.2.
    singular = np.linalg.svd(updates["kernel"].astype(np.float32), compute_uv=False)
    assert 0.5 < singular.min() < singular.max() < 1.3
