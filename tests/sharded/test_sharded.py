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
    make_optimizer,
    make_state,
    mesh_of,
    moved_inside,
    prepare,
    put,
    run,
    specs_of,
)
from jax.sharding import PartitionSpec

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers
from curvadion_jax.matrices import _orthonormalize

# Sums in another order, over some steps: of how far the parameters have moved.
CLOSE = 2e-3
# Blocks of a device's own part are other blocks, which lose something else.
BLOCKS = {"curvadion": 0.5, "local_muon": 0.5}
pytestmark = pytest.mark.slow  # many programs


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_sharded_replicas_train_as_simulated_ones_and_move_no_matrix(name, mesh):
    mesh = mesh_of(mesh)
    if name != "local_muon":  # whose devices exchange matrices
        compiled, _ = prepare(name, mesh)
        inside = moved_inside(hlo.parse(compiled.as_text()), mesh)
        assert inside  # the products are divided, and not done by every device
        # Factors have RANK columns, and Gram matrices of them RANK x RANK elements.
        assert largest(inside) < least_part(mesh)
    found, start = run(name, mesh)
    expected, _ = run(name, cd.replicas.simulated(mesh.shape[AXIS]))
    for path, wanted in expected.items():
        apart = np.linalg.norm(found[path] - wanted)
        moved = np.linalg.norm(wanted - start[path])
        assert moved > 0
        assert apart / moved < BLOCKS.get(name, CLOSE), path


def test_matrices_are_exchanged_and_none_is_gathered_whole():
    """Each device orthonormalises some of those that are sharded alike."""
    mesh = mesh_of("2x2x2")
    compiled, _ = prepare("local_muon", mesh)
    inside = moved_inside(hlo.parse(compiled.as_text()), mesh)
    exchanged = [x for x in inside if x.opcode == "all-to-all"]
    others = [x for x in inside if x.opcode != "all-to-all"]
    matrix = 4 * least_part(mesh)
    assert largest(exchanged) >= matrix
    assert largest(others) < matrix


def test_devices_of_a_replica_share_the_bases(monkeypatch):
    seen, first = set(), _orthonormalize.orthonormal

    def recorded(factors):
        seen.add(factors.shape)
        return first(factors)

    monkeypatch.setattr(_orthonormalize, "orthonormal", recorded)
    mesh = mesh_of("2x2x2")
    tx = make_optimizer("synchronous_dion", mesh)
    state = make_state(tx, mesh)
    jax.jit(helpers.train_step(tx)).lower(state, make_gradients(mesh))
    # The stack of four, "up" and "down" have 192 rows; four devices take two each.
    assert {shape for shape in seen if shape[-2] == 192} == {(2, 192, RANK)}


def test_divided_is_whole_however_matrices_lie():
    """Experts, sides of several axes, equal shapes that lie otherwise."""
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
    specs = {name: PartitionSpec(*x[1]) for name, x in shapes.items()}
    rng = np.random.default_rng(0)
    params = {name: np.zeros(x[0], np.float32) for name, x in shapes.items()}
    drift = {k: np.float32(rng.normal(size=(2, *x.shape))) for k, x in params.items()}
    results = []
    for mesh in (mesh_of("2x2x2"), cd.replicas.simulated(2)):
        given, gradients, divided = params, drift, None
        if hasattr(mesh, "devices"):
            given = {k: put(x, mesh, specs[k]) for k, x in params.items()}
            rows = {k: PartitionSpec(AXIS, *specs[k]) for k in specs}
            gradients = {k: put(drift[k], mesh, rows[k]) for k in rows}
            divided = specs
        tx = cd.adaptive_sync(
            cd.scale_by_dion(3, dimension_numbers=numbers),
            triggers.always(),
            synchronizers.average_factors(numbers),
            mesh,
            specs=divided,
        )
        state = helpers.start(tx, given, mesh)
        step = helpers.quick(jax.jit(helpers.train_step(tx)), state, gradients)
        (found, opt_state), _ = step(state, gradients)
        results.append(jax.device_get((found, opt_state.common.sync_state)))
    chex.assert_trees_all_close(*results, atol=CLOSE, rtol=CLOSE)


def test_a_spoilt_replica_of_several_devices_begins_again():
    """Its momenta and Q start afresh, and those of the others do not."""
    mesh = mesh_of("2x2x2")
    step, (params, opt_state) = prepare("everything", mesh)
    gradients = [make_gradients(mesh, seed) for seed in range(2)]
    sound = opt_state.rows.inner_state

    def spoil(x):
        is_array = x.ndim > 2 and x.dtype == jnp.float32
        return jax.device_put(x.at[1].set(jnp.nan) if is_array else x, x.sharding)

    rows = opt_state.rows._replace(inner_state=jax.tree.map(spoil, sound))
    spoilt = opt_state._replace(rows=rows)
    state, whole = (params, spoilt), (params, opt_state)
    for each in gradients:
        state, _ = step(state, each)
        whole, _ = step(whole, each)
    params, opt_state = jax.device_get(state)
    chex.assert_tree_all_finite(
        (params, opt_state.rows.inner_state, opt_state.common.anchor)
    )
    report = cd.metrics.read(opt_state)
    assert report["excluded"] == [0, 1]
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)
    helpers.assert_bitwise(
        one(opt_state.rows.inner_state), one(jax.device_get(whole[1].rows.inner_state))
    )


def test_compressed_means_of_sharded_arrays_move_nothing_inside():
    form, rounding = compressors.quantize(8, 64), 2 / 127  # two roundings
    mesh = mesh_of("2x2x2")
    tx = cd.adaptive_sync(
        optax.sgd(1.0),
        triggers.always(),
        synchronizers.reconcile(compressor=form),
        mesh,
        specs=specs_of(mesh),
    )
    state, given = make_state(tx, mesh), make_gradients(mesh)
    before = jax.device_get(state[0])
    step = helpers.quick(jax.jit(helpers.train_step(tx)), state, given)
    (after, opt_state), _ = step(state, given)
    inside = moved_inside(hlo.parse(step.as_text()), mesh)
    # Whether all is finite, and checksums, are single numbers.
    assert largest(inside) <= len(given)
    for name, x in jax.device_get(given).items():
        mean = before[name] - np.asarray(after[name])
        np.testing.assert_array_equal(mean[0], mean[1])
        bound = rounding * np.max(np.abs(x)) + 1e-6
        np.testing.assert_allclose(mean[0], x.mean(axis=0), rtol=0, atol=bound)
        sent = x + np.asarray(opt_state.rows.residual[name])  # of minus the gradient
        np.testing.assert_allclose(sent.mean(axis=0), mean[0], rtol=0, atol=1e-6)
