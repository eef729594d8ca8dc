"""A trainer under the virtual clock: who gets which chunk, rows that come back, steps, sums of gradients.

Owns `Trainer`. Which worker gets which chunk is decided by `core.dispatch` (or, under wrr, by `core.prongs.TwoEnded`),
as in `train.feed`; what a batch is, by `core.order.Dealing`. An epoch is one dispatch, as it is live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from headwater.core.dispatch import Assign, Decision, Deliver, Dispatch, Keep, Pace, Stop, window_of
from headwater.core.plan import PLACE, Plan
from headwater.core.prongs import MTE, WRR, TwoEnded, meeting_point, tail_bytes, tail_room
from headwater.core.rhythm import Rhythm
from headwater.core.share import is_own, more_ahead, own_out
from headwater.sim.costs import Costs
from headwater.sim.machine import Machine
from headwater.sim.node import Order, Spans, Worker
from headwater.sim.sharing import Line, after, carry, together

PATIENCE_S = 60.0  # without any worker, as `near` has it by default


@dataclass(frozen=True)
class Way:
    """To a worker: what is asked goes up, rows come down."""

    down: Sequence[Line]
    up: Sequence[Line]


@dataclass
class Progress:
    """What a trainer has done: when each step ended, and after how many rows; when each chunk was used or came."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    arrived: list[tuple[float, int]] = field(default_factory=list)
    epochs: list[tuple[float, float]] = field(default_factory=list)
    num_chunks: int = 0
    num_again: int = 0  # chunks that were handed out more than once
    waited_s: float = 0.0


class Trainer:
    """One trainer's run through all epochs."""

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        machine: Machine,
        plan: Plan,
        costs: Costs,
        workers: Mapping[str, tuple[Worker, Way]],
        own: str | None,
        batches: Callable[[int], Iterable[int]],
        *,
        memory_bytes: int | None = None,
        beside: int = 1,
        num_epochs: int = 1,
        kept: Callable[[str, int, range], int] = lambda worker, epoch, entries: 0,
        made: Callable[[str, int, range], None] = lambda worker, epoch, entries: None,
        sync: Callable[[Trainer, int], simpy.Event] | None = None,
        spans: Spans | None = None,
        need: Any = None,
        stop_after: int | None = None,
        tenant: str = "",
        starts_s: float = 0.0,
    ) -> None:
        """`batches` tells the sizes of this trainer's batches in an epoch. `kept` tells how many rows of some entries
        of its order a worker has, `made` that it made them. `sync` is asked for the end of a step's sums. `beside`:
        so many trainers share the machine and its memory."""
        self.env, self.name, self.machine, self.plan, self.costs = env, name, machine, plan, costs
        self.workers, self.own = dict(workers), own
        self._batches, self._num_epochs = batches, num_epochs
        self._kept, self._made, self._sync = kept, made, sync
        self._spans, self._need, self._stop_after = spans, need, stop_after
        self._memory_bytes, self._beside, self._starts_s = memory_bytes, beside, starts_s
        self.tenant = tenant or name
        self.progress = Progress()
        self.error: str | None = None
        self._paces: dict[str, Pace] = {}
        self._machine: Dispatch | TwoEnded | None = None
        self._sizes: list[int] = []
        self._starts: list[int] = []
        self._ready: deque[int] = deque()
        self._wake: simpy.Event | None = None
        self._number = 0  # of the epoch's dispatch: replies of an earlier one are dropped
        self._epoch = 0
        self._handed: set[int] = set()
        self._rhythm = Rhythm()
        self._up = set(self.workers)
        self._lost_s = 0.0
        machine.memory.add(costs.taking.trainer_base_bytes + (max(batches(0), default=0)) * costs.taking.step_bytes)
        self.done = env.process(self._run())

    # What happens to workers

    def lost(self, name: str) -> None:
        """A worker no longer answers."""
        self._up.discard(name)
        self._lost_s = self.env.now
        if self._machine is not None and name in self.workers:
            self._carry_out(self._machine.node_down(name))

    def found(self, name: str) -> None:
        """It answers again."""
        if name in self.workers:
            self._up.add(name)
            if self._machine is not None:
                self._carry_out(self._machine.node_up(name))

    # The loop

    def _run(self) -> Generator[simpy.Event, Any, None]:
        if self._starts_s:
            yield self.env.timeout(self._starts_s)
        rows_done = 0
        for epoch in range(self._num_epochs):
            begun = self.env.now
            batches = list(self._batches(epoch))
            self._begin(epoch, batches)
            here, first = 0, True
            for number, rows in enumerate(batches):
                while here < rows:
                    if not first:
                        assert self._machine is not None
                        self._carry_out(self._machine.taken())
                    first = False
                    since = self.env.now
                    while not self._ready:
                        yield self._wait()
                        if self.error:
                            return
                    self.progress.waited_s += self.env.now - since
                    self._span("loop", "wait", since)
                    here += self._use(self._ready.popleft())
                here -= rows
                since = self.env.now
                yield self._step(rows)
                if self._sync is not None:
                    yield self._sync(self, number)
                self._span("loop", "step", since)
                rows_done += rows
                self.progress.steps.append((self.env.now, rows_done))
                if self._stop_after is not None and rows_done >= self._stop_after:
                    return
            self._paces = dict(self._machine.paces) if self._machine is not None else {}
            self._number += 1
            self._machine = None
            self.progress.epochs.append((begun, self.env.now))

    def _begin(self, epoch: int, batches: Sequence[int]) -> None:
        """A dispatch for the epoch, made as `train.source` makes it."""
        plan, total = self.plan, sum(batches)
        self._epoch, self._handed, self._rhythm = epoch, set(), Rhythm()
        self._number += 1
        self._ready.clear()
        if plan.prongs == WRR and self.own is not None and plan.host_share:
            self._sizes = list(batches)
            self._machine = TwoEnded(len(self._sizes), own=self.own, per_worker=plan.prefetch)
        else:
            rows = plan.chunk_rows
            self._sizes = [min(rows, total - start) for start in range(0, total, rows)]
            self._machine = self._dispatch(max(batches, default=1), total)
        starts, start = [], 0
        for size in self._sizes:
            starts.append(start)
            start += size
        self._starts = starts
        self._carry_out(self._machine.node_up(*[name for name in self.workers if name in self._up]))

    def _dispatch(self, batch: int, total: int) -> Dispatch:
        plan, options = self.plan, dict[str, Any]()
        ahead = 0
        if plan.host_share:
            options = {"own": self.own, "own_out": own_out(self.machine.build.cores)}
            if plan.prongs == MTE:
                first = -(-meeting_point(total, plan.host_share, batch) // plan.chunk_rows)
                room = self._room()

                def is_mine(chunk: int) -> bool:
                    return chunk < first or (chunk >= first + room and is_own(chunk, plan.host_share))

                options |= {"is_own": is_mine, "tail": (first, room)}
            else:
                ahead = more_ahead(plan.host_share)
                if plan.split == PLACE:
                    options["is_own"] = lambda chunk: is_own(chunk, plan.host_share)
        window = window_of(len(self.workers), plan.prefetch, ahead)
        return Dispatch(len(self._sizes), window=window, per_node=plan.prefetch, paces=self._paces, **options)

    def _room(self) -> int:
        """Chunks of a tail that may be held until the head is used up."""
        if self._memory_bytes is None:
            return len(self._sizes)
        chunk_bytes = max(1.0, self.plan.chunk_rows * self.costs.taking.raw_bytes)
        mine = tail_bytes(self._memory_bytes, max(0.0, self._memory_bytes - self.machine.memory.now)) / self._beside
        return tail_room(mine, chunk_bytes, self.plan.prefetch)

    def _wait(self) -> simpy.Event:
        """Until something is ready; time passes for the dispatch though nobody replies."""
        wake = self._wake = self.env.event()
        self._set_clock(wake)
        return wake

    def _set_clock(self, wake: simpy.Event) -> None:
        def late() -> None:
            if wake is self._wake and not wake.triggered and self._machine is not None:
                self._carry_out(self._machine.late(self._are_overdue(self._machine)))
                if not self._up and self.env.now - self._lost_s > PATIENCE_S:
                    self._carry_out(self._machine.give_up(f"no node has answered for {PATIENCE_S:.0f} s"))
                if not wake.triggered:
                    self._set_clock(wake)

        after(self.env, self._rhythm.late_after_s, late)

    def _are_overdue(self, machine: Dispatch | TwoEnded) -> bool:
        num_out = machine.num_out - (len(machine.out_on(self.own)) if self.own is not None else 0)
        return self._rhythm.are_overdue(self.env.now, num_out)

    def _use(self, chunk: int) -> int:
        rows = self._sizes[chunk]
        self.machine.memory.add(-rows * self.costs.taking.raw_bytes)
        return rows

    def _step(self, rows: int) -> simpy.Event:
        """The loop's own thread, then the suffix on as many cores as it spreads over, or on the accelerator."""
        taking, machine, done = self.costs.taking, self.machine, self.env.event()

        def end() -> None:
            done.succeed()

        def suffix() -> None:
            if taking.on_accelerator and machine.chip_shared is not None:
                machine.chip_shared.use(rows * taking.suffix_s, end)
                return
            count = max(1, min(machine.num_threads, taking.num_threads))
            work = rows * taking.suffix_s / count
            together([lambda one: machine.cores.use(work, one)] * count, end)

        machine.cores.use(taking.step_s + rows * taking.loop_row_s, suffix)
        return done

    # Chunks

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Assign(name, chunk):
                    self._ask(name, chunk)
                case Keep(chunk):
                    self.machine.memory.add(self._sizes[chunk] * self.costs.taking.raw_bytes)
                    self.progress.num_chunks += 1
                    before = self.progress.arrived[-1][1] if self.progress.arrived else 0
                    self.progress.arrived.append((self.env.now, before + self._sizes[chunk]))
                case Deliver(chunk):
                    self._ready.append(chunk)
                case Stop(reason):
                    self.error = reason
        if (self._ready or self.error) and self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def _ask(self, name: str, chunk: int) -> None:
        worker, way = self.workers[name]
        taking, rows, number, epoch = self.costs.taking, self._sizes[chunk], self._number, self._epoch
        entries = range(self._starts[chunk], self._starts[chunk] + rows)
        self.progress.num_again += chunk in self._handed
        self._handed.add(chunk)
        waiting: deque[int] = deque()
        left, is_receiving = rows, False

        def ask() -> None:
            order = Order(self.tenant, chunk, rows, self.plan.node_batch, worker.making, way.down, part, _nothing,
                          self._kept(name, epoch, entries), self._need)  # fmt: skip
            worker.take(order)

        def part(count: int) -> None:
            waiting.append(count)
            receive()

        def receive() -> None:
            """One group after the other, in the thread of this request."""
            nonlocal is_receiving
            if is_receiving or not waiting:
                return
            is_receiving = True
            count = waiting.popleft()
            last = count == left
            work = count * taking.receive_row_s + taking.receive_s_per_byte * worker.making.part_bytes(count)
            work += (taking.receive_chunk_s + taking.receive_s_per_byte * worker.making.chunk_bytes) if last else 0.0
            self.machine.cores.use(work, lambda: received(count))

        def received(count: int) -> None:
            nonlocal left, is_receiving
            left -= count
            is_receiving = False
            if left:
                receive()
                return
            self._made(name, epoch, entries)
            if number != self._number or self._machine is None or name not in self._up:
                return
            self._rhythm.replied(self.env.now, is_own=name == self.own)
            self._carry_out(self._machine.finished(name, chunk, self._are_overdue(self._machine)))

        carry(self.env, way.up, taking.request_chunk_bytes + rows * taking.request_row_bytes, _nothing, ask)

    def _span(self, lane: str, what: str, since: float, chunk: int | None = None) -> None:
        if self._spans is not None and self.env.now > since:
            self._spans(self.name, lane, what, since, chunk)


def _nothing() -> None:
    pass
