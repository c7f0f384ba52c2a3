"""Parameters that are not what the last sync made of them are counted."""

import functools
import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import curvadion_jax as cd
from curvadion_jax import checkpoint, compressors, synchronizers, triggers

REPLICAS, EVERY, STEPS, BAD = 2, 2, 6, 1
MESH = cd.replicas.simulated(REPLICAS)
PARAMS = helpers.make_params()
GRADIENTS = helpers.make_gradients(STEPS, REPLICAS)


def reconciling(inner=None, mesh=MESH, **options):
    inner = optax.adam(0.05) if inner is None else inner
    reconcile = synchronizers.reconcile(**options)
    return cd.adaptive_sync(inner, triggers.every_k(EVERY), reconcile, mesh)


def displaced(state) -> list[int]:
    with warnings.catch_warnings(action="ignore"):  # of what is counted here
        return cd.metrics.read(state).get("displaced", [0] * REPLICAS)


def by_row(function):
    """Of one replica's loss, updates and parameters."""
    return lambda *rows: cd.replicas.map(function, MESH)(*rows)


def choose(finite, new, old):
    return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


# What users do to finished updates by a replica's own loss: as a guard against NaN.
FORMS = {
    "where zero": lambda x, u, p: optax.apply_updates(
        p, jax.tree.map(lambda y: jnp.where(jnp.isfinite(x), y, 0.0), u)
    ),
    "where zeros": lambda x, u, p: optax.apply_updates(
        p, choose(jnp.isfinite(x), u, zeros(u))
    ),
    "factor": lambda x, u, p: optax.apply_updates(
        p, jax.tree.map(lambda y: jnp.isfinite(x) * y, u)
    ),
    "cond": lambda x, u, p: optax.apply_updates(
        p, lax.cond(jnp.isfinite(x), lambda y: y, zeros, u)
    ),
    "scaled": lambda x, u, p: optax.apply_updates(
        p, jax.tree.map(lambda y: y * jnp.where(jnp.isfinite(x), 1.0, 0.5), u)
    ),
    "new or old": lambda x, u, p: choose(jnp.isfinite(x), optax.apply_updates(p, u), p),
    "cond on parameters": lambda x, u, p: lax.cond(
        jnp.isfinite(x), lambda: optax.apply_updates(p, u), lambda: p
    ),
}


@functools.cache
def trained(form: str):
    """Counts after some steps, in one of which a replica's loss is NaN."""
    tx = reconciling()
    apply = by_row(FORMS[form])

    def train(state, given):
        gradients, loss = given
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (apply(loss, updates, params), opt_state), opt_state.counters.displaced

    losses = np.ones((STEPS, REPLICAS), np.float32)
    losses[EVERY - 1, BAD] = np.nan  # at the first sync
    gradients = jax.tree.map(lambda *x: np.stack(x), *GRADIENTS)
    run = jax.jit(lambda state: lax.scan(train, state, (gradients, losses)))
    return run(helpers.start(tx, PARAMS, MESH))


@pytest.mark.parametrize("form", FORMS)
def test_updates_that_a_replica_changes_by_itself_are_counted(form):
    (_, opt_state), counts = trained(form)
    expected = [0, 0]
    expected[BAD] = 1
    # The step after the changed one sees it, and no other.
    assert counts.tolist() == [[0, 0]] * EVERY + [expected] * (STEPS - EVERY)
    assert displaced(opt_state) == expected


AFTER = {
    "clip": optax.clip(0.01),
    "scale": optax.scale(0.5),
    "decay": optax.add_decayed_weights(-0.01),
    "ema": optax.ema(0.9),
    "apply_every": optax.apply_every(2),
    "frozen": optax.masked(
        optax.set_to_zero(), dict.fromkeys(PARAMS, False) | {"tall/kernel": True}
    ),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_follows_the_optimizer_in_a_chain_is_counted(name):
    tx = optax.chain(reconciling(), AFTER[name])
    *_, (_, state) = helpers.run(tx, MESH, PARAMS, GRADIENTS)
    # The last sync is the last step, after which there is none to see it.
    assert displaced(state) == [STEPS // EVERY - 1] * REPLICAS


def old_state(state, new):
    return new[0], state[1]


def one_bit(state, new):
    del state
    bits = lax.bitcast_convert_type(new[0]["bias"], jnp.uint32)
    bits = bits.at[BAD, 3].set(bits[BAD, 3] ^ 1)
    return new[0] | {"bias": lax.bitcast_convert_type(bits, jnp.float32)}, new[1]


def swapped(state, new):
    """Two arrays that change places."""
    del state
    tall, wide = new[0]["tall/kernel"], new[0]["wide/kernel"]
    shape = tall.shape
    return new[0] | {
        "tall/kernel": wide.reshape(shape),
        "wide/kernel": tall.reshape(wide.shape),
    }, new[1]


def to_all(function):
    """A change of every parameter, whose bits may add up to the same sum."""
    return lambda state, new: (jax.tree.map(function, new[0]), new[1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(old_state, [1, 1], id="old state"),
        pytest.param(one_bit, [0, 1], id="one bit"),
        pytest.param(swapped, [1, 1], id="swapped arrays"),
        pytest.param(to_all(lambda x: -x), [1, 1], id="negated"),
        pytest.param(to_all(lambda x: 2 * x), [1, 1], id="doubled"),
        pytest.param(to_all(lambda x: x[:, ::-1]), [1, 1], id="swapped elements"),
    ],
)
def test_any_other_change_of_a_sync_is_counted_once(change, expected):
    tx = reconciling()
    state, step = helpers.start(tx, PARAMS, MESH), jax.jit(helpers.train_step(tx))
    # The state that the sync left comes back after the step that follows it.
    changed = EVERY if change is old_state else EVERY - 1
    for number, gradients in enumerate(GRADIENTS[: EVERY + 2]):
        new, _ = step(state, gradients)
        state = change(state, new) if number == changed else new
    assert displaced(state[1]) == expected


ORDINARY = {
    "adam": lambda mesh: reconciling(mesh=mesh),
    "two bits": lambda mesh: reconciling(
        mesh=mesh, compressor=compressors.quantize(2), outer=optax.sgd(0.7, 0.9)
    ),
    "curvadion": lambda mesh: cd.curvadion(0.02, budget=0.3, mesh=mesh),
    "local_muon": lambda mesh: cd.local_muon(0.02, budget=0.3, bits=2, mesh=mesh),
    "paper": lambda mesh: cd.presets.paper(0.02, threshold=0.5, mesh=mesh),
    "MultiSteps": lambda mesh: optax.MultiSteps(
        reconciling(mesh=mesh), 2
    ).gradient_transformation(),
    "apply_if_finite": lambda mesh: optax.apply_if_finite(reconciling(mesh=mesh), 3),
    "before": lambda mesh: optax.chain(optax.scale(2.0), reconciling(mesh=mesh)),
}


@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", helpers.slow_but(["adam", "MultiSteps"], ORDINARY))
def test_nothing_is_counted_in_an_ordinary_run(name, dtype):
    """A scan of donated steps, of which one has a gradient that is not finite."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    tx = ORDINARY[name](mesh)
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    gradients = jax.tree.map(lambda *x: np.stack(x).astype(dtype), *GRADIENTS)
    gradients["bias"][2, 1] = np.nan
    scan = lambda state, given: lax.scan(helpers.train_step(tx), state, given)
    run = jax.jit(scan, donate_argnums=0)
    state = helpers.start(tx, params, mesh)
    before = jax.device_get(state[0])
    for _ in range(2):
        state, _ = run(state, gradients)
    report = cd.metrics.read(state[1])
    assert "displaced" not in report
    assert report["syncs"] > 0
    assert (np.asarray(state[0]["tall/kernel"]) != before["tall/kernel"]).any()


def test_nothing_is_counted_where_updates_are_applied_elsewhere():
    """Outside of the compiled update, as some loops do."""
    tx = reconciling()
    (params, state), update = helpers.start(tx, PARAMS, MESH), jax.jit(tx.update)
    for gradients in GRADIENTS:
        updates, state = update(gradients, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    assert displaced(state) == [0, 0]


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("saved", [False, True], ids=["resized", "restored"])
def test_nothing_is_counted_after_a_change_of_the_number(tmp_path, number, saved):
    """And then what is changed after a sync is counted again."""
    mesh = cd.replicas.make_mesh(number)
    state = helpers.start(reconciling(mesh=MESH), PARAMS, MESH)
    step = jax.jit(helpers.train_step(reconciling(mesh=MESH)))
    for gradients in GRADIENTS[:EVERY]:
        state, _ = step(state, gradients)
    tx = reconciling(mesh=mesh)
    if saved:
        checkpoint.save(tmp_path, 1, state)
        target = helpers.start(tx, PARAMS, mesh)
        state = checkpoint.restore(tmp_path, target, resize=number != REPLICAS)
    else:
        state = cd.replicas.resize(state, mesh)
    assert not {"alike", "displaced"} & cd.metrics.read(state[1]).keys()
    step = jax.jit(helpers.train_step(tx))
    gradients = helpers.make_gradients(EVERY + 1, number)
    for each in gradients[:EVERY]:
        state, _ = step(state, each)
    assert "displaced" not in cd.metrics.read(state[1])
    moved = jax.tree.map(lambda x: x + 1, state[0])
    state, _ = step((moved, state[1]), gradients[EVERY])
    assert displaced(state[1]) == [1] * number
