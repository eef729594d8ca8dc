"""A limit on how much of something there is in a second. Owns `Rate`: amounts and times go in, waits come out.

What holds (tests/core/test_rate.py): over any stretch of time, what was let begin is at most what the rate allows for
it, and one amount more; whoever comes when nothing was asked for lately does not wait.
"""

from __future__ import annotations


class Rate:
    """`per_s` on average. An amount may begin once all that came before it has had its time."""

    def __init__(self, per_s: float) -> None:
        assert per_s > 0
        self._per_s = per_s
        self._free_at = float("-inf")

    def wait_s(self, amount: float, now: float) -> float:
        """How long to wait before this amount may begin; it counts from then on."""
        begin = max(now, self._free_at)
        self._free_at = begin + amount / self._per_s
        return begin - now
