"""The package can be installed, and needs JAX and Optax alone."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import curvadion_jax as cd

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys

BLOCKED = ["flax", "chex", "matplotlib", "obstore", "orbax", "tqdm"]
sys.modules.update(dict.fromkeys(BLOCKED))  # importing one raises ImportError

import importlib.metadata


def version(name, found=importlib.metadata.version):
    if name.replace("_", "-") == "curvadion-jax":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)


importlib.metadata.version = version

import jax
import jax.numpy as jnp
import optax

import curvadion_jax as cd

mesh = cd.replicas.make_mesh()
tx = cd.local_muon(0.1, budget=0.01, mesh=mesh)
params = cd.replicas.replicate({"kernel": jnp.ones((4, 3))}, mesh)
opt_state = tx.init(params)


def loss_fn(params, batch):
    return jnp.sum((batch @ params["kernel"]) ** 2)


@jax.jit
def step(params, opt_state, batch):
    grads = cd.replicas.map(jax.grad(loss_fn), mesh)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


for _ in range(2):
    batch = jnp.ones((jax.device_count(), 2, 4))
    params, opt_state = step(params, opt_state, batch)
print(cd.__version__, cd.metrics.read(opt_state)["steps"], cd.__file__)
"""


@pytest.mark.slow
def test_a_step_is_taken_from_a_wheel_that_was_built_from_the_sdist(tmp_path):
    python, installed = [sys.executable, "-m"], tmp_path / "installed"
    subprocess.run([*python, "build", "--outdir", tmp_path, ROOT], check=True)
    assert list(tmp_path.glob("*.tar.gz"))
    (wheel,) = tmp_path.glob("*.whl")
    options = ["--quiet", "--no-deps", "--target", installed]
    subprocess.run([*python, "pip", "install", *options, wheel], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, steps, file = done.stdout.split()
    assert (version, steps) == (cd.__version__, "2")
    assert Path(file).is_relative_to(installed)


def test_the_version_is_that_of_the_installed_package():
    assert importlib.metadata.version("curvadion-jax") == cd.__version__


def test_modules_of_python_are_no_names_of_the_package():
    names = [name for name in dir(cd) if not name.startswith("_")]
    assert [name for name in names if name in sys.stdlib_module_names] == []
