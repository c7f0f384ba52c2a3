"""What plain TCP gets across a link: its rate, and a small message's round trip.

A process for each end, started by `calibrate`, with the path of the end's namespace.
"""

import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import namespaces
from line import Conditions
from link import open_link

_PORT, _MESSAGES, _CHUNK = 12500, 15, bytes(1 << 16)
_LIMIT = 120.0


def serve(seconds: float) -> None:
    """Answer small messages, then receive a stream, and print the two numbers."""
    with socket.create_server((namespaces.address(0), _PORT)) as server:
        server.settimeout(_LIMIT)
        connection, _ = server.accept()
    connection.settimeout(_LIMIT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(_MESSAGES):
        connection.sendall(connection.recv(1))
    # The second half: slow start has ended by then.
    began = now = time.monotonic()
    received, halfway = 0, None
    while data := connection.recv(1 << 20):
        received += len(data)
        now = time.monotonic()
        if halfway is None and now - began > seconds / 2:
            halfway = (now, received)
        if now - began > seconds:
            break
    if halfway is None:
        raise RuntimeError("the stream ended before half of its time")
    rate = 8 * (received - halfway[1]) / (now - halfway[0])
    whole = 8 * received / (now - began)
    print(json.dumps({"stream": rate, "stream_with_start": whole}))


def send() -> None:
    """Time small messages there and back, then send until nobody listens."""
    end = time.monotonic() + _LIMIT
    while True:
        try:
            connection = socket.create_connection((namespaces.address(0), _PORT), 10)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    connection.settimeout(_LIMIT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(_MESSAGES):
        began = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        trips.append(time.monotonic() - began)
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    found = {"round_trip": statistics.median(trips)}
    found["congestion"] = name.split(b"\0")[0].decode()
    print(json.dumps(found), flush=True)
    try:
        while True:
            connection.sendall(_CHUNK)
    except OSError:
        pass


def calibrate(conditions: Conditions, seconds: float = 6.0) -> dict[str, Any]:
    """Measure a link with these conditions.

    Returns:
        `stream` and `stream_with_start`: payload bits a second of one TCP connection in
        the second half of its time, and in all of it; `round_trip` of one byte in
        seconds, the median; `congestion`: the congestion control that TCP used.
    """
    with open_link(conditions) as link:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, str(end), str(path), str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for end, path in enumerate(link.namespaces)
        ]
        try:
            printed = [worker.communicate(timeout=2 * _LIMIT)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    found = [json.loads(text) for text in printed]
    return {**found[0], **found[1]}


def main() -> None:
    """One end of the measurement."""
    end, path, seconds = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    namespaces.die_with_parent()
    namespaces.enter(path, end)
    if end == 0:
        serve(seconds)
    else:
        send()


if __name__ == "__main__":
    main()
