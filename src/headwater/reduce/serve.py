"""An aggregator's life as a process: start, announce, wait for a signal, end.

Owns signals, and how many files may be open.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
from collections.abc import Callable

from headwater.reduce.aggregator import Aggregator

MAX_FILES = 65_536  # open at once, if the system allows it: two connections a worker, and guests


def _allow_files() -> None:
    """As many as the system allows: the usual 1,024 are for programs that use select()."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def serve(aggregator: Aggregator, announce: Callable[[Aggregator], None]) -> None:
    """Run until SIGTERM or Ctrl-C. Workers are told, and go on by themselves."""
    _allow_files()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: aggregator.stop())
    gc.collect()
    gc.freeze()  # what start-up made stays; collecting around it again and again would hold up packets
    announce(aggregator)
    aggregator.run()
