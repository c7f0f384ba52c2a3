"""What leaves no checkpoint behind, or finds none."""

import asyncio
import importlib.util
import re
import shutil
import sys
import threading
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental import multihost_utils
from stored_states import assert_same, differ

from curvadion_jax import checkpoint


@pytest.fixture
def simple() -> dict[str, Any]:
    return differ({"b": jnp.zeros(3), "w": {"kernel": jnp.ones((4, 2), jnp.bfloat16)}})


THREAD_END_SECONDS = 30.0  # how long a thread that was told to end may take


@pytest.mark.parametrize("missing", [False, True], ids=["empty", "missing"])
def test_no_checkpoint(tmp_path, simple, missing):
    folder = tmp_path / "runs" if missing else tmp_path
    assert checkpoint.latest_step(folder) is None
    for read in (
        lambda: checkpoint.restore(folder, simple),
        lambda: checkpoint.restore(folder, simple, 3),
        lambda: checkpoint.read_extra(folder),
    ):
        with pytest.raises(FileNotFoundError, match="no checkpoint in " + str(folder)):
            read()
    assert folder.exists() is not missing


@pytest.mark.parametrize(
    "changed",
    [{"step": -1}, {"keep": 0}, {"extra": [1]}, {"state": {"step": 3}}],
    ids=lambda changed: next(iter(changed)),
)
def test_what_save_refuses_leaves_nothing_behind(tmp_path, simple, changed):
    arguments = {"step": 1, "state": simple, **changed}
    with pytest.raises((ValueError, TypeError)):
        checkpoint.save(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stamp", ["", "-1700000000"], ids=["plain", "with time"])
def test_partial_step_of_a_crash_is_ignored(tmp_path, simple, stamp):
    checkpoint.save(tmp_path, 1, simple)
    partial = tmp_path / f"2.orbax-checkpoint-tmp{stamp}"
    shutil.copytree(tmp_path / "1", partial)
    shutil.rmtree(partial / "info")
    assert checkpoint.latest_step(tmp_path) == 1
    assert_same(checkpoint.restore(tmp_path, simple), simple)
    assert partial.exists()
    checkpoint.save(tmp_path, 2, simple)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    assert_same(checkpoint.restore(tmp_path, simple, 2), simple)


def test_a_donated_state_is_refused_and_the_former_one_stays(tmp_path, simple):
    checkpoint.save(tmp_path, 1, simple)
    gone = {**simple, "b": simple["b"] + 0}
    gone["b"].delete()
    with pytest.raises(ValueError, match=r"'b' was deleted: .* the step returned"):
        checkpoint.save(tmp_path, 2, gone, keep=1)
    assert checkpoint.latest_step(tmp_path) == 1
    checkpoint.save(tmp_path, 2, simple, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2"]


def test_inside_an_event_loop(tmp_path, simple):
    """As in a notebook cell, which runs in a loop already."""

    async def cell():
        checkpoint.save(tmp_path, 1, simple)
        return checkpoint.restore(tmp_path, simple)

    assert_same(asyncio.run(cell()), simple)


def test_no_thread_is_left(tmp_path, simple):
    before = set(threading.enumerate())
    checkpoint.save(tmp_path, 1, simple)
    checkpoint.restore(tmp_path, simple)
    for thread in set(threading.enumerate()) - before:
        thread.join(THREAD_END_SECONDS)
        assert not thread.is_alive(), thread.name


def test_without_orbax(tmp_path, simple, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "orbax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "orbax", None)
    spec = importlib.util.spec_from_file_location("fresh", checkpoint.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hint = re.escape("pip install 'curvadion-jax[checkpoint]'")
    for call in (
        lambda: module.save(tmp_path, 1, simple),
        lambda: module.restore(tmp_path, simple),
        lambda: module.latest_step(tmp_path),
        lambda: module.read_extra(tmp_path),
    ):
        with pytest.raises(ImportError, match=hint):
            call()


def test_saving_does_not_count_a_step_for_the_preemption_service(tmp_path, monkeypatch):
    # A training loop counts its own; what JAX's service sees must not fall.
    asked = []
    name = "reached_preemption_sync_point"
    monkeypatch.setattr(multihost_utils, name, lambda step: asked.append(step))
    checkpoint.save(tmp_path, 1, {"w": jnp.ones((2, 3))})
    assert asked == []
