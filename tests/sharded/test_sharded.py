"""Replicas of several devices: nothing is rebuilt, nothing moves that need not."""

import functools
import math
from typing import Any

import chex
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import (
    _collectives,
    _layout,
    _matrices,
    _orthonormalize,
    _within_replica,
    compressors,
    synchronizers,
    triggers,
)

AXIS = cd.replicas.AXIS
RANK = 2
SHAPES = {
    "down": (192, 128),
    "embed": (256, 128),
    "scale": (128,),
    "square": (128, 128),
    "stack": (4, 128, 192),
    "up": (128, 192),
}
# Replicas, and axes inside each.
MESHES = {
    "2x2x2": (2, {"fsdp": 2, "tensor": 2}),
    "4x2": (4, {"fsdp": 2}),
    "2x4": (2, {"tensor": 4}),
}
# Sums in another order, over some steps: of how far the parameters have moved.
CLOSE = 2e-3


def divided(name: str, inner: Any) -> PartitionSpec:
    """Rows over fsdp and columns over tensor, as far as there are such axes."""
    rows, columns = (axis if axis in inner else None for axis in ("fsdp", "tensor"))
    if name == "down":  # as in Megatron: what is split by columns goes in by rows
        rows, columns = columns, rows
    return {
        "scale": PartitionSpec(columns),
        "stack": PartitionSpec(None, rows, columns),
    }.get(name, PartitionSpec(rows, columns))


def reconciling(synchronizer, rank=RANK):
    return cd.adaptive_sync(
        cd.dion(0.01, rank), triggers.every_k(2), synchronizer, AXIS
    )


reconcile = synchronizers.reconcile
OPTIMIZERS = {
    "synchronous_dion": lambda: cd.presets.synchronous_dion(
        0.01, rank=RANK, axis_name=AXIS
    ),
    "curvadion": lambda: cd.curvadion(0.01, 0.3, RANK, axis_name=AXIS),
    "paper": lambda: cd.presets.paper(0.01, rank=RANK, axis_name=AXIS),
    "authors_code": lambda: cd.presets.authors_code(0.01, rank=RANK, axis_name=AXIS),
    "everything": lambda: reconciling(reconcile()),
    "low_rank": lambda: reconciling(reconcile(compressor=compressors.low_rank(RANK))),
    "low_rank_in_8_bits": lambda: reconciling(
        reconcile(
            compressor=compressors.chain(
                compressors.low_rank(RANK), compressors.quantize(8)
            )
        )
    ),
    "top_k": lambda: reconciling(
        reconcile(compressor=compressors.top_k(1 / 16, 2), momentum=False)
    ),
    "momenta_in_4_bits": lambda: reconciling(
        reconcile(momentum=compressors.quantize(4))
    ),
    "fragments": lambda: reconciling(
        reconcile(compressor=compressors.quantize(2), momentum=False, fragments=2)
    ),
    "orthonormal": lambda: reconciling(
        reconcile(cd.outer.orthonormal(1.0, 0.5, rank=RANK))
    ),
    "factors_in_8_bits": lambda: reconciling(
        synchronizers.average_factors(compressors.quantize(8))
    ),
    "diloco": lambda: cd.presets.diloco(0.01, k=2, axis_name=AXIS),
    "local_sgd": lambda: cd.presets.local_sgd(0.01, k=2, axis_name=AXIS),
}
# On 2x2x2 rows and columns are divided, and on the others one of them. There local
# steps of Dion, syncs that send factors and syncs that send codes are seen once each.
OTHER_MESHES = [
    *[("curvadion", "4x2"), ("curvadion", "2x4"), ("low_rank", "2x4")],
    *[("synchronous_dion", "4x2"), ("synchronous_dion", "2x4")],
]
MUON = {
    "muloco": lambda: cd.presets.muloco(0.01, k=2, axis_name=AXIS),
    "local_muon": lambda: cd.local_muon(0.01, budget=0.05, axis_name=AXIS),
}
# Blocks of a device's own part are other blocks, which lose something else.
BLOCKS = {
    "curvadion": 0.5,
    "factors_in_8_bits": 0.1,
    "fragments": 0.7,
    "local_muon": 0.5,
    "low_rank_in_8_bits": 0.1,
    "momenta_in_4_bits": 0.2,
    "top_k": 0.9,
}


def mesh_of(name: str):
    number, inner = MESHES[name]
    return cd.replicas.make_mesh(number, inner)


def make_state(tx, mesh, dtype=np.float32):
    """(Parameters, optimizer state) of all replicas, parameters as `divided`."""
    rng = np.random.default_rng(0)
    inner = set(mesh.axis_names) - {AXIS}
    params = {
        name: jax.device_put(
            rng.normal(size=shape).astype(dtype),
            NamedSharding(mesh, divided(name, inner)),
        )
        for name, shape in SHAPES.items()
    }
    return cd.replicas.replicate((params, tx.init(params)), mesh)


def make_gradients(mesh, seed=1):
    rng = np.random.default_rng(seed)
    number, inner = mesh.shape[AXIS], set(mesh.axis_names) - {AXIS}
    return {
        name: jax.device_put(
            rng.normal(size=(number, *shape)).astype(np.float32),
            NamedSharding(mesh, PartitionSpec(AXIS, *divided(name, inner))),
        )
        for name, shape in SHAPES.items()
    }


def mean_of(form, mesh, given):
    """What takes a tree to its compressed mean, and what was not put in."""

    def train(state, batch):
        del batch
        group = _collectives.Replicas(AXIS, _layout.current())
        result = form.average(state, (), group, {})
        return result.mean, {"unsent": result.unsent}

    return helpers.manual(train, mesh, given)


def moved_inside(program: hlo.Program, mesh) -> list[hlo.Instruction]:
    """Collectives in which several devices of a replica take part, of all steps."""
    devices = mesh.size // mesh.shape[AXIS]
    found = program.collectives([*program.computations])
    return [each for each in found if each.joins(devices)]


def largest(instructions) -> int:
    """Elements of the largest array that they send or receive.

    An all-to-all or a permutation has an array in several parts.
    """
    sizes = [0]
    for each in instructions:
        parts = [math.prod(shape) for _, shape in each.arrays]
        whole = each.opcode.startswith(("all-to-all", "collective-permute"))
        sizes.append(sum(parts) if whole else max(parts))
    return max(sizes)


def least_part(mesh) -> int:
    """Elements of the smallest part of a matrix that a device holds."""
    devices = mesh.size // mesh.shape[AXIS]
    sizes = [math.prod(shape) for shape in SHAPES.values() if len(shape) > 1]
    return min(sizes) // devices


CASES = [*((name, "2x2x2") for name in OPTIMIZERS), *OTHER_MESHES]


@functools.cache
def prepare(name: str, mesh):
    """A compiled step, and a state to start from."""
    tx = (OPTIMIZERS | MUON)[name]()
    state = make_state(tx, mesh)
    step = helpers.replica_step(tx, mesh)
    return helpers.quick(step, state, make_gradients(mesh)), state


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_no_matrix_moves_inside_a_replica(name, mesh):
    mesh = mesh_of(mesh)
    compiled, _ = prepare(name, mesh)
    inside = moved_inside(hlo.parse(compiled.as_text()), mesh)
    # Factors have RANK columns, and Gram matrices of them RANK x RANK elements.
    assert largest(inside) < least_part(mesh)
    if name not in ("diloco", "local_sgd"):
        assert inside  # the products are divided, and not done by every device


def stacks_seen(monkeypatch, mesh, orthonormalize) -> set[tuple[int, ...]]:
    """Shapes of the stacks of factors with 192 rows that a device orthonormalises."""
    seen, first = set(), _orthonormalize._shifted_pass

    def recorded(factors, shift):
        seen.add(factors.shape)
        return first(factors, shift)

    monkeypatch.setattr(_orthonormalize, "_shifted_pass", recorded)
    tx = cd.presets.synchronous_dion(
        0.01, rank=RANK, axis_name=AXIS, orthonormalize=orthonormalize
    )
    state = make_state(tx, mesh)
    helpers.replica_step(tx, mesh).lower(state, make_gradients(mesh))
    return {shape for shape in seen if shape[-2] == 192}


@pytest.mark.parametrize(
    "mesh",
    [
        "1x1",
        "2x2x2",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("4x2", "2x4")),
    ],
)
def test_devices_of_a_replica_share_the_bases(monkeypatch, mesh):
    mesh = cd.replicas.make_mesh(1) if mesh == "1x1" else mesh_of(mesh)
    devices = mesh.size // mesh.shape[AXIS]
    # The stack of four, "up" and "down" have 192 rows.
    expected = {(math.ceil(6 / devices), 192, RANK)}
    assert stacks_seen(monkeypatch, mesh, None) == expected


def test_a_function_of_the_users_is_left_to_the_compiler(monkeypatch):
    def own(factors):
        spec = PartitionSpec(*[None] * (factors.ndim - 2), "fsdp", None)
        factors = jax.lax.with_sharding_constraint(factors, spec)
        return cd.cholesky_qr(factors)

    seen = stacks_seen(monkeypatch, mesh_of("2x2x2"), own)
    assert seen == {(6, 192, RANK)}


@pytest.mark.slow
def test_divided_is_whole_however_matrices_lie():
    """Experts, sides of several axes, equal shapes that lie otherwise, one spoilt."""
    shapes = {
        "experts": ((8, 64, 96), ("fsdp", None, "tensor"), (1,), (2,)),
        "heads": ((6, 64, 8, 12), (None, "fsdp", "tensor", None), (1,), (2, 3)),
        "merged": ((6, 8, 12, 64), (None, None, "tensor", "fsdp"), (1, 2), (3,)),
        "rows": ((5, 96, 64), (None, ("fsdp", "tensor"), None), (1,), (2,)),
        "columns": ((5, 96, 64), (None, None, ("fsdp", "tensor")), (1,), (2,)),
        "whole": ((5, 96, 64), (None, None, None), (1,), (2,)),
        "few": ((96, 64), ("fsdp", None), (0,), (1,)),
    }
    numbers = {
        name: optax.contrib.MuonDimensionNumbers(fan_in, fan_out)
        for name, (*_, fan_in, fan_out) in shapes.items()
    }
    rng = np.random.default_rng(0)
    given = {
        name: rng.normal(size=x[0]).astype(np.float32) for name, x in shapes.items()
    }
    drift = {name: rng.normal(size=(2, *x.shape)) for name, x in given.items()}
    drift["rows"][:, 3] = np.nan  # one matrix, which shares its stack with others
    tx = cd.scale_by_dion(3, dimension_numbers=numbers)

    def train(params, gradients):
        layout = _layout.current()

        def reduce_fn(arrays, made_of):
            group = _collectives.Replicas(AXIS, layout.of_factors(arrays, made_of))
            return group.mean(arrays), None

        gradients = jax.tree.map(lambda x: x[0].astype(jnp.float32), gradients)
        devices = _within_replica.Devices(layout)
        updates, state = tx.update(
            gradients, tx.init(params), reduce_fn=reduce_fn, devices=devices
        )
        return params, (updates, state.q)

    results = {}
    for mesh in (mesh_of("2x2x2"), cd.replicas.make_mesh(2)):
        inner = set(mesh.axis_names) - {AXIS}
        params = {
            name: jax.device_put(
                x, NamedSharding(mesh, PartitionSpec(*shapes[name][1] if inner else ()))
            )
            for name, x in given.items()
        }
        state = cd.replicas.replicate(params, mesh)
        _, found = helpers.manual(train, mesh, state)(state, drift)
        results[bool(inner)] = jax.device_get(found)
    updates, _ = results[True]
    spoilt = np.isnan(updates["rows"]).any(axis=(-2, -1))
    assert spoilt[..., 3].all()
    assert spoilt.sum() == spoilt.size // 5
    chex.assert_trees_all_close(results[True], results[False], atol=CLOSE, rtol=CLOSE)


def test_a_condition_of_a_replicas_own_is_refused():
    mesh = mesh_of("2x2x2")
    inner = optax.apply_if_finite(optax.adam(0.01), 3)
    tx = cd.adaptive_sync(inner, triggers.every_k(2), reconcile(), AXIS)
    step, state = helpers.replica_step(tx, mesh), make_state(tx, mesh)
    with pytest.raises(ValueError, match="waits for the devices of all replicas"):
        step.lower(state, make_gradients(mesh))


def all_finite(tree) -> bool:
    return all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(tree)))


@pytest.mark.slow
def test_a_spoilt_replica_of_several_devices_comes_back():
    """Its momenta and Q start afresh, and those of the others do not."""
    mesh = mesh_of("2x2x2")
    step, (params, opt_state) = prepare("everything", mesh)
    inner = opt_state.inner_state
    spoilt = jax.tree.map(
        lambda x: x.at[1].set(jnp.nan) if x.ndim > 2 and x.dtype == jnp.float32 else x,
        inner,
    )
    assert not all_finite(spoilt)
    spoilt = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), spoilt, inner)
    state = (params, opt_state._replace(inner_state=spoilt))
    for seed in range(3):
        state, _ = step(state, make_gradients(mesh, seed))
    params, opt_state = state
    assert all_finite((params, opt_state.inner_state, opt_state.sync_state))


@pytest.mark.filterwarnings("ignore:of the state .* alone")
def test_what_gathers_a_matrix_is_seen():
    mesh = mesh_of("2x2x2")

    def train(state, gradients):
        return state + jnp.cumsum(state.reshape(-1)).reshape(state.shape), {}

    spec = PartitionSpec(AXIS, "fsdp", "tensor")
    state = jax.device_put(np.ones((2, 128, 128)), NamedSharding(mesh, spec))
    compiled = cd.replicas.step(train, mesh).lower(state, np.ones(2)).compile()
    inside = moved_inside(hlo.parse(compiled.as_text()), mesh)
    assert largest(inside) >= 128 * 128 // 4


def assert_as_before(state, before):
    """Shapes, dtypes, and where every array lies."""
    chex.assert_trees_all_equal_shapes_and_dtypes(state, before)
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(before), strict=True)
    for (path, x), old in pairs:
        name = jax.tree_util.keystr(path)
        assert x.sharding.is_equivalent_to(old.sharding, x.ndim), name


@functools.cache
def run(name: str, mesh, steps: int = 4):
    """Parameters after some steps, and before; the state stays divided as it was."""
    step, state = prepare(name, mesh)
    before = state
    for index in range(steps):
        state, _ = step(state, make_gradients(mesh, seed=index))
    assert_as_before(state, before)
    return jax.device_get((state[0], before[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [*CASES, *[(name, "2x2x2") for name in MUON]]
)
def test_divided_is_whole(name, mesh):
    mesh = mesh_of(mesh)
    found, start = run(name, mesh)
    expected, _ = run(name, cd.replicas.make_mesh(mesh.shape[AXIS]))
    for path, wanted in expected.items():
        apart = np.linalg.norm(found[path] - wanted)
        moved = np.linalg.norm(wanted - start[path])
        assert moved > 0
        assert apart / moved < BLOCKS.get(name, CLOSE), path


def test_state_is_divided_as_parameters_are():
    mesh = mesh_of("2x2x2")
    tx = reconciling(
        reconcile(optax.sgd(0.7, 0.9), compressor=compressors.low_rank(RANK))
    )
    params, state = make_state(tx, mesh)
    leaves = {
        jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(state)
    }
    checked = 0
    for name, x in params.items():
        for path, leaf in leaves.items():
            if path.endswith(f"['{name}']") and leaf.shape == x.shape:
                assert leaf.sharding == x.sharding, path
                checked += 1
    # Momenta of five kinds, the anchor, its outer momentum, and the residual.
    assert checked >= 4 * len(SHAPES)
    common = state.sync_state.common
    (q,), (form, _) = common.q, common.compressor_state
    for each in (q, form):
        specs = {name: each[name].sharding.spec for name in ("down", "stack", "up")}
        assert specs["up"] == PartitionSpec(AXIS, "fsdp", None)
        assert specs["down"] == PartitionSpec(AXIS, "fsdp", None)
        assert specs["stack"] == PartitionSpec(AXIS, None, "fsdp", None)


def test_attention_kernels_follow_their_heads():
    mesh = mesh_of("2x2x2")
    shapes = {"query": (96, 4, 8), "key": (96, 4, 8), "out": (4, 8, 96)}
    specs = {"query": ("fsdp", "tensor"), "key": (None, None, "tensor"), "out": ()}
    params = {
        name: jax.device_put(
            np.ones(shape), NamedSharding(mesh, PartitionSpec(*specs[name]))
        )
        for name, shape in shapes.items()
    }
    numbers = {
        name: optax.contrib.MuonDimensionNumbers(*axes)
        for name, axes in (("query", (0, (1, 2))), ("key", (0, (1, 2))))
    }
    numbers["out"] = optax.contrib.MuonDimensionNumbers((0, 1), 2)
    state = cd.scale_by_dion(RANK, dimension_numbers=numbers).init(params)
    spec = {name: q.sharding.spec for name, q in state.q.items()}
    assert spec["query"] == PartitionSpec("tensor", None)  # (heads, width) merged
    assert spec["key"] == PartitionSpec(None, None)  # heads before what is divided
    assert spec["out"] == PartitionSpec(None, None)


@pytest.mark.slow
def test_q_divided_along_the_rank_gathers_no_momentum():
    mesh = mesh_of("2x2x2")
    tx = cd.presets.synchronous_dion(0.01, rank=4, axis_name=AXIS)

    def along_rank(path, x):
        name = jax.tree_util.keystr(path)
        if not (".q" in name or ".common" in name) or x.shape[-1] != 4:
            return x
        spec = PartitionSpec(AXIS, *[None] * (x.ndim - 2), "fsdp")
        return jax.device_put(x, NamedSharding(mesh, spec))

    state = jax.tree.map_with_path(along_rank, make_state(tx, mesh))
    specs = [str(x.sharding.spec) for x in jax.tree.leaves(state[1])]
    assert "P('replica', None, 'fsdp')" in specs
    compiled = helpers.quick(
        helpers.replica_step(tx, mesh), state, make_gradients(mesh)
    )
    inside = moved_inside(hlo.parse(compiled.as_text()), mesh)
    assert largest(inside) < least_part(mesh)


def test_without_notes_nothing_is_known():
    params = {"a": jnp.ones((2, 4)), "b": {"c": jnp.ones((3,))}}
    layout = _layout.Layout({"fsdp": 2})
    with pytest.warns(UserWarning, match="gathers whole arrays"):
        layout.check_known()
    assert layout.specs(params, by_shape=True) == [None, None]


def test_arrays_are_found_by_path_and_then_by_shape():
    rows, columns = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
    notes = (
        _layout.Placed("0/params/layer/b", (4, 4), columns),
        _layout.Placed("0/params/layer/a", (4, 4), rows),
        _layout.Placed("1/count", (), PartitionSpec()),
    )
    shapes = {"a": (4, 4), "b": (4, 4), "er/a": (4, 4), "other": (2,)}
    tree = {"layer": {name: jnp.ones(shape) for name, shape in shapes.items()}}
    layout = _layout.Layout({"fsdp": 2}, notes)
    found = dict(zip(sorted(shapes), layout.specs(tree, by_shape=True), strict=True))
    surely = layout.specs(tree, by_shape=False)
    assert surely == [rows, columns, None, None]
    assert found["a"] == rows
    assert found["b"] == columns
    assert found["er/a"] == columns  # no such path: the first of the shape
    assert found["other"] is None


def test_factors_follow_the_axes_that_they_are_made_of():
    view = _matrices.make_view((3, 8, 8), 1, 2)
    notes = (_layout.Placed("0/params/a", (3, 8, 8), PartitionSpec(None, "x", "y")),)
    layout = _layout.Layout({"x": 2, "y": 2}, notes)
    factor = jnp.ones((3, 8, 2))  # P and R of a square matrix are alike in shape

    def found(axes):
        of_factors = layout.of_factors({"a": factor}, {"a": (view.shape, axes)})
        (spec,) = of_factors.specs({"a": factor}, by_shape=False)
        return spec

    assert found(view.p_axes) == PartitionSpec(None, "y", None)
    assert found(view.q_axes) == PartitionSpec(None, "x", None)
    assert layout.specs({"a": factor}, by_shape=False) == [None]


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (("fsdp", "tensor"), ("fsdp", None)),
        ((("fsdp", "tensor"), None), ("fsdp", None)),
        ((("tensor",), ("expert", "fsdp")), (None, ("expert", "fsdp"))),
    ],
)
def test_of_a_division_that_over_inner_axes_counts(spec, kept):
    notes = (_layout.Placed("a", (4, 4), PartitionSpec(*spec)),)
    layout = _layout.Layout({"expert": 2, "fsdp": 2}, notes)
    found = layout.specs({"a": jnp.ones((4, 4))}, by_shape=True)
    assert found == [PartitionSpec(*kept)]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["2x4", None])
def test_checkpoint_moves_to_another_mesh(tmp_path, other):
    name, mesh = "curvadion", mesh_of("2x2x2")
    elsewhere = mesh_of(other) if other else cd.replicas.make_mesh(2)
    step, state = prepare(name, mesh)
    for index in range(2):
        state, _ = step(state, make_gradients(mesh, seed=index))
    cd.checkpoint.save(tmp_path, 2, state)
    step, target = prepare(name, elsewhere)
    restored = cd.checkpoint.restore(tmp_path, target)
    assert_as_before(restored, target)
    helpers.assert_bitwise(jax.device_get(restored), jax.device_get(state))
    after, _ = step(restored, make_gradients(elsewhere, seed=2))
    assert_as_before(after, target)


def test_the_one_model_is_divided_as_a_replica_is():
    mesh = mesh_of("2x2x2")
    params, opt_state = make_state(OPTIMIZERS["curvadion"](), mesh)
    for model in (
        cd.replicas.consensus(params),
        cd.replicas.consensus(params, opt_state),
    ):
        for name, x in model.items():
            place = NamedSharding(mesh, divided(name, {"fsdp", "tensor"}))
            assert x.sharding.is_equivalent_to(place, x.ndim), name
    assert float(cd.replicas.divergence(params)) == 0


@pytest.mark.filterwarnings("ignore:of the state .* alone")
def test_a_step_compiles_once_and_refuses_what_it_was_given_before():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    tx = optax.sgd(0.1, momentum=0.9)
    state, step = make_state(tx, mesh), helpers.replica_step(tx, mesh, donate=True)
    first = state
    for index in range(3):
        state, _ = step(state, make_gradients(mesh, seed=index))
    assert len(step._programs) == 1
    with pytest.raises(ValueError, match=r"state\[0\]\['down'\].*donate=False"):
        step(first, make_gradients(mesh))


@pytest.mark.parametrize(
    ("form", "rounding"),
    [
        (compressors.quantize(8, 64), 2 / 127),  # two roundings to half a step
        (compressors.top_k(1.0, block=64), 1e-6),
        (compressors.top_k(1.0, 8, block=64), 1 / 127),
    ],
)
@pytest.mark.parametrize(
    "mesh",
    [
        # Which divides rows and columns; the others one of them.
        "2x2x2",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("4x2", "2x4")),
    ],
)
def test_compressed_means_of_divided_arrays(form, rounding, mesh):
    mesh = mesh_of(mesh)
    given = make_gradients(mesh)
    compiled = helpers.quick(mean_of(form, mesh, given), given, np.ones(4))
    mean, metrics = compiled(given, np.ones(4))
    assert not moved_inside(hlo.parse(compiled.as_text()), mesh)
    for name, x in jax.device_get(given).items():
        bound = rounding * np.max(np.abs(x))
        np.testing.assert_array_equal(
            mean[name], np.broadcast_to(mean[name][0], x.shape)
        )
        np.testing.assert_allclose(mean[name][0], x.mean(axis=0), rtol=0, atol=bound)
        sent = x - np.asarray(metrics["unsent"][name])
        np.testing.assert_allclose(sent.mean(axis=0), mean[name][0], rtol=0, atol=1e-6)


def test_an_axis_of_one_device_is_no_axis():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 1, "tensor": 2})
    spec = PartitionSpec(AXIS, "fsdp", "tensor")
    state = jax.device_put(np.ones((2, 64, 64), np.float32), NamedSharding(mesh, spec))
    run = mean_of(compressors.quantize(8, 64), mesh, state)
    mean, _ = run(state, np.ones(2))
    np.testing.assert_allclose(mean, 1)


@pytest.mark.filterwarnings("ignore:of the state .* alone")
@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec(None, "fsdp")])
def test_a_state_that_lies_elsewhere_is_divided_over_the_replicas(spec):
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    step = cd.replicas.step(lambda state, batch: (2 * state, {}), mesh, donate=False)
    state = jax.device_put(np.ones((2, 64)), NamedSharding(mesh, spec))
    program = hlo.parse(step.lower(state, np.ones(2)).compile().as_text())
    assert not program.collectives([program.entry])
    after, _ = step(state, np.ones(2))
    wanted = NamedSharding(mesh, PartitionSpec(AXIS, *spec[1:]))
    assert after.sharding.is_equivalent_to(wanted, 2)


@pytest.mark.filterwarnings("ignore:of the state .* alone")
def test_a_state_may_change_its_shape():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    spec = NamedSharding(mesh, PartitionSpec(AXIS, None, "fsdp"))
    state = jax.device_put(np.ones((2, 4, 2)), spec)
    step = cd.replicas.step(lambda state, batch: (state.sum(1), {}), mesh)
    assert step(state, np.ones(2))[0].shape == (2, 4)


def test_what_lies_in_host_memory_stays_divided():
    mesh = mesh_of("4x2")
    tx = cd.presets.local_sgd(0.01, k=2, axis_name=AXIS)
    state = cd.replicas.offload(make_state(tx, mesh))
    compiled = helpers.quick(
        helpers.replica_step(tx, mesh), state, make_gradients(mesh)
    )
    after, _ = compiled(state, make_gradients(mesh))
    anchors = after[1].sync_state.anchor
    for name, x in anchors.items():
        place = NamedSharding(mesh, PartitionSpec(AXIS, *divided(name, {"fsdp"})))
        place = place.with_memory_kind("pinned_host")
        assert x.sharding.is_equivalent_to(place, x.ndim), name


@pytest.mark.slow
def test_momenta_sent_whole_are_known_by_their_names():
    # Alike in shape, and divided otherwise: by shape alone one would be resharded.
    mesh = mesh_of("2x2x2")
    specs = {"out": ("tensor", "fsdp"), "query": ("fsdp", "tensor")}
    tx = helpers.synced_dion(
        0.01,
        0.75,
        triggers.always(),
        synchronizers.average_factors(compressors.quantize(8)),
        axis_name=AXIS,
    )
    params = {
        name: jax.device_put(
            np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32),
            NamedSharding(mesh, PartitionSpec(*spec)),
        )
        for name, spec in specs.items()
    }
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    gradients = jax.tree.map(lambda x: x, state[0])
    compiled = helpers.quick(helpers.replica_step(tx, mesh), state, gradients)
    inside = moved_inside(hlo.parse(compiled.as_text()), mesh)
    shapes = {shape[-2:] for each in inside for _, shape in each.arrays}
    assert (64, 64) not in shapes  # a device's part of a matrix; of a factor (64, 96)


def test_a_state_on_other_devices_is_refused():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 4})
    step = cd.replicas.step(lambda state, batch: (state, {}), mesh)
    state = cd.replicas.replicate(np.ones(4), cd.replicas.make_mesh(2, {"fsdp": 2}))
    message = r"lies on the mesh \{'replica': 2, 'fsdp': 2\} and .*'fsdp': 4"
    with pytest.raises(ValueError, match=message):
        step(state, np.ones(2))
