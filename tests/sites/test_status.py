"""What the status of a run says."""

import pytest
from obstore.store import LocalStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _run
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
    # counted in three rounds, last in round 2, with all of its weight
    assert lines["oslo"] == ["oslo", "-", "3", "2", "1.00"]
    assert lines["rome"] == ["rome", "sent", "0", "-"]
    assert lines["bonn"][1] == "left"
    assert "round 0: the contribution of 'rome' does not count: 'It contains" in text


def test_strays_damage_and_what_strangers_write(tmp_path, capsys):
    oslo, rome = pair(tmp_path)
    oslo.send(1.0)
    settle(oslo, rome)
    oslo.send(1.0)
    header = {"uid": "0", "before": "\x1b[2J\nINFO verified", "tokens": 1, "rounds": 1}
    rome.store.write(_run.contribution_key(1, "rome"), header, rome.anchor)
    settle(oslo, rome)
    (tmp_path / _run.commit_key(0)).write_bytes(b"junk")
    for stray in (
        "commits/Thumbs.db",
        "rounds/00000001/a\tb",
        "notes.txt",
        "commits/00009999.json",
    ):
        (tmp_path / stray).write_bytes(b"junk")
    text, _ = shown(tmp_path, capsys)
    assert "3 objects are not the run's" in text
    assert "commits/00000000.json has no header in JSON." in text
    assert "\x1b" not in text
    assert "\nINFO" not in text
    assert r"\x1b[2J\\nINFO verified" in text


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_where_there_is_no_run(folder, tmp_path, capsys):
    assert main(["status", str(tmp_path / folder)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
