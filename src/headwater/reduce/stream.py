"""A worker's packets: what `core.slots.Worker` decides, carried out on a wire. Owns `Stream`.

Whoever has numbers to add gives the bytes of a block when they are to be sent (`Source.fill`) and takes those of its
sum (`Source.take`): the reducer of a worker, and a leaf's way to its root. One thread at a time may use a stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headwater.core.slots import Ask, Done, Drop, Keep, Send, Worker, WorkerDecision, runs
from headwater.reduce.control import tag_bytes
from headwater.reduce.packets import (
    ASK,
    DATA,
    NEED,
    RESULT,
    WAIT,
    Layout,
    OddSizeError,
    Packets,
    message,
    one_by_one,
    read_word,
    split,
    word,
)
from headwater.reduce.wire import Wire

BATCH = 32  # buffers that are taken from the wire before anything else is looked at


class Source(Protocol):
    """Where a stream's blocks come from and go to."""

    def fill(self, block: int, first: int, count: int, packets: Packets) -> tuple[int, int] | None:
        """Put so many pieces of a block into the first rows; the bytes of the last one and the flags. None: not yet."""

    def take(self, block: int, packets: Packets, num_pieces: int, last_bytes: int) -> None:
        """The sum of a block, in the first rows. The packets stay as they are until the slot's next sum comes."""


class Stream:
    """Blocks on their way to the switch, and sums on their way back."""

    def __init__(self, wire: Wire, layout: Layout, num_slots: int, up_tag: int, down_tag: int, source: Source) -> None:
        self.wire, self.layout = wire, layout
        self.machine = Worker(down_tag, num_slots)
        self.counts: Counter[str] = Counter()  # packets that were dropped, by why; and those sent again
        self.num_heard = 0  # packets of this job that came, of whatever kind
        self.num_done = 0
        self._up_tag, self._down_tag, self._down_bytes = up_tag, down_tag, tag_bytes(down_tag)
        self._source = source
        self._staging = Packets(layout, up_tag)
        self._ring = [Packets(layout) for _ in range(num_slots)]
        self._last_bytes = [0] * num_slots  # per slot: of the sum's last piece
        self._spare, self._single = Packets(layout), Packets(layout)
        self._sizes: dict[int, int] = {}  # of blocks that are not done: their pieces
        self._backlog: deque[tuple[int, int]] = deque()  # what the kernel had no room for

    @property
    def wants_to_send(self) -> bool:
        return bool(self._backlog)

    def submit(self, sizes: Iterable[int]) -> None:
        """Further blocks, of so many pieces each."""
        sizes = list(sizes)
        self._sizes.update(enumerate(sizes, self.machine.submitted))
        self._carry_out(self.machine.submit(sizes))

    def send_held(self, blocks: Iterable[int]) -> None:
        """`fill` had nothing for these when it was asked, and has now."""
        for block in blocks:
            if block in self._sizes:
                self._send(block, (1 << self._sizes[block]) - 1)

    def late(self) -> None:
        """Nothing has come for a while."""
        self.counts["late"] += 1
        self._carry_out(self.machine.late())

    def writable(self) -> None:
        """The kernel has room again."""
        while self._backlog:
            block, pieces = self._backlog.popleft()
            if block in self._sizes and not self._send(block, pieces):
                return

    def readable(self) -> None:
        """Take what has come."""
        for _ in range(BATCH):
            num_bytes, packet_bytes = self.wire.receive(self._spare)
            if num_bytes == 0:
                return
            if num_bytes < 0:
                self.counts["foreign"] += 1
                continue
            try:
                self._packets(self._spare, num_bytes, packet_bytes)
            except OddSizeError:
                for each in one_by_one(self._spare, num_bytes, packet_bytes, self._single):
                    self._packets(self._single, each, each)

    def held(self, block: int) -> npt.NDArray[np.uint8]:
        """The bytes of the last sum of a block's slot; behind a short one there may be anything."""
        body = self._ring[block % self.machine.num_slots].body
        return np.ascontiguousarray(body[: self.layout.pieces]).reshape(-1)

    def _packets(self, packets: Packets, num_bytes: int, packet_bytes: int) -> None:
        found, foreign = split(packets, num_bytes, packet_bytes, self._down_bytes)
        if foreign:
            self.counts["foreign"] += foreign
        for row, count, first_word, last_bytes in found:
            self.num_heard += count
            kind, block, first, num_pieces, _ = read_word(first_word)
            if kind == RESULT:
                pieces = ((1 << count) - 1) << first
                for decision in self.machine.result(self._down_tag, block, pieces, num_pieces):
                    if isinstance(decision, Keep):
                        slot = block % self.machine.num_slots
                        if first + count == num_pieces:
                            self._last_bytes[slot] = last_bytes
                        if row == 0 and count == num_pieces and packets is self._spare:
                            self._ring[slot], self._spare = packets, self._ring[slot]
                        else:
                            held = self._ring[slot].body
                            for start, length in runs(decision.pieces):
                                from_row = row + start - first
                                held[start : start + length] = packets.body[from_row : from_row + length]
                    else:
                        self._carry_out((decision,))
            elif kind == NEED and last_bytes >= 8:
                self._carry_out(self.machine.needed(self._down_tag, block, packets.bitmap()), again=True)
            elif kind == WAIT and last_bytes >= 8:
                self._carry_out(self.machine.waiting(self._down_tag, block, packets.bitmap()))
            else:
                self.counts["misfit"] += count

    def _carry_out(self, decisions: Iterable[WorkerDecision], *, again: bool = False) -> None:
        for decision in decisions:
            match decision:
                case Send(block, pieces):
                    if again:
                        self.counts["sent again"] += pieces.bit_count()
                    if self._backlog:
                        self._backlog.append((block, pieces))
                    else:
                        self._send(block, pieces)
                case Done(block):
                    slot = block % self.machine.num_slots
                    self.num_done += 1
                    self._source.take(block, self._ring[slot], self._sizes.pop(block), self._last_bytes[slot])
                case Ask(block, have):
                    self.counts["asked"] += 1
                    self.wire.send(message(self._up_tag, ASK, block, have))
                case Drop(reason):
                    self.counts[reason] += 1

    def _send(self, block: int, pieces: int) -> bool:
        """Whether the kernel took it; if not, it is in the backlog."""
        num_pieces = self._sizes[block]
        packets = self._staging
        for first, count in runs(pieces):
            filled = self._source.fill(block, first, count, packets)
            if filled is None:
                return True  # the source sends it once it can
            last_bytes, flags = filled
            packets.set_words(word(DATA, block, first, num_pieces, flags), count)
            if not self.wire.send(packets.memory[: self.layout.on_wire(count, last_bytes)]):
                self._backlog.appendleft((block, pieces >> first << first))
                return False
        return True
