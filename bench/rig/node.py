"""A real `headwater serve` in a host. Owns its command line and how to tell that it is up."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rig.description import RigError
from bench.rig.python import python

UP_WITHIN_S = 120.0  # 2 s on a whole core; a host may have a fiftieth of one
_ADDRESS = re.compile(r"grpc(\+tls)?://[\w.]+:\d+")


@dataclass(frozen=True)
class Node:
    """A node that serves. `process` is its own, for whoever wants to kill it; what it wrote is in `log`."""

    host: str
    address: str
    process: subprocess.Popen[bytes]
    log: Path


def command(roots: Sequence[str], listen: str, state: Path, options: Sequence[str]) -> list[str]:
    # --insecure: everyone who can reach the address is a host of the same rig. Rows are made anew each time, unless an
    # option says otherwise: benchmarks ask for the same ones again and again.
    fixed = ("--listen", listen, "--insecure", "--state", str(state), "--cache-size", "0")
    return python("headwater.cli", "serve", *roots, *fixed, *options)


def start(host: str, popen: Callable[[Path], subprocess.Popen[bytes]], log: Path) -> Node:
    """Start it with `popen`, which writes to `log`, and wait until it says where it listens."""
    process = popen(log)
    deadline = time.monotonic() + UP_WITHIN_S
    while True:
        said = log.read_text(errors="replace")
        if match := _ADDRESS.search(said):
            return Node(host, match[0], process, log)
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RigError(f"the node on {host} did not start; it wrote:\n{said[-2000:]}")
        time.sleep(0.02)
