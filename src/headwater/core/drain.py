"""How a node stops: it takes nothing new, finishes what it has within a while, and ends.

Owns `Drain`, a state machine without clock, lock or signal: events go in, and whoever asks gets its state.

    serving ──told──▶ draining ──the last request ends, the time is up, told again──▶ ended

What holds, whatever happens and in whatever order (tests/core/test_drain.py explores it exhaustively):
1. A request begins only while the node serves.
2. There is no way back.
3. A node that drains has something under way, and time left.
4. It is draining for `within_s` at most, and being told twice ends it at once.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


class Drain:
    """`within_s` is the time that requests under way have once the node is told to stop."""

    def __init__(self, within_s: float) -> None:
        assert within_s >= 0
        self._within_s = within_s
        self._deadline = 0.0
        self.state = State.SERVING
        self.num_under_way = 0
        self.why = ""  # it ended

    def begin(self) -> bool:
        """A request wants to begin; False if it must not. One that did will `finish`."""
        if self.state is not State.SERVING:
            return False
        self.num_under_way += 1
        return True

    def finish(self) -> None:
        """A request that had begun is over, however it went."""
        assert self.num_under_way > 0
        self.num_under_way -= 1
        if self.state is State.DRAINING and self.num_under_way == 0:
            self._end("everything under way was finished")

    def told(self, now: float) -> None:
        """Somebody wants the node to stop."""
        if self.state is State.DRAINING:
            self._end(f"told again with {self._left()} under way")
        elif self.state is State.SERVING:
            self.state = State.DRAINING
            self._deadline = now + self._within_s
            if self.num_under_way == 0:
                self._end("nothing was under way")
            else:
                self.passed(now)

    def passed(self, now: float) -> None:
        """It is so late now."""
        if self.state is State.DRAINING and now >= self._deadline:
            self._end(f"{self._left()} took longer than {self._within_s:g} s and was cut off; trainers ask other nodes")

    def end(self, why: str) -> None:
        """Whoever the node works for is gone."""
        if self.state is not State.ENDED:
            self._end(why)

    def left_s(self, now: float) -> float | None:
        """When to tell it the time next; None while it does not matter."""
        return max(0.0, self._deadline - now) if self.state is State.DRAINING else None

    def _left(self) -> str:
        return f"{self.num_under_way} request" + ("s" if self.num_under_way != 1 else "")

    def _end(self, why: str) -> None:
        self.state, self.why = State.ENDED, why
