"""Network namespaces without names: the kernel removes them with their last user.

Python has `os.unshare` and `os.setns` from 3.12 on; here they are called through libc.
"""

import ctypes
import os
import platform
import shutil
import signal
import struct
import subprocess
from pathlib import Path

from line import Conditions

_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_DIE_WITH_PARENT = 1
_TUN = Path("/dev/net/tun")
_INTERFACE = "wan0"
# Linux's defaults, whatever this machine has: the bounds of a connection's window.
_SETTINGS = {
    "tcp_rmem": "4096 131072 6291456",
    "tcp_wmem": "4096 16384 4194304",
    "tcp_slow_start_after_idle": "1",
}


def address(end: int) -> str:
    """The address of an end of the link."""
    return f"10.77.0.{end + 1}"


def refusal() -> str | None:
    """Why links cannot be made here; None where they can."""
    if platform.system() != "Linux":
        return (
            "network namespaces are a feature of Linux, and this is "
            f"{platform.system()}: run the benchmark on Linux, as root"
        )
    if os.geteuid() != 0:
        return "making network namespaces takes root: run the benchmark as root"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN} is not there: load the module `tun`, or allow the device"
    if shutil.which("ip") is None:
        return "the command `ip` is not there: install iproute2"
    try:
        probe = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    except FileNotFoundError:
        return "the command `unshare` is not there: install util-linux"
    if probe.returncode:
        return (
            "the kernel refuses a network namespace here "
            f"({probe.stderr.decode().strip()}): run outside of a container, or in "
            "one that is privileged"
        )
    return None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it is gone."""
    _call("prctl", _DIE_WITH_PARENT, signal.SIGKILL)


def make(end: int, conditions: Conditions) -> tuple[int, Path]:
    """A namespace for an end of a link, which this process enters.

    Returns:
        The descriptor of its device, from which packets are read and to which they are
        written, and a path by which processes enter while this one lives.
    """
    import fcntl  # which Windows has not

    _call("unshare", _NEW_NETWORK)
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = struct.pack("16sH22x", _INTERFACE.encode(), _TUN_WITHOUT_HEADER)
    fcntl.ioctl(device, _SET_INTERFACE, flags)
    for name, value in _SETTINGS.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)
    # Its own packets about neighbours and routers would be counted.
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    _ip("link", "set", "lo", "up")
    _ip("address", "add", f"{address(end)}/32", "dev", _INTERFACE)
    mtu = ("mtu", str(conditions.mtu), "txqueuelen", "2000")
    _ip("link", "set", "dev", _INTERFACE, *mtu, "up")
    # By the route, because not every name is allowed as a namespace's setting.
    route = ("dev", _INTERFACE, "src", address(end), "congctl", conditions.congestion)
    _ip("route", "add", f"{address(1 - end)}/32", *route)
    held = os.open("/proc/self/ns/net", os.O_RDONLY)
    return device, Path(f"/proc/{os.getpid()}/fd/{held}")


def enter(path: Path, end: int) -> None:
    """Move this process, which has one thread, to an end of a link.

    gloo listens on the address that the host's name stands for, and so the name becomes
    the address, in a namespace for names.
    """
    namespace = os.open(path, os.O_RDONLY)
    _call("setns", namespace, _NEW_NETWORK)
    os.close(namespace)
    _call("unshare", _NEW_NAMES)
    name = address(end).encode()
    _call("sethostname", name, len(name))


def retransmitted() -> int:
    """TCP segments that this namespace has sent again."""
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _call(name: str, *arguments: int | bytes) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
