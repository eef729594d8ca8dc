"""A fixed number of threads that take the most urgent task of whoever has had the least of their time.

Owns `Pool`. Its threads do the CPU work of a node or a trainer: one a core, so that decoding and inference never
compete for more cores than there are; urgency lets a finished group run before more pictures are decoded, and
`core.fair` says whose turn it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from headwater.core.fair import Fair
from headwater.core.places import Places

Task = Callable[[], None]

END_WITHIN_S = 10.0  # that a task may go on after it was told to end; the longest is the inference of one group


class Pool:
    """Tasks must not raise: whoever submits one deals with its errors inside."""

    def __init__(self, num_threads: int, name: str, places: Places | None = None) -> None:
        """`places` says how many of one place may run at once; there is a thread for all that it lets in."""
        assert num_threads >= 1
        num_threads = num_threads if places is None else places.total
        self._at_once, self._running = num_threads, 0
        self._began: dict[int, tuple[float, str]] = {}  # thread → since when its task runs, and where
        self._tasks: Fair[Task] = Fair(places)
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def allow(self, at_once: int) -> None:
        """Have no more than so many tasks run at once, from the next one on."""
        assert at_once >= 1
        with self._wake:
            if at_once > self._at_once:  # those who wait were told of their tasks before
                self._wake.notify_all()
            self._at_once = at_once

    def submit(self, urgency: int, task: Task, tenant: str = "", weight: float = 1.0, place: str = "") -> None:
        """Queue a task; of a tenant's, the lowest urgency number first, then the oldest."""
        with self._wake:
            self._tasks.put(tenant, urgency, task, weight, place)
            self._wake.notify()

    def running_for(self, seconds: float) -> Counter[str]:
        """How many tasks of each place have run for longer than that."""
        before = time.perf_counter() - seconds
        with self._wake:
            return Counter(place for began, place in self._began.values() if began < before)

    def close(self, within_s: float = END_WITHIN_S) -> None:
        """Drop what is queued, finish what runs, end the threads; those that hang, on a dead disk, are left behind."""
        with self._wake:
            self._closed = True
            self._tasks.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may close a job anywhere
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, number: int) -> None:
        while True:
            with self._wake:
                while (self._running >= self._at_once or not self._tasks.may) and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                turn, task = self._tasks.take()
                self._running += 1
                start = time.perf_counter()
                self._began[number] = start, turn.place
            task()
            del task  # don't keep its buffers alive while waiting for the next
            with self._wake:
                self._tasks.took(turn, time.perf_counter() - start)
                self._running -= 1
                del self._began[number]
