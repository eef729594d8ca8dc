"""What waits for a disk that may never answer: reads and listings that hang, by place, and what is said of them.

Owns `Hanging`. A read from a dead mount does not end, and nothing can stop it: its thread is lost until the mount comes
back. So it is counted, told in the log once, and a node with no reader left says that it is not ready.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headwater.core.places import Places
from headwater.data.extract import Extractor

HANGS_S = 60.0  # without an answer; stores over a network have given up by then, or said something

log = logging.getLogger(__name__)


class Hanging:
    """Of `extractor`'s reads, and of the listings that `lists` lets in."""

    def __init__(self, extractor: Extractor, lists: Places) -> None:
        self._extractor = extractor
        self._lists = lists
        self._changed = threading.Condition()
        self._heard: dict[object, tuple[str, float]] = {}  # listing → where, and when it last found something
        self._told: set[tuple[str, str]] = set()

    def may_list(self, place: str, within_s: float) -> bool:
        """Wait for leave to list there, which is then taken; False if there is none so far."""
        with self._changed:
            if self._changed.wait_for(lambda: self._lists.may(place), within_s):
                self._lists.take(place)
                return True
            return False

    @contextmanager
    def listing(self, place: str) -> Iterator[Callable[[], None]]:
        """For one that has leave, which it gives back; it says so whenever it finds something."""
        this = object()

        def heard() -> None:
            with self._changed:
                self._heard[this] = place, time.monotonic()

        heard()
        try:
            yield heard
        finally:
            with self._changed:
                del self._heard[this]
                self._lists.give(place)
                self._changed.notify_all()

    def look(self) -> dict[str, Any]:
        """How many hang now; the log is told of a place where that is new."""
        reads = self._extractor.hanging(HANGS_S)
        with self._changed:
            before = time.monotonic() - HANGS_S
            lists = Counter(place for place, heard in self._heard.values() if heard < before)
            found = {("reads", place): num for place, num in reads.items()}
            found |= {("listings", place): num for place, num in lists.items()}
            new = found.keys() - self._told
            self._told = set(found)
        for what, place in sorted(new):
            log.error("%s%s have had no answer for more than %.3g s, and hold a thread each until they have: is a disk "
                      "or a mount dead?", what, f" of {place}" if place else "", HANGS_S,
                      extra={"fields": {"hanging": found[what, place]}})  # fmt: skip
        return {"reads": reads.total(), "readers": self._extractor.num_readers, "listings": lists.total()}

    def fault(self) -> str:
        """Why nothing can be read any more, if that is so."""
        found = self.look()
        if found["reads"] < found["readers"]:
            return ""
        return (f"no reader is left: {found['reads']} reads have had no answer for more than {HANGS_S:.3g} s; the log "
                "says of which disk")  # fmt: skip
