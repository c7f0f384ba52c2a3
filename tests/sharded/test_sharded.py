"""Replicas of several devices: nothing is rebuilt, nothing moves that need not."""

import chex
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from divided_replicas import (
    AXIS,
    CASES,
    RANK,
    largest,
    least_part,
    make_gradients,
    make_state,
    mesh_of,
    moved_inside,
    prepare,
    reconcile,
    run,
)
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import _collectives, _mapped, _orthonormalize, compressors, triggers

# Sums in another order, over some steps: of how far the parameters have moved.
CLOSE = 2e-3
pytestmark = pytest.mark.slow  # many programs
# Blocks of a device's own part are other blocks, which lose something else.
BLOCKS = {"curvadion": 0.5, "local_muon": 0.5}


def mean_of(form, mesh, given):
    """What takes a tree to its compressed mean, and what was not put in."""

    def train(state, batch):
        del batch
        group = _collectives.Group(AXIS, _mapped.layout())
        result = form.average_by_device(state, group)
        return result.mean, {"unsent": result.unsent}

    return helpers.manual(train, mesh, given)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_sharded_replicas_train_as_whole_ones_and_move_no_matrix(name, mesh):
    mesh = mesh_of(mesh)
    if name != "local_muon":  # whose devices exchange matrices
        compiled, _ = prepare(name, mesh)
        inside = moved_inside(hlo.parse(compiled.as_text()), mesh)
        assert inside  # the products are divided, and not done by every device
        # Factors have RANK columns, and Gram matrices of them RANK x RANK elements.
        assert largest(inside) < least_part(mesh)
    found, start = run(name, mesh)
    expected, _ = run(name, cd.replicas.make_mesh(mesh.shape[AXIS]))
    for path, wanted in expected.items():
        apart = np.linalg.norm(found[path] - wanted)
        moved = np.linalg.norm(wanted - start[path])
        assert moved > 0
        assert apart / moved < BLOCKS.get(name, CLOSE), path


def test_devices_of_a_replica_share_the_bases(monkeypatch):
    seen, first = set(), _orthonormalize._shifted_pass

    def recorded(factors, shift):
        seen.add(factors.shape)
        return first(factors, shift)

    monkeypatch.setattr(_orthonormalize, "_shifted_pass", recorded)
    mesh = mesh_of("2x2x2")
    tx = cd.presets.synchronous_dion(0.01, rank=RANK, axis_name=AXIS)
    state = make_state(tx, mesh)
    helpers.replica_step(tx, mesh).lower(state, make_gradients(mesh))
    # The stack of four, "up" and "down" have 192 rows; four devices take two each.
    assert {shape for shape in seen if shape[-2] == 192} == {(2, 192, RANK)}


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
        layout = _mapped.layout()

        def reduce_fn(arrays, made_of):
            group = _collectives.Group(AXIS, layout.of_factors(arrays, made_of))
            return group.mean(arrays)

        gradients = jax.tree.map(lambda x: x[0].astype(jnp.float32), gradients)
        updates, state = tx.update(
            gradients, tx.init(params), reduce_fn=reduce_fn, layout=layout
        )
        return params, (updates, state.dion_q)

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
    with pytest.raises(ValueError, match="may decide differently"):
        step.lower(state, make_gradients(mesh))


def all_finite(tree) -> bool:
    return all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(tree)))


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


def test_compressed_means_of_sharded_arrays():
    form, rounding = compressors.quantize(8, 64), 2 / 127  # two roundings
    mesh = mesh_of("2x2x2")
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
