"""What a link or a core really gives. Owns the plain TCP transfer and the busy loop that measure a rig."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

from bench.rig.python import python, python_env
from bench.rig.up import RigUp

_PIECE = bytes(1 << 18)
_WARM_S = 0.5  # the bucket's burst, and TCP's first losses


def mbit_per_s(up: RigUp, source: str, target: str, *, port: int = 5201, seconds: float = 1.5) -> float:
    """Payload of one TCP stream from `source` to `target`: megabits a second, over `seconds` once it flows."""
    receiver = up.popen(
        target, python(__name__, "receive", up.address(target), str(port), str(seconds)), env=python_env(),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert receiver.stdout is not None
    receiver.stdout.readline()  # it listens
    sender = up.popen(source, python(__name__, "send", up.address(target), str(port)), env=python_env())
    answer = receiver.stdout.read()
    receiver.wait()
    sender.wait()
    return float(answer)


def cpu_s_per_byte(up: RigUp, source: str, target: str) -> tuple[float, float]:
    """What a byte of a plain TCP stream costs the sender and the receiver; what starting them costs is left out."""
    found = []
    for seconds in (1.0, 4.0):
        before = [up.usage(host) for host in (source, target)]
        rate = mbit_per_s(up, source, target, seconds=seconds)
        used = [up.usage(host).since(then).cpu_s for host, then in zip((source, target), before, strict=True)]
        found.append((rate * 1e6 / 8 * (seconds + _WARM_S), *used))
    num_bytes, *cpu_s = (late - early for early, late in zip(*found, strict=True))
    sent, received = (max(0.0, each / num_bytes) for each in cpu_s)
    return sent, received


def cpu_share(up: RigUp, host: str, *, seconds: float = 2.0) -> float:
    """CPU seconds a second that a busy loop gets in the host."""
    return float(up.call(host, f"{__name__}:spin", seconds=seconds))


def spin(seconds: float) -> float:
    """Burn CPU for `seconds` by the clock; how much of it there was, a second."""
    start, start_cpu = time.monotonic(), time.process_time()
    while (taken_s := time.monotonic() - start) < seconds:
        pass
    return (time.process_time() - start_cpu) / taken_s


def receive(address: str, port: int, seconds: float) -> float:
    with socket.create_server((address, port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    with connection:
        warm_until = time.monotonic() + _WARM_S
        while time.monotonic() < warm_until:
            connection.recv_into(buffer)
        start, num_bytes = time.monotonic(), 0
        while (taken_s := time.monotonic() - start) < seconds:
            num_bytes += connection.recv_into(buffer)
    return num_bytes * 8 / taken_s / 1e6


def send(address: str, port: int) -> None:
    """Until the other side has seen enough."""
    with socket.create_connection((address, port)) as connection:
        try:
            while True:
                connection.sendall(_PIECE)
        except OSError:
            return


def main(arguments: list[Any]) -> None:
    if arguments[0] == "receive":
        print(receive(arguments[1], int(arguments[2]), float(arguments[3])))
    else:
        send(arguments[1], int(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
