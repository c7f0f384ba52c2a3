"""Which text the losses of the study are of."""

import bases
import comparisons
import data
import pytest
import texts
from study_rows import by_key, row


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
    muon, local = (
        row(run.but(seed=seed), loss + seed) | {"losses": {"source": 2 * loss}}
        for run, loss, seed in ((bases.rising_muon(), 1.0, 0), (bases.rising(), 1.1, 0))
    )
    old = row(bases.rising().but(seed=1), 5.0)  # without: it is in no line
    lines = comparisons.by_text(by_key([muon, local, old])).splitlines()[4:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    source, whole = "held out, source code alone", "held out, all"
    assert [each[2:] for each in cells[2:]] == [
        [source, "Muon, synchronous", "1", "2.0000", "0.00%"],
        [source, "`local_muon`", "1", "2.2000", "10.00%"],
        [whole, "Muon, synchronous", "1", "1.0000", "0.00%"],
        [whole, "`local_muon`", "1", "1.1000", "10.00%"],
    ]
