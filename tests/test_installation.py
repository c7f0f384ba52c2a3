"""The package needs JAX and Optax alone, and no installation."""

import importlib.metadata
import os
import subprocess
import sys

import curvadion_jax as cd

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

tx = cd.local_muon(0.1, budget=0.01, axis_name="replica")
params = {"kernel": jnp.ones((4, 3))}
mesh = cd.replicas.make_mesh(jax.device_count())
state = cd.replicas.replicate((params, tx.init(params)), mesh)


def train(state, batch):
    params, opt_state = state
    grads = jax.grad(lambda p: jnp.sum((batch @ p["kernel"]) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {}


step = cd.replicas.step(train, mesh)
for _ in range(2):
    state, _ = step(state, jnp.ones((2, 4)))
print(cd.__version__, cd.metrics.read(state[1])["steps"])
"""


def test_a_step_is_taken_from_a_checkout_without_optional_packages():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [cd.__version__, "2"]


def test_the_version_is_that_of_the_installed_package():
    assert importlib.metadata.version("curvadion-jax") == cd.__version__


def test_modules_of_python_are_no_names_of_the_package():
    names = [name for name in dir(cd) if not name.startswith("_")]
    assert [name for name in names if name in sys.stdlib_module_names] == []
