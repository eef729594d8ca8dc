"""A job on the aggregator: its slots, their memory, and the sums. Owns `SlotJob` and `Member`.

What `core.slots.Switch` decides is carried out here. A block that came whole is not copied: its buffer changes places
with the slot's, and the sum is made from there into packets that go out as they are, the same to every worker.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headwater.core.slots import MISFIT, Drop, Multicast, Need, Result, Switch, SwitchDecision, Take, Total, Wait, runs
from headwater.core.sums import EXPONENTS, Format, add_up
from headwater.reduce.control import Lines, tag_bytes
from headwater.reduce.packets import (
    ASK,
    BUFFER_BYTES,
    DATA,
    MEAN,
    NEED,
    RESULT,
    WAIT,
    Layout,
    OddSizeError,
    Packets,
    format_of_flags,
    message,
    one_by_one,
    read_word,
    split,
    word,
)
from headwater.reduce.wire import Wire

ALIKE = "all workers must add up arrays of the same size and type, in the same order"
_BITMAP = (1 << 64) - 1  # a message has room for 64 workers; of more, the first ones are named
BATCH = 8  # buffers of one worker before the next one's turn

log = logging.getLogger(__name__)


class MisfitError(Exception):
    """Workers don't agree about what they add up."""


class Root(Protocol):
    """Where a leaf's sums go."""

    def add(self, block: int, packets: Packets, num_pieces: int, last_bytes: int, flags: int) -> None: ...


@dataclass
class Member:
    """A worker of a job, or a leaf with several behind it."""

    rank: int
    weight: int
    control: Lines
    wire: Wire
    up_tag: int
    backlog: deque[tuple[int, int]] = field(default_factory=deque)  # pieces of sums that the kernel had no room for
    waits_for_room: bool = False

    @property
    def has_backlog(self) -> bool:
        return bool(self.backlog)

    def fileno(self) -> int:
        return self.wire.fileno()


def memory_bytes(num_workers: int, num_slots: int) -> int:
    """What a job takes: a buffer a worker and slot, and two sums a slot, with their shadows a leaf needs."""
    return BUFFER_BYTES * (num_slots * (num_workers + 3) + 4)


class SlotJob:
    """One start of one job, from the moment that all workers are there."""

    def __init__(self, name: str, members: list[Member], layout: Layout, num_slots: int, total: int, tag: int) -> None:
        self.name, self.members, self.layout = name, members, layout
        self.total = total  # workers, those behind leaves counted
        self.root: Root | None = None
        self.counts: Counter[str] = Counter()  # packets that were dropped, by why
        self.num_blocks = self.num_bytes = 0  # added up
        self._switch = Switch(tag, len(members), num_slots)
        self._tag, self._num_slots = tag, num_slots
        self.slots = num_slots
        self._up_bytes = [tag_bytes(member.up_tag) for member in members]
        self._parts = [[Packets(layout) for _ in members] for _ in range(num_slots)]
        # Per slot and worker: flags of its block, and bytes of its last piece.
        self._abouts = [[(0, 0)] * len(members) for _ in range(num_slots)]
        self._sums = [[Packets(layout, tag), Packets(layout, tag)] for _ in range(num_slots)]
        self._sum_abouts = [[(0, 0, 0), (0, 0, 0)] for _ in range(num_slots)]  # pieces, bytes of the last, flags
        self._spare, self._single = Packets(layout), Packets(layout)

    def memory_bytes(self) -> int:
        return memory_bytes(len(self.members), self.slots)

    def readable(self, rank: int) -> None:
        """Take what a worker has sent."""
        wire = self.members[rank].wire
        for _ in range(BATCH):
            num_bytes, packet_bytes = wire.receive(self._spare)
            if num_bytes == 0:
                return
            if num_bytes < 0:
                self.counts["foreign"] += 1
                continue
            try:
                self._packets(rank, self._spare, num_bytes, packet_bytes)
            except OddSizeError:
                for each in one_by_one(self._spare, num_bytes, packet_bytes, self._single):
                    self._packets(rank, self._single, each, each)

    def writable(self, rank: int) -> None:
        """The kernel has room for this worker again."""
        backlog = self.members[rank].backlog
        while backlog:
            block, pieces = backlog.popleft()
            if self._switch.holds(block) and not self._send(rank, block, pieces):
                return

    def finished(self, block: int, packets: Packets, num_pieces: int, last_bytes: int) -> None:
        """The root's sum of a block that was handed to it."""
        slot, version = block % self._num_slots, block // self._num_slots % 2
        _, _, flags = self._sum_abouts[slot][version]
        held = self._sums[slot][version]
        held.body[:num_pieces] = packets.body[:num_pieces]
        self._sum_abouts[slot][version] = (num_pieces, last_bytes, flags)
        self._carry_out(self._switch.finished(block))

    def close(self) -> None:
        for member in self.members:
            member.wire.close()
            member.control.close()

    def _packets(self, rank: int, packets: Packets, num_bytes: int, packet_bytes: int) -> None:
        found, foreign = split(packets, num_bytes, packet_bytes, self._up_bytes[rank])
        if foreign:
            self.counts["foreign"] += foreign
        for row, count, first_word, last_bytes in found:
            kind, block, first, num_pieces, flags = read_word(first_word)
            if kind == DATA:
                pieces = ((1 << count) - 1) << first
                for decision in self._switch.arrived(self._tag, rank, block, pieces, num_pieces):
                    if isinstance(decision, Take):
                        slot = block % self._num_slots
                        if first + count == num_pieces:
                            self._abouts[slot][rank] = (flags, last_bytes)
                        if row == 0 and count == num_pieces and packets is self._spare:
                            self._parts[slot][rank], self._spare = packets, self._parts[slot][rank]
                        else:
                            held = self._parts[slot][rank].body
                            for start, length in runs(decision.pieces):
                                from_row = row + start - first
                                held[start : start + length] = packets.body[from_row : from_row + length]
                    elif isinstance(decision, Total):
                        self._add_up(block, num_pieces)
                    elif isinstance(decision, Drop) and decision.reason == MISFIT:
                        raise MisfitError(f"block {block} has {num_pieces} pieces of worker {rank}, and another number "
                                          f"of a worker that came before it; {ALIKE}")  # fmt: skip
                    else:
                        self._carry_out((decision,))
            elif kind == ASK and last_bytes >= 8:
                self._carry_out(self._switch.asked(self._tag, rank, block, packets.bitmap()))
            else:
                self.counts["misfit"] += count

    def _add_up(self, block: int, num_pieces: int) -> None:
        slot, version = block % self._num_slots, block // self._num_slots % 2
        abouts = self._abouts[slot]
        flags, last_bytes = abouts[0]
        for rank, about in enumerate(abouts):
            if about != abouts[0]:
                raise MisfitError(f"block {block} is {_say(*abouts[0], num_pieces, self.layout)} of worker 0 and "
                                  f"{_say(*about, num_pieces, self.layout)} of worker {rank}; {ALIKE}")  # fmt: skip
        number = checked_number(block, flags)
        packets = self._sums[slot][version]
        parts = [each.values(number)[:num_pieces] for each in self._parts[slot]]
        divisor = self.total if flags & MEAN and self.root is None else 1
        add_up(parts, number, divisor, packets.values(number)[:num_pieces])
        packets.set_words(word(RESULT, block, 0, num_pieces, flags), num_pieces)
        self._sum_abouts[slot][version] = (num_pieces, last_bytes, flags)
        self.num_blocks += 1
        self.num_bytes += (num_pieces - 1) * self.layout.piece_bytes + last_bytes
        if self.root is not None:
            self.root.add(block, packets, num_pieces, last_bytes, flags)
        else:
            self._carry_out(self._switch.finished(block))

    def _carry_out(self, decisions: Iterable[SwitchDecision]) -> None:
        for decision in decisions:
            match decision:
                case Multicast(block):
                    num_pieces, last_bytes, _ = self._about(block)
                    packets = self._sums[block % self._num_slots][block // self._num_slots % 2]
                    memory = packets.memory[: self.layout.on_wire(num_pieces, last_bytes)]
                    for member in self.members:
                        if member.backlog or not member.wire.send(memory):
                            member.backlog.append((block, (1 << num_pieces) - 1))
                case Result(rank, block, pieces):
                    self._send(rank, block, pieces)
                case Need(rank, block, pieces):
                    self.members[rank].wire.send(message(self._tag, NEED, block, pieces))
                case Wait(rank, block, ranks):
                    self.members[rank].wire.send(message(self._tag, WAIT, block, ranks & _BITMAP))
                case Drop(reason):
                    self.counts[reason] += 1

    def _about(self, block: int) -> tuple[int, int, int]:
        return self._sum_abouts[block % self._num_slots][block // self._num_slots % 2]

    def _send(self, rank: int, block: int, pieces: int) -> bool:
        """Pieces of a sum to one worker; whether the kernel took them. What it did not is in the backlog."""
        num_pieces, last_bytes, _ = self._about(block)
        packets = self._sums[block % self._num_slots][block // self._num_slots % 2]
        size = self.layout.packet_bytes
        for first, count in runs(pieces & ((1 << num_pieces) - 1)):
            last = last_bytes if first + count == num_pieces else self.layout.piece_bytes
            start = first * size
            if not self.members[rank].wire.send(packets.memory[start : start + self.layout.on_wire(count, last)]):
                self.members[rank].backlog.appendleft((block, pieces >> first << first))
                return False
        return True


def checked_number(block: int, flags: int) -> Format:
    """What a block's values are; MisfitError if they can't be added up as it says."""
    number = format_of_flags(flags)
    if flags & MEAN and number.added.kind == "i" and number is not EXPONENTS:
        raise MisfitError(f"block {block} is to be a mean of {number.name}, which is no {number.name}; use the same "
                          "version of headwater on all workers")  # fmt: skip
    return number


def _say(flags: int, last_bytes: int, num_pieces: int, layout: Layout) -> str:
    mean = "the mean of " if flags & MEAN else ""
    return f"{mean}{(num_pieces - 1) * layout.piece_bytes + last_bytes:,} bytes of {format_of_flags(flags).name}"
