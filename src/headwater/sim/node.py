"""A worker under the virtual clock: a node, or what makes rows beside a trainer.

Owns `Worker` and a chunk's way through it. The decisions are those of the live node: `core.ring` walks a chunk through
its stages, `core.turns` lets chunks in, `core.admission` says when a group may begin and how large it is, `core.fair`
whose task runs next, `core.reads` how many reads are under way over a link that others need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import simpy

from headwater.core import admission
from headwater.core.admission import Admission, Need
from headwater.core.reads import Reads
from headwater.core.ring import Decode, Infer, Read, Ring, Send
from headwater.core.turns import Turns
from headwater.sim.costs import Making
from headwater.sim.machine import Machine
from headwater.sim.sharing import Done, Line, Shared, after, carry

INFER, DECODE = 0, 1  # a finished group goes first, as in `data.extract`
STALLED_S = 10.0
Spans = Callable[[str, str, str, float, int | None], None]  # place, lane, what, since when, chunk


@dataclass(frozen=True)
class Order:
    """A chunk to be made: of so many rows in groups of at most `group_rows`, `num_kept` of which are kept already.

    `part` is told of every group that arrives, `done` when all have; a worker that dies never tells. The rows travel
    over `path`."""

    tenant: str
    chunk: int
    num_rows: int
    group_rows: int
    making: Making
    path: Sequence[Line]
    part: Callable[[int], None]
    done: Done
    num_kept: int = 0
    need: Need | None = None


class Worker:
    """What takes orders on a machine.

    `store` and `ask` are the ways from and to the store where it is far, and `serve` does the store's own work for a
    read; `disk` is where it is not. `budget_bytes` is for admission; without it there is room for everything.
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        machine: Machine,
        making: Making,
        *,
        disk: Line | None = None,
        disk_row_bytes: float = 0.0,
        store: Sequence[Line] = (),
        ask: Sequence[Line] = (),
        serve: Callable[[float, Done], None] | None = None,
        budget_bytes: int | None = None,
        kept_row_s: float = 0.0,
        jitter: float = 0.0,
        random: np.random.Generator | None = None,
        spans: Spans | None = None,
        row_bytes: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.env, self.name, self.machine, self.making = env, name, machine, making
        self.disk, self.disk_row_bytes, self.store, self.ask, self.serve = disk, disk_row_bytes, store, ask, serve
        self.kept_row_s, self.spans = kept_row_s, spans
        self._jitter, self._random = jitter, random
        self.buffer_bytes, self.infer_bytes = row_bytes
        self.budget_bytes = budget_bytes
        self.is_up = True
        self.num_rows = 0
        self._fresh()

    def _fresh(self) -> None:
        self.life: set[_Passage] = set()
        self._turns = Turns(self.making.max_chunks, STALLED_S)
        self._line: deque[_Passage] = deque()
        self.admission = Admission(self.budget_bytes) if self.budget_bytes is not None else None
        self.asking: dict[int, _Passage] = {}
        self._requests = 0
        self.readers = _Readers(self)
        wait_s = self.making.read_wait_s
        self.waits = Shared(self.env, self.making.num_readers / wait_s) if wait_s > 0 else None

    def take(self, order: Order) -> None:
        if not self.is_up:
            return
        passage = _Passage(self, order)
        self.life.add(passage)
        self._line.append(passage)
        self._let_in()

    def die(self) -> None:
        """Nothing that it had is ever heard of again."""
        self.is_up = False
        for passage in self.life:
            passage.is_dead = True
        self.machine.restart()
        self._fresh()

    def come_back(self) -> None:
        self.is_up = True

    def _let_in(self) -> None:
        waiting, self._line = self._line, deque()
        for passage in waiting:
            turn = self._turns.take(self.env.now, passage.order.tenant)
            if turn is None:
                self._line.append(passage)
            else:
                passage.turn = turn
                passage.begin()

    def ended(self, passage: _Passage) -> None:
        self.life.discard(passage)
        self._turns.give_back(passage.turn)
        if self.admission is not None and passage.request is not None:
            self.asking.pop(passage.request, None)
            self.carry_out(self.admission.done(passage.request, self.env.now))
        self._let_in()

    def enter(self, passage: _Passage) -> None:
        """A request for memory, where that is counted."""
        if self.admission is None or passage.order.need is None:
            return
        self._requests += 1
        passage.request = self._requests
        self.asking[self._requests] = passage
        now, need = self.env.now, passage.order.need
        self.carry_out(self.admission.ask(self._requests, passage.order.tenant, need, now))
        if passage.request in self.asking:
            self.carry_out(self.admission.measured(passage.request, need, now))

    def carry_out(self, decisions: Sequence[admission.Decision]) -> None:
        assert self.admission is not None
        todo = deque(decisions)
        while todo:
            match todo.popleft():
                case admission.Wake(request):
                    if (passage := self.asking.get(request)) is not None:
                        after(self.env, 0.0, passage.go_on)
                case admission.Refuse(request, need_bytes):
                    raise Refused(self.name, need_bytes, self.budget_bytes or 0)
                case admission.Shrink(engine):
                    todo.extend(self.admission.shrunk(engine, self.env.now))
                case admission.Unload(engine):
                    if self.admission.may_unload(engine):
                        todo.extend(self.admission.unloaded(engine, self.env.now))

    def varied(self, work: float) -> float:
        """With the spread that the rig asks for, and the same mean."""
        if not self._jitter or self._random is None or work <= 0:
            return work
        spread = float(np.sqrt(np.log1p(self._jitter**2)))
        return work * float(self._random.lognormal(-(spread**2) / 2, spread))


class Refused(Exception):  # noqa: N818 - the world makes a PlanError of it
    """A node can't do this at all."""

    def __init__(self, name: str, need_bytes: int, has_bytes: int) -> None:
        super().__init__(f"a group of one row needs {need_bytes / 1e9:.2f} GB on {name} (has {has_bytes / 1e9:.2f}); "
                         "cut earlier, or give the node more memory")  # fmt: skip


class _Readers:
    """Reads over a link that others need, a few at a time; each sample is a flow of its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reads = Reads(worker.making.num_readers) if worker.making.is_far else None
        self._most = worker.making.num_readers
        self._under_way = 0
        self._queue: deque[Done] = deque()

    def submit(self, then: Done) -> None:
        self._queue.append(then)
        self._next()

    def _next(self) -> None:
        while self._queue and self._under_way < self._most:
            self._under_way += 1
            self._read(self._queue.popleft())

    def _read(self, then: Done) -> None:
        worker, making, since = self._worker, self._worker.making, self._worker.env.now

        def asked() -> None:
            after(worker.env, making.read_wait_s, answered)

        def answered() -> None:
            if worker.serve is None:
                served()
            else:
                worker.serve(making.serve_s, served)

        def served() -> None:
            carry(worker.env, worker.store, making.stored_bytes, _nothing, arrived)

        def arrived() -> None:
            worker.machine.cores.use(making.read_s, done)

        def done() -> None:
            self._under_way -= 1
            if self._reads is not None:
                self._most = self._reads.took(worker.env.now - since, int(making.stored_bytes))
            then()
            self._next()

        carry(worker.env, worker.ask, making.asked_bytes, _nothing, asked)


class _Passage:
    """One chunk on its way through the stages."""

    def __init__(self, worker: Worker, order: Order) -> None:
        self.worker, self.order = worker, order
        self.turn = 0
        self.request: int | None = None
        self.is_dead = False
        self._ring: Ring | None = None
        self._ready: deque[int] = deque()
        self._is_sending = False
        self._there = 0  # rows that have arrived
        self._kept = order.num_kept

    def begin(self) -> None:
        self.worker.machine.cores.use(self.order.making.chunk_s, self._begun)

    def _begun(self) -> None:
        order = self.order
        if self.is_dead:
            return
        if self._kept:
            self.worker.machine.cores.use(self._kept * self.worker.kept_row_s, self._send_kept)
        if order.num_rows > self._kept:
            self._ring = Ring(order.num_rows - self._kept, slots=order.making.num_slots)
            self.worker.enter(self)
            self.go_on()

    def _send_kept(self) -> None:
        rows, order = self._kept, self.order
        carry(self.worker.env, order.path, order.making.part_bytes(rows), _nothing, lambda: self._arrived(rows))

    def go_on(self) -> None:
        """Begin as many groups as there are slots and room for."""
        ring, worker = self._ring, self.worker
        while ring is not None and not self.is_dead and ring.may_begin:
            rows: int | None = min(self.order.group_rows, ring.num_left)
            if worker.admission is not None and self.request is not None:
                rows = worker.admission.take(self.request, int(rows or 1), worker.env.now)
                if rows is None:
                    return
            assert rows is not None
            decisions = ring.begin(rows)
            first = decisions[0]
            assert isinstance(first, Read)
            worker.machine.memory.add(len(decisions) * worker.buffer_bytes)
            self._read(ring.group_of(first.sample), len(decisions))

    def _read(self, group: int, rows: int) -> None:
        """A group at once where the store is near; from far, its samples come one by one."""
        making, worker, since = self.order.making, self.worker, self.worker.env.now
        if making.stored_bytes:
            self._read_far(group, rows)
            return

        def waited() -> None:
            if self.is_dead:
                return
            if worker.disk is None:
                worker.machine.cores.use(rows * making.read_s, done)
            else:
                carry(worker.env, [worker.disk], rows * worker.disk_row_bytes, _nothing, read)

        def read() -> None:
            worker.machine.cores.use(rows * making.read_s, done)

        def done() -> None:
            if not self.is_dead:
                self._note("read", "read", since)
                self._decode(group, rows)

        if worker.waits is None:
            waited()
        else:  # a read takes its time, and so many wait at once
            worker.waits.use(rows, lambda: after(worker.env, making.read_wait_s * (1 - 1 / making.num_readers), waited))

    def _read_far(self, group: int, rows: int) -> None:
        """Each sample is decoded when it is here, though others of its group are still on their way."""
        ring, worker, making, since = self._ring, self.worker, self.order.making, self.worker.env.now
        assert ring is not None
        decode_s, left = worker.varied(rows * making.decode_s) / rows, rows

        def came(sample: int) -> None:
            nonlocal left
            if self.is_dead:
                return
            left -= 1
            if left == 0:
                self._note("read", "read", since)
            for decision in ring.read(sample):
                assert isinstance(decision, Decode)
                worker.machine.threads.submit(DECODE, decode_s, partial(self._decoded, [decision.sample]),
                                              self.order.tenant, self._noter("decode"))  # fmt: skip

        for sample in ring.samples_of(group):
            worker.readers.submit(partial(came, sample))

    def _decode(self, group: int, rows: int) -> None:
        ring, worker, making = self._ring, self.worker, self.order.making
        assert ring is not None
        samples = [decision.sample for sample in ring.samples_of(group) for decision in ring.read(sample)
                   if isinstance(decision, Decode)]  # fmt: skip
        tasks = min(worker.machine.num_threads, rows)
        left = tasks

        def one() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._decoded(samples)

        work = worker.varied(rows * making.decode_s) / tasks
        for _ in range(tasks):
            worker.machine.threads.submit(DECODE, work, one, self.order.tenant, self._noter("decode"))

    def _decoded(self, samples: Sequence[int]) -> None:
        ring = self._ring
        assert ring is not None
        if self.is_dead:
            return
        for sample in samples:
            for decision in ring.decoded(sample):
                assert isinstance(decision, Infer)
                self._infer(decision.group, len(ring.samples_of(decision.group)))

    def _infer(self, group: int, rows: int) -> None:
        ring, worker, making, machine = self._ring, self.worker, self.order.making, self.worker.machine
        assert ring is not None

        def inferred() -> None:
            if self.is_dead:
                return
            machine.memory.add(-rows * worker.infer_bytes)
            for decision in ring.inferred(group):
                assert isinstance(decision, Send)
                self._ready.append(decision.group)
            self._send()

        machine.memory.add(rows * worker.infer_bytes)
        if not making.has_engine:
            inferred()
            return
        engine = worker.varied(making.group_s + rows * making.engine_s)
        if machine.chip is None:
            work = rows * making.finish_s + engine
            machine.threads.submit(INFER, work, inferred, self.order.tenant, self._noter("infer"))
            return
        chip = machine.chip
        machine.threads.submit(
            INFER,
            rows * making.finish_s,
            lambda: chip.submit(INFER, engine, inferred, self.order.tenant, self._noter("infer", "accelerator")),
            self.order.tenant,
        )

    def _send(self) -> None:
        """One group after the other, as one stream does."""
        ring, worker, making = self._ring, self.worker, self.order.making
        if self._is_sending or not self._ready or self.is_dead:
            return
        assert ring is not None
        group = self._ready.popleft()
        rows, since = len(ring.samples_of(group)), worker.env.now
        self._is_sending = True
        num_bytes = making.part_bytes(rows) + (making.chunk_bytes if ring.num_left == 0 and not self._ready else 0.0)

        def encoded() -> None:
            if not self.is_dead:
                carry(worker.env, self.order.path, num_bytes, left, lambda: self._arrived(rows))

        def left() -> None:
            if self.is_dead:
                return
            self._note("send", "send", since)
            self._is_sending = False
            worker.machine.memory.add(-rows * worker.buffer_bytes)
            worker.num_rows += rows
            ring.sent(group)
            if worker.admission is not None and self.request is not None:
                worker.carry_out(worker.admission.give(self.request, rows, worker.env.now))
            self._send()
            self.go_on()

        worker.machine.cores.use(rows * making.encode_s + making.send_s_per_byte * num_bytes, encoded)

    def _arrived(self, rows: int) -> None:
        if self.is_dead:
            return
        self._there += rows
        last = self._there == self.order.num_rows
        if last:
            self.worker.ended(self)
        self.order.part(rows)
        if last:
            self.order.done()

    def _note(self, lane: str, what: str, since: float) -> None:
        if self.worker.spans is not None:
            self.worker.spans(self.worker.name, lane, what, since, self.order.chunk)

    def _noter(self, what: str, lane: str = "") -> Callable[[str, float], None] | None:
        if self.worker.spans is None:
            return None
        return lambda thread, since: self._note(lane or thread, what, since)


def _nothing() -> None:
    pass
