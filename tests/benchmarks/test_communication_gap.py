"""The study's plans at several batches and lengths, and what they try."""

import dataclasses
import itertools

import alternatives
import bases
import comparisons
import gap
import ideas
import jax
import jax.numpy as jnp
import law
import numpy as np
import optax
import optimizers
import pytest
import scaling
import study
from runs import Run

PARAMS = {"kernel": jax.ShapeDtypeStruct((64, 64), np.float32)}
SEVERAL = {name: PARAMS["kernel"] for name in "abcde"}  # as many as fragments
BASE = bases.local_muon_evenly()


def row(run: Run, loss: float, tokens: int = 1024, size: str = "cpu") -> dict:
    return {
        "method": bases.SCALED[run.inner],
        "size": size,
        "tokens": tokens,
        "run": dataclasses.asdict(run),
        "loss": loss,
        "syncs": 3,
        "bytes": 10,
        "synchronous_bytes": 1000,
        "date": "2026-11-23",
    }


def by_key(rows) -> dict:
    return {each["size"] + Run(**each["run"]).key(): each for each in rows}


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


def test_the_ideas_are_tried_at_the_cheapest_setting_alone():
    cheap = gap.against({}, "cpu", 300)
    assert {run for pair in ideas.tried().values() for run in pair} < set(cheap)
    assert set(gap.parts()) < set(cheap)
    longer = gap.against({}, "cpu-32k", 1200)
    won = bases.rising_muon().but(learning_rate=0.113)  # at 300 steps
    runs = (bases.rising(), bases.rising_muon(), bases.rising_curvadion())
    by_seed = [run.but(seed=seed) for run in runs for seed in gap.SEEDS]
    assert longer == [run.but(steps=1200) for run in (*by_seed, won)]


def setting(tokens: int, steps: int, replicas: int = 8) -> law.Setting:
    return law.Setting("", law.WIDTH, tokens * replicas, steps, replicas)


def test_the_law_is_found_again():
    settings = list(
        itertools.starmap(setting, itertools.product((1024, 4096), (300, 1200)))
    )
    settings += [setting(4096, 300, 2)]
    gaps = {
        label: {
            at: [law.Law({label: scale}, 0.5, 0.75, 0.25).at(label, at)] for at in of
        }
        for label, scale, of in (("even", 5.0, settings), ("rising", 4.0, settings[:3]))
    }
    found = law.fit(gaps)
    assert gaps["even"][setting(4096, 300)] == [2.5]
    np.testing.assert_allclose(gaps["even"][setting(4096, 300, 2)], 2.5 / 2**0.5)
    np.testing.assert_allclose(list(found.scales.values()), [5.0, 4.0])
    np.testing.assert_allclose([found.a, found.b, found.c], [0.5, 0.75, 0.25])


def test_gaps_are_to_muon_as_tuned_with_the_same_seed():
    local, muon = BASE.but(steps=1200), bases.muon().but(steps=1200)
    rows = [
        row(muon, 1.0),
        row(muon.but(seed=1), 2.0),
        row(muon.but(last_momentum=0.95), 5.0),
        row(local, 1.02),
        row(local.but(seed=1), 2.08),
        row(local.but(seed=2), 9.0),
        row(local.but(momentum=0.9), 9.0),
    ]
    found = law.points(BASE, bases.muon(), by_key(rows))
    assert list(found) == [setting(1024, 1200)]
    np.testing.assert_allclose(found[setting(1024, 1200)], [2.0, 4.0])
    text = scaling.document(by_key(rows))
    assert "| constant, both | 1,024 | 8 | 1,200 | 3.00 ± 1.41% | 2 |  |" in text


def test_shares_of_a_batch_are_compared_with_the_whole_of_it():
    local = bases.rising()
    rows = [
        row(bases.rising_muon(), 1.0),
        row(local, 1.02),
        row(local.but(replicas=2), 1.01, tokens=4096),
        row(local, 9.0, size="cpu-prose"),
    ]
    found = law.points(local, bases.rising_muon(), by_key(rows))
    assert list(found) == [setting(4096, 300, 2), setting(1024, 300)]
    np.testing.assert_allclose(list(found.values()), [[1.0], [2.0]])
    text = scaling.document(by_key(rows))
    assert "## Width 64, 4,096 tokens a replica and step, 2 replicas" in text
    assert "## Prose, width 64, 1,024 tokens a replica and step, 8 replicas" in text


def test_an_idea_is_compared_on_the_seeds_that_both_have():
    run, base = ideas.tried()["momentum from 0.8 to 0.95"]
    losses = {run: 1.9, run.but(seed=3): 2.1, base: 2.0, base.but(seed=3): 2.0}
    rows = [row(each, loss) for each, loss in losses.items()]
    rows += [row(base.but(seed=1), 9.0), row(run.but(steps=1200), 9.0)]
    text = comparisons.ideas(by_key(rows))
    line = "| momentum from 0.8 to 0.95 | 2.0000 | 2.0000 | 0.00 ± 7.07% | 2 |"
    assert text.splitlines()[-1] == line
    assert len(text.splitlines()) == 7


def test_bits_are_compared_on_the_seeds_that_both_have():
    two = bases.rising().but(steps=1200)
    four = two.but(compressor="int 4")
    losses = {two: 2.0, two.but(seed=2): 2.0, four: 2.1, four.but(seed=2): 1.9}
    losses |= {four.but(seed=1): 9.0, two.but(steps=300): 9.0}
    text = alternatives.bits(by_key(row(each, loss) for each, loss in losses.items()))
    assert text.splitlines()[-1] == (
        "| 1,024 | 1,200 | 3 | 2.0000, 2.0000 | 3 | 2.1000, 1.9000 | 0.00 ± 7.07% |"
    )
    assert len(text.splitlines()) == 7


def test_signals_are_compared_with_even_spacing():
    even = bases.rising()
    turned = even.but(trigger="turn 0.01 1 1")
    losses = {even: 2.0, turned: 2.1, turned.but(seed=1): 9.0}
    losses |= {even.but(trigger="budget 0.01 1 1", seed=1): 9.0}
    text = alternatives.signals(by_key(row(x, loss) for x, loss in losses.items()))
    assert text.splitlines()[-2:] == [
        "|---|---|---|---|---|---|---|",
        "| 1,024 | 300 | turn of the momentum | 3 | 1.00% | 2.1000 | 5.00% |",
    ]


def test_averaged_weights_are_compared_on_both_sides():
    local, muon = bases.rising(), bases.rising_muon()
    change = {"final": 0.5, "weight_average": 0.1}
    losses = {local: 2.0, muon: 1.6, local.but(**change): 1.8, muon.but(**change): 1.2}
    losses |= {local.but(**change, seed=1): 9.0}
    text = alternatives.averages(by_key(row(x, loss) for x, loss in losses.items()))
    assert text.splitlines()[-2:] == [
        "|---|---|---|---|---|---|---|---|---|---|",
        "| 1,024 | 300 | 0.5 | 0.1 | 1.8000 | 1.2000 | -10.00% | -25.00% | 50.00% "
        "| 25.00% |",
    ]


def test_delays_are_compared_with_syncs_at_once():
    at_once = bases.rising()
    losses = {
        at_once: 2.0,
        at_once.but(delay=2): 2.1,
        at_once.but(delay=2, seed=1): 9.0,
        at_once.but(delay=1, fragments=2): 1.9,
    }
    text = alternatives.delays(by_key(row(each, loss) for each, loss in losses.items()))
    assert text.splitlines()[-2:] == [
        "| 1,024 | 300 | 1 | 2 | 3 | 1.00% | 0: 2.1000 | 5.00% |",
        "| 1,024 | 300 | 2 | 1 | 3 | 1.00% | 0: 1.9000 | -5.00% |",
    ]


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


def test_the_picture_is_drawn(tmp_path):
    results = study.read(study.RESULTS / "scaling.jsonl")
    scaling.draw(results, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_plans_of_a_file_of_their_own_are_trained_alone(tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main(["scaling", "rates", "--results", str(tmp_path)])
    assert "go to a file of their own" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
