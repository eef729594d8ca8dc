"""What is shared: cores, links, disks, accelerators, as one kind of resource under SimPy's clock.

Owns `Shared` and `Line`. Tasks on a `Shared` progress alike, at capacity ÷ tasks and at most `each`; that is what a
scheduler does with threads, and a fair queue with flows. Instead of moving every task on at every change, the work that
each has had by now is one number for all (virtual time), so that a change costs the logarithm of the tasks.

A transfer over several links has its bytes on all of them at once and is over when the last one is through (`carry`):
alone it takes bytes ÷ the narrowest, and no link ever carries more than it can. What this leaves out: a flow that is
held up on one link takes no less of another meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import simpy

Done = Callable[[], None]
_TINY = 1e-12


class Shared:
    """`capacity` units a second, shared evenly; no task gets more than `each`."""

    def __init__(self, env: simpy.Environment, capacity: float, each: float = float("inf")) -> None:
        assert capacity > 0
        self._env, self._capacity, self._each = env, capacity, each
        self._factor = 1.0
        self._heap: list[tuple[float, int, Done]] = []  # (had when done, in which order they came, what then)
        self._order = count()
        self._had = 0.0  # units that every task there now would have had, had it been there from the beginning
        self._since = env.now
        self._timer, self._rings_at = 0, float("inf")  # only the latest counts; one that is early is set again
        self.used = 0.0  # units in all
        self.busy_s = 0.0  # seconds with anything to do
        self.full_s = 0.0  # seconds, each counted by the part of the capacity of that moment that was used

    @property
    def capacity(self) -> float:
        return self._capacity * self._factor

    @property
    def num_tasks(self) -> int:
        return len(self._heap)

    def slow(self, factor: float) -> None:
        """From now on it does so much of what it did at first."""
        assert factor > 0
        self._move_on()
        self._factor = factor
        self._set_timer()

    def use(self, amount: float, then: Done) -> None:
        """Call `then` once this task has had so many units."""
        if amount <= 0:
            then()
            return
        self._move_on()
        heapq.heappush(self._heap, (self._had + amount, next(self._order), then))
        self._set_timer()

    def usage(self) -> tuple[float, float]:
        """Units given so far, and seconds with anything to do."""
        self._move_on()
        return self.used, self.busy_s

    def full(self) -> float:
        """Seconds so far, as if all of it or nothing had been used; what slowed it down meanwhile changes nothing."""
        self._move_on()
        return self.full_s

    def _rate(self) -> float:
        """Of each task."""
        return min(self._each * self._factor, self.capacity / len(self._heap))

    def _move_on(self) -> None:
        now = self._env.now
        if self._heap and now > self._since:
            had = (now - self._since) * self._rate()
            self._had += had
            self.used += had * len(self._heap)
            self.busy_s += now - self._since
            self.full_s += had * len(self._heap) / self.capacity
        self._since = now

    def _set_timer(self) -> None:
        """There is one for when the first is done, or before: tasks that come later put that off."""
        if not self._heap:
            return
        in_s = max(0.0, (self._heap[0][0] - self._had) / self._rate())
        if self._rings_at <= self._env.now + in_s:
            return
        self._timer += 1
        number, self._rings_at = self._timer, self._env.now + in_s
        event = self._env.timeout(in_s)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: self._ring(number))

    def _ring(self, number: int) -> None:
        if number != self._timer:
            return
        self._rings_at = float("inf")
        self._move_on()
        if not self._heap:
            return
        now, left = self._env.now, self._heap[0][0] - self._had
        if left > 0 and now + left / self._rate() > now * (1 + _TINY):
            self._set_timer()
            return
        # Exactly what the first was to have, whatever rounding made of it.
        self._had = max(self._had, self._heap[0][0])
        limit = self._had * (1 + _TINY)
        done = []
        while self._heap and self._heap[0][0] <= limit:
            done.append(heapq.heappop(self._heap)[2])
        if not self._heap:
            self._had = 0.0  # so that long runs lose no digits
        self._set_timer()
        for then in done:
            then()


class Line(Shared):
    """One direction of a link: bytes a second, and how long a byte takes to get through: `latency_s`, and `queue_s`
    more where others have filled the link's buffer."""

    def __init__(
        self, env: simpy.Environment, bytes_per_s: float, latency_s: float = 0.0, queue_s: float = 0.0
    ) -> None:
        super().__init__(env, bytes_per_s)
        self.latency_s, self.queue_s = latency_s, queue_s
        self.num_bytes = 0.0

    @property
    def delay_s(self) -> float:
        return self.latency_s + (self.queue_s if self.num_tasks else 0.0)


def carry(env: simpy.Environment, path: Sequence[Line], num_bytes: float, left: Done, there: Done) -> None:
    """Send bytes over all lines of the path: `left` is called when the sender has none left, `there` when they have
    arrived."""
    waiting = len(path)

    def through() -> None:
        nonlocal waiting
        waiting -= 1
        if waiting > 0:
            return
        left()
        after(env, sum(line.delay_s for line in path), there)

    if not path:
        left()
        after(env, 0.0, there)
    for line in path:
        line.num_bytes += num_bytes
        line.use(num_bytes, through)


def after(env: simpy.Environment, seconds: float, then: Done) -> None:
    """Call `then` in so many seconds; not from within this call, though it be none: chains of events may be long."""
    event = env.timeout(max(0.0, seconds))
    assert event.callbacks is not None
    event.callbacks.append(lambda _: then())


def together(parts: Iterable[Callable[[Done], None]], then: Done) -> None:
    """Begin all parts; `then` once all are done."""
    begun = list(parts)
    left = len(begun)

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    if not begun:
        then()
    for part in begun:
        part(one)
