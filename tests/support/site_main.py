"""A site as a process: ``site_main.py FOLDER NAME STEPS [KILLED]``.

It kills itself after so many steps.
"""

import hashlib
import os
import signal
import sys

import jax
import numpy as np
import optax
from site_runs import make_step, start_params, target

from curvadion_jax import compressors, sites


def main(folder: str, name: str, steps: int, killed: int = 0) -> None:
    inner = optax.adam(0.05)
    step = make_step(inner)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    form = compressors.quantize(4, block=16)
    options = {"every": 2, "max_lag": 2, "grace": 1.0, "poll": 0.02}
    with sites.Site(folder, name, outer=outer, compressor=form, **options) as site:
        params = site.start(start_params())
        state = inner.init(params)
        for index in range(steps):
            params, state = step(params, state, target(len(name), index))
            params = site.sync(params)
            if index + 1 == killed:
                os.kill(os.getpid(), signal.SIGKILL)
        params = site.leave(params)
    parts = [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]
    print(site.metrics.round, hashlib.sha256(b"".join(parts)).hexdigest(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
