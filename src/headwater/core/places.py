"""How many may be at work at once, where some of them may never come back: of one place no more than half.

Owns `Places`, a count without clock or lock. A place is what shares a fate: a root of the store, whose disk may hang,
or a tenant where there is one root alone. With several of them there is room for twice as many, so that one alone has
as many as without the others.

What holds (tests/core/test_places.py): of one place no more than `most` get in; where there are several, whoever else
comes gets in however many of one place never leave.
"""

from __future__ import annotations

from collections import Counter


class Places:
    def __init__(self, most: int, are_several: bool = False) -> None:
        assert most >= 1
        self.most = most  # of one place
        self.total = 2 * most if are_several else most
        self._inside: Counter[str] = Counter()

    def may(self, place: str) -> bool:
        return self._inside[place] < self.most and self._inside.total() < self.total

    def take(self, place: str) -> None:
        assert self.may(place)
        self._inside[place] += 1

    def give(self, place: str) -> None:
        assert self._inside[place] >= 1
        self._inside[place] -= 1
        if not self._inside[place]:
            del self._inside[place]
