"""What the status of a run says."""

import os

import pytest
from obstore.store import LocalStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _rounds, _run, _store
from curvadion_jax.sites.__main__ import main


def shown(url, capsys) -> tuple[str, dict[str, list[str]]]:
    """All of the text, and the words of each line by its first."""
    assert main(["status", str(url)]) == 0
    text = capsys.readouterr().out
    return text, {line.split()[0]: line.split() for line in text.splitlines()}


def pair(folder):
    return (ByHand(LocalStore(folder), name) for name in ("oslo", "rome"))


def test_it_names_the_sites_and_what_was_rejected(tmp_path, capsys):
    oslo, rome = pair(tmp_path)
    oslo.send(1.0, tokens=300)
    rome.send(float("nan"), tokens=100)
    settle(oslo, rome)
    for _ in range(2):
        oslo.step()
    rome.follow()
    rome.send(1.0)
    bonn = ByHand(LocalStore(tmp_path), "bonn")
    _run.leave(bonn.store, "bonn", 1)
    before = sorted(tmp_path.rglob("*"))
    text, lines = shown(f"file://{tmp_path}", capsys)
    assert sorted(tmp_path.rglob("*")) == before  # it takes no part
    assert "3 rounds" in text
    assert "contributed to round 3: rome" in text
    # counted in three rounds, last in round 2, with all of its weight
    assert lines["oslo"][:5] == ["oslo", "here", "3", "2", "1.00"]
    assert lines["rome"][:5] == ["rome", "here", "0", "-", "-"]
    assert lines["bonn"][1] == "left"
    assert "round 0: the contribution of 'rome' is not counted: 'it is not" in text


def test_tokens_a_second_by_the_times_of_the_store(tmp_path, capsys):
    oslo, rome = pair(tmp_path)
    for oslos, romes in ((7e6, 5e6), (300, 20_000), (500, 60_000)):
        oslo.send(1.0, tokens=oslos)
        rome.send(1.0, tokens=romes)
        settle(oslo, rome)
    for number, at in enumerate((1000, 1004, 1020)):
        os.utime(tmp_path / _rounds.commit_key(number), (at, at))
    _, lines = shown(tmp_path, capsys)
    # In 20 seconds; what the first round had was seen before them.
    assert lines["oslo"][5] == "40"
    assert lines["rome"][5] == "4,000"


def test_strays_damage_and_what_strangers_write(tmp_path, capsys):
    oslo, rome = pair(tmp_path)
    oslo.send(1.0)
    settle(oslo, rome)
    oslo.send(1.0)
    header = {
        "kind": "contribution",
        "run": rome.follower._run["sha256"],
        "name": "rome",
        "uid": "0",
        "round": 1,
        "before": "\x1b[2J\nINFO verified",
        "tokens": 1.0,
        "rounds": 1,
    }
    key = _rounds.contribution_key(1, "rome")
    _store.write(rome.store, key, header, rome.anchor)
    settle(oslo, rome)
    (tmp_path / _rounds.commit_key(0)).write_bytes(b"junk")
    for stray in (
        "commits/Thumbs.db",
        "rounds/00000001/a\tb",
        "notes.txt",
        "commits/00009999.json",
    ):
        (tmp_path / stray).write_bytes(b"junk")
    text, _ = shown(tmp_path, capsys)
    assert "3 objects are not the run's" in text
    assert "Commit 0 cannot be used: it is no JSON object." in text
    assert "\x1b" not in text
    assert "\nINFO" not in text
    assert r"\x1b[2J\\nINFO verified" in text


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_where_there_is_no_run(folder, tmp_path, capsys):
    assert main(["status", str(tmp_path / folder)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
