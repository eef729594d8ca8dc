"""How many samples are read at once over a link that others need, too.

Owns `Reads`, a state machine: how long each read took goes in, how many may be under way comes out. Many reads at once
hide the time that a store takes to answer. Once they only wait for each other on the link, more of them bring nothing;
and whatever else comes over it, such as rows from nodes, gets a part that is the smaller the more of them there are.

What holds (tests/core/test_reads.py): never fewer than `least` and never more than `most`; reads that are all answered
within `CROWDED_S` are never held back; a link on which they share what it carries is left to as few as fill it; once
reads take no longer than one alone, there are as many as at first.

Its numbers are chosen, not measured: a read of 50 ms still leaves a link of 10 Mbit/s to others within a tenth of a
second, and four reads fill a link unless a store answers later than it sends.
"""

from __future__ import annotations

CROWDED_S = 0.05  # a read that takes no longer crowds nobody
TIMES = 3.0  # as long as the fastest: so much longer than alone, reads wait for each other
_FORGETS = 1.02  # a round: what was fastest long ago may have been a link, or a sample, that is no more


class Reads:
    """Begins with as many as there may be."""

    def __init__(self, most: int, least: int = 4) -> None:
        assert most >= 1
        self._most, self._least = most, min(least, most)
        self.at_once = most
        self._fastest_s = float("inf")
        self._sum_s, self._count = 0.0, 0

    def took(self, seconds: float) -> int:
        """A sample was read; how many may be under way from here on."""
        self._fastest_s = min(self._fastest_s, seconds)
        self._sum_s += seconds
        self._count += 1
        if self._count < 2 * self.at_once:  # one round that began under the number before, and one of its own
            return self.at_once
        mean_s, crowded_s = self._sum_s / self._count, max(CROWDED_S, TIMES * self._fastest_s)
        self._sum_s, self._count = 0.0, 0
        self._fastest_s *= _FORGETS
        if mean_s > crowded_s:
            self.at_once = max(self._least, self.at_once // 2)
        elif mean_s < crowded_s / 2:  # twice as many would take at most twice as long
            self.at_once = min(self._most, self.at_once * 2)
        return self.at_once
