"""The ports of other codebases train, in programs of their own, at a tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(port: str, *arguments: str) -> dict:
    command = [sys.executable, str(PORTS / port / "main.py"), "--steps", str(STEPS)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        # Compiling takes longer than running here.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
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


def check(result: dict, first: float) -> None:
    assert result["loss"] < first
    assert 0 < result["syncs"] < STEPS
    # A tiny model's flags of 4 bytes and one sync of so few steps.
    assert result["share"] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("port", ["nanodo", "lm1b", "gemma"])
def test_a_patched_codebase_trains(port, folder):
    get = upstream.nanodo if port == "nanodo" else upstream.flax_example
    given = () if port == "nanodo" else (port,)
    try:
        get(*given, folder, patched=True)
    except upstream.NotReachedError as error:
        pytest.skip(str(error))
    options = ("--optimizer", "local_muon", "--width", "32", "--layers", "1")
    result = run(port, *options, "--folder", str(folder))
    check(result, first=5.6)  # ln(259) = 5.56 of a model that knows nothing
    assert result["losses"][-1][1] == result["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["layernorm", "batchnorm"])
def test_an_equinox_model_trains(model):
    options = ("--optimizer", "local_muon", "--model", model, "--width", "32")
    check(run("equinox", *options), first=5.6)
