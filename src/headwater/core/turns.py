"""Who may work on a chunk now: so many of each job at once, not counting those whose trainer has stopped reading.

Owns `Turns`, a state machine without clock or lock: times go in, answers come out. A stream that waits for its trainer
for longer than `stalled_s` lends its turn to the next in line; otherwise one trainer that is stopped in the middle of
its replies (Ctrl-Z, a debugger) would hold up everybody. It keeps its buffers, so no more than `MOST_STALLED` times as
many streams of a job are let in, stalled or not. Jobs don't wait for each other here: what all of them together may
hold is a matter of memory (`core.admission`).

What holds (tests/core/test_turns.py): of a job no more than `most` that are not stalled get in; no more than
`MOST_STALLED` times as many in all; while there is room, whoever asks gets in.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST_STALLED = 4


class Turns:
    def __init__(self, most: int, stalled_s: float) -> None:
        assert most >= 1
        self._most = most
        self._stalled_s = stalled_s
        self._held: dict[int, float | None] = {}  # turn → since when its stream waits for its trainer
        self._jobs: dict[int, str] = {}  # turn → whose it is
        self._next = 0

    def take(self, now: float, job: str = "") -> int | None:
        """A turn; None if there is none now."""
        own = [self._held[turn] for turn, whose in self._jobs.items() if whose == job]
        if len(own) >= MOST_STALLED * self._most or self._count(own, now) >= self._most:
            return None
        self._next += 1
        self._jobs[self._next] = job
        self._held[self._next] = None
        return self._next

    def waits(self, turn: int, now: float) -> None:
        """From now on this one's stream waits for its trainer."""
        self._held[turn] = now

    def goes_on(self, turn: int) -> None:
        """Its trainer has taken what there was."""
        self._held[turn] = None

    def give_back(self, turn: int) -> None:
        del self._held[turn], self._jobs[turn]

    @property
    def num_held(self) -> int:
        """Turns that were taken, whether or not they count."""
        return len(self._held)

    def num_working(self, now: float) -> int:
        """Turns that count."""
        return self._count(self._held.values(), now)

    def _count(self, held: Iterable[float | None], now: float) -> int:
        return sum(since is None or now - since <= self._stalled_s for since in held)
