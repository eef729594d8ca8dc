"""Room for pictures in memory: those that are decoded at the same time have so many pixels together, and no more.

Owns `Room`. A file of some kilobytes may say that it is a picture of hundreds of megabytes; one is refused, or waited
for, but many at once would take all there is, on every thread that decodes. May import `headwater.data.memory`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.data.memory import memory_bytes

PART = 2  # of the machine's memory; the other half is for everything else
# Of a picture while it is worked on, at most: Pillow takes 4 for RGB, and has the picture as it was stored, as RGB, and
# after the first transform. WebP's own buffers come to as much.
PIXEL_BYTES = 16


class Room:
    """For `most` pixels at the same time; first come, first served, so that a large picture gets its turn."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._door = threading.Lock()  # held by the one that waits; the others are behind it
        self._left = threading.Condition()

    @contextmanager
    def of(self, num_pixels: int) -> Iterator[None]:
        """Wait until there is room for so many, and have it for the block."""
        with self._door, self._left:
            self._left.wait_for(lambda: self._used == 0 or self._used + num_pixels <= self.most)
            self._used += num_pixels
        try:
            yield
        finally:
            with self._left:
                self._used -= num_pixels
                self._left.notify()


ROOM = Room(memory_bytes() // PART // PIXEL_BYTES)  # of the process
