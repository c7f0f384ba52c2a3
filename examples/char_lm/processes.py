"""Several processes as one program: how they start, agree, and divide a batch.

JAX's distributed runtime does the work. All processes run the same program and must
take the same decisions, or they wait for each other for ever. So what only one of
them may see (its flags, a file, a missing directory) is told to all before it counts.
With one process nothing here sends anything.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from config import UserError
from jax.experimental import multihost_utils

T = TypeVar("T")


def start(
    replicas: int,
    coordinator: str | None = None,
    number: int | None = None,
    index: int | None = None,
    detect: bool = False,
    *,
    heartbeat: int = 100,
) -> None:
    """Join the other processes, if any, and make CPU devices for the replicas.

    Comes before anything else uses JAX. CPU devices of several processes talk through
    gloo, JAX's default.

    Args:
        replicas: All of them, in all processes.
        coordinator: Host and port of process 0, the same in every process.
        number: Number of processes.
        index: Which one this is.
        detect: Let JAX find these three in the cluster's environment.
        heartbeat: Seconds of silence after which a process counts as dead, and JAX ends
            all others.

    Raises:
        ValueError: the flags do not fit together, or there is nothing to find.
    """
    given = {"--coordinator": coordinator, "--num-processes": number}
    given["--process-id"] = index
    _check(given, replicas, detect)
    if heartbeat < 1:
        raise UserError(f"--heartbeat-timeout {heartbeat} must be at least 1 second")
    # How many processes JAX will find is not known before it has started.
    _make_devices(1 if detect else replicas // (number or 1))
    if not detect and number is None:
        return
    try:
        # Three flags are meant as they stand: without "deactivate" a cluster that JAX
        # recognises would still choose the devices.
        method = None if detect else "deactivate"
        jax.distributed.initialize(
            coordinator,
            number,
            index,
            cluster_detection_method=method,
            heartbeat_timeout_seconds=heartbeat,
        )
    except ValueError as error:
        raise UserError(
            f"--distributed: JAX recognises no cluster here ({error}). It looks for "
            "SLURM, Open MPI, Cloud TPU and Kubernetes (with the package "
            "`kubernetes`); elsewhere give --coordinator, --num-processes and "
            "--process-id"
        ) from error


def _check(given: dict[str, Any], replicas: int, detect: bool) -> None:
    coordinator, number, index = given.values()
    present = [flag for flag, value in given.items() if value is not None]
    if detect and present:
        raise UserError(
            f"--distributed finds by itself what {', '.join(present)} says: give one "
            "or the other"
        )
    if not present:
        return
    if missing := [flag for flag, value in given.items() if value is None]:
        raise UserError(
            f"{', '.join(present)} without {', '.join(missing)}: give every process "
            "all three (with none of them there is one process)"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"--coordinator {coordinator} must be HOST:PORT: a host of process 0 that "
            "the others reach, and a free port on it"
        )
    if number < 1:
        raise UserError(f"--num-processes {number} must be at least 1")
    if not 0 <= index < number:
        raise UserError(
            f"--process-id {index} must be one of 0 to --num-processes - 1 = "
            f"{number - 1}, a different one in every process"
        )
    _check_division(replicas, number)


def _check_division(replicas: int, number: int) -> None:
    if replicas % number:
        raise UserError(
            f"--replicas {replicas}, the number in all processes together, cannot be "
            f"divided by {number} processes; give a multiple of {number}"
        )


def _make_devices(number: int) -> None:
    """At least so many CPU devices in this process; accelerators stay as they are."""
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    option = "jax_num_cpu_devices"
    if not forced and getattr(jax.config, option) < number:
        jax.config.update(option, number)


def check_devices(replicas: int) -> None:
    """Refuse more replicas than devices, or other numbers of them in some processes."""
    _check_division(replicas, jax.process_count())
    devices, each = jax.devices(), replicas // jax.process_count()
    counts = [0] * jax.process_count()
    for device in devices:
        counts[device.process_index] += 1
    if min(counts) < each:
        where = f" in each of {len(counts)} processes" if len(counts) > 1 else ""
        raise UserError(
            f"--replicas {replicas} needs as many devices, {each}{where}, and there "
            f"are {min(counts)} ({devices[0].platform}); use fewer, or set "
            "JAX_PLATFORMS=cpu, where devices are made as needed (with --distributed "
            "set JAX_NUM_CPU_DEVICES as well)"
        )


def is_first() -> bool:
    """Whether this process writes the files and talks to the user."""
    return jax.process_index() == 0


def leave(status: int) -> None:
    """End this process if there are others, which JAX then ends.

    At a usual end JAX waits for all of them, minutes long, and they wait in the
    middle of something for this one.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def together(action: Callable[[], T]) -> T:
    """What the action returns here, unless it was refused in any process.

    Raises:
        ValueError: the action's own, or in the other processes, that there was one.
    """
    refusal = result = None
    try:
        result = action()
    except UserError as error:
        refusal = error
    refused = _gathered(np.array(refusal is not None))
    if refusal is not None:
        raise refusal
    if refused.any():
        raise UserError(f"process {int(np.argmax(refused))} stopped; it says why")
    return result  # type: ignore[return-value]


def in_any(flag: bool) -> bool:
    """Whether it is so in any process. All of them ask."""
    return bool(_gathered(np.array(flag)).any())


def check_same(content: dict[str, Any]) -> None:
    """Refuse processes that were not given the same flags and data."""
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    digests = _gathered(np.frombuffer(digest, np.uint8))
    others = np.flatnonzero((digests != digests[0]).any(axis=-1))
    if others.size:
        raise UserError(
            f"process {others[0]} has other flags or other data than process 0: give "
            f"all the same, but for --process-id. Here it is {text}"
        )


def from_first(value: np.ndarray) -> np.ndarray:
    """The first process's value; all have one of this shape and type."""
    return np.asarray(multihost_utils.broadcast_one_to_all(value))


def mean_over_replicas(values: list[jax.Array]) -> list[float]:
    """The mean of each array [R], all of them in one message."""
    if jax.process_count() == 1:
        return [float(np.mean(value)) for value in jax.device_get(values)]
    gathered = multihost_utils.process_allgather(jax.jit(_stack)(values), tiled=True)
    return [float(np.mean(value)) for value in gathered]


def _stack(values: list[jax.Array]) -> jax.Array:
    return jax.numpy.stack(values)


def _gathered(value: np.ndarray) -> np.ndarray:
    if jax.process_count() == 1:
        return value[None]
    return np.asarray(multihost_utils.process_allgather(value))
