"""One of the two processes of a site: ``site_of_two.py PROCESS PORT FOLDER``.

Its parameters are divided over both. Process 1 cannot use the store's folder: its URL
is another one, at which there is nothing.
"""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from curvadion_jax import compressors, sites
from curvadion_jax.sites import _run, _worker
from curvadion_jax.sites._store import Store

STEPS = 6


def train(url: str, mesh, name="oslo", before_steps=None, **options) -> dict:
    """A site whose steps move all of its parameters by numbers of its own."""
    shardings = {
        "w": NamedSharding(mesh, PartitionSpec("fsdp")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }
    params = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.full(3, -0.0)}
    params = jax.tree.map(jax.device_put, params, shardings)
    step = jax.jit(
        lambda params, by: jax.tree.map(lambda x: x + by, params), donate_argnums=0
    )
    given = {
        "every": 2,
        "poll": 0.01,
        "outer": optax.sgd(0.7, momentum=0.9, nesterov=True),
        "compressor": compressors.quantize(4, block=8),
    }
    with sites.Site(url, name, **(given | options)) as site:
        params = site.start(params)
        if before_steps is not None:
            before_steps(url, name)
        for index in range(STEPS):
            params = step(params, 0.1 * index + len(name))
            params = site.sync(params, tokens=8)
            for key, x in params.items():
                assert x.sharding.is_equivalent_to(shardings[key], x.ndim)
        params = site.leave(params)
    whole = [multihost_utils.process_allgather(x, tiled=True) for x in params.values()]
    found = b"".join(np.asarray(x).tobytes() for x in whole)
    return {
        "digest": hashlib.sha256(found).hexdigest(),
        "round": site.metrics.round,
        "counted": site.metrics.counted,
        "up": site.metrics.bytes_up,
    }


def main(process: int, port: str, folder: str) -> dict:
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    mesh = jax.make_mesh((4,), ("fsdp",), (jax.sharding.AxisType.Auto,))
    own = folder if process == 0 else f"{folder}/nothing/is/here"
    handed_over: list[str] = []
    record(handed_over)
    return {
        "with another": train(f"{own}/lock", mesh, max_lag=0, quorum=2),
        "overlap": train(f"{own}/overlap", mesh, max_lag=4),
        "errors": errors(own, mesh),
        "handed over": sorted(set(handed_over)),
    }


def record(kinds: list[str]) -> None:
    """Notes the type of every array that the thread is handed over."""
    submit = _worker.Worker.submit

    def noted(worker, arrays, tokens):
        kinds.extend(type(x).__name__ for x in arrays)
        submit(worker, arrays, tokens)

    _worker.Worker.submit = noted


def take_its_name(url: str, name: str) -> None:
    if jax.process_index() == 0:
        _run.join(Store(url), name)


def errors(url: str, mesh) -> list[str]:
    """What both processes are told that only the first can know, or only one does."""
    told = []
    alone = {"w": jnp.ones(3)}
    attempts = (
        lambda: train("file:///proc/nothing", mesh),
        lambda: train(f"{url}/lock", mesh, compressor=compressors.quantize(8)),
        lambda: sites.Site(f"{url}/new", "rome").start(alone),
        lambda: train(f"{url}/taken", mesh, max_lag=0, before_steps=take_its_name),
    )
    for attempt in attempts:
        try:
            attempt()
        except (OSError, RuntimeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], sys.argv[3])))
