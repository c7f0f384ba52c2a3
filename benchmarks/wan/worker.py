"""One training process: `python worker.py JOB`, with a `Job` as JSON.

Started by `launching.py`. Enters its namespace before JAX starts.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import namespaces
from counters import Counters
from job import Job

_EXAMPLE = Path(__file__).parents[2] / "examples" / "char_lm"


def writer(job: Job, stream: TextIO) -> Callable[..., None]:
    """A function that writes a line: what it is given, the time, and the counters.

    The counters are those of packets delivered to this end: when a step has ended here,
    all that it needed from the other replica has arrived.
    """
    counters = Counters(Path(job.counters)) if job.counters else None

    def write(**row: Any) -> None:
        row["time"] = time.monotonic()
        if counters:
            row["link"] = counters.read(job.process)
            row["retransmitted"] = namespaces.retransmitted()
        stream.write(json.dumps(row) + "\n")
        stream.flush()

    return write


def main() -> None:
    """Do the job."""
    job = Job.from_dict(json.loads(sys.argv[1]))
    namespaces.die_with_parent()
    if job.namespace:
        namespaces.enter(Path(job.namespace), job.process)
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(_EXAMPLE))
    import training

    with Path(job.out).open("w") as stream:
        training.run(job, writer(job, stream))


if __name__ == "__main__":
    main()
