"""A job on the aggregator whose blocks come over TCP. Owns `FlowJob` and `FlowMember`.

The same as `reduce.slotjob` is for packets: `core.slots.Switch` decides. A block is received into a buffer that then
changes places with its slot's, and the sum is made where it is sent from, to every worker. How much can pile up for a
worker that does not read is bounded: it sends nothing more without sums, so nobody gets further than a window.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headwater.core.slots import Drop, Multicast, Switch, SwitchDecision, Take, Total, Wait
from headwater.core.sums import Format, add_up
from headwater.reduce.connection import BLOCK_BYTES, BLOCK_HEAD, Connection
from headwater.reduce.control import Lines
from headwater.reduce.packets import DATA, MEAN, RESULT, Layout, format_of_flags, read_word, word
from headwater.reduce.slotjob import ALIKE, MisfitError, checked_number

BATCH = 16  # blocks of one worker before the next one's turn


class Root(Protocol):
    """Where a leaf's sums go."""

    def add(self, block: int, body: memoryview, flags: int) -> None: ...


class Block:
    """Room for one block: its header, and its values."""

    __slots__ = ("_body", "_values", "memory")

    def __init__(self) -> None:
        raw = np.zeros(BLOCK_HEAD.size + BLOCK_BYTES, np.uint8)
        self.memory: memoryview = raw.data
        self._body = raw[BLOCK_HEAD.size :]
        self._values: dict[int, npt.NDArray[Any]] = {}

    def values(self, number: Format) -> npt.NDArray[Any]:
        found = self._values.get(number.code)
        if found is None:
            found = self._values[number.code] = self._body.view(number.wire)
        return found

    def body(self, num_bytes: int) -> memoryview:
        return self.memory[BLOCK_HEAD.size : BLOCK_HEAD.size + num_bytes]


@dataclass
class FlowMember:
    """A worker of a job, or a leaf with several behind it."""

    rank: int
    weight: int
    control: Lines
    wire: Connection | None = None  # until it has opened its connection
    inbox: Block = field(default_factory=Block)
    num_bytes: int = 0  # that are in the inbox
    outbox: deque[list[memoryview]] = field(default_factory=deque)  # sums that the kernel had no room for
    waits_for_room: bool = False

    @property
    def has_backlog(self) -> bool:
        return bool(self.outbox)

    def fileno(self) -> int:
        return self.wire.fileno() if self.wire is not None else -1


def memory_bytes(num_workers: int, num_slots: int) -> int:
    """What a job takes: a block a worker and slot, two sums a slot, with their shadows a leaf needs, and inboxes."""
    return (BLOCK_HEAD.size + BLOCK_BYTES) * (num_slots * (num_workers + 2) + num_workers)


class FlowJob:
    """One start of one job, from the moment that all workers are there."""

    def __init__(self, name: str, job_id: str, members: list[FlowMember], num_slots: int, total: int) -> None:
        self.name, self.job_id, self.members = name, job_id, members
        self.layout = Layout(BLOCK_BYTES)
        self.total = total  # workers, those behind leaves counted
        self.root: Root | None = None
        self.counts: Counter[str] = Counter()
        self.num_blocks = self.num_bytes = 0  # added up
        self.slots = num_slots
        self._switch = Switch(0, len(members), num_slots)
        self._parts = [[Block() for _ in members] for _ in range(num_slots)]
        self._abouts = [[(0, 0)] * len(members) for _ in range(num_slots)]  # per slot and worker: flags, bytes
        self._sums = [(Block(), Block()) for _ in range(num_slots)]
        self._sum_abouts = [[(0, 0), (0, 0)] for _ in range(num_slots)]

    def memory_bytes(self) -> int:
        return memory_bytes(len(self.members), self.slots)

    def readable(self, rank: int) -> None:
        """Take what a worker has sent."""
        member = self.members[rank]
        assert member.wire is not None
        for _ in range(BATCH):
            room = member.inbox.memory[member.num_bytes :]
            came = member.wire.receive([room])
            member.num_bytes += came
            while self._has_block(member):
                self._arrived(member)
            if came < len(room):
                return

    def writable(self, rank: int) -> None:
        """The kernel has room for this worker again."""
        member = self.members[rank]
        assert member.wire is not None
        while member.outbox and member.wire.send(member.outbox[0]):
            member.outbox.popleft()

    def asked(self, rank: int, block: int) -> None:
        """A worker has waited long for the sum of this block."""
        ranks = 0
        for decision in self._switch.asked(0, rank, block, 0):
            if isinstance(decision, Wait):
                ranks = decision.workers
        self.members[rank].control.say(waits=block, workers=ranks)  # nothing else is to do: all else is on its way

    def finished(self, block: int) -> None:
        """The root's sum of a block is where it goes."""
        self._carry_out(self._switch.finished(block))

    def close(self) -> None:
        for member in self.members:
            if member.wire is not None:
                member.wire.close()
            member.control.close()

    def _has_block(self, member: FlowMember) -> bool:
        if member.num_bytes < BLOCK_HEAD.size:
            return False
        num_bytes: int = BLOCK_HEAD.unpack_from(member.inbox.memory)[1]
        if num_bytes > BLOCK_BYTES:
            raise MisfitError(f"worker {member.rank} sent something that is no block")
        return member.num_bytes >= BLOCK_HEAD.size + num_bytes

    def _arrived(self, member: FlowMember) -> None:
        """A whole block is in the inbox, and maybe a part of the next one."""
        said, num_bytes = BLOCK_HEAD.unpack_from(member.inbox.memory)
        kind, block, first, num_pieces, flags = read_word(said)
        if (kind, first, num_pieces) != (DATA, 0, 1):
            raise MisfitError(f"worker {member.rank} sent something that is no block")
        slot = block % self.slots
        for decision in self._switch.arrived(0, member.rank, block, 1, 1):
            match decision:
                case Take():
                    self._abouts[slot][member.rank] = (flags, num_bytes)
                    whole, free = member.inbox, self._parts[slot][member.rank]
                    self._parts[slot][member.rank], member.inbox = whole, free
                    end, stop = BLOCK_HEAD.size + num_bytes, member.num_bytes
                    free.memory[: stop - end] = whole.memory[end:stop]
                    member.num_bytes = stop - end
                case Total():
                    self._add_up(block)
                case Drop(reason):
                    raise MisfitError(f"worker {member.rank} sent block {block} out of turn ({reason})")

    def _add_up(self, block: int) -> None:
        abouts = self._abouts[block % self.slots]
        flags, num_bytes = abouts[0]
        for rank, about in enumerate(abouts):
            if about != abouts[0]:
                raise MisfitError(f"block {block} is {_say(*abouts[0])} of worker 0 and {_say(*about)} of worker "
                                  f"{rank}; {ALIKE}")  # fmt: skip
        number = checked_number(block, flags)
        num_values = num_bytes // number.wire.itemsize
        made = self._sum(block)
        parts = [each.values(number)[:num_values] for each in self._parts[block % self.slots]]
        divisor = self.total if flags & MEAN and self.root is None else 1
        add_up(parts, number, divisor, made.values(number)[:num_values])
        BLOCK_HEAD.pack_into(made.memory, 0, word(RESULT, block, 0, 1, flags), num_bytes)
        self._sum_abouts[block % self.slots][block // self.slots % 2] = (flags, num_bytes)
        self.num_blocks += 1
        self.num_bytes += num_bytes
        if self.root is not None:
            self.root.add(block, made.body(num_bytes), flags)
        else:
            self._carry_out(self._switch.finished(block))

    def _carry_out(self, decisions: Iterable[SwitchDecision]) -> None:
        for decision in decisions:
            assert isinstance(decision, Multicast)
            num_bytes = self._sum_abouts[decision.block % self.slots][decision.block // self.slots % 2][1]
            memory = self._sum(decision.block).memory[: BLOCK_HEAD.size + num_bytes]
            for member in self.members:
                assert member.wire is not None  # it has sent its part
                parts = [memory]
                if member.outbox or not member.wire.send(parts):
                    member.outbox.append(parts)

    def _sum(self, block: int) -> Block:
        return self._sums[block % self.slots][block // self.slots % 2]


def _say(flags: int, num_bytes: int) -> str:
    return f"{'the mean of ' if flags & MEAN else ''}{num_bytes:,} bytes of {format_of_flags(flags).name}"
