"""A fixed number of threads that take the most urgent task of whoever has had the least of their time.

Owns `Pool`. Its threads do the CPU work of a node or a trainer: one a core, so that decoding and inference never
compete for more cores than there are; urgency lets a finished group run before more pictures are decoded, and
`core.fair` says whose turn it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from headwater.core.fair import Fair

Task = Callable[[], None]

END_WITHIN_S = 10.0  # that a task may go on after it was told to end; the longest is the inference of one group


class Pool:
    """Tasks must not raise: whoever submits one deals with its errors inside."""

    def __init__(self, num_threads: int, name: str) -> None:
        assert num_threads >= 1
        self._at_once, self._running = num_threads, 0
        self._tasks: Fair[Task] = Fair()
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
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

    def submit(self, urgency: int, task: Task, tenant: str = "", weight: float = 1.0) -> None:
        """Queue a task; of a tenant's, the lowest urgency number first, then the oldest."""
        with self._wake:
            self._tasks.put(tenant, urgency, task, weight)
            self._wake.notify()

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

    def _work(self) -> None:
        while True:
            with self._wake:
                while (not self._tasks or self._running >= self._at_once) and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                turn, task = self._tasks.take()
                self._running += 1
            start = time.perf_counter()
            task()
            del task  # don't keep its buffers alive while waiting for the next
            with self._wake:
                self._tasks.took(turn, time.perf_counter() - start)
                self._running -= 1
