"""An optimizer's state keeps the partition it was made with, which cannot change."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax.sharding import PartitionSpec

import curvadion_jax as cd
from curvadion_jax.dimension_numbers import DimensionNumbers, _record
from curvadion_jax.matrices import _two_optimizers

DENSE, TURNED = DimensionNumbers(0, 1), DimensionNumbers(1, 0)
NUMBERS = {"bias": None, "down": DENSE, "up": DENSE}
PARAMS = {"bias": jnp.ones(8), "down": jnp.ones((8, 8)), "up": jnp.ones((8, 8))}
# What changed since NUMBERS: the arrays of a state may stay as they are, or change.
OTHERS: dict[str, Any] = {"turned": {"up": TURNED}, "to AdamW": {"up": None}}
TWO = cd.replicas.simulated(2)


def muon(numbers):
    return cd.local_muon(0.1, dimension_numbers=numbers)


MASK = {"bias": False, "down": True, "up": True}
LABELS = {name: "ours" if ours else "sgd" for name, ours in MASK.items()}
# Optimizers of one replica, made of the dimension numbers of their parameters.
BUILDS: dict[str, Any] = {
    "dion": lambda numbers: cd.dion(0.1, rank=2, dimension_numbers=numbers),
    "local_muon": muon,
    "curvadion": lambda numbers: cd.curvadion(0.1, dimension_numbers=numbers),
    "preset": lambda numbers: cd.presets.synchronous_muon(
        0.1, dimension_numbers=numbers
    ),
    "chain": lambda numbers: optax.chain(optax.clip(1.0), muon(numbers)),
    "MultiSteps": lambda numbers: optax.MultiSteps(
        muon(numbers), 2
    ).gradient_transformation(),
    "partition": lambda numbers: optax.partition(
        {"ours": muon(of_a_part(numbers)), "sgd": optax.sgd(0.1)}, LABELS
    ),
    "inject_hyperparams": lambda numbers: optax.inject_hyperparams(
        cd.dion, static_args=("dimension_numbers",)
    )(0.1, dimension_numbers=lambda params: numbers),
}


def of_a_part(numbers):
    """A function, since a tree of all numbers is no prefix of a part's."""
    return lambda params: (
        {name: numbers[name] for name in params if MASK[name]}
        | {name: x for name, x in params.items() if not MASK[name]}
    )


def update(tx, state):
    return jax.eval_shape(tx.update, PARAMS, state, PARAMS)


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", BUILDS)
def test_another_partition_than_at_init_is_refused(name, change):
    tx, other = BUILDS[name](NUMBERS), BUILDS[name](NUMBERS | change)
    state = jax.eval_shape(tx.init, PARAMS)
    _, after = update(tx, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    # A synchronizer within the step compares states before the update does.
    message = "pytree structure" if name == "preset" else r"up was a matrix \(0 -> 1\)"
    with pytest.raises(ValueError, match=message):
        update(other, after)


@pytest.mark.parametrize("params", [{}, {"bias": jnp.ones(3)}])
def test_a_state_without_matrices_passes_under_jit(params):
    """It may have a number in the place of a record, as of Q."""
    tx = cd.dion(0.1)
    state = jax.eval_shape(tx.init, params)
    jax.eval_shape(tx.update, params, state, params)


def test_scale_by_dion_remembers_its_axes():
    params = {"down": jnp.ones((8, 8)), "up": jnp.ones((8, 8))}
    tx, other = (cd.scale_by_dion(2, dimension_numbers=x) for x in (DENSE, TURNED))
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"down was a matrix \(0 -> 1\).*up was"):
        other.update(params, state)


def test_a_state_of_another_partition_is_traced_anew_by_jit():
    """Its arrays are alike, so a cached program would turn the steps over."""
    tx, other = muon(NUMBERS), muon(NUMBERS | {"up": TURNED})
    state, turned = tx.init(PARAMS), other.init(PARAMS)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(state) == shapes(turned)
    step = jax.jit(tx.update)
    for _ in range(2):
        _, state = step(PARAMS, state, PARAMS)
    assert step._cache_size() == 1
    with pytest.raises(ValueError, match=r"up was a matrix \(1 -> 0\)"):
        step(PARAMS, turned, PARAMS)


def test_a_message_names_five_parameters_and_answers_all():
    numbers = {f"layer_{index}": DENSE for index in range(7)}
    params = dict.fromkeys(numbers, jnp.ones((4, 8)))
    views = lambda x: _two_optimizers.matrix_views(params, x)
    old, new = (
        _record.lines_of(_record.record(params, views(x)))
        for x in (numbers, dict.fromkeys(numbers) | {"layer_6": DENSE})
    )
    message = _record.difference(old, new)
    assert message.count("is now left to the other optimizer") == 5
    assert "and 1 more" in message
    answers = eval(message.partition("answers=")[2].removesuffix(")."), {"cd": cd})
    assert answers == {name: DENSE for name in numbers if name != "layer_6"}
    assert _record.difference(old, old) == ""


def test_a_record_is_json_and_no_array():
    numbers = {"bias": None, "up": DimensionNumbers(0, (1, 2))}
    params = {"bias": jnp.ones(3), "up": jnp.ones((4, 2, 3))}
    found = _record.record(params, _two_optimizers.matrix_views(params, numbers))
    assert jax.tree.leaves(found) == []
    assert _record.lines_of(found) == [
        ["bias", [3], None, None],
        ["up", [4, 2, 3], [0], [1, 2]],
    ]


def records(state):
    """The lines of all records in a state."""
    kinds = _two_optimizers.TwoOptimizersState | cd.DionState
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [_record.lines_of(x.partition) for x in nodes if isinstance(x, kinds)]


def test_map_params_of_optax_keeps_it():
    tx = cd.dion(0.1, rank=2, dimension_numbers=NUMBERS)
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    specs = optax.tree.map_params(
        tx,
        lambda x, spec: spec,
        state,
        dict.fromkeys(PARAMS, PartitionSpec()),
        transform_non_params=lambda x: PartitionSpec(),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    is_spec = lambda x: isinstance(x, PartitionSpec)
    jax.tree.map(lambda spec, x: None, specs, state, is_leaf=is_spec)  # a prefix of it


STORED = {
    "flax": lambda state, _: serialization.from_bytes(
        state, serialization.to_bytes(state)
    ),
    "pickle": lambda state, _: pickle.loads(pickle.dumps(jax.device_get(state))),
    "orbax": lambda state, folder: orbax_of(state, folder),
}


def orbax_of(state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", state)


@pytest.mark.parametrize("store", STORED.values(), ids=STORED)
def test_other_ways_to_store_a_state_keep_it(store, tmp_path):
    state = cd.dion(0.1, rank=2, dimension_numbers=NUMBERS).init(PARAMS)
    found = store(state, tmp_path)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert records(found) == records(state)


@pytest.mark.parametrize("divided", [False, True])
def test_placing_a_state_on_a_mesh_keeps_its_partition(divided):
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2} if divided else None)
    specs = PartitionSpec("fsdp") if divided else None
    tx = cd.curvadion(0.1, dimension_numbers=NUMBERS, mesh=mesh, specs=specs)
    rows = cd.replicas.replicate(PARAMS, mesh)
    (found,) = records(tx.init(rows))
    assert [path for path, *_ in found] == ["bias", "down", "up"]
    assert found[2] == ["up", [8, 8], [0], [1]]


def test_states_resized_or_offloaded_keep_their_partition():
    tx = cd.local_muon(0.1, dimension_numbers=NUMBERS, mesh=TWO)
    state = tx.init(cd.replicas.replicate(PARAMS, TWO))
    one = cd.replicas.resize(state, cd.replicas.simulated(1))
    for other in (one, cd.replicas.offload(state)):
        assert records(other) == records(state)
        assert records(other)[0]


def test_parameters_of_another_shape_are_named_with_both():
    lines = lambda columns: [["head", [4, columns], None, None]]
    found = _record.difference(lines(10), lines(3))
    assert found.startswith("head was (4, 10) and is now (4, 3). ")
    assert "call init" in found
    assert "answers" not in found
