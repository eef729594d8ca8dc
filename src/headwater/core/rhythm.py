"""How often replies come, and when nodes have been silent for much longer than that.

Owns `Rhythm`. Times are given to it, by a clock or a virtual one; what follows is decided in `core.dispatch`.
"""

from __future__ import annotations

LATE_S = (0.05, 1.0)  # at least and at most, between two times that the dispatch is told that nothing came; chosen
TICKS = 2.0  # replies that usually come meanwhile; chosen
KNOWN = 4  # replies of nodes, before it is known how often they come; chosen
OVERDUE = 2.0  # times what nodes once took for as many chunks as they have; chosen: chunks may come in bursts


def late_after_s(num_replies: int, taken_s: float) -> float:
    """How long a trainer waits for nothing before the clock goes on, where so many replies took so long, the first one
    not counted.

    The clock counts replies. Where none come since all wait for a slow node, it has to go on about as fast, or what is
    twice as slow as others would be found out only after as many seconds as others make chunks.
    """
    least_s, most_s = LATE_S
    return most_s if num_replies < 2 else min(max(TICKS * taken_s / (num_replies - 1), least_s), most_s)


class Rhythm:
    """Of one epoch's replies."""

    def __init__(self) -> None:
        self._all, self._nodes = _Series(), _Series()

    def replied(self, now: float, *, is_own: bool) -> None:
        """A chunk was finished, by the trainer's own worker or by a node."""
        self._all.add(now)
        if not is_own:
            self._nodes.add(now)

    @property
    def late_after_s(self) -> float:
        """How long the trainer waits for nothing before it says so."""
        return late_after_s(self._all.count, self._all.last - self._all.first)

    def are_overdue(self, now: float, num_out: int) -> bool:
        """Have nodes, which have so many chunks, been silent for much longer than such a number took at their best, by
        now or before they last answered?

        Their best, since a node that crawls makes every mean larger by and by.
        """
        nodes = self._nodes
        silent_s = max(now - nodes.last, nodes.gap_s)
        return nodes.count >= KNOWN and silent_s > max(OVERDUE * max(num_out, 1) * nodes.best_s, LATE_S[0])


class _Series:
    def __init__(self) -> None:
        self.count, self.first, self.last = 0, 0.0, 0.0
        self.gap_s = 0.0  # between the last two
        self.best_s = float("inf")  # the least mean from one to the next so far, of no fewer than KNOWN

    def add(self, now: float) -> None:
        self.first = now if self.count == 0 else self.first
        self.gap_s = now - self.last if self.count else 0.0
        self.count, self.last = self.count + 1, now
        if self.count >= KNOWN:
            self.best_s = min(self.best_s, (now - self.first) / (self.count - 1))
