"""The law of the gap, and the tables of `results/scaling.jsonl`."""

import contextlib
import itertools
import json
import re
from pathlib import Path

import alternatives
import bases
import comparisons
import gap
import ideas
import law
import numpy as np
import pytest
import scaling
import study
from study_rows import by_key, row

BASE = bases.local_muon_evenly()
ROOT = Path(__file__).parents[2]


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
    assert found is not None
    assert gaps["even"][setting(4096, 300)] == [2.5]
    np.testing.assert_allclose(gaps["even"][setting(4096, 300, 2)], 2.5 / 2**0.5)
    np.testing.assert_allclose(list(found.scales.values()), [5.0, 4.0])
    np.testing.assert_allclose([found.a, found.b, found.c], [0.5, 0.75, 0.25])


def test_the_law_takes_gaps_near_zero_and_says_nothing_of_what_does_not_vary():
    at = [setting(*x) for x in ((1024, 300), (4096, 300), (1024, 1200), (1024, 300, 4))]
    exact = law.Law({"rising": 4.0}, 0.5, 1.0, 0.5)
    gaps = {x: [exact.at("rising", x) + noise for noise in (-2, 0, 2)] for x in at}
    assert min(map(min, gaps.values())) < 0
    found = law.fit({"rising": gaps})
    assert found is not None
    np.testing.assert_allclose([found.a, found.b, found.c], [0.5, 1.0, 0.5])
    alike = {x: gap for x, gap in gaps.items() if x.replicas == 8}
    assert law.fit({"rising": alike}) is None


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


def test_a_thousandth_of_the_bytes_is_compared_with_a_hundredth():
    local, seldom = bases.rising(), ideas.seldom()["4 bits"]
    nothing = ideas.seldom()["nothing"]
    losses = {bases.rising_muon(): 1.0, local: 1.1, nothing: 1.2, seldom: 1.32}
    rows = [row(run.but(steps=1200), loss) for run, loss in losses.items()]
    rows.append(row(seldom.but(steps=1200, seed=1), 9.0))
    text = alternatives.seldom(by_key(rows))
    assert "| 1,024 | 1,200 | 4 bits |" in text
    assert "| 0: 1.3200, 1: 9.0000 | 10.00% | 20.00% | 32.00% |" in text


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
    losses |= {even.but(trigger="weighted 0.01 0.5"): 1.9}
    text = alternatives.signals(by_key(row(x, loss) for x, loss in losses.items()))
    assert text.splitlines()[-3:] == [
        "|---|---|---|---|---|---|---|",
        "| 1,024 | 300 | turn of the momentum | 3 | 1.00% | 2.1000 | 5.00% |",
        "| 1,024 | 300 | square root of the learning rate | 3 | 1.00% | 1.9000 "
        "| -5.00% |",
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


@pytest.mark.parametrize("directory", ["", "by_text"])
def test_plans_make_every_row_of_the_committed_results(directory):
    results = study.read(study.RESULTS / directory / "scaling.jsonl")
    left = dict(results)
    for size, steps in {(x["size"], x["run"]["steps"]) for x in results.values()}:
        for plan in gap.PLANS.values():
            # They choose from what was trained, or say what to train first.
            choose = plan in (gap.between, gap.scaling, gap.seldom)
            with contextlib.suppress(*[ValueError] * choose):
                for run in plan(results, size, steps):
                    left.pop(size + run.key(), None)
    assert not left


def test_the_page_on_the_gap_quotes_the_committed_tables():
    files = [study.RESULTS / name for name in ("scaling.md", "by_text/scaling.md")]
    lines = [set(file.read_text().splitlines()) for file in files]
    page = (ROOT / "docs" / "gap.md").read_text("utf-8").splitlines()
    quoted = [0, 0]
    for number, line in enumerate(page):
        if line.startswith("|---") and any(page[number - 1] in x for x in lines):
            rows = {*itertools.takewhile(lambda x: x.startswith("|"), page[number:])}
            of_file = [rows <= each for each in lines]
            assert sum(of_file) == 1
            quoted[of_file.index(True)] += 1
    assert quoted == [3, 5]


@pytest.mark.parametrize("name", ["README.md", "docs/gap.md"])
def test_pages_quote_the_law_of_the_committed_results(name):
    rows = study.read(study.RESULTS / "by_text" / "scaling.jsonl")
    text = law.text(comparisons.on(rows, "source"), scaling.SEEDS["source"])
    found = re.search(r"([\d.]+)% \(rising, both\) times (.*?),\s\d", text)
    assert found
    both, powers = found.groups()
    formula = f"gap to synchronous Muon = {float(both):.1f}% {powers}\n"
    assert formula in (ROOT / name).read_text("utf-8")


def test_the_program_writes_tables_and_picture(tmp_path):
    rows = study.read(study.RESULTS / "by_text" / "scaling.jsonl").values()
    file = tmp_path / "scaling.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scaling.main(["--results", str(tmp_path)])
    written = (tmp_path / "scaling.md").read_text()
    assert f"scaling.py --results {tmp_path}\n" in written
    assert "on source code that is held out" in written
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
