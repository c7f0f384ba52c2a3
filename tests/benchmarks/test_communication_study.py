"""The study's harness at a tiny size: runs, the simulator, resuming, the tables."""

import argparse
import dataclasses
import json

import chex
import data
import gap
import jax
import jax.numpy as jnp
import numpy as np
import pieces
import plans
import pytest
import simulate as simulation
import study
import tables
from optimizers import optimizer
from runs import Run
from simulate import simulate
from sizes import SIZES

import curvadion_jax as cd

PARAMS = {"kernel": jax.ShapeDtypeStruct((8, 16), np.float32)}
QUICK = Run("sgd", 0.1, trigger="every 2", sync="reconcile", steps=3, replicas=2)


@pytest.fixture(scope="module")
def corpus():
    return data.load(None)


def result(run: Run, loss: float) -> dict:
    return {
        "run": dataclasses.asdict(run),
        "loss": loss,
        "syncs": 3,
        "bytes": 10,
        "synchronous_bytes": 1000,
    }


@pytest.mark.parametrize("name", plans.METHODS)
def test_every_method_can_be_built_at_every_rate(name):
    method = plans.METHODS[name]
    for outer in (method.run.outer, *method.outers):
        tx = optimizer(method.run.but(outer=outer), PARAMS)
        state = jax.eval_shape(tx.init, PARAMS)
        assert state.metrics.steps.dtype == np.int32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": "adagrad"}, "no inner optimizer 'adagrad'"),
        ({"trigger": "sometimes"}, "'sometimes' is none of always, every"),
        ({"sync": "gossip"}, "no synchronizer 'gossip'"),
        ({"compressor": "zip"}, "'zip' is none of exact, int"),
        ({"outer": "adam 1"}, "'adam 1' is none of mean, nesterov"),
    ],
)
def test_unknown_words_are_named(changes, message):
    run = Run("sgd", 0.1, sync="reconcile").but(**changes)
    with pytest.raises(ValueError, match=message):
        optimizer(run, PARAMS)


@pytest.mark.slow
def test_a_simulated_run(corpus):
    found = simulate(QUICK, SIZES["test"], corpus)
    again = simulate(QUICK, SIZES["test"], corpus)
    other = simulate(QUICK.but(seed=1), SIZES["test"], corpus)
    assert list(found["curve"]) == [2, 3]
    assert found["loss"] == found["curve"][3] == again["loss"] != other["loss"]
    # Steps 2 and 3: the last one always synchronises. Two replicas send each payload
    # once; the flag's 4 bytes come on every step, and those of a weight at every sync.
    assert found["syncs"] == 2
    assert 3 * (found["bytes"] - 3 * 4 - 2 * 4) == 2 * found["synchronous_bytes"]
    assert found["divergence"] < 1e-6


@pytest.mark.slow
def test_products_in_bfloat16(corpus):
    wide = SIZES["test"]
    narrow = dataclasses.replace(wide, products="bfloat16", at_once=2)
    one, other = (simulate(QUICK, size, corpus)["loss"] for size in (wide, narrow))
    assert one != other == pytest.approx(one, rel=1e-2)  # 8 bits of a mantissa


def test_weights_are_averaged_by_their_age():
    run = QUICK.but(steps=3, weight_average=2 / 3)  # an age of two steps
    averaged = simulation.averaged(run)
    seen = np.array([3.0, -1.0, 5.0], np.float32)
    state = averaged.init(jnp.zeros(2))
    for value in seen:
        _, state = averaged.update(jnp.array([value, 1.0]), state)
    counts = 0.5 ** np.arange(2, -1, -1)
    wanted = [np.average(seen, weights=counts), 1.0]
    found = simulation.weights_average(state, run)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)  # a rounding or two
    with pytest.raises(ValueError, match=r"at least a step, got 0\.75"):
        simulation.averaged(run.but(weight_average=0.25))


@pytest.mark.slow
def test_the_loss_is_of_the_average_and_the_curve_is_not(corpus):
    size, run = SIZES["test"], QUICK.but(steps=4)
    plain, one, two = (
        simulate(run.but(weight_average=age), size, corpus) for age in (0, 1 / 4, 1 / 2)
    )
    assert plain["curve"] == one["curve"] == two["curve"]
    assert one["loss"] == plain["loss"] == plain["curve"][4] != two["loss"]


@pytest.mark.slow
def test_a_run_in_pieces_is_the_same_run(corpus, tmp_path):
    run = QUICK.but(
        inner="local_muon",
        last_momentum=0.95,
        compressor="int 2",
        outer="nesterov 1.0 0.4",
        weight_average=0.5,
    )
    # A step in a piece; the third piece is over before it has begun.
    answers = iter([False, True] * 2 + [True] + [False, True])

    class Short(pieces.Piece):
        def is_over(self):
            return next(answers)

    *kept, last = (
        simulate(run, SIZES["test"], corpus, Short(tmp_path, 0.0)) for _ in range(4)
    )
    assert kept == [None] * 3
    seconds = cd.checkpoint.read_extra(tmp_path)["seconds"]
    whole = simulate(run, SIZES["test"], corpus)
    assert last["cpu_seconds"] > seconds > 0
    assert last | {"cpu_seconds": 0} == whole | {"cpu_seconds": 0}


def test_gradients_of_a_part_at_once_are_those_of_all(corpus):
    size = SIZES["test"]
    gpt = simulation.transformer(size, corpus)
    params = simulation.on_replicas(simulation.parameters(gpt, QUICK, size), 2)
    # What starts at zero would keep the gradients of all before it at zero.
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )
    batch = simulation.batch_of(QUICK, size, corpus, 1)
    whole, parts = (
        jax.jit(lambda p, b, n=n: simulation.gradients(gpt, p, b, n))(params, batch)
        for n in (None, 2)
    )
    assert min(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole)) > 1e-4
    # Sums of 8 sequences in another order.
    chex.assert_trees_all_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_budget_pays_for_the_last_sync(corpus):
    # A sync sends what an all-reduce of the gradients does; the last step takes one.
    found = simulate(QUICK.but(trigger="evenly 0.45", steps=8), SIZES["test"], corpus)
    assert found["syncs"] == 3  # of 8 x 0.45 = 3.6: at 4, 7 and 8
    assert found["divergence"] < 1e-6


@pytest.mark.slow
def test_replicas_see_the_same_tokens_however_many_they_are(corpus):
    synchronous = QUICK.but(trigger="always", sync="gradients")
    losses = [
        simulate(synchronous.but(replicas=number), SIZES["test"], corpus)["loss"]
        for number in (1, 4)
    ]
    # One big batch, to the rounding of 3 steps in float32.
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_results_are_read_without_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "cpu.jsonl"
    whole = json.dumps(result(QUICK, 1.0)) + "\n"
    file.write_text(whole + whole[:20])
    assert list(study.read(file)) == [QUICK.key()]
    left = study.missing([QUICK, QUICK.but(seed=1), QUICK.but(seed=1)], file)
    assert left == [QUICK.but(seed=1)]
    assert study.read(tmp_path / "none.jsonl") == {}


@pytest.mark.slow  # two processes start JAX
def test_a_study_writes_and_resumes(tmp_path, monkeypatch, capsys):
    runs = [QUICK, QUICK.but(seed=1)]
    monkeypatch.setitem(plans.PLANS, "rates", lambda results: runs)
    arguments = ["rates", "--size", "test", "--results", str(tmp_path)]
    study.main([*arguments, "--workers", "1"])
    file = tmp_path / "test.jsonl"
    assert set(study.read(file)) == {run.key() for run in runs}
    written = file.read_text()
    file.write_text(written.splitlines(keepends=True)[0] + '{"cut')
    study.main([*arguments, "--workers", "1"])
    assert "2 runs, 1 of them to train" in capsys.readouterr().out
    rows = [json.loads(line) for line in written.splitlines()]
    again = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["loss"] for row in rows] == [row["loss"] for row in again]


@pytest.mark.slow
def test_a_study_stops_in_time_and_goes_on(tmp_path, monkeypatch, capsys, corpus):
    monkeypatch.setitem(plans.PLANS, "rates", lambda results: [QUICK])
    arguments = ["rates", "--size", "test", "--results", str(tmp_path)]
    study.main([*arguments, "--workers", "1", "--limit", "0"])
    assert "1 runs are left; the same command goes on" in capsys.readouterr().out
    assert (tmp_path / "test.jsonl").read_text() == ""
    # What was kept on the way is where the next command looks for it.
    options = argparse.Namespace(results=tmp_path)
    piece = study._piece(QUICK, SIZES["test"], options, 0.0)
    answers = iter([False, True])

    class OneStep(pieces.Piece):
        def is_over(self):
            return next(answers)

    simulate(QUICK, SIZES["test"], corpus, OneStep(piece.folder, 0.0))
    assert list((tmp_path / "unfinished").iterdir()) == [piece.folder]
    study.main([*arguments, "--workers", "1"])
    assert "1 runs, 1 of them to train" in capsys.readouterr().out
    assert list(study.read(tmp_path / "test.jsonl")) == [QUICK.key()]
    assert not list((tmp_path / "unfinished").iterdir())
    # One that was killed before it was cleared.
    piece.folder.mkdir()
    study.main([*arguments, "--workers", "1"])
    assert not piece.folder.exists()


@pytest.mark.parametrize("folder", [study.RESULTS, "tests/../benchmarks/communication"])
def test_other_data_do_not_go_among_the_results(folder, capsys, monkeypatch):
    monkeypatch.chdir(study.RESULTS.parents[2])
    if folder != study.RESULTS:
        folder += "/results"
    with pytest.raises(SystemExit):
        study.main(["rates", "--data", "shards", "--results", str(folder)])
    assert "--data needs a directory of its own" in capsys.readouterr().err


def test_plans_with_steps_of_their_own_take_no_others(capsys):
    with pytest.raises(SystemExit):
        study.main(["rates", "--steps", "20"])
    assert "rates has steps of its own: leave --steps out" in capsys.readouterr().err


def test_help_says_what_each_plan_is(capsys):
    with pytest.raises(SystemExit):
        study.main(["--help"])
    said = capsys.readouterr().out
    for name, plan in (plans.PLANS | gap.PLANS).items():
        assert f"  {name}: {plan.__doc__.splitlines()[0]}" in said


def test_data_are_not_mixed(tmp_path):
    row = result(QUICK, 1.0) | {"data": "one"}
    (tmp_path / "cpu.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit, match="has results of other --data: one"):
        study.main(["rates", "--data", "two", "--results", str(tmp_path)])


def tuned_results() -> dict:
    """All sweeps, with the smallest loss at the second rate and its last outer step.

    Or at the only one.
    """
    results = {}
    for base, method in enumerate(plans.METHODS.values(), start=1):
        for rate, loss in zip(method.rates, (1.2, 1.0, 1.1, 1.3), strict=False):
            run = method.run.but(learning_rate=rate)
            results[run.key()] = result(run, base * loss)
        best = method.run.but(learning_rate=method.rates[:2][-1])
        for number, outer in enumerate(method.outers, start=1):
            run = best.but(outer=outer)
            results[run.key()] = result(run, base * (1 - number / 100))
    return results


def test_later_plans_take_the_tuned_values():
    results = tuned_results()
    for name, method in plans.METHODS.items():
        tuned = plans.tuned(name, results)
        assert tuned.learning_rate == method.rates[:2][-1]
        assert tuned.outer == (method.outers or (method.run.outer,))[-1]
    assert {run.seed for run in plans.seeds(results)} == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="train the plan 'rates' first"):
        plans.seeds({})


def test_the_gap_compares_equal_seeds(tmp_path, capsys):
    results = tuned_results()
    reference = plans.tuned("dion", results)
    rival = plans.tuned("muloco", results)
    for seed, (loss, other) in {1: (2.0, 2.2), 2: (4.0, 4.1)}.items():
        results[reference.but(seed=seed).key()] = result(reference.but(seed=seed), loss)
        results[rival.but(seed=seed).key()] = result(rival.but(seed=seed), other)
    gaps = [tables.gap(row, results) for row in tables.seeds_of(rival, results)]
    np.testing.assert_allclose(gaps[1:], [10.0, 2.5])  # percent
    assert tables.gap(result(QUICK.but(seed=7), 1.0), results) is None
    file = tmp_path / "cpu.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in results.values()))
    tables.main(["--results", str(tmp_path)])
    written = (tmp_path / "cpu.md").read_text()
    assert all(method.label in written for method in plans.METHODS.values())
    assert "**chosen**" in written
    assert capsys.readouterr().out.strip() in written
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "file", sorted(study.RESULTS.glob("*.jsonl")), ids=lambda file: file.stem
)
def test_the_committed_tables_are_those_of_the_committed_results(file):
    results = study.read(file)
    assert file.with_suffix(".md").read_text() == tables.document(results)


def test_the_table_in_the_documentation_is_of_the_committed_results():
    results = study.read(study.RESULTS / "cpu.jsonl")
    rows = set(tables.comparison(results).splitlines())
    page = (study.RESULTS.parents[2] / "docs/results.md").read_text().splitlines()
    start = page.index(tables.comparison(results).splitlines()[0])
    quoted = page[start : page.index("", start)]
    assert len(quoted) > 5
    assert set(quoted) <= rows


def test_other_sizes_take_what_won_at_the_first():
    results = study.read(study.RESULTS / "cpu.jsonl")
    taken = {(r.inner, r.compressor, r.momentum, r.outer) for r in plans.leaders({})}
    names = ("dion", "muon", "local_muon", "muloco")
    best = [plans.tuned(name, results) for name in names]
    assert taken == {(r.inner, r.compressor, r.momentum, r.outer) for r in best}
