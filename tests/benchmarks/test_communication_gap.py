"""The study's plans at several batches and lengths, and what they try."""

import bases
import gap
import ideas
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
import study
from runs import Run
from study_rows import by_key, row

PARAMS = {"kernel": jax.ShapeDtypeStruct((64, 64), np.float32)}
SEVERAL = {name: PARAMS["kernel"] for name in "abcde"}  # as many as fragments
BASE = bases.local_muon_evenly()


def all_plans():
    yield from gap.against({}, "cpu", 300)
    yield from gap.against({}, "cpu", 1200)
    yield from gap.against({}, "cpu-32k", 300)
    yield from gap.scaling({}, "cpu", 300)
    yield from gap.delays({}, "cpu", 300)
    yield from gap.fragments({}, "cpu", 300)
    yield from gap.tuning({}, "cpu-32k", 300)
    yield from gap.limits({}, "cpu-32k", 300)
    yield from gap.bits({}, "cpu", 300)
    yield from gap.shares({}, "cpu", 300)
    yield from gap.pairs({}, "cpu-prose", 300)
    yield from gap.pairs({}, "cpu-w128", 300)
    yield from gap.signals({}, "cpu-32k", 300)
    yield from gap.averages({}, "cpu", 300)
    yield from gap.seldom({}, "cpu", 1200)
    yield from gap.large({}, "30m", 1200)


@pytest.mark.parametrize("run", dict.fromkeys(all_plans()), ids=Run.key)
def test_every_run_can_be_built(run):
    tx = optimizers.optimizer(run, SEVERAL)
    state = jax.eval_shape(tx.init, SEVERAL)
    assert optax.tree.get(state, "metrics").steps.dtype == np.int32


def test_a_sync_of_a_fragment_costs_its_share():
    whole, part = (
        optimizers._syncs(BASE.but(fragments=number), SEVERAL, 0.01)
        for number in (1, 3)
    )
    assert (whole, part) == (42, 128)


@pytest.mark.parametrize(("power", "warm"), [(0.0, 0), (1.0, 0), (-0.5, 0), (0.0, 5)])
def test_a_spread_budget_is_spent(power, warm):
    run = BASE.but(trigger="weighted 0.01 0.0")
    wanted = optimizers._spread(run, PARAMS, 0.01, power, warm)
    assert wanted.shape == (run.steps,)
    assert wanted[-1]
    assert wanted[:warm].all()
    # A sync costs 2.25 bits of 32 an element: 42.7 of them are paid for, and one is
    # lost where two would be due in the first step, of no learning rate.
    assert wanted.sum() == (41 if power < 0 else 42)
    periods = np.diff(np.flatnonzero(wanted)[warm:])
    first, last = periods[5:10].mean(), periods[-10:-5].mean()
    if power == 0:
        assert periods.max() - periods.min() <= 1
    else:
        assert (first < last) == (power > 0)


def test_the_learning_rate_ends_where_it_should():
    run = BASE.but(final=0.2)
    assert optimizers.schedule(run)(run.steps) == pytest.approx(0.2 * 0.08)


@pytest.mark.parametrize("inner", ["local_muon", "muon", "curvadion 1.0"])
def test_a_momentum_rises_to_its_last_value(inner):
    run = BASE.but(inner=inner, last_momentum=0.95, steps=4, trigger="every 2")
    run = run.but(replicas=2)
    params = {"kernel": jnp.ones((8, 8))}
    tx = optimizers.optimizer(run, params)
    state = tx.init(params)
    update = jax.jit(
        jax.vmap(lambda s: tx.update(params, s, params)[1], axis_name=optimizers.AXIS)
    )
    state = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    seen = []
    for _ in range(4):
        state = update(state)
        found = optax.tree.get(state, "hyperparams")["momentum"]
        seen.append(float(found[0]))
    # Linear from 0.8 on the first step towards 0.95 after the last.
    np.testing.assert_allclose(seen, 0.8 + 0.15 * np.arange(4) / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("averaged", "moved"),
    [("none", [-1, 1, -1, 1]), ("matrices", [0, 0, -1, 1]), ("others", [-1, 1, 0, 0])],
)
def test_gradients_of_some_parameters_are_averaged(averaged, moved):
    run = BASE.but(averaged=averaged, steps=20, replicas=2, trigger="every 20")
    params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    tx = optimizers.optimizer(run, params)
    state = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(params))
    gradients = jax.tree.map(lambda x: jnp.stack([x, -x]), params)
    update = jax.vmap(lambda g, s: tx.update(g, s, params), axis_name=optimizers.AXIS)
    _, state = update(gradients, state)  # the first step of a warmup has no length
    updates, _ = update(gradients, state)
    found = [np.sign(updates[name][:, ..., 0]) for name in ("kernel", "bias")]
    found = np.concatenate([found[0][:, 0], found[1]])
    np.testing.assert_array_equal(found, moved)


def test_unknown_parameters_are_named():
    with pytest.raises(ValueError, match="no parameters 'all'"):
        optimizers.optimizer(BASE.but(averaged="all"), PARAMS)


def test_an_outer_step_that_changes():
    outer = optimizers._nesterov(1.0, 0.4, 0.5, 0.0, syncs=2, dtype="float32")
    params = {"kernel": jnp.zeros(1)}
    state = outer.init(params)
    steps = []
    for _ in range(3):
        updates, state = outer.update({"kernel": jnp.ones(1)}, state, params)
        steps.append(float(updates["kernel"][0]))
    # Trace t and Nesterov step g + m t: rates 1, 0.75, 0.5; momenta 0.4, 0.2, 0.
    np.testing.assert_allclose(steps, [-1.4, -0.75 * 1.24, -0.5], rtol=1e-6)


def test_large_runs_spend_a_tenth_too():
    runs = gap.large({}, "30m", 1200)
    assert len(set(runs)) == len(runs) == 13
    triggers = {run.trigger for run in runs}
    assert {"evenly 0.001", "budget 0.001 1 1"} < triggers


def test_longer_runs_take_what_won_in_short_ones():
    short = gap.scaling({}, "cpu", 300)
    with pytest.raises(ValueError, match="train 'scaling --size cpu --steps 300'"):
        gap.scaling({}, "cpu", 1200)
    best = short[1]
    results = by_key(row(run, 1.0 if run == best else 2.0) for run in short)
    longer = gap.scaling(results, "cpu-32k", 1200)
    assert {run.steps for run in longer} == {1200}
    assert sorted({run.seed for run in longer}) == [0, 1, 2]
    assert best.but(steps=1200) in longer
    assert {r.learning_rate for r in longer if r.inner == "dion 1.0"} == {0.08}


def test_lengths_between_are_of_synchronous_muon():
    runs = gap.between({}, "cpu", 600)
    assert runs == [bases.rising_muon().but(steps=600, seed=seed) for seed in range(3)]
    with pytest.raises(ValueError, match=r"of \(600, 900\) steps, got 300"):
        gap.between({}, "cpu", 300)


def test_what_won_at_a_thousandth_is_trained_by_seeds():
    changed = gap.seldom({}, "cpu", 1200)
    assert {run.trigger for run in changed} == {"evenly 0.001"}
    best = changed[3]
    results = by_key(row(run, 1.0 if run == best else 2.0) for run in changed)
    both = (best, changed[0])
    by_seed = [run.but(seed=seed) for seed in gap.SEEDS for run in both]
    assert gap.seldom(results, "cpu", 1200) == [*changed, *by_seed[2:]]
    assert gap.seldom(results, "cpu-32k", 1200) == by_seed
    del results["cpu" + best.key()]
    with pytest.raises(ValueError, match="train 'seldom --size cpu --steps 1200'"):
        gap.seldom(results, "cpu-32k", 1200)


def test_the_ideas_are_tried_at_the_cheapest_setting_alone():
    cheap = gap.against({}, "cpu", 300)
    assert {run for pair in ideas.tried().values() for run in pair} < set(cheap)
    assert set(gap.parts()) < set(cheap)
    longer = gap.against({}, "cpu-32k", 1200)
    won = bases.rising_muon().but(learning_rate=0.113)  # at 300 steps
    runs = (bases.rising(), bases.rising_muon(), bases.muon(), bases.dion("cpu-32k"))
    runs = (*runs, bases.rising_curvadion())  # the rows of the README's table
    by_seed = [run.but(seed=seed) for run in runs for seed in gap.MORE_SEEDS]
    assert longer == [run.but(steps=1200) for run in (*by_seed, won)]


def test_a_delayed_run_ends_its_last_sync_with_its_last_step():
    run = BASE.but(delay=2, steps=6, trigger="every 1000", replicas=2)
    params = {"kernel": jnp.ones((8, 8))}
    tx = optimizers.optimizer(run, params)
    state = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(params))
    update = jax.jit(
        jax.vmap(lambda s: tx.update(params, s, params)[1], axis_name=optimizers.AXIS)
    )
    moved = []
    for _ in range(6):
        before, state = state, update(state)
        anchors = (x.sync_state.anchor["kernel"] for x in (before, state))
        moved.append(bool(jnp.any(jnp.not_equal(*anchors))))
    assert moved == [False] * 5 + [True]


def test_plans_of_a_file_of_their_own_are_trained_alone(tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main(["scaling", "rates", "--results", str(tmp_path)])
    assert "go to a file of their own" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
