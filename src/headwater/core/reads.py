"""How many samples are read at once over a link that others need, too.

Owns `Reads`, a state machine: how long each read took goes in, how many may be under way comes out. Many reads at once
hide the time that a store takes to answer. Once they only wait for each other on the link, more of them bring nothing;
and whatever else comes over it, such as rows from nodes, gets a part that is the smaller the more of them there are.

Which of both it is, a try tells: with half as many under way, a full link carries as much as before, and a store that
takes long to answer gives half. So reads that take long are halved in number, and that stays if it cost little; where
there are few, now and then twice as many are tried, and that stays if it brought something. A try in vain is not
repeated soon.

What holds (tests/core/test_reads.py): never fewer than `least` and never more than `most`; reads that are all answered
within `CROWDED_S` are never held back; a link on which they share what it carries is left to a few; a store that is
slow to answer keeps nearly all of its readers.
"""

from __future__ import annotations

CROWDED_S = 0.05  # a read that takes no longer crowds nobody; chosen, not measured
LOSES, GAINS = 0.85, 1.15  # of the rate before: what fewer may cost, and what more must bring
_FIRST_PAUSE, _LONGEST_PAUSE = 2, 64  # rounds, after a try in vain


class Reads:
    """Begins with as many as there may be."""

    def __init__(self, most: int, least: int = 4) -> None:
        assert most >= 1
        self._most, self._least = most, min(least, most)
        self.at_once = most
        self._sum_s, self._bytes, self._count = 0.0, 0, 0
        self._before: tuple[int, float] | None = None  # how many, and how many bytes a second, before the try under way
        self._skip = 0  # reads that began under another number say nothing about this one
        self._wants_fewer = True
        self._wait, self._pause = 0, _FIRST_PAUSE

    def took(self, seconds: float, num_bytes: int) -> int:
        """A sample was read; how many may be under way from here on."""
        if self._skip:
            self._skip -= 1
            return self.at_once
        self._sum_s += seconds
        self._bytes += num_bytes
        self._count += 1
        if self._count >= 2 * self.at_once:
            mean_s = self._sum_s / self._count
            rate = self.at_once * self._bytes / max(self._sum_s, 1e-9)
            self._sum_s, self._bytes, self._count = 0.0, 0, 0
            self._round(mean_s, rate)
        return self.at_once

    def _round(self, mean_s: float, rate: float) -> None:
        if self._before is not None:
            self._judge(*self._before, rate)
        elif self._wait:
            self._wait -= 1
        elif mean_s <= CROWDED_S:
            self._try(self.at_once * 2, rate)
        elif self._wants_fewer:
            self._try(self.at_once // 2, rate)
        else:
            self._wants_fewer = True
            self._try(self.at_once * 2, rate)

    def _try(self, wanted: int, rate: float) -> None:
        wanted = min(max(wanted, self._least), self._most)
        if wanted != self.at_once:
            self._before, self._skip = (self.at_once, rate), self.at_once
            self.at_once = wanted
        else:
            self._wants_fewer = wanted == self._most

    def _judge(self, before: int, was: float, rate: float) -> None:
        self._before = None
        if rate >= was * (LOSES if self.at_once < before else GAINS):
            self._pause = _FIRST_PAUSE
            return
        self._wants_fewer = self.at_once > before  # the other way next
        self._skip, self.at_once = self.at_once, before
        self._wait, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
