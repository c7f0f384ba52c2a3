"""Which text the losses of the study are of."""

import bases
import comparisons
import data
import gap
import pytest
import scaling
import study
import texts
from runs import Run
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
    several = {"source": 2.0, "training": 3.0}
    muon, local, other = (
        row(run, loss) | {"losses": {x: loss * y for x, y in several.items()}}
        for run, loss in (
            (bases.rising_muon(), 1.0),
            (bases.rising(), 1.1),
            (bases.rising().but(seed=1), 5.0),  # of a seed that Muon has not
        )
    )
    lines = comparisons.by_text(by_key([other, local, muon])).splitlines()
    cells = [
        [x.strip() for x in line.split("|")[1:-1]] for line in lines if "|" in line
    ]
    source, whole = "held out, source code alone", "held out, all"
    assert [each[2:] for each in cells[2:-2]] == [
        [source, "Muon, synchronous", "0.08", "1", "2.0000", "0.00%"],
        [source, "`local_muon`", "0.08", "2", "6.1000 ± 5.5154", "10.00%"],
        [whole, "Muon, synchronous", "0.08", "1", "1.0000", "0.00%"],
        [whole, "`local_muon`", "0.08", "2", "3.0500 ± 2.7577", "10.00%"],
    ]


def test_plans_make_what_was_run_again():
    for each in scaling.again(study.RESULTS).values():
        assert set(each["losses"]) == {"source", "training"}
        at = each["size"], each["run"]["steps"]
        some = (gap.against, gap.pairs, gap.signals)
        assert Run(**each["run"]) in [run for plan in some for run in plan({}, *at)]
