"""Optax around and inside of adaptive_sync: wrappers, clips, scans, frozen parts."""

from typing import Any

import by_hand
import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers

PARAMS = {"w": np.float32([[1, -2], [0.5, 1]]), "b": np.float32([2, 1, 0])}
TWO = cd.replicas.simulated(2)
SGD = optax.sgd(0.1, 0.9)
NESTEROV = optax.sgd(1.0, 0.4, nesterov=True)
every_kind = pytest.mark.parametrize("kind", ["simulated", "mesh"])


def close(actual, expected):
    """Two float32 programs of the same mathematics on numbers of order 1: 1e-7."""
    chex.assert_trees_all_close(actual, expected, rtol=0, atol=3e-6)


def syncing(inner, k=2, outer=None, **options) -> Any:
    """Makes an optimizer that reconciles every k steps, on a mesh."""
    synchronizer = synchronizers.reconcile(outer)
    return lambda mesh: cd.adaptive_sync(
        inner, triggers.every_k(k), synchronizer, mesh, **options
    )


def gradients(steps, replicas=2, spoilt=()):
    rng = np.random.default_rng(3)
    trees = [
        {
            name: rng.normal(size=(replicas, *x.shape)).astype(np.float32)
            for name, x in PARAMS.items()
        }
        for _ in range(steps)
    ]
    for step in spoilt:
        trees[step]["w"][-1, 0] = np.nan
    return trees


INNER = {
    "adam": optax.adam(0.1),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "apply_every": optax.chain(optax.sgd(0.1), optax.apply_every(2)),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.0, 8)
    ),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), SGD),
    "partition": optax.partition(
        {"train": optax.adam(0.1), "frozen": optax.set_to_zero()},
        {"w": "train", "b": "frozen"},
    ),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), {"w": True, "b": False}), SGD
    ),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, key=3), SGD),
    "ema": optax.chain(optax.ema(0.5), optax.scale(-0.1)),
}


@pytest.mark.parametrize("spoilt", [(), (2, 3)], ids=["finite", "nan"])
@pytest.mark.parametrize("name", helpers.slow_but(("adam", "MultiSteps"), INNER))
def test_what_is_inside_does_as_in_a_list_of_replicas(name, spoilt):
    """With a NaN on one replica, too, on a local step and on a sync."""
    trees = gradients(6, spoilt=spoilt)
    run = helpers.run_simulated(syncing(INNER[name], outer=NESTEROV), PARAMS, trees)
    wanted = by_hand.run(INNER[name], PARAMS, trees, 2, NESTEROV)
    for (params, _), expected in zip(run, wanted, strict=True):
        close(params, expected)


@every_kind
@pytest.mark.parametrize("name", ["before", "lift", "inside", "mean", "within"])
def test_each_replica_draws_its_own_noise_unless_all_take_one_step(name, kind):
    mesh, noise = helpers.mesh_of(kind, 2), optax.add_noise(0.1, 0.5, key=3)
    inner = optax.chain(noise, SGD)
    within = synchronizers.average_gradients()
    tx = {
        "before": lambda: syncing(SGD, before=noise)(mesh),
        "lift": lambda: optax.chain(cd.replicas.lift(noise, mesh), syncing(SGD)(mesh)),
        "inside": lambda: syncing(inner)(mesh),
        "mean": lambda: cd.adaptive_sync(
            SGD, triggers.never(), within, mesh, before=noise
        ),
        "within": lambda: cd.adaptive_sync(inner, triggers.always(), within, mesh),
    }[name]()
    trees = [jax.tree.map(np.zeros_like, tree) for tree in gradients(1)]
    ((params, _),) = helpers.run(tx, mesh, PARAMS, trees)
    alike = np.array_equal(params["w"][0], params["w"][1])
    assert alike == (name == "within")


@every_kind
@pytest.mark.parametrize("name", ["before", "lift", "inside"])
def test_each_replica_is_clipped_by_its_own_norm(name, kind):
    mesh, clip = helpers.mesh_of(kind, 2), optax.clip_by_global_norm(0.5)
    inner = optax.chain(clip, SGD)
    tx = {
        "before": lambda: syncing(SGD, before=clip)(mesh),
        "lift": lambda: optax.chain(cd.replicas.lift(clip, mesh), syncing(SGD)(mesh)),
        "inside": lambda: syncing(inner)(mesh),
    }[name]()
    trees = gradients(4)
    run = helpers.run(tx, mesh, PARAMS, trees)
    for (params, _), expected in zip(
        run, by_hand.run(inner, PARAMS, trees, 2), strict=True
    ):
        close(params, expected)


def test_what_is_before_is_before_the_trigger():
    """A change of the clipped gradients, none of which is one here."""
    change = triggers.relative_momentum_change(0.5)
    make = lambda before: (
        lambda mesh: cd.adaptive_sync(
            optax.sgd(0.1, 0.0), change, synchronizers.reconcile(), mesh, before=before
        )
    )
    sizes = np.float32([1, 1, 9, 1, 1])
    trees = [{"w": size * np.ones((2, 3), np.float32)} for size in sizes]
    params = {"w": np.zeros(3, np.float32)}
    decided = [
        helpers.decisions(helpers.run_simulated(make(before), params, trees))
        for before in (None, optax.clip_by_global_norm(1.0))
    ]
    assert decided == [[True, False, True, True, False], [True] + [False] * 4]


@every_kind
@pytest.mark.parametrize("poisoned", [False, True], ids=["finite", "nan"])
def test_multi_steps_around_is_a_mean_of_micro_batches(kind, poisoned):
    """Its NaN on one replica skips a micro-batch, of all: it sees all rows at once."""
    mesh = helpers.mesh_of(kind, 2)
    tx = optax.MultiSteps(
        syncing(SGD)(mesh), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation()
    trees = gradients(9, spoilt=[4] if poisoned else [])
    states = list(helpers.run(tx, mesh, PARAMS, trees))
    taken = [tree for index, tree in enumerate(trees) if index != 4 or not poisoned]
    pairs = [
        jax.tree.map(lambda x, y: (x + y) / 2, *taken[index : index + 2])
        for index in range(0, 8, 2)
    ]
    wanted = by_hand.run(SGD, PARAMS, pairs, 2)
    close(states[-1][0], wanted[-1])
    report = metrics.read(states[-1][1])
    assert (report["steps"], report["syncs"]) == (4, 2)
    assert "displaced" not in report


@every_kind
def test_apply_if_finite_around_skips_a_step_of_all(kind):
    mesh = helpers.mesh_of(kind, 2)
    tx = optax.apply_if_finite(syncing(SGD)(mesh), 3)
    trees = gradients(5, spoilt=[1])
    states = list(helpers.run(tx, mesh, PARAMS, trees))
    wanted = by_hand.run(SGD, PARAMS, [trees[i] for i in (0, 2, 3, 4)], 2)
    close(states[-1][0], wanted[-1])
    helpers.assert_bitwise(states[1][0], states[0][0])
    report = metrics.read(states[-1][1])
    assert (report["steps"], report["syncs"]) == (4, 2)
    assert "nonfinite" not in report


@every_kind
def test_partition_around_freezes_what_others_train(kind):
    mesh = helpers.mesh_of(kind, 2)
    parts = {"train": syncing(SGD)(mesh), "frozen": optax.set_to_zero()}
    tx = optax.partition(parts, {"w": "train", "b": "frozen"})
    trees, matrix = gradients(4), {"w": PARAMS["w"]}
    wanted = by_hand.run(SGD, matrix, [{"w": tree["w"]} for tree in trees], 2)
    run = helpers.run(tx, mesh, PARAMS, trees)
    for (params, _), expected in zip(run, wanted, strict=True):
        close(params["w"], expected["w"])
        np.testing.assert_array_equal(params["b"], [PARAMS["b"]] * 2)


@every_kind
def test_inject_hyperparams_around_takes_a_rate_that_is_set(kind):
    mesh = helpers.mesh_of(kind, 2)

    def make(learning_rate):
        return syncing(optax.sgd(learning_rate))(mesh)

    tx = optax.inject_hyperparams(make)(learning_rate=0.1)
    rows = cd.replicas.replicate(PARAMS, mesh)
    state, update = tx.init(rows), jax.jit(tx.update)
    for rate in (0.1, 0.3):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(rows, state, rows)
        if rate == 0.1:
            close(updates["b"][0], -0.1 * PARAMS["b"])
    # The second step is a sync, of replicas that are alike.
    close(updates["b"][0], -0.3 * PARAMS["b"])


@pytest.mark.parametrize("kind", ["simulated", "alone"])
def test_two_optimizers_of_parts_synchronise_apart(kind):
    mesh = None if kind == "alone" else TWO
    parts = {"a": syncing(SGD, 2)(mesh), "b": syncing(optax.adam(0.1), 3)(mesh)}
    tx = optax.partition(parts, {"w": "a", "b": "b"})
    rows = cd.replicas.replicate(PARAMS, mesh)
    state, update = tx.init(rows), jax.jit(tx.update)
    for _ in range(6):
        updates, state = update(rows, state, rows)
        rows = optax.apply_updates(rows, updates)
    found = [metrics.read(x)["syncs"] for x in state.inner_states.values()]
    assert sorted(found) == [2, 3]


@every_kind
def test_a_scan_of_steps_is_the_steps(kind):
    mesh = helpers.mesh_of(kind, 2)
    tx = syncing(optax.adam(0.1), 3, NESTEROV)(mesh)
    trees = gradients(7)
    wanted = helpers.last(helpers.run(tx, mesh, PARAMS, trees))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *trees)
    train = helpers.train_step(tx)

    @jax.jit
    def scan(state, trees):
        return jax.lax.scan(
            lambda state, tree: (train(state, tree)[0], ()), state, trees
        )

    found, _ = scan(helpers.start(tx, PARAMS, mesh), stacked)
    close(jax.device_get(found[0]), wanted[0])
    assert int(found[1].counters.syncs) == 2


@pytest.mark.parametrize("kind", ["simulated", "alone"])
@pytest.mark.parametrize("name", helpers.slow_but(["diloco"], ["diloco", "local_muon"]))
def test_map_params_touches_what_is_like_parameters(name, kind):
    """Moments and anchor, and no counters."""
    mesh = None if kind == "alone" else TWO
    make = {"diloco": cd.presets.diloco, "local_muon": cd.local_muon}[name]
    tx = make(0.1, mesh=mesh)
    params = cd.replicas.replicate(helpers.make_params(), mesh)
    state = tx.init(params)
    mapped = optax.tree.map_params(tx, lambda x: x + 7, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    helpers.assert_bitwise(mapped.counters, state.counters)
    moments = optax.tree.get_all_with_path(mapped.rows.inner_state, "mu")
    assert moments
    for _, moment in moments:
        for x in jax.tree.leaves(moment):
            assert np.all(x == 7)


def test_extra_arguments_reach_the_inner_optimizer_of_every_replica():
    def update(updates, state, params=None, **extra_args):
        del params
        return jax.tree.map(lambda g: extra_args["value"] * g, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    tx, params = syncing(inner)(TWO), cd.replicas.replicate(PARAMS, TWO)
    updates, _ = tx.update(params, tx.init(params), params, value=3.0)
    helpers.assert_bitwise(updates, jax.tree.map(lambda x: 3 * x, params))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local_muon", "curvadion"])
def test_the_default_is_made_of_public_parts(name):
    """Muon's or Dion's local steps, evenly spaced or by RMMC, Nesterov, two bits."""
    muon = optax.contrib.muon(
        0.1,
        beta=0.9,
        eps=1e-7,
        weight_decay=optax.constant_schedule(0.01),  # type: ignore[arg-type]
        adam_b2=0.95,
        muon_weight_dimension_numbers=cd.dimension_numbers.by_name(
            helpers.make_params()
        ),
    )
    dion = cd.dion(
        0.1, rank=1.0, momentum=0.9, weight_decay=optax.constant_schedule(0.01)
    )
    local, trigger = {
        "local_muon": (muon, triggers.evenly(0.5)),
        "curvadion": (dion, triggers.budget(0.5)),
    }[name]
    parts = lambda mesh: cd.adaptive_sync(
        local,
        trigger,
        synchronizers.reconcile(
            optax.sgd(1.0, 0.4, nesterov=True, accumulator_dtype="bfloat16"),
            compressor=cd.compressors.quantize(2),
            residual_dtype="bfloat16",
        ),
        mesh,
    )
    whole = lambda mesh: getattr(cd, name)(
        0.1,
        momentum=0.9,
        weight_decay=optax.constant_schedule(0.01),
        budget=0.5,
        bits=2,
        mesh=mesh,
    )
    trees = helpers.make_gradients(6, 2)
    ends = [
        helpers.last(helpers.run_simulated(make, helpers.make_params(), trees))
        for make in (parts, whole)
    ]
    assert ends[0][1].counters.syncs == ends[1][1].counters.syncs > 0
    close(ends[0][0], ends[1][0])


# Learning rates and decays of the AdamW that trains what is no matrix.
@pytest.mark.parametrize("make", [cd.local_muon, cd.curvadion], ids=["muon", "dion"])
def test_adamw_has_its_own_rate_and_second_decay(make):
    params = {"dense/kernel": jnp.ones((3, 3)), "bias": jnp.zeros(2)}
    bias = jnp.float32([1, 4])
    trees = [{"dense/kernel": jnp.ones((3, 3)), "bias": bias} for _ in range(2)]
    trees[1]["bias"] = jnp.float32([3, -1])
    nesterov = make is cd.local_muon
    adam = optax.adamw(
        0.03, b1=0.9, b2=0.95, eps=1e-7, weight_decay=0.0, nesterov=nesterov
    )
    for options, rate in (({"adam_learning_rate": 0.03}, 1), ({}, 0.5 / 0.03)):
        tx = make(0.5, **options)
        state, adam_state = tx.init(params), adam.init(params["bias"])
        for tree in trees:
            updates, state = jax.jit(tx.update)(tree, state, params)
            wanted, adam_state = adam.update(tree["bias"], adam_state, params["bias"])
            np.testing.assert_allclose(updates["bias"], rate * wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "adam"),
    [
        (
            lambda mesh: cd.presets.synchronous_muon(
                0.5, adam_learning_rate=0.03, mesh=mesh
            ),
            optax.adamw(0.03, b2=0.95, eps=1e-8, weight_decay=0.0, nesterov=True),
        ),
        (
            lambda mesh: cd.presets.diloco(0.03, mesh=mesh),
            optax.adamw(0.03, b2=0.95, weight_decay=0.0),
        ),
        (
            lambda mesh: cd.presets.synchronous_adamw(0.03, mesh=mesh),
            optax.adamw(0.03, b2=0.95, weight_decay=0.0),
        ),
    ],
    ids=["synchronous_muon", "diloco", "synchronous_adamw"],
)
def test_presets_have_the_papers_adamw(make, adam):
    params = {"dense/kernel": jnp.ones((3, 3)), "bias": jnp.zeros(2)}
    tree = {"dense/kernel": jnp.ones((3, 3)), "bias": jnp.float32([1, 4])}
    tx, adam_state = make(None), adam.init(params["bias"])
    state = tx.init(params)
    for scale in (1.0, -0.3):
        given = jax.tree.map(lambda x, scale=scale: scale * x, tree)
        updates, state = jax.jit(tx.update)(given, state, params)
        wanted, adam_state = adam.update(given["bias"], adam_state, params["bias"])
        np.testing.assert_allclose(updates["bias"], wanted, rtol=1e-5)
