"""Where the arrays of replicas of several devices lie, and stay."""

import math

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from divided_replicas import (
    AXIS,
    RANK,
    SHAPES,
    assert_as_before,
    divided,
    largest,
    make_gradients,
    make_optimizer,
    make_state,
    mesh_of,
    moved_inside,
    prepare,
    specs_of,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

MESH = cd.replicas.make_mesh(2, {"fsdp": 2, "tensor": 2})


def compressed(mesh, specs, inner=None):
    """An optimizer that keeps all that can be kept: anchor, momentum, residual."""
    reconcile = synchronizers.reconcile(
        optax.sgd(0.7, 0.9), compressor=compressors.quantize(8)
    )
    inner = inner or cd.dion(0.01, rank=RANK, dimension_numbers=helpers.matrices)
    return cd.adaptive_sync(inner, triggers.every_k(2), reconcile, mesh, specs=specs)


def test_state_is_divided_as_parameters_are():
    params, state = make_state(compressed(MESH, specs_of(MESH)), MESH)
    checked = 0
    for path, leaf in jax.tree.leaves_with_path(state):
        for name, x in params.items():
            if not jax.tree_util.keystr(path).endswith(f"['{name}']"):
                continue
            spec = x.sharding.spec
            if leaf.shape == x.shape:
                wanted = x.sharding
            elif leaf.shape == x.shape[1:]:  # what is common
                wanted = NamedSharding(MESH, P(*spec[1:]))
            else:
                continue
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), path
            checked += 1
    # Momenta, the anchor, its outer momentum, and the residual.
    assert checked >= 4 * len(SHAPES)
    q = helpers.dion_state(state).dion_q
    specs = {name: q[name].sharding.spec for name in ("down", "stack", "up")}
    assert specs["up"] == P(AXIS, "fsdp")
    assert specs["down"] == P(AXIS, "fsdp")
    assert specs["stack"] == P(AXIS, None, "fsdp")


def test_updates_that_lie_otherwise_than_parameters_are_not_gathered():
    """As of an inner optimizer whose products the compiler divides in its own way."""
    shape, place = (64, 64), P("fsdp", "tensor")
    turned = lambda x: jax.lax.with_sharding_constraint(x, P("tensor", "fsdp"))
    inner = optax.stateless(lambda updates, _: jax.tree.map(turned, updates))
    params = {
        "w": jax.device_put(np.ones(shape, np.float32), NamedSharding(MESH, place))
    }
    tx = compressed(MESH, place, inner)
    params, state = helpers.start(tx, params, MESH)
    update = jax.jit(helpers.when(tx, True).update)
    text = update.lower(params, state, params).compile().as_text()
    inside = moved_inside(hlo.parse(text), MESH)
    permuted = [each for each in inside if each.opcode == "collective-permute"]
    assert permuted  # they do lie otherwise
    assert largest(inside) < math.prod(shape)


@pytest.mark.parametrize(
    ("spec", "of_q"),
    [
        (("fsdp", "tensor"), ("tensor",)),
        ((None, None, "tensor"), ()),
        ((None, "fsdp", "tensor"), ()),
    ],
)
def test_q_follows_the_first_of_merged_axes_if_it_alone_is_sharded(spec, of_q):
    place = NamedSharding(MESH, P(*spec))
    params = {"query": jax.device_put(np.ones((96, 4, 8), np.float32), place)}
    numbers = {"query": cd.DimensionNumbers(0, (1, 2))}
    inner = cd.scale_by_dion(RANK, dimension_numbers=numbers)
    tx = compressed(MESH, {"query": P(*spec)}, inner)
    _, state = helpers.start(tx, params, MESH)
    q = helpers.dion_state(state).dion_q["query"]
    assert q.sharding.spec == P(AXIS, *of_q)


@pytest.mark.parametrize("as_function", [False, True])
def test_a_tree_of_dimension_numbers_of_one_model(as_function):
    """Optax, asked what in a state is like parameters, inits without any."""
    shapes = {name: jnp.empty(shape) for name, shape in SHAPES.items()}
    numbers = helpers.matrices(shapes)
    given = (lambda params: numbers) if as_function else numbers
    states = []
    for dimension_numbers in (given, helpers.matrices):
        tx = cd.local_muon(
            0.01,
            budget=0.05,
            dimension_numbers=dimension_numbers,
            mesh=MESH,
            specs=specs_of(MESH),
        )
        states.append(make_state(tx, MESH))
    assert_as_before(*states)


@pytest.mark.parametrize("specs", [P("fsdp"), {"w": P("fsdp"), "b": {"c": P("fsdp")}}])
def test_specs_are_a_tree_or_a_prefix_of_it(specs):
    params = {"w": jnp.ones((4, 2)), "b": {"c": jnp.ones(4)}}
    tx = cd.presets.local_sgd(0.1, k=2, mesh=MESH, specs=specs)
    _, state = helpers.start(tx, params, MESH)
    for x in jax.tree.leaves(state.common.anchor):
        assert x.sharding.spec == P("fsdp")


def test_shardings_and_axes_of_the_whole_mesh_are_specs_too():
    """As a model's own rules may have them."""
    place = NamedSharding(MESH, P(("fsdp", "replica")))
    tx = cd.presets.local_sgd(0.1, k=2, mesh=MESH, specs=place)
    _, state = helpers.start(tx, {"w": jnp.ones((4, 2))}, MESH)
    assert state.common.anchor["w"].sharding.spec == P("fsdp")


@pytest.mark.parametrize(
    "spec", [P("fspd"), P(None, ("fsdp", "model")), P(AXIS, "fsdp")]
)
def test_specs_of_other_axes_and_of_rows_are_refused(spec):
    tx = cd.presets.local_sgd(0.1, k=2, mesh=MESH, specs={"w": spec})
    with pytest.raises(ValueError, match=r"for w\. Give.*\['fsdp', 'tensor'\]"):
        helpers.start(tx, {"w": jnp.ones((4, 2))}, MESH)


def test_specs_of_more_axes_than_a_parameter_has_are_refused():
    tx = cd.presets.local_sgd(0.1, k=2, mesh=MESH, specs=P(None, None, "fsdp"))
    with pytest.raises(ValueError, match=r"for w, of more axes than.* \(4, 2\)\."):
        helpers.start(tx, {"w": jnp.ones((4, 2))}, MESH)


@pytest.mark.parametrize("specs", [{"w": None}, {"v": P()}, [P()]], ids=str)
def test_specs_of_another_structure_are_refused(specs):
    tx = cd.presets.local_sgd(0.1, k=2, mesh=MESH, specs=specs)
    with pytest.raises(ValueError, match="specs is not a tree, or a prefix, of the"):
        helpers.start(tx, {"w": jnp.ones((4, 2))}, MESH)


def test_missing_specs_are_refused():
    tx = cd.presets.local_sgd(0.1, k=2, mesh=MESH)
    with pytest.raises(ValueError, match=r"several devices, .*'fsdp': 2.* Pass specs="):
        helpers.start(tx, {"w": jnp.ones((4, 2))}, MESH)


def test_an_inner_optimizer_whose_init_reads_arrays_needs_one_device_a_replica():
    """Where all rows lie alike nobody asks Optax what is like the parameters."""

    def init(params):
        return {"scale": {name: x.mean() for name, x in params.items()}}

    inner = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    mesh = cd.replicas.make_mesh(2)
    tx = cd.adaptive_sync(inner, triggers.every_k(2), synchronizers.reconcile(), mesh)
    _, state = helpers.start(tx, {"w": jnp.ones((4, 2))}, mesh)
    assert state.rows.inner_state["scale"]["w"].sharding.spec == P(AXIS)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [{}, {"fsdp": 2}], ids=["one", "several"])
@pytest.mark.parametrize("name", ["local_muon", "curvadion", "factors"])
def test_the_second_call_does_not_compile_again(name, inner, caplog):
    mesh = cd.replicas.make_mesh(
        2, inner, devices=jax.devices()[: 2 * (1 + len(inner))]
    )
    tx = make_optimizer(name, mesh)
    state, gradients = make_state(tx, mesh), make_gradients(mesh)
    step = jax.jit(helpers.train_step(tx))
    with jax.log_compiles():
        for _ in range(3):
            state, _ = step(state, gradients)
    finished = "Finished XLA compilation of jit(train)"
    assert sum(finished in x.getMessage() for x in caplog.records) == 1


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
    assert "displaced" not in cd.metrics.read(after[1])


def test_consensus_and_anchor_are_divided_as_a_replica_is():
    params, opt_state = make_state(compressed(MESH, specs_of(MESH)), MESH)
    for model in (cd.replicas.consensus(params), cd.replicas.anchor(opt_state)):
        for name, x in model.items():
            place = NamedSharding(MESH, divided(name, {"fsdp", "tensor"}))
            assert x.sharding.is_equivalent_to(place, x.ndim), name
    assert float(cd.replicas.divergence(params)) == 0


@pytest.mark.slow
def test_what_lies_in_host_memory_stays_divided():
    mesh = mesh_of("4x2")
    tx = cd.presets.local_sgd(0.01, k=2, mesh=mesh, specs=specs_of(mesh))
    params, opt_state = make_state(tx, mesh)
    state = params, cd.replicas.offload(opt_state)
    step = jax.jit(helpers.train_step(tx))
    after = state
    for _ in range(2):
        after, _ = step(after, make_gradients(mesh))
    for name, x in after[1].common.anchor.items():
        place = NamedSharding(mesh, divided(name, {"fsdp"}))
        place = place.with_memory_kind("pinned_host")
        assert x.sharding.is_equivalent_to(place, x.ndim), name
