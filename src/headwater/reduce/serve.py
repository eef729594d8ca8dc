"""An aggregator's life as a process: start, announce, wait for a signal, end. Owns signals."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable

from headwater.reduce.aggregator import Aggregator


def serve(aggregator: Aggregator, announce: Callable[[Aggregator], None]) -> None:
    """Run until SIGTERM or Ctrl-C. Workers are told, and go on by themselves."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: aggregator.stop())
    gc.collect()
    gc.freeze()  # what start-up made stays; collecting around it again and again would hold up packets
    announce(aggregator)
    aggregator.run()
