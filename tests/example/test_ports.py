"""The ports of other codebases train, in programs of their own, at a tiny size.

Their steps are somewhere inside; XLA is told to write what it compiled of them.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import audit
import jax
import pytest
from jax.sharding import AxisType

import curvadion_jax as cd

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
sys.path.insert(0, str(PORTS))

import upstream  # noqa: E402

STEPS = 6


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """Where downloads are kept from run to run."""
    cache = getattr(request.config, "cache", None)
    return cache.mkdir("ports") if cache else tmp_path_factory.mktemp("ports")


def run(port: str, compiled: Path, *arguments: str) -> dict:
    program = PORTS / port if port.endswith(".py") else PORTS / port / "main.py"
    command = [sys.executable, str(program), "--steps", str(STEPS)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        # Compiling takes longer than running here.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        # What is taken from a cache is not written.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={compiled} "
        "--xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.*",
    }
    done = subprocess.run(
        [*command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(result: dict, compiled: Path, first: float) -> None:
    assert result["loss"] < first
    assert 0 < result["syncs"] < STEPS
    # A tiny model's flags of 4 bytes and one sync of so few steps.
    assert result["share"] < 0.2
    mesh = cd.replicas.make_mesh(4, {"inside": 2})
    programs = [*compiled.glob("*train_step*after_optimizations.txt")]
    assert programs
    for program in programs:
        audit = cd.replicas.audit(
            types.SimpleNamespace(as_text=program.read_text), mesh
        )
        assert not audit.every_step, audit
        assert audit.sync


@pytest.mark.slow
@pytest.mark.parametrize("port", ["nanodo", "lm1b", "gemma"])
def test_a_patched_codebase_trains(port, folder, tmp_path):
    get = upstream.nanodo if port == "nanodo" else upstream.flax_example
    given = () if port == "nanodo" else (port,)
    try:
        get(*given, folder, patched=True)
    except upstream.NotReachedError as error:
        pytest.skip(str(error))
    options = ("--optimizer", "local_muon", "--width", "32", "--layers", "1")
    result = run(port, tmp_path, *options, "--folder", str(folder))
    check(result, tmp_path, first=5.6)  # ln(259) = 5.56 of a model that knows nothing
    assert result["losses"][-1][1] == result["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["layernorm", "batchnorm"])
def test_an_equinox_model_trains(model, tmp_path):
    options = ("--optimizer", "local_muon", "--model", model, "--width", "32")
    check(run("equinox", tmp_path, *options), tmp_path, first=5.6)


@pytest.mark.slow
def test_maxtext_trains(folder, tmp_path):
    """In an environment that has its requirements, which its page lists."""
    if not importlib.util.find_spec("tokamax"):
        pytest.skip("MaxText's requirements are not installed")
    try:
        upstream.maxtext(folder, patched=True)
    except upstream.NotReachedError as error:
        pytest.skip(str(error))
    options = ("--optimizer", "local_muon", "--folder", str(folder))
    check(run("maxtext", tmp_path, *options), tmp_path, first=5.6)


@pytest.fixture
def levanter(folder, tmp_path):
    """Starts a site, in an environment that has Levanter, which its page tells."""
    if not importlib.util.find_spec("haliax"):
        pytest.skip("Levanter is not installed")
    try:
        upstream.levanter(folder, patched=True)
    except upstream.NotReachedError as error:
        pytest.skip(str(error))

    def start(name: str, steps: int, stdout=None, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, str(PORTS / "levanter" / "main.py"), "--site", name]
        command += ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
        command += ["--folder", str(folder), "--steps", str(steps), *arguments]
        with (tmp_path / name).open("w") as log:
            return subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=stdout or log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    return start


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_levanter_trains_as_one_of_two_sites(levanter, tmp_path):
    """Of which one is killed, and continues from its checkpoint and the run."""
    steps, every, tokens = 28, 7, 8 * 128  # of a step, as in tiny.yaml
    paris = levanter("paris", steps)
    often = "--trainer.checkpointer.save_interval", "1s"
    rome = levanter("rome", steps, subprocess.PIPE, *often)
    with rome.stdout as lines:
        for line in lines:
            if "Saved checkpoint" in line and (tmp_path / "run" / "commits").is_dir():
                break
        rome.kill()
    assert rome.wait() == -signal.SIGKILL
    rome = levanter("rome", steps)
    assert (paris.wait(), rome.wait()) == (0, 0)
    said = {name: (tmp_path / name).read_text() for name in ("paris", "rome")}
    assert "Resuming training from step" in said["rome"]
    assert audit.audit(tmp_path / "run")[1] == []
    counted = dict.fromkeys(said, 0.0)
    for file in (tmp_path / "run" / "commits").iterdir():
        for entry in json.loads(file.read_text())["contributors"]:
            counted[entry["name"]] += entry["tokens"] / tokens
    assert counted["paris"] == steps
    # It loses at most a contribution that was under way, and the steps after it.
    assert counted["rome"] > steps - 2 * every
    for text in said.values():
        result = json.loads(text.splitlines()[-1])
        assert result["loss"] < 5.5  # ln(259) = 5.56 of a model that knows nothing
        assert result["counted"] == result["contributions"] > 0


@pytest.mark.slow
def test_levanter_trains_on_replicas_inside_one_slice(levanter, folder, tmp_path):
    """Between two syncs it sends the mean of the loss, and nothing else."""
    out = "--out", str(tmp_path / "out"), "--folder", str(folder)
    result = run("levanter/in_slice.py", tmp_path / "compiled", *out)
    assert result["loss"] < 5.5  # ln(259) = 5.56 of a model that knows nothing
    assert 0 < result["syncs"] < STEPS
    assert result["share"] < 0.2
    axes = ("data", "replica")  # in Levanter's order
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2)
    programs = [*(tmp_path / "compiled").glob("*_train_step*after_optimizations.txt")]
    assert programs
    for program in programs:
        audit = cd.replicas.audit(
            types.SimpleNamespace(as_text=program.read_text), mesh
        )
        assert [(x.arrays, x.bytes) for x in audit.every_step] == [("f32[]", 4)]
        assert audit.sync
