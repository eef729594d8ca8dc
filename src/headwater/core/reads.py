"""How many samples are read at once over a link that others need, too.

Owns `Reads`, a state machine: how long each read took goes in, how many may be under way comes out. Many reads at once
hide the time that a store takes to answer. Once they only wait for each other on the link, more of them bring nothing;
and whatever else comes over it, such as rows from nodes, gets a part that is the smaller the more of them there are.

What holds (tests/core/test_reads.py): never fewer than `least` and never more than `most`; reads that are all answered
within `CROWDED_S` are never held back; a link on which they share what it carries is left to as few as fill it.
"""

from __future__ import annotations

CROWDED_S = 0.05  # a read that takes no longer crowds nobody
TIMES = 3.0  # as long as the fastest: so much longer than alone, reads wait for each other


class Reads:
    """Begins with as many as there may be."""

    def __init__(self, most: int, least: int = 4) -> None:
        assert most >= 1
        self._most, self._least = most, min(least, most)
        self.at_once = most
        self._fastest_s = float("inf")
        self._sum_s, self._count = 0.0, 0

    def took(self, seconds: float) -> int:
        """A read is done; how many may be under way from here on."""
        self._fastest_s = min(self._fastest_s, seconds)
        self._sum_s += seconds
        self._count += 1
        if self._count < 2 * self.at_once:  # one round that began under the number before, and one of its own
            return self.at_once
        mean_s, crowded_s = self._sum_s / self._count, max(CROWDED_S, TIMES * self._fastest_s)
        self._sum_s, self._count = 0.0, 0
        if mean_s > crowded_s:
            self.at_once = max(self._least, self.at_once // 2)
        elif mean_s < crowded_s / 4:  # twice as many would take at most twice as long, and are still well below
            self.at_once = min(self._most, self.at_once * 2)
        return self.at_once
