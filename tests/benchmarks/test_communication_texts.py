"""Which text the losses of the study are of."""

from pathlib import Path

import bases
import comparisons
import data
import pytest
import scaling
import study
import texts
from study_rows import by_key, row

ROOT = Path(__file__).parents[2]
BY_TEXT = study.RESULTS / "by_text"
RESULTS = study.read(BY_TEXT / "scaling.jsonl")


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return texts.load(None)


def test_source_alone_is_a_part_of_what_is_held_out(corpus):
    found = texts.others(corpus, None)
    (source,), (held_out,) = found["source"].validation, corpus.validation
    whole = held_out.tobytes()
    files = source.tobytes().split(b"\0")
    assert len(files) == len(texts.source_files()) > 1
    assert all(file in whole for file in files)
    assert 0 < source.size < held_out.size
    assert found["training"].validation is corpus.training
    assert all(other.training is corpus.training for other in found.values())


def test_other_data_have_no_source_code(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("some text. " * 100)
    found = texts.others(texts.load(str(file)), str(file))
    assert list(found) == ["training"]
    assert texts.load("prose").fingerprint != texts.load(str(file)).fingerprint


def test_losses_are_told_by_text():
    several = {"source": 2.0, "training": 3.0}
    local = bases.rising()
    rows = [
        row(run, loss) | {"losses": {x: loss * y for x, y in several.items()}}
        for run, loss in (
            (bases.rising_muon(), 1.0),
            (local.but(seed=1), 5.0),  # of a seed that Muon has not
            (local, 1.1),
            (local.but(fragments=3), 9.0),  # not one of the methods that are compared
        )
    ]
    rows[2]["losses"]["training"] = 3.6
    text = comparisons.by_text(by_key([*rows, row(local.but(steps=1200), 7.0)]))
    assert text.splitlines()[-3:] == [
        "|---|---|---|---|---|---|---|---|---|---|",
        "| 1,024 | 300 | 8 | Muon, synchronous | 0.08 | 1 | 2.0000 | 0.00% | 0.00% "
        "| 0.00% |",
        "| 1,024 | 300 | 8 | `local_muon` | 0.08 | 1 | 6.1000 ± 5.5154 | 10.00% "
        "| 10.00% | 20.00% |",
    ]


def test_tables_are_of_one_text():
    rows = [
        row(bases.rising_muon(), 1.0) | {"losses": {"source": 2.0}},
        row(bases.rising(), 1.5) | {"losses": {"source": 2.2}},
        row(bases.rising().but(seed=1), 9.0),  # of an earlier day: one loss
    ]
    text = scaling.document(by_key(rows[:2]), "somewhere")
    assert "on source code that is held out" in text
    assert "| rising, both | 1,024 | 8 | 300 | 10.00% | 1 |  |" in text
    assert "study.py against --size cpu --steps 300 --workers 1 --results some" in text
    assert "scaling.py --results somewhere\n" in text
    assert "## Bits" not in text  # without rows
    text = scaling.document(by_key(rows))
    assert "on all that is held out" in text
    assert "| rising, both | 1,024 | 8 | 300 | 50.00% | 1 |  |" in text


def test_the_tables_by_text_are_those_of_their_results():
    at = BY_TEXT.relative_to(ROOT).as_posix()
    found = (BY_TEXT / "scaling.md").read_text()
    assert found == scaling.document(RESULTS, at)


def test_every_row_has_all_losses():
    assert {tuple(sorted(x["losses"])) for x in RESULTS.values()} == {
        ("source", "training")
    }
