"""The 1% track: what an entry sends, how it is ranked, and the page."""

import doctest

import board
import data
import jax
import pytest
import simulate
import study

import curvadion_jax as cd

SIZE = simulate.Size(1, 16, 1, 16, 2, 8)
ENTRIES = sorted(board.ENTRIES.glob("*.py"))


def test_examples():
    assert doctest.testmod(board).failed == 0


@pytest.mark.slow  # compiles steps for 8 devices
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.stem)
def test_an_entrys_bytes_in_the_program_are_those_of_its_counters(entry):
    text = data.load(None)
    costs = board.costs(entry, text, SIZE)
    mesh = cd.replicas.simulated(SIZE.replicas)
    tx = board.optimizer_of(entry, study.STEPS, mesh)
    params = simulate.parameters(simulate.transformer(SIZE, text), 0)
    rows = cd.replicas.replicate(params, mesh)
    state, update = tx.init(rows), jax.jit(tx.update)
    while not (counted := cd.metrics.read(state))["syncs"]:
        _, state = update(jax.tree.map(jax.numpy.zeros_like, rows), state, rows)
    assert costs["every_step"] == 0
    assert costs["sync"] == counted["bytes"]
    steps = counted["steps"]
    assert costs["synchronous"] * steps == counted["synchronous_bytes"]


def test_an_entry_of_more_than_a_percent_is_not_on_the_board(tmp_path, monkeypatch):
    monkeypatch.setattr(board, "ENTRIES", tmp_path)
    costs = {"every_step": 0.0, "sync": 0.1, "synchronous": 1.0}
    for name, loss, syncs in (("a", 1.0, 104), ("b", 0.9, 105), ("c", 0.8, 104)):
        for seed in study.SEEDS:
            row = {"seed": seed, "costs": costs, "loss": loss + seed / 1e3 * loss**9}
            row |= {"syncs": syncs, "date": "2026-11-29"}
            study.append(tmp_path / f"{name}.jsonl", row)
    first, second = board.board()  # "b" sends 1.01%
    assert ("[c]" in first[1], "[a]" in second[1]) == (True, True)
    assert float(first[4]) < 0.001
    assert second[4] == ""


def test_the_page_has_the_board():
    page = board.ENTRIES.with_name("README.md").read_text("utf-8")
    for cells in board.board():
        assert f"| {' | '.join(cells)} |" in page
