"""Chunks in, replies out, in order: the threads and queues around `core.dispatch`.

Owns `Feed`. Which worker gets which chunk is the dispatch's decision; what is this file's own: which errors are worth
another try, after what pause, and when patience is over.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from headwater.core.dispatch import Assign, Decision, Deliver, Dispatch, Keep, Pace, Stop, window_of
from headwater.core.prongs import TwoEnded
from headwater.core.rhythm import Rhythm
from headwater.data.wire import Chunk
from headwater.errors import (
    ConfigError,
    DamagedError,
    HeadwaterError,
    RefusedError,
    StoreError,
    UnreachableError,
    VersionError,
)
from headwater.train.host import HostWorker
from headwater.train.reply import QUIET_S, SILENT_TIMES, Heard, Reply, Worker

log = logging.getLogger(__name__)

RETRY_EVERY_S = 1.0
END_WITHIN_S = 5.0  # a thread that waits for a node gone silent ends by itself when its connection is given up
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # before a chunk is tried again whose store failed; doubled each time
STARTS_WITHIN_S = 10.0  # a worker that takes longer to answer is there: it is sent a prefix, or being started
MAX_DEATHS = 10  # of nodes while they worked on the same chunk: it may be what kills them
# What another try, or another node, may mend: what is said of a node or its store; and what nobody foresaw, which is a
# HeadwaterError and nothing more. Anything else is the same everywhere and stops the job at once.
_WORTH_A_RETRY = (StoreError, RefusedError, DamagedError, VersionError)


class Feed:
    """One epoch's chunks through some workers. Iterate over it once; `close` lets go of everything."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        num_chunks: int,
        chunk: Callable[[int, str], Chunk],
        *,
        per_worker: int,
        patience_s: float,
        arrived: Callable[[Reply], None] = lambda reply: None,
        able: Callable[[int], Collection[str]] | None = None,
        more_ahead: int = 0,
        own: str | None = None,
        is_own: Callable[[int], bool] | None = None,
        own_out: int = 2,
        paces: dict[str, Pace] | None = None,
        tail: tuple[int, int] | None = None,
        any_order: bool = False,
        coming: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`chunk` makes the request for a worker; `able` names the workers that can do a chunk (all, without it).

        `arrived` is told of every chunk's reply when it comes, in whatever order. `more_ahead` chunks may wait for
        their turn beyond the usual. `own` is the worker beside this process, with at most `own_out` chunks at once;
        `is_own` says which chunks it shall do.
        `paces` has what is known of workers from an epoch before, and is written to when this one ends. `tail` is the
        first chunk of those that are made while the ones before are used up, and how many may wait; with `any_order`
        whatever is ready is passed on, and chunks are taken from both ends (`core.prongs`). `coming` names the
        workers that are on their way and will `join`: they are waited for.
        """
        self._paces = {} if paces is None else paces
        self._workers = dict(workers)
        self._per_worker, self._more_ahead, self._coming = per_worker, more_ahead, coming
        self._chunk = chunk
        self._patience_s, self._quiet_s = patience_s, patience_s or QUIET_S
        self._arrived = arrived
        window = window_of(len(workers), per_worker, more_ahead)
        self._machine: Dispatch | TwoEnded
        if any_order:
            assert own is not None
            self._machine = TwoEnded(num_chunks, own=own, per_worker=per_worker)
        else:
            self._machine = Dispatch(num_chunks, window=window, per_node=per_worker, able=able, own=own, is_own=is_own,
                                     own_out=own_out, paces=self._paces, tail=tail)  # fmt: skip
        self._begun = time.monotonic()
        self._own, self._tail_first = own, num_chunks if tail is None else tail[0]
        self._tail_chunks = num_chunks - self._tail_first
        self._any_order, self._next = any_order, 0  # the chunk that the loop gets next, where there is an order
        self._asked: dict[int, tuple[str, int, Chunk]] = {}  # by thread: worker, chunk and request under way
        self._num_of_tail, self._tail_made = 0, self._begun  # by nodes, and when the last of them
        self._rhythm = Rhythm()
        self._wake = threading.Condition()
        self._tasks: dict[str, queue.SimpleQueue[int | None]] = {}
        self._kept: dict[int, Reply] = {}
        self._ready: deque[Reply] = deque()
        self._down: dict[str, str] = {}  # worker → why
        self._asking: dict[str, float] = {}  # of those, who is being asked again → since when
        self._alone_s = 0.0  # that nobody has been there who could do what is left
        self._alone_since: float | None = None  # what was not counted yet
        self._deaths: Counter[int] = Counter()  # chunk → how often its node was lost meanwhile
        self._outages: dict[int, tuple[float, int]] = {}  # chunk → since when its store fails, and how often it did
        self._error: HeadwaterError | None = None
        self._last_error: HeadwaterError | None = None
        self._closed = threading.Event()
        self._abandoned = False
        self._threads: list[threading.Thread] = []
        self._left: list[Worker] = []  # which may still be at work on something
        with self._wake:
            for name in workers:
                self._begin(name)
            self._carry_out(self._machine.node_up(*workers))
        # Not joined by `close`: it may be waiting for a node that is out of reach, and holds nothing.
        threading.Thread(target=self._revive, name="revive", daemon=True).start()

    def __iter__(self) -> Iterator[Reply]:
        try:
            while True:
                with self._wake:
                    since = came = told = time.monotonic()
                    while not self._wake.wait_for(self._has_news, timeout=self._rhythm.late_after_s):
                        self._carry_out(self._machine.late(self._are_overdue()))
                        since, came, told = self._silent(since, came, told)
                    if self._ready:
                        reply = self._ready.popleft()
                    elif self._error is not None:
                        raise self._error
                    elif self._machine.done or self._abandoned:
                        return
                    else:
                        raise ConfigError("the job was closed while its loader was in use; close it after the loop")
                yield reply
                del reply
                with self._wake:
                    self._carry_out(self._machine.taken())
        finally:
            self.close()

    def join(self, name: str, worker: Worker) -> None:
        """A worker that came while the epoch runs: it is given chunks from here on."""
        with self._wake:
            if self._closed.is_set() or name in self._workers:
                return
            self._workers[name] = worker
            self._begin(name)
            if isinstance(self._machine, Dispatch):
                self._machine.widen(window_of(len(self._workers), self._per_worker, self._more_ahead))
            self._carry_out(self._machine.node_up(name))
            self._note_alone()

    def leave(self, name: str) -> None:
        """A worker that won't come back: its chunks go to others. A reply that is under way still counts."""
        with self._wake:
            if self._closed.is_set() or name not in self._workers:
                return
            self._left.append(self._workers.pop(name))
            self._down.pop(name, None)
            self._end(self._tasks.pop(name))
            self._carry_out(self._machine.node_down(name))

    def _begin(self, name: str) -> None:
        """Threads for a worker; the lock is held."""
        self._tasks[name] = queue.SimpleQueue()
        given = (name, self._workers[name], self._tasks[name])
        for number in range(self._per_worker):
            thread = threading.Thread(target=self._fetch, args=given, name=f"fetch-{name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _end(self, tasks: queue.SimpleQueue[int | None]) -> None:
        """Have a worker's threads end once they are done with what they have."""
        for _ in range(self._per_worker):
            tasks.put(None)

    def _silent(self, since: float, came: float, told: float) -> tuple[float, float, float]:
        """The loop has waited since then; the lock is held. A chunk that is slow is told of. It may take as long as it
        likes while rows of it come; if none do for a long while the job stops: a store on a dead mount answers neither
        with bytes nor with an error. Rows of other chunks are no help to a loop that wants this one."""
        now = time.monotonic()
        wanted = self._wanted()
        if len(self._down) == len(self._workers) or any(heard.waits_for for _, _, heard in wanted):
            return now, now, now  # that is said elsewhere
        came = max([came, *(heard.came_s for _, _, heard in wanted)])
        if now - told > self._quiet_s:
            told = now
            self._tell_slow(now - since, now - came, wanted)
        if now - came > SILENT_TIMES * self._quiet_s:
            self._last_error = None
            logs = "" if self._are_here() else " Their logs may say more"
            self._carry_out(self._machine.give_up(
                f"no rows have come for {now - came:.0f} s, though {self._who_lives()}; can they read the data (a "
                f"store or a disk that hangs)?{logs}"))  # fmt: skip
        return since, came, told

    def _tell_slow(self, waited_s: float, quiet_s: float, wanted: list[tuple[str, int, Heard]]) -> None:
        if quiet_s > self._quiet_s:
            out = {name: sorted(self._machine.out_on(name)) for name in self._workers}
            work = "; ".join(f"{name} has chunks {', '.join(map(str, some))}" for name, some in out.items() if some)
            log.warning("no rows have come for %.0f s, though %s: %s", quiet_s, self._who_lives(),
                        work or "nobody has any")  # fmt: skip
            return
        found = "; ".join(f"{heard.num_came} of {heard.num_rows} rows of chunk {chunk} are here from {name}"
                          for name, chunk, heard in wanted)  # fmt: skip
        log.warning("the loop has waited for %.0f s, and rows still come: %s", waited_s, found or "nobody has the next")

    def _wanted(self) -> list[tuple[str, int, Heard]]:
        """How what the loop waits for gets on, with whoever is up and has it."""
        up = self._workers.keys() - self._down.keys()
        asked = [(name, chunk, self._workers[name].heard(request)) for name, chunk, request in self._asked.values()
                 if name in up and (self._any_order or chunk == self._next)]  # fmt: skip
        return [(name, chunk, heard) for name, chunk, heard in asked if heard is not None]

    def _are_here(self) -> bool:
        """Is it only threads of this process that have work?"""
        busy = [worker for name, worker in self._workers.items() if self._machine.out_on(name)]
        return all(isinstance(worker, HostWorker) for worker in busy or self._workers.values())

    def _who_lives(self) -> str:
        return "threads of this process are at work" if self._are_here() else "nodes answer"

    def _has_news(self) -> bool:
        return bool(self._ready or self._machine.done or self._error is not None or self._closed.is_set())

    def _are_overdue(self) -> bool:
        """Have nodes been silent for much longer than they usually are? The lock is held."""
        num_out = sum(len(self._machine.out_on(name)) for name in self._workers if name != self._own)
        return self._rhythm.are_overdue(time.monotonic(), num_out)

    @property
    def tail_s(self) -> float | None:
        """When nodes had made the tail, in seconds from the beginning, or would have: this machine may have made some
        of it while it waited for them. None if none made any, or some are away."""
        with self._wake:
            if not self._num_of_tail or self._down.keys() - {self._own}:
                return None
            return (self._tail_made - self._begun) * self._tail_chunks / self._num_of_tail

    @property
    def is_complete(self) -> bool:
        """Has every chunk been passed on?"""
        with self._wake:
            return self._machine.done

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def abandon(self) -> None:
        """What is left is wanted another way: end the threads, and the iteration without an error."""
        self._abandoned = True
        self.close()

    def close(self) -> None:
        """End the threads; replies under way are dropped."""
        with self._wake:
            if self._closed.is_set():
                return
            self._closed.set()
            self._paces.clear()  # who was down in the end is forgotten
            self._paces.update(self._machine.paces)
            self._wake.notify_all()
            workers, threads = [*self._workers.values(), *self._left], list(self._threads)
            for tasks in self._tasks.values():
                self._end(tasks)
        for worker in workers:
            worker.stop(self._closed)
        deadline = time.monotonic() + END_WITHIN_S
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may call us anywhere
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._wake:
            self._kept.clear()
            self._ready.clear()

    def _carry_out(self, decisions: list[Decision], reply: Reply | None = None) -> None:
        """Do what the machine decided; the lock is held."""
        for decision in decisions:
            match decision:
                case Assign(name, chunk):
                    self._tasks[name].put(chunk)
                case Keep(chunk):
                    assert reply is not None
                    self._kept[chunk] = reply
                    self._arrived(reply)
                case Deliver(chunk):
                    self._next = chunk + 1
                    self._ready.append(self._kept.pop(chunk))
                case Stop(reason):
                    kind = type(self._last_error) if self._last_error else UnreachableError
                    plain = (*_WORTH_A_RETRY, UnreachableError, HeadwaterError)
                    self._error = kind(reason) if kind in plain else self._last_error
        self._wake.notify_all()

    def _fetch(self, name: str, worker: Worker, tasks: queue.SimpleQueue[int | None]) -> None:
        while not self._closed.is_set() and (chunk := tasks.get()) is not None:
            if name in self._down or self._workers.get(name) is not worker or self._closed.is_set():
                continue  # handed back when the worker was taken for dead, or left
            try:
                request = self._chunk(chunk, name)
                with self._wake:
                    self._asked[threading.get_ident()] = name, chunk, request
                try:
                    reply = worker.rows(request, self._closed)
                finally:
                    with self._wake:
                        del self._asked[threading.get_ident()]
            except HeadwaterError as error:
                self._went_wrong(name, worker, chunk, error)
            except Exception as error:  # ours; it must not leave the consumer waiting
                log.exception("unexpected error in a fetch thread")
                self._went_wrong(name, worker, chunk, HeadwaterError(f"unexpected {type(error).__name__}: {error}"))
            else:
                with self._wake:
                    if self._closed.is_set():
                        return
                    self._outages.pop(chunk, None)
                    now = time.monotonic()
                    self._rhythm.replied(now, is_own=name == self._own)
                    decisions = self._machine.finished(name, chunk, self._are_overdue())
                    if chunk >= self._tail_first and name != self._own and Keep(chunk) in decisions:
                        self._num_of_tail, self._tail_made = self._num_of_tail + 1, now
                    self._carry_out(decisions, replace(reply, chunk=chunk))

    def _went_wrong(self, name: str, worker: Worker, chunk: int, error: HeadwaterError) -> None:
        if self._workers.get(name) is not worker:
            return  # it has left, and its chunks are with others
        if isinstance(error, StoreError):
            self._store_failed(name, chunk, error)
            return
        with self._wake:
            if self._closed.is_set() or self._error is not None or self._workers.get(name) is not worker:
                return
            self._last_error = error
            if isinstance(error, UnreachableError):
                self._deaths[chunk] += 1
                if self._deaths[chunk] > MAX_DEATHS:
                    self._carry_out(self._machine.give_up(
                        f"nodes stopped answering {MAX_DEATHS} times while they worked on chunk {chunk}; their logs "
                        f"may say why (is it memory?); the last: {error}"))  # fmt: skip
                elif name not in self._down:
                    log.warning("%s", error)
                    self._down[name] = str(error)
                    self._carry_out(self._machine.node_down(name))
            elif isinstance(error, _WORTH_A_RETRY) or type(error) is HeadwaterError:
                log.warning("chunk %d will be tried again: %s", chunk, error)
                self._carry_out(self._machine.failed(name, chunk, str(error)))
            else:
                self._error = error
                self._wake.notify_all()

    def _store_failed(self, name: str, chunk: int, error: StoreError) -> None:
        """A store that is restarted, or says that it is busy, is asked again after a pause, while patience lasts."""
        with self._wake:
            now = time.monotonic()
            since, times = self._outages.get(chunk, (now, 0))
            self._outages[chunk] = since, times + 1
        pause_s = min(FIRST_PAUSE_S * 2**times, LONGEST_PAUSE_S)
        over = now + pause_s - since > self._patience_s
        if not over:
            log.warning("chunk %d will be tried again in %g s: %s", chunk, pause_s, error)
            self._closed.wait(pause_s)
        with self._wake:
            if self._closed.is_set() or self._error is not None:
                return
            self._last_error = error
            if over:
                self._carry_out(self._machine.give_up(
                    f"chunk {chunk} was tried {times + 1} times in {now - since:.0f} s; the last time on {name}: "
                    f"{error}"))  # fmt: skip
            else:
                self._carry_out(self._machine.failed(name, chunk, str(error), counts=False))

    def _revive(self) -> None:
        """Have dead workers asked again and again; give up when nobody could do what is left for too long."""
        told = time.monotonic()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed.is_set() or self._down)
                if self._closed.is_set():
                    return
                now = time.monotonic()
                for name in [name for name in self._down if name not in self._asking]:
                    self._asking[name] = now
                    # Each by itself: one may be sent a large file, or not be there at all, while another is back.
                    threading.Thread(target=self._ask_again, args=(name,), name=f"ask-{name}", daemon=True).start()
                come = [name for name, since in self._asking.items() if now - since > STARTS_WITHIN_S]
                come += self._coming()
                if not self._machine.is_stuck or not come:
                    told = now
                elif now - told > self._quiet_s:
                    told = now
                    log.warning("what comes next waits for %s, which is being made ready (it is sent a prefix, waits "
                                "for memory, or is being started)", ", ".join(come))  # fmt: skip
                if self._is_over(now, bool(come)):
                    reasons = "; ".join(self._down.values())
                    some = len(self._down) < len(self._workers)
                    who = "no node that holds the samples that come next" if some else "no node"
                    self._last_error = None
                    self._carry_out(self._machine.give_up(
                        f"{who} has answered for {self._patience_s:g} s. {reasons}"))  # fmt: skip
                    return
                self._wake.wait_for(self._closed.is_set, timeout=RETRY_EVERY_S)

    def _is_over(self, now: float, is_one_coming: bool) -> bool:
        """Has nobody who could do what is left been there, or on the way, for longer than patience lasts? The lock is
        held. While somebody is on the way time does not count, but what was waited before does: it may be in vain, and
        happen again and again."""
        if self._alone_since is not None:
            self._alone_s += now - self._alone_since
        self._alone_since = None if is_one_coming else now
        self._note_alone()
        return self._alone_since is not None and self._alone_s > self._patience_s

    def _note_alone(self) -> None:
        """Whoever is there counts, however short that is between two looks."""
        if not self._machine.is_stuck:
            self._alone_s, self._alone_since = 0.0, None

    def _ask_again(self, name: str) -> None:
        """Whether a worker that was taken for dead is there again."""
        reason, worker = None, self._workers.get(name)
        try:
            if worker is not None:
                worker.prepare()
        except HeadwaterError as error:
            log.debug("%s is still down: %s", name, error)
            reason = str(error)
        except Exception as error:  # ours; without an answer the consumer would wait for ever
            log.exception("unexpected error while asking %s again", name)
            reason = f"unexpected {type(error).__name__}: {error}"
        with self._wake:
            del self._asking[name]
            if self._closed.is_set() or self._workers.get(name) is not worker or name not in self._down:
                return  # the one that is called so now, if any, is not the one that was asked
            if reason is not None:
                self._down[name] = reason
                return
            log.warning("%s answers again", name)
            del self._down[name]
            self._carry_out(self._machine.node_up(name))
            self._note_alone()
