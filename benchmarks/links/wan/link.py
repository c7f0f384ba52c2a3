"""Two network namespaces joined by a slow link, made and removed around a `with`.

Linux's own shaping (`tc netem`) is not in every kernel, so a process carries the
packets from one TUN device to the other. It has the token bucket, the queue, the delay
and the losses of `line.py`, and real-time priority. Namespaces have no names: the
kernel removes them with their last user.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from line import Conditions, Line

PORT = 12421  # of the coordinator
_TURN = 32  # Packets taken from one end before the other end has its turn.
_NEW_NETWORK, _NEW_NAMES, _DIE_WITH_PARENT = 0x40000000, 0x04000000, 1
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_TUN, _INTERFACE = Path("/dev/net/tun"), "wan0"


def address(end: int) -> str:
    """The address of an end of the link, 0 or 1."""
    return f"10.77.0.{end + 1}"


def refusal() -> str | None:
    """Why links cannot be made here; None where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "Network namespaces take Linux and root. Run the benchmark as root."
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN} is not there. Load the module `tun`, or allow the device."
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    if probe.returncode:
        return f"The kernel refuses a network namespace: {probe.stderr.decode()}"
    return None


@contextlib.contextmanager
def open_link(conditions: Conditions, seed: int = 0) -> Iterator[list[Path]]:
    """Paths by which a process enters each end (`enter`)."""
    argument = json.dumps([dataclasses.asdict(conditions), seed])
    relay = subprocess.Popen(
        [sys.executable, __file__, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = relay.stdout.readline() if relay.stdout else ""
        if not line:
            raise RuntimeError(f"The relay ended with status {relay.wait()}.")
        yield [Path(path) for path in json.loads(line)]
    finally:
        relay.kill()
        relay.communicate()


def enter(path: Path, end: int) -> None:
    """Moves this process, which has one thread, to an end of a link.

    gloo listens on the address of the host's name, so the name becomes the address.
    """
    namespace = os.open(path, os.O_RDONLY)
    _call("setns", namespace, _NEW_NETWORK)
    os.close(namespace)
    _call("unshare", _NEW_NAMES)
    name = address(end).encode()
    _call("sethostname", name, len(name))


def received() -> int:
    """Bytes of packets that this end has received, headers included."""
    folder = Path("/sys/class/net", _INTERFACE, "statistics", "rx_bytes")
    if folder.exists():  # the view of the process that mounted /sys
        return int(folder.read_text())
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(numbers.split()[0])
    raise ValueError(f"There is no {_INTERFACE} here.")


def die_with_parent() -> None:
    """Asks the kernel to end this process with the one that started it."""
    _call("prctl", _DIE_WITH_PARENT, signal.SIGKILL)


def _make_end(end: int, conditions: Conditions) -> tuple[int, str]:
    """A namespace, which this process enters: its device, and a path to it."""
    import fcntl  # which Windows has not

    _call("unshare", _NEW_NETWORK)
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = struct.pack("16sH22x", _INTERFACE.encode(), _TUN_WITHOUT_HEADER)
    fcntl.ioctl(device, _SET_INTERFACE, flags)
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    _ip("link", "set", "lo", "up")
    _ip("address", "add", f"{address(end)}/32", "dev", _INTERFACE)
    mtu = ("mtu", str(conditions.mtu), "txqueuelen", "2000")
    _ip("link", "set", "dev", _INTERFACE, *mtu, "up")
    route = ("dev", _INTERFACE, "src", address(end), "congctl", conditions.congestion)
    _ip("route", "add", f"{address(1 - end)}/32", *route)
    held = os.open("/proc/self/ns/net", os.O_RDONLY)
    return device, f"/proc/{os.getpid()}/fd/{held}"


def _relay(devices: list[int], lines: list[Line], size: int) -> None:
    """Carries packets until the input ends; line i leads to device i."""
    sources = [*devices, sys.stdin.fileno()]
    while True:
        next_time = min(line.next_arrival() for line in lines)
        wait = max(0.0, next_time - time.monotonic())
        # `select` and not `epoll`, which counts in milliseconds.
        ready, _, _ = select.select(sources, [], [], min(wait, 1.0))
        if sources[-1] in ready and not os.read(sources[-1], 1024):
            return
        for end, device in enumerate(devices):
            for _ in range(_TURN if device in ready else 0):
                try:
                    lines[1 - end].send(time.monotonic(), os.read(device, size))
                except BlockingIOError:
                    break
            for packet in lines[end].arrived(time.monotonic()):
                os.write(device, packet)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _call(name: str, *arguments: int | bytes) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main() -> None:
    """The relay: makes both ends, and carries packets until its input ends."""
    given, seed = json.loads(sys.argv[1])
    conditions = Conditions(**given)
    die_with_parent()
    devices, paths = zip(*(_make_end(end, conditions) for end in (0, 1)), strict=True)
    lines = [Line(conditions, 2 * seed + end) for end in (0, 1)]
    # Ahead of the training, which has the same cores: a packet does not wait for it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    print(json.dumps(paths), flush=True)
    _relay([*devices], lines, conditions.mtu)


if __name__ == "__main__":
    main()
