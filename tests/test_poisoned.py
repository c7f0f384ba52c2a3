"""A replica that is not finite spoils nobody else, and comes back where it can."""

import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

AXIS = cd.replicas.AXIS
REPLICAS = 8
EVERY = 3
# Parameters plus an update may miss where all meet by a rounding.
ROUNDING = 1e-6
reconcile = synchronizers.reconcile


def sgd(synchronizer, k=EVERY):
    inner = optax.sgd(0.1, 0.9)
    return cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, AXIS)


def dion(synchronizer, k=EVERY):
    inner = cd.dion(0.1, 2)
    return cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, AXIS)


FORMS = {
    "quantize": compressors.quantize(4, block=8),
    "top_k": compressors.top_k(0.5, 8),
    "low_rank": compressors.low_rank(2),
    "chain": compressors.chain(compressors.low_rank(2), compressors.quantize(8)),
}
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
OPTIMIZERS = {
    "gradients": lambda: sgd(synchronizers.average_gradients()),
    "factors": lambda: dion(synchronizers.average_factors()),
    "factors-quantize": lambda: dion(synchronizers.average_factors(FORMS["quantize"])),
    "everything": lambda: sgd(reconcile()),
    "everything-dion": lambda: dion(reconcile()),
    "outer": lambda: sgd(reconcile(NESTEROV, momentum=False)),
    "orthonormal": lambda: dion(
        reconcile(cd.outer.orthonormal(1.0, 0.5, rank=2), momentum=False)
    ),
    "momentum-quantize": lambda: sgd(reconcile(momentum=FORMS["quantize"])),
    "fragments": lambda: sgd(reconcile(fragments=2, momentum_every=2), k=1),
    "curvadion": lambda: cd.curvadion(
        0.1, axis_name=AXIS, trigger=triggers.every_k(EVERY)
    ),
    "adamw": lambda: cd.presets.diloco(0.1, k=EVERY, axis_name=AXIS),
    **{
        f"gradients-{name}": functools.partial(
            lambda form: sgd(synchronizers.average_gradients(form)), form
        )
        for name, form in FORMS.items()
    },
    **{
        f"reconcile-{name}": functools.partial(
            lambda form: sgd(reconcile(NESTEROV, compressor=form, momentum=False)),
            form,
        )
        for name, form in FORMS.items()
    },
}
QUICK = ("gradients", "reconcile-quantize")
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in OPTIMIZERS
]


@functools.cache
def prepare(name: str):
    """A compiled step (state, gradients, weights) -> state, by vmap, and its start."""
    tx, params = OPTIMIZERS[name](), helpers.make_params()

    def train(state, gradients, weight):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, weight=weight)
        return optax.apply_updates(params, updates), opt_state

    state = jax.tree.map(
        lambda x: np.broadcast_to(x, (REPLICAS, *np.shape(x))),
        (params, tx.init(params)),
    )
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    mapped = jax.jit(jax.vmap(train, axis_name=AXIS))
    return helpers.quick(mapped, state, gradients, np.ones(REPLICAS, np.float32)), state


def run(name, gradients, weights=None, change=None):
    """States after every step; `change` maps (index, state) to what goes in."""
    step, state = prepare(name)
    history = []
    for index, tree in enumerate(gradients):
        if change is not None:
            state = change(index, jax.tree.map(np.array, state))
        weight = np.ones(REPLICAS) if weights is None else weights[index]
        state = jax.device_get(step(state, tree, np.float32(weight)))
        history.append(state)
    return history


def poisoned(gradients, step, replicas, number=np.nan):
    changed = [jax.tree.map(np.copy, tree) for tree in gradients]
    for index in replicas:
        changed[step]["tall"][index, 0, 0] = number
    return changed


def arrays(state):
    """Those of parameters and of states, but the counters."""
    params, opt_state = state
    return params, opt_state._replace(metrics=(), trigger_state=())


def assert_finite(state):
    chex.assert_tree_all_finite(arrays(state))


def rows(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def without(index):
    return np.delete(np.arange(REPLICAS), index)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_not_finite_are_not_used(name):
    """On a quiet step (1), and on one that synchronises (2), on one and on several."""
    gradients = helpers.make_gradients(6, REPLICAS)
    gradients = poisoned(gradients, 1, [5], np.inf)
    gradients = poisoned(gradients, 2, [0, 7], np.nan)
    gradients = poisoned(gradients, 2, [3], -np.inf)
    history = run(name, gradients)
    for state in history:
        assert_finite(state)
    before, after = rows(history[0], 5), rows(history[1], 5)
    if name != "fragments":  # which synchronises there
        helpers.assert_bitwise(arrays(before), arrays(after))  # no step at all
    found = history[-1][1].metrics
    assert found.skipped.tolist() == [1, 0, 0, 1, 0, 1, 0, 1]
    assert found.skipped_at.tolist() == [2, -1, -1, 2, -1, 1, -1, 2]
    assert found.synced[0] == (name == "fragments" or EVERY == 3)
    # Where a sync averages gradients, these three had none to bring.
    bring_gradients = name.startswith(("gradients", "factors"))
    expected = [1, 0, 0, 1, 0, 0, 0, 1] if bring_gradients else [0] * REPLICAS
    assert found.left_out.tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_nothing_happens_where_all_are_poisoned(name):
    """On a quiet step, and where a sync has nothing but gradients to average."""
    gradients = helpers.make_gradients(4, REPLICAS)
    bad = poisoned(gradients, 1, range(REPLICAS))
    bad = poisoned(bad, 2, range(REPLICAS))
    first, second, third, last = run(name, bad)
    if name != "fragments":  # which synchronises there
        helpers.assert_bitwise(arrays(first), arrays(second))
    if name.startswith(("gradients", "factors")):
        helpers.assert_bitwise(arrays(first), arrays(third))
        assert third[1].metrics.empty.tolist() == [1] * REPLICAS
    assert third[1].metrics.skipped_in_a_row.tolist() == [2] * REPLICAS
    assert last[1].metrics.skipped_in_a_row.tolist() == [0] * REPLICAS
    assert_finite(third)
    assert_finite(last)


def spoil(state, where, index, number=np.nan):
    """The state with one number of a part of it replaced."""
    params, opt_state = state
    tree = {
        "parameters": params,
        "momentum": opt_state.inner_state,
        "error": getattr(opt_state.sync_state, "error", ()),
        "anchor": getattr(opt_state.sync_state, "anchor", ()),
    }[where]
    leaves = [
        x
        for x in jax.tree.leaves(tree)
        if x.ndim > 1 and x.dtype.kind == "f" and x.size
    ]
    for leaf in leaves[:1]:
        leaf[index].reshape(-1)[0] = number
    return bool(leaves)


@functools.cache
def spoilt(name, where, index=2):
    """States of three steps, one replica of which is spoilt in front of the last one,
    which synchronises; None if it has no such part."""
    there = []

    def change(step, state):
        if step == 2:
            there.append(spoil(state, where, index, -np.inf))
        return state

    history = run(name, helpers.make_gradients(4, REPLICAS)[:3], change=change)
    return history if there[0] else None


@pytest.mark.parametrize("where", ["momentum", "error", "parameters", "anchor"])
@pytest.mark.parametrize("name", NAMES)
def test_a_spoilt_replica_is_left_out(name, where):
    """Whatever of it is spoilt, the others do the same."""
    index, history = 2, spoilt(name, where)
    if history is None:
        pytest.skip("there is no such part")
    others, expected = without(index), spoilt(name, "parameters")
    assert expected is not None
    helpers.assert_bitwise(
        arrays(rows(history[-1], others)), arrays(rows(expected[-1], others))
    )
    found = history[-1][1].metrics
    assert found.left_out.tolist() == [int(each == index) for each in range(REPLICAS)]
    assert found.left_out_at[index] == 2
    if where in ("momentum", "error"):
        assert_finite(history[-1])
        if name.startswith(("everything", "outer", "curvadion", "reconcile")):
            for x in history[-1][0].values():
                np.testing.assert_allclose(
                    x[index], x[others[0]], rtol=0, atol=ROUNDING
                )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "outer", "gradients"])
def test_the_others_do_as_if_it_did_not_exist(name):
    found, others = spoilt(name, "parameters"), without(2)
    assert found is not None
    gradients = [
        {key: x[others] for key, x in tree.items()}
        for tree in helpers.make_gradients(4, REPLICAS)[:3]
    ]
    *_, wanted = helpers.run_vmap(OPTIMIZERS[name](), helpers.make_params(), gradients)
    for x, y in zip(
        jax.tree.leaves(arrays(rows(found[-1], others))),
        jax.tree.leaves(arrays(wanted)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", QUICK)
def test_parameters_that_are_spoilt_are_mended(name):
    gradients = helpers.make_gradients(3, REPLICAS)

    def change(step, state):
        if step == 1:
            spoil(state, "parameters", 4)
        return state

    state = run(name, gradients, change=change)[-1]
    assert not np.isfinite(state[0]["bias"][4]).all()
    assert np.isfinite(np.delete(state[0]["bias"], 4, 0)).all()
    mended, replaced = cd.replicas.mend(jax.tree.map(jnp.asarray, state))
    assert replaced == [4]
    helpers.assert_bitwise(rows(mended[0], 4), rows(state[0], 0))
    inner = mended[1].inner_state, state[1].inner_state
    helpers.assert_bitwise(rows(inner[0], 4), rows(inner[1], 0))
    for x in jax.tree.leaves(getattr(mended[1].sync_state, "error", ())):
        assert not np.any(x[4])  # what the other holds back comes once
    counted = {"skipped_in_a_row": state[1].metrics.skipped_in_a_row.copy()}
    counted["left_out_in_a_row"] = state[1].metrics.left_out_in_a_row.copy()
    for in_a_row in counted.values():
        in_a_row[4] = 0  # and so no warning goes on
    helpers.assert_bitwise(mended[1].metrics, state[1].metrics._replace(**counted))
    helpers.assert_bitwise(rows(mended, without(4)), rows(state, without(4)))
    again, replaced = cd.replicas.mend(mended)
    assert replaced == []
    assert again is mended


def test_a_replica_that_is_finite_but_another_one_is_mended_by_name():
    """Where gradients are averaged, one whose momentum started afresh."""
    spoilt_run = spoilt("gradients", "momentum")
    assert spoilt_run is not None
    state = jax.tree.map(jnp.asarray, spoilt_run[-1])
    assert cd.replicas.mend(state) == (state, [])
    assert float(cd.replicas.divergence(state[1].inner_state)) > 0
    mended, replaced = cd.replicas.mend(state, also=[2])
    assert replaced == [2]
    for x in jax.tree.leaves(arrays(mended)):
        np.testing.assert_array_equal(x[2], x[0])


def test_mending_without_anybody_is_refused():
    with pytest.raises(ValueError, match="none of the 3 replicas is finite"):
        cd.replicas.mend({"w": jnp.full((3, 2), jnp.nan)})


def test_mending_leaves_arrays_where_they_are():
    mesh = cd.replicas.make_mesh(4, {"fsdp": 2})
    spec = jax.sharding.PartitionSpec(AXIS, "fsdp")
    place = jax.sharding.NamedSharding(mesh, spec)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    x[1, 2] = np.nan
    mended, replaced = cd.replicas.mend({"w": jax.device_put(x, place)})
    assert replaced == [1]
    assert mended["w"].sharding == place
    np.testing.assert_array_equal(mended["w"][1], x[0])


def test_one_that_stays_bad_does_not_force_syncs():
    """Its momentum is spoilt on every step, which makes the trigger ask for a sync."""
    tx = cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        triggers.relative_momentum_change(1e6),
        reconcile(),
        AXIS,
    )
    gradients = helpers.make_gradients(1, 2)[0]
    params = helpers.make_params()
    state = jax.tree.map(
        lambda x: np.broadcast_to(x, (2, *np.shape(x))), (params, tx.init(params))
    )
    step = helpers.quick(
        jax.jit(jax.vmap(helpers.train_step(tx), axis_name=AXIS)), state, gradients
    )
    synced = []
    for _ in range(26):
        state = jax.tree.map(np.array, jax.device_get(step(state, gradients)[0]))
        synced.append(bool(state[1].metrics.synced[0]))
        spoil(state, "momentum", 1)
        params = state[0]
        assert all(np.isfinite(x).all() for x in params.values())
    # The first step always; the second heals it; then it has to wait.
    assert np.flatnonzero(synced).tolist() == [0, 1, 12, 23]
    assert state[1].metrics.left_out.tolist() == [0, 3]
    read = metrics.read(state[1])
    assert read["left_out"] == 3
    assert read["troubled"] == {1: {"skipped": 0, "left_out": 3, "last": 23}}


@pytest.mark.parametrize("k", [20, 2])
def test_one_replica_alone_skips_what_is_not_finite(k):
    tx = cd.adaptive_sync(optax.adam(0.1), triggers.every_k(k), reconcile())
    gradients = [{k: v[0] for k, v in g.items()} for g in helpers.make_gradients(3, 1)]
    gradients[1]["tall"][:] = np.nan
    first, second, third = helpers.run_alone(tx, helpers.make_params(), gradients)
    if k > 2:
        helpers.assert_bitwise(arrays(first), arrays(second))
    else:  # its sync moves the anchor to where the first step has led
        helpers.assert_bitwise(first[0], second[0])
        helpers.assert_bitwise(first[1].inner_state, second[1].inner_state)
        helpers.assert_bitwise(second[1].sync_state.anchor, first[0])
    assert_finite(third)
    assert metrics.read(third[1], replicas=1)["skipped"] == 1


def test_a_long_run_of_skipped_steps_is_reported():
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.every_k(20), reconcile())
    params = helpers.make_params()
    state, bad = tx.init(params), jax.tree.map(lambda x: x * np.nan, params)
    update = jax.jit(tx.update)
    for _ in range(10):
        assert metrics.read(state, replicas=1)["synced"] is False
        _, state = update(bad, state, params)
    with pytest.warns(RuntimeWarning, match="replica 0 has skipped its last 10 steps"):
        read = metrics.read(state, replicas=1)
    assert read["troubled"][0]["skipped"] == 10
    assert metrics.read(state, replicas=1, patience=11)["skipped"] == 10


def test_a_replica_that_no_sync_takes_is_reported():
    """Its gradients are sound, so that it skips no step."""

    def change(step, state):
        if step == 0:
            spoil(state, "anchor", 3)
        return state

    gradients = helpers.make_gradients(7, REPLICAS)
    state = run("reconcile-quantize", gradients, change=change)[-1]
    report = "replica 3 was left out of the last 2 syncs"
    with pytest.warns(RuntimeWarning, match=report):
        read = metrics.read(state, patience=2)
    assert read["troubled"] == {3: {"skipped": 0, "left_out": 2, "last": 5}}
    assert metrics.read(state, patience=3)["left_out"] == 2
    state, replaced = cd.replicas.mend(jax.tree.map(jnp.asarray, state))
    assert replaced == [3]
    assert metrics.read(state, patience=1)["left_out"] == 2
    step, _ = prepare("reconcile-quantize")
    for each in gradients[:EVERY]:
        state = step(state, each, np.ones(REPLICAS, np.float32))
    assert metrics.read(state, patience=1)["left_out"] == 2


def test_a_scalar_that_is_meant_to_be_infinite_is_no_poison():
    inner = optax.chain(
        optax.with_extra_args_support(optax.contrib.reduce_on_plateau()),
        optax.sgd(0.1, 0.9),
    )
    tx = cd.adaptive_sync(inner, triggers.always(), reconcile(momentum=False), AXIS)
    gradients = helpers.make_gradients(2, 2)
    params, state = jax.tree.map(
        lambda x: np.broadcast_to(x, (2, *np.shape(x))),
        (helpers.make_params(), tx.init(helpers.make_params())),
    )
    update = jax.vmap(lambda g, s, p: tx.update(g, s, p, value=1.0), axis_name=AXIS)
    assert np.isinf(state.inner_state[0].best_value).all()
    _, state = update(gradients[0], state, params)
    assert state.metrics.left_out.tolist() == [0, 0]


def test_a_random_key_in_the_state_is_left_alone():
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(3))
    inner = optax.chain(noise, optax.sgd(0.1, 0.9))
    tx = cd.adaptive_sync(inner, triggers.every_k(2), reconcile())
    params = helpers.make_params()
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
    chex.assert_tree_all_finite(updates)
    assert int(state.metrics.left_out) == 0
