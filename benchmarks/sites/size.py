"""Memory and time of one round, at the size of a real model.

    python benchmarks/sites/size.py --parameters 1e8
    python benchmarks/sites/size.py --parameters 1e8 --store s3
    python benchmarks/sites/size.py --parameters 1e8 --outer mean

One site contributes two rounds and takes their outer steps, step by step, without a
training loop. The first round compiles; the second is measured. Memory is the most that
the process had, above what it had with the parameters alone. The store is a folder, or
an S3 server (moto's, in a process of its own).
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from obstore.store import from_url

from curvadion_jax import compressors
from curvadion_jax.sites._follower import Follower
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import Store

OUTER: dict[str, optax.GradientTransformation] = {
    "nesterov": optax.sgd(1.0, momentum=0.4, nesterov=True),
    "nesterov-bfloat16": optax.sgd(1.0, 0.4, True, accumulator_dtype=jnp.bfloat16),
    "mean": optax.scale(-1),  # what `outer=None` is: it has no state
}


def parameters(count: float) -> dict[str, np.ndarray]:
    """Arrays of a GPT of about so many parameters: layers, and an embedding of 5%."""
    layers = 12
    width = int((0.95 * count / layers / 12) ** 0.5 / 64) * 64
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (int(0.05 * count) // width, width)
    }
    for layer in range(layers):
        shapes |= {
            f"{layer}.attention.in": (width, 3 * width),
            f"{layer}.attention.out": (width, width),
            f"{layer}.mlp.in": (width, 4 * width),
            f"{layer}.mlp.out": (4 * width, width),
            f"{layer}.norm": (width,),
        }
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return {name: draw(shape) for name, shape in shapes.items()}


def resident() -> int:
    """Bytes of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def most_resident() -> int:
    """The most of them since `forget`."""
    line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line
    return 1024 * int(line[1])


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Measured:
    """Seconds and memory of the parts of a round."""

    def __init__(self, count: int, base: int) -> None:
        self._count, self._base, self.rows = count, base, {}

    def part(self, name: str, function: Any) -> Any:
        forget()
        start, used = time.monotonic(), time.process_time()
        found = function()
        seconds, used = time.monotonic() - start, time.process_time() - used
        self.rows[name] = {
            "seconds": round(seconds, 2),
            "processor seconds": round(used, 2),
            "most bytes per parameter": round(
                (most_resident() - self._base) / self._count, 1
            ),
            "bytes per parameter after": round(
                (resident() - self._base) / self._count, 1
            ),
        }
        return found


def disk(folder: Path, count: int) -> dict[str, int]:
    """MB/s of the file system for the bytes of the parameters, without the library."""
    data, path = os.urandom(2**24), folder / "plain"
    times = -(-4 * count // len(data))
    start = time.monotonic()
    with path.open("wb") as file:
        for _ in range(times):
            file.write(data)
    write = time.monotonic() - start
    start = time.monotonic()
    with path.open("rb") as file:
        while file.read(len(data)):
            pass
    read = time.monotonic() - start
    path.unlink()
    size = times * len(data) / 1e6
    return {"write MB/s": round(size / write), "read MB/s": round(size / read)}


def server() -> tuple[subprocess.Popen, Any]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    for line in process.stderr:
        if found := re.search(r"Running on (http://[\d.:]+)", line):
            break
    else:
        raise RuntimeError("moto's server has not started. Install moto[server].")
    make = urllib.request.Request(f"{found[1]}/bucket", method="PUT")
    urllib.request.urlopen(make).close()
    os.environ |= {
        "AWS_ENDPOINT_URL": found[1],
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    # On a busy machine moto takes longer to join the parts of an upload than the 30
    # seconds that obstore waits for an answer.
    patient: Any = {"timeout": timedelta(minutes=10), "allow_http": True}
    return process, from_url("s3://bucket/run", client_options=patient)


def measure(url: Any, count: float, bits: int, outer: str) -> dict[str, Any]:
    params = parameters(count)
    size = sum(x.size for x in params.values())
    form = compressors.exact() if bits == 32 else compressors.quantize(bits)
    measured = Measured(size, resident())
    leaves = [params[name] for name in sorted(params)]
    model = Model(params, OUTER[outer], form.codec)
    follower = Follower(Store(url), model, "site", 1, 0.0)
    measured.part("fingerprint", lambda: model.outer_step.fingerprint)
    measured.part("start", lambda: follower.start(leaves))
    for _ in range(2):
        captured = [x + np.float32(1e-3) for x in leaves]
        base = follower.outer.params
        measured.part("encode", lambda c=captured, b=base: follower.prepare(c, b, 1.0))
        del captured, base
        measured.part("write", follower.send)
        measured.part("read, norm", follower.propose)
        measured.part("decode, outer step", follower.advance)
        follower.decided = None  # which a training loop takes
    return {
        "parameters": size,
        "bits": bits,
        "outer": outer,
        "message bytes per parameter": round(
            sum(x.size * x.dtype.itemsize for x in model.message) / size, 2
        ),
        **measured.rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--bits", type=int, default=2, choices=[1, 2, 4, 8, 32])
    parser.add_argument("--store", choices=["folder", "s3"], default="folder")
    parser.add_argument("--outer", choices=OUTER, default="nesterov")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process = None
        if flags.store == "s3":
            process, url = server()
        else:
            url = folder
        try:
            found = measure(url, flags.parameters, flags.bits, flags.outer)
            found["file system"] = disk(Path(folder), found["parameters"])
            print(json.dumps({"store": flags.store, **found}, indent=1))
        finally:
            if process is not None:
                process.kill()


if __name__ == "__main__":
    main()
