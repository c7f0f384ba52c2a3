"""Entries of a shared folder that are no objects: they are ignored and counted."""

import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from obstore.store import LocalStore
from site_steps import ByHand, settle

from curvadion_jax import sites
from curvadion_jax.sites import _run, _store

ROUND = "rounds/00000000"


def link(at, to):
    def make(folder):
        (folder / at).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(to, folder / at)

    return make


def named(name):
    """A file of this name, in bytes, in the first round."""

    def make(folder):
        (folder / ROUND).mkdir(parents=True, exist_ok=True)
        (folder / ROUND / os.fsdecode(name)).write_bytes(b"x")

    return make


def directory(at):
    def make(folder):
        (folder / at).mkdir(parents=True)

    return make


def pipe(at):
    def make(folder):
        (folder / at).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(folder / at)

    return make


ODD = {
    "a link to its folder": link(f"{ROUND}/loop", ".."),
    "a link to itself": link(f"{ROUND}/itself", "itself"),
    "a link to nowhere": link(f"{ROUND}/nowhere", "/nowhere/at/all"),
    "a link to a file": link(f"{ROUND}/file", "../../run.json"),
    "a round that is a link": link("rounds/00000007", "/usr"),
    "a loop of members": link("members/loop", ".."),
    "a member that is a link to itself": link("members/d/000001.json", "000001.json"),
    "a loop of snapshots": link("snapshots/00000099", ".."),
    "a name that is not UTF-8": named(b"\xff\xfe"),
    "a control character": named(b"a\tb"),
    "a line break": named(b"a\nb"),
    "a space": named(b"a b"),
    "a name of many bytes": named("é".encode() * 100),
    "a pipe": pipe(f"{ROUND}/pipe"),
    "a pipe of a member": pipe("members/d/000001.json"),
    "a folder in place of the commit": directory(_run.commit_key(0)),
    "a pipe in place of a snapshot": pipe(_run.snapshot_key(99)),
}


@pytest.mark.parametrize("name", ODD)
def test_a_round_with_an_odd_entry_is_committed_and_the_entry_counted(name, tmp_path):
    a, b = (ByHand(LocalStore(tmp_path), x, quorum=2) for x in "ab")
    ODD[name](tmp_path)
    settle(a, b, by=[1.0, 3.0])
    c = ByHand(LocalStore(tmp_path), "c", quorum=2)
    assert a.moved() == c.moved() == 2.0
    a.store.keys("")
    assert a.store.ignored == 1


ENTRIES = {
    "a folder": directory,
    "a pipe": pipe,
    "a link to itself": lambda at: link(at, Path(at).name),
    "a link to nowhere": lambda at: link(at, "/nowhere/at/all"),
    "a link to a file": lambda at: link(at, "/etc/hostname"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_in_place_of_a_contribution_does_not_count(entry, tmp_path):
    a, b, c = (ByHand(LocalStore(tmp_path), x, quorum=2) for x in "abc")
    ENTRIES[entry](_run.contribution_key(0, "c"))(tmp_path)
    settle(a, b, by=[1.0, 3.0])
    assert a.moved() == 2.0
    c.follow()
    assert c.digest == a.digest


@pytest.mark.parametrize("entry", [x for x in ENTRIES if x != "a folder"])
@pytest.mark.parametrize("at", [_run.commit_key(0), _run.contribution_key(0, "a")])
def test_an_entry_in_place_of_what_a_site_creates_is_named(entry, at, tmp_path):
    a = ByHand(LocalStore(tmp_path), "a")
    ENTRIES[entry](at)(tmp_path)
    a.prepare(1.0)

    def contribute():
        a.follower.send()
        assert a.follower.propose()

    for _ in range(2):
        with pytest.raises(
            OSError, match=f"^{at} in LocalStore is a link, or no .*Remove"
        ):
            contribute()
    (tmp_path / at).unlink()
    contribute()
    a.follow()
    assert a.moved() == 1.0


def test_a_folder_with_something_in_it_is_not_removed(tmp_path):
    a = ByHand(LocalStore(tmp_path), "a")
    kept = tmp_path / _run.commit_key(0) / "somebodys"
    kept.mkdir(parents=True)
    a.send(1.0)
    with pytest.raises(OSError, match="or no file and no empty folder"):
        a.follower.propose()
    assert kept.is_dir()


def test_the_folder_of_a_run_may_be_a_link(tmp_path):
    """As to a larger disk."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    os.symlink(disk, run)
    a, b = (ByHand(LocalStore(run), x, quorum=2) for x in "ab")
    settle(a, b, by=[1.0, 3.0])
    assert a.moved() == 2.0
    assert a.store.keys("rounds/") == [f"{ROUND}/a", f"{ROUND}/b"]
    assert a.store.ignored == 0


def linked_outside(tmp_path, at):
    """A site whose folder has a link there, and the folder that it leads to."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    run.mkdir()
    a = ByHand(LocalStore(run), "a")
    if at == "bodies":  # which has the first snapshot's
        (run / "bodies").rename(tmp_path / "aside")
    link(at, outside)(run)
    return a, run, outside


@pytest.mark.parametrize("at", ["rounds", "bodies", "commits"])
def test_nothing_is_written_through_a_link(at, tmp_path):
    a, run, outside = linked_outside(tmp_path, at)
    with pytest.raises(OSError, match=f"^{at} in LocalStore is a link, .*Remove"):
        a.step()
    assert not list(outside.iterdir())
    (run / at).unlink()
    a.step()
    assert a.moved() == 1.0


@pytest.mark.parametrize("at", [ROUND, "bodies/rounds", f"bodies/{ROUND}"])
def test_a_link_where_only_sites_make_folders_is_removed(at, tmp_path):
    a, run, outside = linked_outside(tmp_path, at)
    (outside / "precious").write_bytes(b"x")
    a.step()
    assert a.moved() == 1.0
    assert [x.name for x in outside.iterdir()] == ["precious"]
    assert not (run / at).is_symlink()


@pytest.mark.parametrize("at", ["rounds", "bodies", "rounds/00000001", "snapshots"])
def test_nothing_is_read_or_removed_through_a_link(at, tmp_path):
    """What is collected lies in the run's own folders."""
    run, aside = tmp_path / "run", tmp_path / "aside"
    run.mkdir()
    a = ByHand(LocalStore(run), "a", snapshot_every=2)
    for _ in range(4):
        a.step()
    (run / at).rename(aside)
    before = sorted(aside.rglob("*"))
    os.symlink(aside, run / at)
    assert before
    assert a.store.keys(f"{at}/") == a.store.keys(at) == []
    keys = [f"{at}/{x.relative_to(aside)}" for x in before if x.is_file()]
    assert [a.store.get(key, 10**6) for key in keys] == [None] * len(keys)
    a.store.delete(keys)
    _run._collect(a.store, 4)
    assert sorted(aside.rglob("*")) == before
    assert a.store.ignored == 1


def test_a_folder_is_listed_as_obstore_lists_it(tmp_path):
    given = LocalStore(tmp_path)
    a = ByHand(given, "a", snapshot_every=2)
    for _ in range(5):
        a.step()
    (tmp_path / "rounds" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "rounds" / "killed#1").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for prefix in ("", "rounds/", "members/a/", "snapshots/", "nothing/here/"):
        listing = given.list(prefix=prefix)
        expected = sorted(meta["path"] for chunk in listing for meta in chunk)
        assert a.store.keys(prefix) == expected
        assert bool(expected) == (prefix != "nothing/here/")
    assert a.store.ignored == 0


def test_a_file_in_place_of_a_folder_is_an_error_that_names_it(tmp_path):
    store = _store.Store(LocalStore(tmp_path))
    (tmp_path / "rounds").write_bytes(b"x")
    with pytest.raises(OSError, match=r"cannot list rounds/: .*Not a directory"):
        store.keys("rounds/")
    with pytest.raises(OSError, match=r"cannot write rounds/x: .*Not a directory"):
        store.create("rounds/x", b"")


def test_a_warning_names_an_entry_once(tmp_path, caplog):
    a = ByHand(LocalStore(tmp_path), "a")
    named(b"\xff")(tmp_path)
    for _ in range(3):
        a.store.keys("rounds/")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"'{ROUND}/\\udcff' in {tmp_path} is no object")


def test_metrics_count_entries_that_are_no_objects(tmp_path):
    options = {"every": 1, "max_lag": 0, "poll": 0.01}
    with sites.Site(str(tmp_path), "oslo", **options) as site:
        params = site.start({"w": jnp.ones(3)})
        link("members/loop", "..")(tmp_path)
        link("members/itself", "itself")(tmp_path)
        site.sync(params)
        assert site.metrics.counted == 1
        assert site.metrics.ignored == 2
