"""Where the arrays of replicas of several devices lie, and stay."""

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from divided_replicas import (
    AXIS,
    OPTIMIZERS,
    RANK,
    SHAPES,
    assert_as_before,
    divided,
    make_gradients,
    make_state,
    mesh_of,
    prepare,
    reconcile,
    reconciling,
)
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import _layout, _matrices, compressors


def test_state_is_divided_as_parameters_are():
    mesh = mesh_of("2x2x2")
    tx = reconciling(reconcile(optax.sgd(0.7, 0.9), compressor=compressors.quantize(8)))
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
    q = helpers.dion_state(state).dion_q
    specs = {name: q[name].sharding.spec for name in ("down", "stack", "up")}
    assert specs["up"] == PartitionSpec(AXIS, "fsdp", None)
    assert specs["down"] == PartitionSpec(AXIS, "fsdp", None)
    assert specs["stack"] == PartitionSpec(AXIS, None, "fsdp", None)


def test_q_follows_the_first_of_merged_axes():
    mesh = mesh_of("2x2x2")
    specs = {"query": ("fsdp", "tensor"), "key": (None, None, "tensor")}
    params = {
        name: jax.device_put(
            np.ones((96, 4, 8)), NamedSharding(mesh, PartitionSpec(*spec))
        )
        for name, spec in specs.items()
    }
    numbers = cd.DimensionNumbers(0, (1, 2))
    q = cd.scale_by_dion(RANK, dimension_numbers=numbers).init(params).dion_q
    assert q["query"].sharding.spec == PartitionSpec("tensor", None)
    assert q["key"].sharding.spec == PartitionSpec(None, None)


def test_arrays_are_found_by_path():
    rows, columns = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
    both = PartitionSpec(None, ("tensor", "fsdp"))
    notes = (
        _layout.Placed("0/params/of/layer/a", (4, 4), columns),  # a longer path
        _layout.Placed("0/params/layer/b", (4, 4), both),
        _layout.Placed("0/params/layer/a", (4, 4), rows),
        _layout.Placed("1/count", (), PartitionSpec()),
    )
    shapes = {"a": (4, 4), "b": (4, 4), "er/a": (4, 4), "other": (2,)}
    tree = {"layer": {name: jnp.ones(shape) for name, shape in shapes.items()}}
    layout = _layout.Layout({"fsdp": 2}, notes)
    assert layout.specs(tree) == [rows, columns, None, None]  # without "tensor"


def test_factors_follow_the_axes_that_they_are_made_of():
    view = _matrices.make_view((3, 8, 8), 1, 2)
    notes = (_layout.Placed("0/params/a", (3, 8, 8), PartitionSpec(None, "x", "y")),)
    layout = _layout.Layout({"x": 2, "y": 2}, notes)
    factor = jnp.ones((3, 8, 2))  # P and R of a square matrix are alike in shape

    def found(axes):
        of_factors = layout.of_factors({"a": factor}, {"a": (view.shape, axes)})
        (spec,) = of_factors.specs({"a": factor})
        return spec

    assert found(view.p_axes) == PartitionSpec(None, "y", None)
    assert found(view.q_axes) == PartitionSpec(None, "x", None)
    assert layout.specs({"a": factor}) == [None]


@pytest.mark.slow
def test_checkpoint_moves_to_another_mesh(tmp_path):
    name, mesh, elsewhere = "synchronous_dion", mesh_of("2x2x2"), mesh_of("2x4")
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
    for model in (cd.replicas.consensus(params), cd.replicas.anchor(opt_state)):
        for name, x in model.items():
            place = NamedSharding(mesh, divided(name, {"fsdp", "tensor"}))
            assert x.sharding.is_equivalent_to(place, x.ndim), name
    assert float(cd.replicas.divergence(params)) == 0


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec(None, "fsdp")])
def test_a_state_that_lies_elsewhere_is_divided_over_the_replicas(spec):
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    step = cd.replicas.step(
        lambda state, batch: ({"x": 2 * state["x"]}, {}), mesh, donate=False, local="x"
    )
    state = {"x": jax.device_put(np.ones((2, 64)), NamedSharding(mesh, spec))}
    program = hlo.parse(step.lower(state, np.ones(2)).compile().as_text())
    assert not program.collectives([program.entry])
    after, _ = step(state, np.ones(2))
    wanted = NamedSharding(mesh, PartitionSpec(AXIS, *spec[1:]))
    assert after["x"].sharding.is_equivalent_to(wanted, 2)


@pytest.mark.slow
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
