"""The study's harness at a tiny size: plans, resuming, the tables."""

import argparse
import dataclasses
import json
import re

import data
import gap
import jax
import numpy as np
import pieces
import plans
import pytest
import scaling
import study
import tables
from optimizers import optimizer
from runs import Run
from simulate import simulate
from sizes import SIZES

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


def test_texts_are_not_mixed(tmp_path):
    row = result(QUICK, 1.0) | {"text": "of another library"}
    (tmp_path / "cpu.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit, match="of another text, of another library, and"):
        study.main(["rates", "--results", str(tmp_path)])


def documented() -> list[list[list[str]]]:
    """The plans of each command, page by page, in the order of the page."""
    root = study.RESULTS.parents[2]
    page = (root / "docs/results.md").read_text()
    (names,) = re.findall(r"for plan in (.*); do", page)
    page = (root / "benchmarks/communication/README.md").read_text()
    commands = re.findall(r"^ +python \S+/study.py ([^-#\n]+?) *(?:#.*)?$", page, re.M)
    return [[[name] for name in names.split()], [each.split() for each in commands]]


@pytest.mark.parametrize("commands", documented(), ids=["results", "README"])
def test_the_documented_order_trains_what_later_plans_need(commands):
    results: dict = {}
    for names in commands:
        runs = [run for name in names for run in plans.PLANS[name](results)]
        results |= {run.key(): result(run, 1.0 + len(run.key())) for run in runs}
    assert {name for names in commands for name in names} >= {"grid", "seeds", "ideas"}


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
    results, found = study.read(file), file.with_suffix(".md").read_text()
    if file.stem == "scaling":
        assert found == scaling.document(results)
    else:
        assert found == tables.document(results)


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
