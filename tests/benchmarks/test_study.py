"""The study at a tiny size: its plan, runs that resume, and what RMMC reads."""

import dataclasses
import doctest
import functools
import json
import re

import corpus as corpus_files
import curve
import curve_table
import data
import ideas
import jax
import jax.numpy as jnp
import measuring
import model
import numpy as np
import pytest
import readme_numbers
import reproduce
import rmmc
import rows
import simulate
import study
import table
from simulate import Run

import curvadion_jax as cd
from curvadion_jax.matrices import _two_optimizers

SIZE = simulate.Size(1, 16, 1, 16, 2, 8)
PARAMS = {"kernel": jax.ShapeDtypeStruct((2, 8, 16), np.float32)}


@pytest.fixture(scope="module")
def corpus():
    return data.load(None)


def test_examples():
    assert not any(doctest.testmod(x).failed for x in (study, table, curve_table))


# Of the ideas those of one share, which differ as all do.
METHODS = rows.METHODS | curve.METHODS
METHODS |= {x: ideas.METHODS[x] for x in ideas.METHODS if ", 0.3%, " in x}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_built(method):
    rate, mesh = simulate.schedule(0.02, 100), cd.replicas.simulated(2)
    tx = METHODS[method](rate, 100, mesh)
    assert jax.tree.leaves(jax.eval_shape(tx.init, PARAMS))


def test_the_plan_ends_where_no_best_rate_is_at_an_edge():
    results, counted = {}, []
    while runs := study.plan(results):
        counted.append(len(runs))
        for run in runs:  # best at twice the highest of the rates that are tried first
            best = 2 * max(study.RATES.get(run.method, (0.16,)))
            results[run] = {"loss": abs(np.log(run.rate / best))}
    grid, total = len(study.RATES), len(rows.METHODS) * len(study.SEEDS) * 2
    # Those of seed 0 at a quarter of the steps are in the grid, but for SAME_RATE.
    second = len(rows.COMPARED_WITH) * len(study.SEEDS)
    assert counted == [4 * grid, grid, grid, total - grid + second]
    assert study.best_rate(results, rows.LOCAL_MUON + rows.RISING) == 0.32


@pytest.mark.parametrize("method", rows.COMPARED_WITH)
@pytest.mark.parametrize("lower", [0, 1])
def test_the_zero_has_the_better_of_two_rates_after_all_steps(method, lower):
    related = rows.SAME_RATE.get(method, method)
    middle = rows.RATES[related][1]
    losses = {rate: abs(np.log(rate / (1.1 * middle))) for rate in rows.RATES[related]}
    results = {
        Run(related, rate, 0, study.QUARTER): {"loss": loss}
        for rate, loss in losses.items()
    }
    best = study.best_rates(results, method)[:2]
    assert best == sorted(losses, key=losses.__getitem__)[:2]
    for rate in best:
        assert study.best_rate(results, method, study.STEPS) == best[0]
        results |= {
            Run(method, rate, seed, study.STEPS): {"loss": rate != best[lower]}
            for seed in study.SEEDS
        }
    assert study.best_rate(results, method, study.STEPS) == best[lower]
    assert study.best_rate(results, method) == best[0]


@pytest.mark.parametrize(
    ("loss", "sent", "text", "differs"),
    [
        (1.004, 104, "a", ""),
        (1.006, 100, "a", "loss"),
        (np.nan, 106, "a", "loss and bytes"),
        (1.0, 100, "b", "another text"),
    ],
)
def test_a_run_that_is_trained_again_agrees_within_half_a_percent(
    loss, sent, text, differs
):
    committed = {"loss": 1.0, "bytes": 100, "text": "a"}
    again = {"loss": loss, "bytes": sent, "text": text}
    assert reproduce.disagreement(committed, again) == differs


def test_every_row_of_the_table_can_be_trained_again():
    results = study.read()
    assert {run.method for run in reproduce.runs(results)} == {*rows.METHODS}
    cells = [*reproduce.lines(results, results)]
    assert len(cells) == len(rows.METHODS)
    assert {each[3] for each in cells} == {"+0.00%"}
    assert sum(each[-1] == "yes" for each in cells) == len(cells) - 1  # CHANGED


def test_the_curve_reports_the_best_of_every_forms_tuning_runs():
    results = {}
    last = {form: (form.decided or form.tried)[-1] for form in curve.FORMS}
    winners = {form.method(setting) for form, (setting, _) in last.items()}
    while runs := curve.plan(results):
        run = runs[0]
        wins = run.method in winners
        loss = 2.0 - 0.5 * wins - 5 * run.rate  # apart by more than curve.CLOSE
        results[run] = {"loss": loss, "date": "", "bytes": 1}
    for form in curve.FORMS:
        setting, rates = last[form]
        rate = max(rates)
        reported = {
            Run(form.method(setting), rate, seed, study.STEPS) for seed in study.SEEDS
        }
        assert reported <= results.keys()
        point = curve_table.point(form, results, study.STEPS)
        assert point.best_of == len(form.tuning())
    seeds = [run.seed for run in results if run.steps == study.STEPS]
    forms = len(curve.FORMS) + len(curve.UNTUNED)
    named = sum(len(rates) for form in curve.FORMS for _, rates in form.decided[1:])
    assert len(seeds) == (forms + named) * len(study.SEEDS)
    assert {*seeds} == {*study.SEEDS}
    assert {run.seed for run in results if run.steps != study.STEPS} == {3}


def test_tuning_runs_of_all_steps_decide():
    form = curve.FORMS[0]
    losses = dict(zip(form.tuning(), (1.0, 1.019, 1.021, 1.3), strict=True))
    first, second, *others = losses
    assert form.deciding({}) == []
    results = {run: {"loss": loss} for run, loss in losses.items()}
    for run, loss in zip(form.deciding(results), (0.9, 0.8), strict=True):
        assert form.tried_so_far(results) == [first, second, *others]
        assert form.reported(results) == []
        assert run in curve.plan(results)
        results[run] = {"loss": loss}
    assert form.tried_so_far(results) == [second, first, *others]
    assert {run.rate for run in form.reported(results)} == {second.rate}


def test_of_what_is_named_the_lower_mean_on_the_reported_seeds_wins():
    named = (curve.RISING, (0.08,)), (curve.CONSTANT, (0.08,))
    form = curve.FORMS[0]._replace(decided=named)
    losses = dict(zip(form.tuning(), (1.0, 1.001, 1.2, 1.3), strict=True))
    first, second, _, last = losses
    results = {run: {"loss": loss} for run, loss in losses.items()}
    assert form.tried_so_far(results)[0] == first
    deciding = form.deciding(results)
    assert len(deciding) == 2 * len(study.SEEDS)
    assert {run.seed for run in deciding} == {*study.SEEDS}
    of_both = zip(deciding, (0.5, 0.9, 0.9, 0.6, 0.8, 0.8), strict=True)
    results |= {run: {"loss": loss} for run, loss in of_both}
    assert form.tried_so_far(results)[:2] == [last, second]
    assert {run.rate for run in form.reported(results)} == {last.rate}


def test_no_part_of_the_text_is_read_twice(corpus):
    batches = simulate.Batches(corpus, 0, SIZE)
    seen = np.concatenate([batches.of(step)[..., :-1].reshape(-1) for step in (0, 1)])
    windows = {row.tobytes() for row in seen.reshape(-1, SIZE.length)}
    assert len(windows) >= 31  # of 32; two may be blanks
    with pytest.raises(ValueError, match="The text ends"):
        batches.of(10**9)


def test_the_large_text_is_the_same_unpacked(text, tmp_path):
    folder, archive = tmp_path / "large", tmp_path / "large.tar.xz"
    corpus_files.write_large(text, folder, archive)
    whole, unpacked = (
        corpus_files.large(x, archive) for x in (folder, tmp_path / "other")
    )
    expected = data.load(str(text))
    for found in (whole, unpacked):
        assert found.fingerprint == expected.fingerprint
        np.testing.assert_array_equal(found.training[0], expected.training[0])
        np.testing.assert_array_equal(found.validation[0], expected.validation[0])


def test_products_are_those_of_float32_up_to_bfloat16():
    x, w = (jax.random.normal(jax.random.key(n), (2, 8, 8)) for n in (0, 1))
    dimensions = (((2,), (0,)), ((), ()))

    def total(product):
        of_both = lambda x, w: jnp.sum(jnp.sin(product(x, w[0], dimensions)))
        return jax.value_and_grad(of_both, argnums=(0, 1))(x, w)

    ours, exact = total(simulate.product), total(jax.lax.dot_general)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.2), ours, exact)
    assert (ours[0] != exact[0]).any()


def test_products_on_a_cpu_without_bfloat16_are_the_same(monkeypatch):
    x, w = (jax.random.normal(jax.random.key(n), (64, 64)) for n in (0, 1))
    dimensions = (((1,), (0,)), ((), ()))

    def of(emulates):
        monkeypatch.setattr(simulate, "_emulates_bfloat16", lambda: emulates)
        return jax.jit(lambda x, w: simulate._product(x, w, dimensions))(x, w)

    # Products of bfloat16 numbers are exact in float32; sums of 64 differ in order.
    np.testing.assert_allclose(of(True), of(False), rtol=0, atol=64 * 2**-20)
    assert (of(True) != x @ w).any()


@pytest.mark.slow
def test_gradients_taken_together_are_those_taken_one_by_one(corpus):
    gpt, batch = simulate.transformer(SIZE, corpus), simulate.Batches(corpus, 0, SIZE)
    mesh = cd.replicas.simulated(SIZE.replicas)
    params = cd.replicas.replicate(simulate.parameters(gpt, 0), mesh)
    take = jax.jit(simulate.gradients_of, static_argnums=(0, 3))
    together, each = (
        take(gpt, params, batch.of(0), dataclasses.replace(SIZE, at_once=x))
        for x in (True, False)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), together, each
    )


@pytest.mark.slow
def test_a_killed_run_goes_on_and_is_the_same_run(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "KEPT_EVERY", 0.0)
    run = Run(rows.LOCAL_MUON, 0.02, 0, 16)
    whole = simulate.simulate(run, corpus, tmp_path / "whole", SIZE)
    save = cd.checkpoint.save

    def save_and_die(folder, step, *arguments, **options):
        save(folder, step, *arguments, **options)
        if step == 12:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cd.checkpoint, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            simulate.simulate(run, corpus, tmp_path / "killed", SIZE)
    again = simulate.simulate(run, corpus, tmp_path / "killed", SIZE)
    for row in (again, whole):
        row.pop("tokens_a_second")
    assert again == whole
    assert whole["syncs"] == 2
    assert 0 < whole["divergence"]  # local steps since the last sync


def test_a_row_that_was_cut_off_is_written_again(tmp_path):
    file, row = tmp_path / "runs.jsonl", {"run": "a"}
    study.append(file, row)
    with file.open("a") as stream:
        stream.write('{"ru')
    study.append(file, row)
    assert file.read_text() == 2 * '{"run": "a"}\n'


def test_constant_gradients_read_as_the_age_of_lions_momentum():
    beta, steps = 0.95, np.arange(7)[:, None]
    momenta = 3.0 * (1 - beta**steps)  # of a gradient of norm 3
    log = {"before": momenta, "after": momenta + 3.0, "matrix": [False]}
    log["last"] = [3.0 * (1 - beta**7)]
    expected = 1 / (1 - beta ** np.arange(1, 7))
    np.testing.assert_allclose(rmmc.read_by(log, beta, "published"), expected)
    assert rmmc.read_by(log, beta, "published")[1] == pytest.approx(10.256, abs=1e-3)
    assert not rmmc.read_by(log, beta, "matrices").any()
    np.testing.assert_allclose(rmmc.read_by(log, beta, "corrected"), 0, atol=1e-12)


def test_the_steps_on_which_the_head_is_read():
    """The last of two layers, from step 2 on, at 1.5 times the age of its momentum."""
    beta, steps = 0.9, np.arange(8)
    other = 1.0 + np.arange(8.0)  # changes by less on every step
    head = np.where(steps > 1, 1.0, 0.0)  # below the floor on steps 0 and 1
    ages = 1 - beta**steps
    change = np.where(steps > 1, 1.5 / np.where(steps > 0, ages, 1), 0.0)
    change = np.where(steps == 6, 0.0, change)
    log = {"before": np.stack([other, head], axis=1)}
    log["after"] = np.stack([other * 1.01, head * (1 + change)], axis=1)
    assert rmmc.of_the_head(log, beta) == ["2 to 5", "1.50 to 1.50"]


def test_the_pages_of_the_curve_are_those_of_its_rows():
    results = curve.read()
    page = (study.RESULTS / "curve.md").read_text("utf-8")
    assert curve_table.document(results) == page
    steps = json.loads(curve_table.STEPS_FILE.read_text("utf-8"))
    assert steps == curve_table.steps_by_budget(results)


def test_the_table_of_local_muons_docstring_is_that_of_the_rows():
    lines = re.findall(r"^ *(0\.\d+) .* (\d\.\d)$", cd.local_muon.__doc__, re.MULTILINE)
    needed = {
        row["budget"]: f"{row['steps']:.1f}"
        for row in json.loads(curve_table.STEPS_FILE.read_text("utf-8"))
        if row["method"] == curve.LOCAL_MUON
    }
    assert len(lines) == 5
    assert lines == [(budget, needed[float(budget)]) for budget, _ in lines]


@pytest.mark.parametrize("page", readme_numbers.PAGES)
def test_the_tables_of_a_page_are_those_of_the_rows(page):
    text = (readme_numbers.ROOT / page).read_text("utf-8")
    assert "<!-- table: " in text
    assert readme_numbers.with_tables(text) == text


def test_the_page_has_the_tables_of_the_results():
    page = (study.RESULTS / "table.md").read_text("utf-8")
    assert table.document(study.read()) == page


def test_the_matrices_are_those_that_the_loss_has(corpus):
    gpt = simulate.transformer(SIZE, corpus)
    params = simulate.parameters(gpt, 0)
    loss_fn = functools.partial(model.next_token_loss, gpt)
    tokens = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    partition = cd.dimension_numbers.from_loss(loss_fn, params, tokens)
    views = [
        _two_optimizers.matrix_views(params, numbers)
        for numbers in (partition, measuring.matrices)
    ]
    assert views[0] == views[1]
    assert sum(view is not None for view in views[0].values()) == 6
