"""Takes a rig down when the process that made it is gone, however it went: `python -m bench.rig.watchdog NAME`.

It runs in a session of its own, so what ends the maker (Ctrl-C, SIGTERM, SIGKILL to its group) passes it by.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

from bench.rig.leftovers import is_alive, owner, tear_down
from bench.rig.python import python, python_env

_QUIET_S = 0.5  # an `ip` that the maker had started may finish after it, so: until nothing more turned up for a while


def start(name: str) -> subprocess.Popen[bytes]:
    """Watch over the rig from now on. Its maker ends it after taking the rig down."""
    return subprocess.Popen(
        python(__name__, name), env=python_env(), start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def watch(name: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        maker = os.pidfd_open(owner(name))
        if is_alive(name):
            select.select([maker], [], [])
        os.close(maker)
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < _QUIET_S:
        if tear_down(name):
            quiet_since = time.monotonic()
        time.sleep(0.05)


if __name__ == "__main__":
    watch(sys.argv[1])
