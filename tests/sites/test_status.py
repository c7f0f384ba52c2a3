"""What the status of a run says."""

from obstore.store import LocalStore
from site_steps import ByHand, settle

from curvadion_jax.sites import _run
from curvadion_jax.sites.__main__ import main


def shown(url, capsys) -> str:
    assert main(["status", str(url)]) == 0
    return capsys.readouterr().out


def test_it_names_the_sites_and_what_was_rejected(tmp_path, capsys):
    oslo, rome, bonn = (
        ByHand(LocalStore(tmp_path), x) for x in ("oslo", "rome", "bonn")
    )
    oslo.send(1.0, tokens=300)
    rome.send(float("nan"), tokens=100)
    settle(oslo, rome)
    oslo.step()
    rome.follow()
    rome.send(1.0)
    _run.leave(bonn.store, "bonn", 1)
    before = sorted(tmp_path.rglob("*"))
    text = shown(f"file://{tmp_path}", capsys)
    assert sorted(tmp_path.rglob("*")) == before  # it takes no part
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][1:] == ["2", "rounds,", "quorum", "1"]
    assert lines[2:5] == [
        ["bonn", "left", "0", "-"],
        ["oslo", "-", "2", "1", "1.00"],  # in two rounds, the last with all the weight
        ["rome", "sent", "0", "-"],
    ]
    assert "round 0: the contribution of 'rome' does not count: 'It contains" in text


def test_strays_damage_and_what_strangers_write(tmp_path, capsys):
    oslo, rome = (ByHand(LocalStore(tmp_path), name) for name in ("oslo", "rome"))
    oslo.step()
    rome.follow()
    oslo.send(1.0)
    header = {"uid": "0", "before": "\x1b[2J\nINFO verified", "tokens": 1, "rounds": 1}
    rome.store.write(_run.contribution_key(1, "rome"), header, rome.anchor)
    settle(oslo, rome)
    strays = ["commits/Thumbs.db", "rounds/00000001/a\tb", "notes.txt"]
    for name in [*strays, "commits/00009999.json", _run.commit_key(0)]:
        (tmp_path / name).write_bytes(b"junk")
    text = shown(tmp_path, capsys)
    assert f"{len(strays)} objects are not the run's" in text
    assert "commits/00000000.json has no header in JSON." in text
    assert "\x1b" not in text
    assert "\nINFO" not in text
    assert r"\x1b[2J\\nINFO verified" in text


def test_where_there_is_no_run(tmp_path, capsys):
    assert main(["status", str(tmp_path / "nowhere")]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
