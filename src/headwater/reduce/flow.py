"""A worker's blocks on a connection: what `core.slots.Worker` decides, carried out over TCP. Owns `Flow`.

The same as `reduce.stream` is for packets, with less to do: nothing is lost or overtaken, so a block is one piece, and
it is known which sum comes next. So a block is sent from where its values are, and its sum is received where it
belongs, with no copy between. Only whole blocks are taken from the kernel: should the aggregator go away, the values of
a block whose sum did not come are as they were (core.agree).

The thread is woken for many blocks at a time (`await_blocks`): for two thirds of a window, or for the end of what
somebody waits for. The last third is under way meanwhile. One thread at a time may use a flow.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from headwater.core.slots import Ask, Done, Drop, Send, Worker, WorkerDecision
from headwater.errors import ReduceError
from headwater.reduce.connection import BLOCK_BYTES, BLOCK_HEAD, MOST_PLACES, Connection
from headwater.reduce.packets import DATA, RESULT, word


@dataclass(slots=True)
class Sent:
    """A block that is on its way, and where its sum goes."""

    block: int
    flags: int
    place: memoryview


class FlowSource(Protocol):
    """Where a flow's blocks come from and go to."""

    def give(self, block: int) -> tuple[memoryview, memoryview, int] | None:
        """A block's bytes, as they stay until its sum is there; where that goes, which may be the same place; and the
        flags. None: not yet."""

    def took(self, block: int) -> None:
        """The sum of a block is where it goes."""


class Flow:
    """Blocks on their way to the switch, and sums on their way back."""

    def __init__(self, connection: Connection, num_slots: int, source: FlowSource, ask: Callable[[int], None]) -> None:
        """`ask` asks on the other connection what has become of a block."""
        self.wire = connection
        self.machine = Worker(0, num_slots)
        self.counts: Counter[str] = Counter()  # how often sums were late, and asked for
        self.num_heard = 0  # sums and answers that came
        self.num_done = 0
        self._source, self._ask = source, ask
        self._outbox: deque[int] = deque()  # blocks to send, in order
        self._rest: list[memoryview] = []  # of the one that the kernel took a part of
        self._sent: deque[Sent] = deque()  # in order; the last one may not be out whole
        self._is_held = False  # the source had nothing yet for the first one of the outbox
        whole = BLOCK_HEAD.size + BLOCK_BYTES
        self._most = max(whole, min(connection.make_room(2 * num_slots * whole), num_slots * 2 // 3 * whole))
        connection.wake_at(1)
        heads = memoryview(bytearray(BLOCK_HEAD.size * min(num_slots, MOST_PLACES // 2)))  # with a place behind each
        self._heads = [heads[start : start + BLOCK_HEAD.size] for start in range(0, len(heads), BLOCK_HEAD.size)]

    @property
    def wants_to_send(self) -> bool:
        return bool(self._rest) or (bool(self._outbox) and not self._is_held)

    def submit(self, sizes: Iterable[int]) -> None:
        """Further blocks, of one piece each."""
        self._carry_out(self.machine.submit(sizes))
        self.writable()

    def send_held(self, blocks: Iterable[int]) -> None:
        """The source had nothing for these when it was asked, and has now."""
        self._is_held = False
        self.writable()

    def late(self) -> None:
        """Nothing has come for a while."""
        before = self.num_done
        self.readable()
        asks = self.machine.late() if self.num_done == before else ()
        if asks:  # for the first one: the others are behind it
            self.counts["late"] += 1
            self._carry_out(asks[:1])

    def waiting(self, block: int, workers: int) -> None:
        """The switch's answer: it is there, and waits for these workers."""
        self.num_heard += 1
        self.machine.waiting(0, block, workers)

    def writable(self) -> None:
        """The kernel has room, or there is more to send."""
        while self.wants_to_send and not self.wire.is_cut:
            if not self._rest:
                block = self._outbox[0]
                given = self._source.give(block)
                if given is None:
                    self._is_held = True
                    return
                self._outbox.popleft()
                body, place, flags = given
                self._sent.append(Sent(block, flags, place))
                head = BLOCK_HEAD.pack(word(DATA, block, 0, 1, flags), len(body))
                self._rest = [memoryview(head), body]
            if not self.wire.send(self._rest):
                return

    def readable(self) -> None:
        """Take the sums that have come whole."""
        waiting, places = self.wire.num_waiting, []
        for sent, head in zip(self._sent, self._heads, strict=False):
            waiting -= BLOCK_HEAD.size + len(sent.place)
            if waiting < 0:
                break
            places += [head, sent.place]
        if not places or self.wire.receive(places) == 0:
            return
        for head in places[::2]:
            sent = self._sent.popleft()
            if head != BLOCK_HEAD.pack(word(RESULT, sent.block, 0, 1, sent.flags), len(sent.place)):
                raise ReduceError(f"what came is not the sum of block {sent.block}; use the same version of headwater "
                                  "on both sides, and add up arrays of the same size in the same order")  # fmt: skip
            self.num_heard += 1
            self._carry_out(self.machine.result(0, sent.block, 1, 1))
        self.writable()

    def await_blocks(self, stop: int) -> None:
        """Let the wire be readable once all sums before block `stop` are there, or two thirds of a window."""
        wanted = 0
        for sent in self._sent:
            if sent.block >= stop or wanted >= self._most:
                break
            wanted += BLOCK_HEAD.size + len(sent.place)
        self.wire.wake_at(max(1, min(wanted, self._most)))

    def _carry_out(self, decisions: Iterable[WorkerDecision]) -> None:
        for decision in decisions:
            match decision:
                case Send(block, _):
                    self._outbox.append(block)
                case Done(block):
                    self.num_done += 1
                    self._source.took(block)
                case Ask(block, _):
                    self.counts["asked"] += 1
                    self._ask(block)
                case Drop(reason):
                    self.counts[reason] += 1
