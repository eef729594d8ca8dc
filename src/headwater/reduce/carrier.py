"""Carries buckets: by the aggregator while it is there, by the ordinary all-reduce while it is not. Owns `Carrier`.

One thread a worker. Every worker is given the same buckets in the same order, and all of them go over from one way to
the other at the same bucket:

    by the aggregator ──any of: it is gone, a worker is gone, it does not answer──▶ settling
    settling: every worker says which sums it has, and how many buckets it has begun (a collective).
              Sums that some have go to all (`core.agree`); what nobody has is added up by the ordinary all-reduce, for
              every bucket that any worker had begun, so that all do the same collectives ──▶ by all-reduce
    by all-reduce: before each bucket all say whether they have joined again; once all have ──▶ by the aggregator

Nobody is left behind: a worker that has not noticed gets no further sum either, and notices; a worker that is dead
makes the collective fail on all others, within its time-out, and then the run stops with an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from headwater.core.agree import settle
from headwater.core.sums import EXPONENTS, Format
from headwater.errors import HeadwaterError, ReduceError, WorkerGoneError
from headwater.reduce.call import Call
from headwater.reduce.fallback import Fallback
from headwater.reduce.joining import Joined, Ticket
from headwater.reduce.reducer import Reducer, StalledError
from headwater.reduce.rejoin import Rejoin

_IDLE_S = 3600.0  # something always wakes the thread

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Bucket:
    """Flat values that all workers have, and what to do once they are the mean of all."""

    values: npt.NDArray[Any]
    number: Format
    finished: Callable[[BaseException | None], None]
    prepare: Callable[[], None] | None = None  # in the carrier's thread, before anything else


class Carrier:
    """The thread, and what others may ask of it."""

    def __init__(
        self, switch: str, where: tuple[str, int], ticket: Ticket, joined: Joined, fallback: Fallback, timeout_s: float
    ) -> None:
        self._switch, self._where, self._ticket = switch, where, ticket
        self._fallback, self._timeout_s = fallback, timeout_s
        self._reducer: Reducer | None = None
        self._rejoin: Rejoin | None = None
        self._round = 0  # how often the way changed
        self._begun = 0  # buckets
        self.num_by_switch = self.num_by_group = 0  # buckets that were finished so
        self.num_settled = 0  # how often the aggregator was lost
        self.failed: BaseException | None = None
        self._queue: deque[Bucket] = deque()
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        os.set_blocking(self._tell, False)
        self._closing = self._has_left = False
        self._over = threading.Event()
        self._new = threading.Condition()
        self._use(joined)
        self._thread = threading.Thread(target=self._run, name="headwater reduce", daemon=True)
        self._thread.start()

    # From other threads

    def put(self, bucket: Bucket) -> None:
        """Add these up. `finished` is called in the carrier's thread, with an error if there is one."""
        with self._new:
            if self.failed is None:
                self._queue.append(bucket)
                self._new.notify()
        if self.failed is not None:
            raise self.failed
        self._wake()

    @property
    def is_by_switch(self) -> bool:
        return self._reducer is not None

    @property
    def counts(self) -> dict[str, int]:
        reducer = self._reducer
        return dict(reducer.counts) if reducer is not None else {}

    def leave(self) -> None:
        """Tell the aggregator that this worker is done, and no more; for the end of the process."""
        self._has_left = True
        reducer = self._reducer
        if reducer is not None:
            reducer.say_goodbye()

    def close(self) -> None:
        """Finish what was put, and end the thread."""
        with self._new:
            self._closing = True
            self._new.notify()
        self._wake()
        self._over.wait(2 * self._timeout_s)

    def _wake(self) -> None:
        with self._new, contextlib.suppress(OSError):  # full: it is awake; closed: it is over
            os.write(self._tell, b"\0")

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_over:
                if self._reducer is not None:
                    self._by_switch(self._reducer)
                else:
                    self._by_group()
        except BaseException as error:
            self._fail(error)
        finally:
            if self._reducer is not None:
                self._reducer.close()
            if self._rejoin is not None:
                self._rejoin.stop()
            with self._new:
                for fd in (self._told, self._tell):
                    os.close(fd)
                self._told = self._tell = -1
            self._over.set()

    @property
    def _is_over(self) -> bool:
        return self._closing and not self._queue and (self._reducer is None or self._reducer.is_idle)

    def _use(self, joined: Joined) -> None:
        self._reducer = Reducer.of(self._switch, joined, self._ticket.rank, self._timeout_s)
        self._reducer.watch(self._told)
        self._pending: deque[Bucket] = deque()  # begun on this reducer, and not finished

    def _by_switch(self, reducer: Reducer) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                os.read(self._told, 4096)
            while self._queue:
                self._begin(reducer, self._queue.popleft())
            if not self._is_over:  # looked at behind the read: it may just have taken what was to wake us
                reducer.pump(_IDLE_S)
        except ReduceError as error:
            if self._has_left:
                self._closing = True  # the process ends, and so may everybody else
                self._reducer = None
                return
            if type(error) is ReduceError or isinstance(error, StalledError):
                raise  # workers disagree about what they add up, or one hangs: no other way helps
            self._settle(reducer, error)

    def _begin(self, reducer: Reducer, bucket: Bucket) -> None:
        self._begun += 1
        if bucket.prepare is not None:
            bucket.prepare()
        self._pending.append(bucket)

        def finished(call: Call) -> None:
            self._pending.remove(bucket)
            self.num_by_switch += 1
            bucket.finished(None)

        reducer.begin(bucket.values, mean=True, number=bucket.number, finished=finished)

    def _settle(self, reducer: Reducer, why: ReduceError) -> None:
        """The aggregator is lost: end with the same bits on all workers what any of them has begun."""
        log.warning("going on with the ordinary all-reduce: %s", why)
        self.num_settled += 1
        reducer.abandon()  # so that all others hear of it, whoever noticed first
        reports = self._fallback.gather([self._begun, *reducer.stream.machine.done])
        steps, done = settle([report[1:] for report in reports])
        for step in steps:
            reducer.accept(step.block, self._fallback.spread(reducer.held(step.block), step.source))
        for call, spans in list(reducer.unsettled(done)):
            if call.number is EXPONENTS:
                continue  # what they were for is added up as it is
            for start, stop in spans:
                self._fallback.add_up(call.values[start:stop], call.number, mean=True)
            if call.num_left:
                self.num_by_switch -= 1  # `finished` counts it there
                self.num_by_group += 1
                call.done(call.num_left)
        for _ in range(max(report[0] for report in reports) - self._begun):
            self._by_all_reduce(self._next())
        self._reducer = None
        self._round += 1
        self._rejoin = Rejoin(self._where, replace(self._ticket, session=f"{self._ticket.session}.{self._round}"))

    def _by_group(self) -> None:
        assert self._rejoin is not None
        with self._new:
            self._new.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return
        if not self._fallback.least(int(self._rejoin.has_joined)):
            self._by_all_reduce(self._next())
            return
        log.warning("the aggregator at %s is back; using it again", self._switch)
        self._use(self._rejoin.take())
        self._rejoin = None

    def _by_all_reduce(self, bucket: Bucket) -> None:
        self._begun += 1
        self._pending.append(bucket)
        if bucket.prepare is not None:
            bucket.prepare()
        self._fallback.add_up(bucket.values, bucket.number, mean=True)
        self.num_by_group += 1
        self._pending.remove(bucket)
        bucket.finished(None)

    def _next(self) -> Bucket:
        """The next bucket; the others have begun it, so it comes, unless the loop of this worker has stopped."""
        with self._new:
            if not self._new.wait_for(lambda: bool(self._queue), self._timeout_s):
                raise WorkerGoneError(f"the other workers add up a bucket that did not come here for "
                                      f"{self._timeout_s:g} s (timeout_s); all must run the same loop")  # fmt: skip
            return self._queue.popleft()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, HeadwaterError):
            log.error("adding up gradients failed: %s", error)
        else:
            log.exception("adding up gradients failed")
        with self._new:
            self.failed = error
            left = [*self._pending, *self._queue]
            self._queue.clear()
        for bucket in left:
            bucket.finished(error)
