"""What the status of a run says."""

import os
import types

import pytest
from obstore.store import LocalStore
from site_steps import ByHand, settle

from curvadion_jax.sites import __main__ as program
from curvadion_jax.sites import _rounds, _status
from curvadion_jax.sites.__main__ import main


@pytest.fixture
def run(tmp_path):
    store = LocalStore(tmp_path)
    oslo, rome = ByHand(store, "oslo"), ByHand(store, "rome")
    oslo.post(1.0, tokens=300)
    rome.post(float("nan"), tokens=100)
    settle(oslo, rome)
    for _ in range(2):
        oslo.post(1.0, tokens=300)
        oslo.commit()
    rome.bring(1.0)
    rome.follow()
    rome.follower.post()
    return tmp_path


def test_it_names_the_sites_their_lag_and_what_was_rejected(run, capsys):
    assert main(["status", str(run)]) == 0
    found = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in found.splitlines()}
    assert "3 rounds" in found
    assert "posted to the next: rome" in found
    # counted in three rounds, last in round 2, with all of its weight
    assert lines["oslo"][:5] == ["oslo", "here", "3", "2", "1.00"]
    assert lines["rome"][:5] == ["rome", "here", "0", "-", "-"]
    assert "round 0: the contribution of rome is not counted: it is not" in found


def test_a_site_that_has_left_and_a_picture(run, capsys, tmp_path):
    ByHand(LocalStore(run), "bonn").store.create(
        _rounds.member_key("bonn", 1, "left"), b"{}"
    )
    assert main(["status", f"file://{run}", "--picture", str(run / "all.png")]) == 0
    assert "left" in capsys.readouterr().out
    assert (run / "all.png").read_bytes()[:4] == b"\x89PNG"


def test_weights_of_different_rounds_say_of_which(tmp_path, capsys):
    store = LocalStore(tmp_path)
    oslo, rome = ByHand(store, "oslo"), ByHand(store, "rome")
    oslo.post(1.0, tokens=300)
    rome.post(1.0, tokens=100)
    settle(oslo, rome)
    oslo.post(1.0, tokens=100)
    oslo.commit()
    assert main(["status", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert "the last, 1, at" in found
    lines = {line.split()[0]: line.split() for line in found.splitlines()}
    assert lines["oslo"][2:5] == ["2", "1", "1.00"]
    assert lines["rome"][2:5] == ["1", "0", "0.50"]


def test_tokens_a_second_by_the_times_of_the_store(tmp_path, capsys):
    store = LocalStore(tmp_path)
    oslo, rome = ByHand(store, "oslo"), ByHand(store, "rome")
    for oslos, romes in ((7e6, 5e6), (300, 20_000), (500, 60_000)):
        oslo.post(1.0, tokens=oslos)
        rome.post(1.0, tokens=romes)
        settle(oslo, rome)
    for number, at in enumerate((1000, 1004, 1020)):
        os.utime(tmp_path / _rounds.commit_key(number), (at, at))
    assert main(["status", str(tmp_path)]) == 0
    lines = {x.split()[0]: x.split() for x in capsys.readouterr().out.splitlines()}
    # In 20 seconds; what the first round had was seen before them.
    assert lines["oslo"][5] == "40"
    assert lines["rome"][5] == "4,000"


def test_bytes_of_a_round_are_ones_own_up_and_the_others_down(tmp_path, capsys):
    store = LocalStore(tmp_path)
    named = [ByHand(store, name) for name in ("oslo", "rome", "reykjavik")]
    for site in named:
        site.post(1.0)
    settle(*named)
    assert main(["status", str(tmp_path)]) == 0
    lines = {x.split()[0]: x.split() for x in capsys.readouterr().out.splitlines()}
    sizes = {x.name: x.stat().st_size for x in (tmp_path / "rounds").glob("*/*")}
    assert len(set(sizes.values())) > 1
    for name, size in sizes.items():
        others = sum(sizes.values()) - size
        # After one round no rate is known.
        assert lines[name][5:] == ["-", f"{size:,}", f"{others:,}"]


@pytest.mark.parametrize(
    ("flags", "seconds"), [(["--watch"], 10.0), (["--watch", "2.5"], 2.5)]
)
def test_it_watches_until_it_is_stopped(flags, seconds, tmp_path, capsys, monkeypatch):
    oslo, slept = ByHand(LocalStore(tmp_path), "oslo"), []

    def sleep(given):
        slept.append(given)
        if len(slept) == 3:
            raise KeyboardInterrupt
        oslo.post(1.0)
        oslo.commit()

    monkeypatch.setattr(program, "time", types.SimpleNamespace(sleep=sleep))
    assert main(["status", str(tmp_path), *flags]) == 130
    found, errors = capsys.readouterr()
    assert slept == [seconds] * 3
    assert "no round is committed yet" in found
    assert ": 1 rounds, the last, 0, at" in found
    assert ": 2 rounds, the last, 1, at" in found
    assert not errors


def test_it_takes_no_part(run):
    before = sorted(run.rglob("*"))
    _status.read(str(run))
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_where_there_is_no_run(folder, tmp_path, capsys):
    assert main(["status", str(tmp_path / folder)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_before_the_first_round(tmp_path, capsys):
    ByHand(LocalStore(tmp_path), "oslo", quorum=2).post(1.0)
    assert main(["status", str(tmp_path)]) == 0
    assert "posted to the first: oslo; it needs 2" in capsys.readouterr().out
