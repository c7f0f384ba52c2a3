"""The study's harness at a tiny size: plans, runs in pieces, resuming, the tables."""

import doctest
import json

import data
import jax
import numpy as np
import optimizers
import pieces
import plans
import pytest
import runs
import study
import tables
from runs import Run
from simulate import simulate
from sizes import SIZES

PARAMS = {"kernel": jax.ShapeDtypeStruct((8, 16), np.float32)}
QUICK = Run("adamw", 0.01, trigger="every 2", sync="reconcile", steps=3, replicas=2)
RESULTS = study.read(study.RESULTS / study.FILE)


@pytest.fixture(scope="module")
def corpus():
    return data.load(None)


def test_examples():
    assert doctest.testmod(runs).failed == doctest.testmod(tables).failed == 0


@pytest.mark.parametrize("name", plans.PLANS)
def test_every_run_of_a_plan_can_be_built(name):
    for run in plans.PLANS[name]([0], 1200):
        state = jax.eval_shape(optimizers.optimizer(run, PARAMS).init, PARAMS)
        assert jax.tree.leaves(state)


@pytest.mark.slow
def test_a_run_in_pieces_is_the_same_run(corpus, tmp_path):
    run = plans.LOCAL_MUON.but(replicas=2, steps=3, trigger="every 2")
    # A step in a piece; the third piece is over before it has begun.
    answers = iter([False, True] * 2 + [True] + [False, True])

    class Short(pieces.Piece):
        def is_over(self):
            return next(answers)

    *kept, last = (
        simulate(run, SIZES["test"], corpus, Short(tmp_path, 0.0)) for _ in range(4)
    )
    whole = simulate(run, SIZES["test"], corpus)
    assert kept == [None] * 3
    assert last | {"cpu_seconds": 0} == whole | {"cpu_seconds": 0}
    # Of steps 2 and 3, since the last one always synchronises.
    assert whole["syncs"] == 2
    assert whole["divergence"] < 1e-6


@pytest.mark.slow  # a process starts JAX
def test_a_study_writes_stops_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        plans.PLANS, "rates", lambda seeds, steps: [QUICK.but(seed=x) for x in seeds]
    )
    file = tmp_path / study.FILE
    command = ["rates", "--size", "test", "--results", str(tmp_path), "--workers", "1"]
    study.main([*command, "--limit", "0"])
    assert "3 runs are left; the same command goes on" in capsys.readouterr().out
    study.main([*command, "--seeds", "0"])
    written = file.read_text()
    file.write_text(written + '{"cut')
    study.main([*command, "--seeds", "0", "1"])
    assert "2 runs, 1 of them to train" in capsys.readouterr().out
    assert file.read_text().startswith(written)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["run"]["seed"] for row in rows] == [0, 1]
    assert rows[0]["loss"] != rows[1]["loss"]
    with pytest.raises(SystemExit, match="results are of another text"):
        study.main([*command, "--data", str(study.__file__)])


def test_the_page_has_the_tables_of_the_results():
    page = (study.RESULTS / "tables.md").read_text("utf-8")
    assert tables.document(RESULTS) == page
    # The gap on the README, by hand from the losses of the same seeds.
    muon, local = (
        tables.by_seed(RESULTS, "cpu-32k", run.but(steps=1200))
        for run in (plans.MUON, plans.LOCAL_MUON)
    )
    gaps = [100 * (local[seed] / muon[seed] - 1) for seed in range(5)]
    text = f"{np.mean(gaps):.2f} ± {np.std(gaps, ddof=1):.2f}%"
    assert f"| {text} |" in page
