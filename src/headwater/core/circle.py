"""Which nodes add their gradients up among themselves, on an aggregator, so that one sum travels in place of all.

Owns `Circle`: the trainer's view of it, from one step to the next. Times go in, decisions come out. Within a step,
`core.partition.Step` decides.

A circle has a number, and belongs to the sessions that it was made of. It is used for one sum after the other, and adds
up by position alone: what a node gives next is added to what the others give next. So it must never be used again
once any of them may have given something that did not become a sum. What holds (tests/core/test_circle.py explores it,
with steps, nodes and an aggregator around it):

1. Nobody adds up together before all have said that they are there.
2. A circle ends with the first sum that was begun and has not come, whatever the reason; with the first node that can't
   go on with it; and with the first session of it that ends. Its number is not given again.
3. The next one is tried at once if nothing else was wrong than who is there, and otherwise after a while, which doubles
   until a sum has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AGAIN_S, MOST_AGAIN_S = 1.0, 32.0  # until another one is tried
GATHER_WITHIN_S = 60.0  # nodes answer within half of that


@dataclass(frozen=True)
class Gather:
    """Tell these nodes to meet; a node's place here is its rank."""

    number: int
    nodes: tuple[int, ...]


class Circle:
    """The one that is there, or is coming together; `members` are empty where there is none."""

    def __init__(self) -> None:
        self.number = 0
        self._sessions: dict[int, int] = {}  # by node; empty: there is none, nor one coming
        self._met: set[int] = set()
        self._is_adding = False
        self._since = 0.0
        self._again_at = float("-inf")
        self._again_s = AGAIN_S

    @property
    def members(self) -> frozenset[int]:
        """Who add up together from now on."""
        return frozenset(self._met) if len(self._met) == len(self._sessions) else frozenset()

    def look(self, sessions: Mapping[int, int], now: float) -> Gather | None:
        """Before each step, with the session of each node that is there."""
        if self._sessions and self._is_adding:
            self._end(now)
        elif self._sessions and self._sessions != dict(sessions):
            self._sessions = {}
            self._met.clear()
        elif not self.members and self._sessions and now - self._since > GATHER_WITHIN_S:
            self._end(now)
        if self._sessions or len(sessions) < 2 or now < self._again_at:
            return None
        self.number += 1
        self._sessions, self._since, self._is_adding = dict(sessions), now, False
        self._met.clear()
        return Gather(self.number, tuple(sorted(sessions)))

    def met(self, node: int, number: int) -> None:
        """A node has met the others."""
        if number == self.number and node in self._sessions:
            self._met.add(node)

    def apart(self, node: int, number: int, now: float) -> bool:
        """A node could not meet the others, or can't go on with them; whether that is news."""
        if number != self.number or node not in self._sessions:
            return False
        self._end(now)
        return True

    def begins(self) -> None:
        """They are told to add up."""
        assert self.members
        assert not self._is_adding
        self._is_adding = True

    def added(self) -> None:
        """The sum is here."""
        self._is_adding = False
        self._again_s = AGAIN_S

    def _end(self, now: float) -> None:
        self._sessions, self._is_adding = {}, False
        self._met.clear()
        self._again_at = now + self._again_s
        self._again_s = min(MOST_AGAIN_S, 2 * self._again_s)
