"""Room for pictures in memory: those that are decoded at the same time take so many bytes together, and no more.

Owns `Room`. A file of some kilobytes may say that it is a picture of hundreds of megabytes; one is refused, or waited
for, but many at once would take all there is, on every thread that decodes. May import `headwater.data.memory`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.data.memory import memory_bytes

PART = 2  # of the machine's memory, in a trainer; the other half is for everything else. A node says what it can spare


class Room:
    """For `most_bytes` at the same time; first come, first served, so that a large picture gets its turn."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._used = 0
        self._door = threading.Lock()  # held by the one that waits; the others are behind it
        self._left = threading.Condition()

    def allow(self, most_bytes: int) -> None:
        """Have so many from now on."""
        with self._left:
            self.most_bytes = most_bytes
            self._left.notify()

    @contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        """Wait until there is room for so many, and have it for the block."""
        with self._door, self._left:
            self._left.wait_for(lambda: self._used == 0 or self._used + num_bytes <= self.most_bytes)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._left:
                self._used -= num_bytes
                self._left.notify()


ROOM = Room(memory_bytes() // PART)  # of the process
