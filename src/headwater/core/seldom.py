"""What is worth a line in the log, when a stranger could cause a thousand of them a second.

Owns `Seldom`: a bucket of lines that fills up again with time. What is left out is counted, and the next line says so.
"""

from __future__ import annotations


class Seldom:
    """`burst` lines at once, and one more every `every_s`."""

    def __init__(self, burst: int, every_s: float) -> None:
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._at: float | None = None
        self._num_left_out = 0

    def may(self, now: float) -> int | None:
        """None: leave this line out. Otherwise: write it, and say that so many were left out before it."""
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) / self._every_s)
        self._at = now
        if self._left < 1:
            self._num_left_out += 1
            return None
        self._left -= 1
        told, self._num_left_out = self._num_left_out, 0
        return told
