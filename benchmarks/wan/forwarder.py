"""Carries packets between two network namespaces over a link of given conditions.

A process of its own, started by `link.py`. It makes the namespaces, says on its output
how to enter them, and takes commands on its input: "cut" and "join". When the input
ends, so does the process, and the namespaces go with it.
"""

import dataclasses
import gc
import json
import os
import select
import sys
import time
from pathlib import Path

import namespaces
from counters import ENDS, FIELDS, Counters
from line import Conditions, Line

COORDINATOR_PORT = 12421
# Packets taken from one end before the other end has its turn.
_TURN = 32
_TCP = 6
_PACKETS, _BYTES, _PAYLOAD, _COORDINATOR, _DROPPED, _LOST, _CUT = range(len(FIELDS))


def count(counter, packet: bytes) -> None:
    """Count a delivered packet."""
    size = len(packet)
    counter[_PACKETS] += 1
    counter[_BYTES] += size
    # IPv4 without fragments, which TCP does not make.
    if packet[0] >> 4 != 4 or packet[9] != _TCP:
        return
    start = 4 * (packet[0] & 15)
    ports = packet[start : start + 4]
    if COORDINATOR_PORT in (
        int.from_bytes(ports[:2], "big"),
        int.from_bytes(ports[2:], "big"),
    ):
        counter[_COORDINATOR] += size
    else:
        counter[_PAYLOAD] += size - start - 4 * (packet[start + 12] >> 4)


class Forwarder:
    """Two devices, the lines between them, and whether they are cut.

    Args:
        devices: Descriptors; line i carries what is read from the other to device i.
        conditions: The link.
        counters: Where to count.
        seed: Of the losses.
    """

    def __init__(
        self, devices: list[int], conditions: Conditions, counters: Counters, seed: int
    ):
        self._devices = devices
        self._lines = [Line(conditions, ENDS * seed + end) for end in range(ENDS)]
        self._counters = [counters.of(end) for end in range(ENDS)]
        self._size = conditions.mtu
        self._cut = False

    def run(self) -> None:
        """Carry packets until the input ends."""
        sources = [*self._devices, sys.stdin.fileno()]
        while True:
            next_time = min(line.next_arrival() for line in self._lines)
            # `select` and not `epoll`, which counts in milliseconds.
            wait = max(0.0, next_time - time.monotonic())
            ready, _, _ = select.select(sources, [], [], min(wait, 1.0))
            for end, device in enumerate(self._devices):
                if device in ready:
                    self._take(device, ENDS - 1 - end)
                self._deliver(end)
            if sources[-1] in ready and not self._obey():
                return

    def _take(self, device: int, to: int) -> None:
        """Read what an end has sent."""
        line, counter = self._lines[to], self._counters[to]
        for _ in range(_TURN):
            try:
                packet = os.read(device, self._size)
            except BlockingIOError:
                break
            if self._cut:
                counter[_CUT] += 1
            else:
                line.send(time.monotonic(), packet)
        counter[_DROPPED], counter[_LOST] = line.dropped, line.lost

    def _deliver(self, end: int) -> None:
        counter, device = self._counters[end], self._devices[end]
        for packet in self._lines[end].arrived(time.monotonic()):
            if self._cut:
                counter[_CUT] += 1
                continue
            os.write(device, packet)
            count(counter, packet)

    def _obey(self) -> bool:
        """Read commands; whether to go on."""
        words = os.read(sys.stdin.fileno(), 1024).decode().split()
        for word in words:
            self._cut = word == "cut"
        return bool(words)


def main() -> None:
    """Make a link, and carry packets until the input ends."""
    conditions, file, seed = json.loads(sys.argv[1])
    conditions = Conditions(**conditions)
    namespaces.die_with_parent()
    devices, paths = [], []
    for end in range(ENDS):
        device, path = namespaces.make(end, conditions)
        devices.append(device)
        paths.append(str(path))
    forwarder = Forwarder(devices, conditions, Counters(Path(file)), seed)
    # Ahead of the training, which has the same cores: a packet does not wait for it.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    print(json.dumps(paths), flush=True)
    forwarder.run()


def command(conditions: Conditions, file: Path, seed: int) -> list[str]:
    """How to start this program."""
    argument = json.dumps([dataclasses.asdict(conditions), str(file), seed])
    return [sys.executable, __file__, argument]


if __name__ == "__main__":
    main()
