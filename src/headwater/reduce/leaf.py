"""A leaf's way to its root. Owns `Uplink`: the sums of a rack go on as those of one worker.

Blocks keep their numbers, and leaf and root have as many slots: a rack's workers send block b + W once they have the
root's sum of b, so the leaf has it, too, and its window is never in the way. Totals of packets that come out of order,
after a loss, wait for those before them.
"""

from __future__ import annotations

import time

from headwater.errors import AggregatorGoneError
from headwater.reduce.connection import Connection
from headwater.reduce.control import said_of
from headwater.reduce.flow import Flow
from headwater.reduce.flowjob import FlowJob
from headwater.reduce.joining import Joined
from headwater.reduce.packets import Packets
from headwater.reduce.reducer import LATE_S, SILENT_S
from headwater.reduce.slotjob import SlotJob
from headwater.reduce.stream import Stream


class Uplink:
    """The leaf as a worker of the root, for one job: what both lanes have in common."""

    stream: Stream | Flow
    job: SlotJob | FlowJob | None = None
    waits_for_room = False

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self._progress = self._heard = 0
        self._progress_at = self._heard_at = time.monotonic()

    def fileno(self) -> int:
        return self.joined.wire.fileno()

    @property
    def has_backlog(self) -> bool:
        return self.stream.wants_to_send

    def readable(self) -> None:
        self.stream.readable()

    def _begin_watch(self) -> None:
        """Something is sent where nothing was under way: silence counts from here."""
        if self.stream.machine.is_idle:
            self._progress_at = self._heard_at = time.monotonic()

    def tick(self) -> None:
        """Look at the clock; AggregatorGoneError if the root has not answered for long."""
        now, stream = time.monotonic(), self.stream
        if stream.num_done != self._progress:
            self._progress, self._progress_at = stream.num_done, now
        if stream.num_heard != self._heard:
            self._heard, self._heard_at = stream.num_heard, now
        if not stream.machine.num_out:
            self._heard_at = now
        elif now - self._progress_at >= LATE_S[1] * stream.machine.patience:
            self._progress_at = now
            stream.late()
        if now - self._heard_at > 2 * SILENT_S:
            raise AggregatorGoneError(f"the root has not answered for {2 * SILENT_S:g} s")

    def hear(self) -> None:
        """What the root says by the way."""
        said = self.joined.control.hear()
        if said is None:
            raise AggregatorGoneError("the root is gone: it closed the connection")
        for each in [*self.joined.heard, *said]:
            if why := each.get("fault") or each.get("gone") or each.get("stopped"):
                raise AggregatorGoneError(f"the root ended the job: {said_of(why)}")
            block, workers = each.get("waits"), each.get("workers")
            if isinstance(self.stream, Flow) and type(block) is int and type(workers) is int:
                self.stream.waiting(block, workers)
        self.joined.heard.clear()

    def close(self) -> None:
        self.joined.close("done")


class PacketUplink(Uplink):
    """Over UDP."""

    job: SlotJob | None = None

    def __init__(self, joined: Joined) -> None:
        super().__init__(joined)
        assert not isinstance(joined.wire, Connection)
        self.stream: Stream = Stream(joined.wire, joined.layout, joined.num_slots, joined.up_tag, joined.down_tag, self)
        self._waiting: dict[int, tuple[Packets, int, int, int]] = {}  # totals, until the root has added them up
        self._next = 0  # block to submit

    def add(self, block: int, packets: Packets, num_pieces: int, last_bytes: int, flags: int) -> None:
        """The rack's total of a block. Its packets stay as they are until the root's sum is there."""
        self._begin_watch()
        self._waiting[block] = (packets, num_pieces, last_bytes, flags)
        while self._next in self._waiting:
            self._next += 1
            self.stream.submit([self._waiting[self._next - 1][1]])

    def fill(self, block: int, first: int, count: int, packets: Packets) -> tuple[int, int] | None:
        total, num_pieces, last_bytes, flags = self._waiting[block]
        packets.body[:count] = total.body[first : first + count]
        return last_bytes if first + count == num_pieces else packets.layout.piece_bytes, flags

    def take(self, block: int, packets: Packets, num_pieces: int, last_bytes: int) -> None:
        del self._waiting[block]
        assert self.job is not None
        self.job.finished(block, packets, num_pieces, last_bytes)


class FlowUplink(Uplink):
    """Over TCP: the root's sum of a block is received where the rack's was sent from, and goes on from there."""

    job: FlowJob | None = None

    def __init__(self, joined: Joined) -> None:
        super().__init__(joined)
        assert isinstance(joined.wire, Connection)
        self.stream: Flow = Flow(joined.wire, joined.num_slots, self, self._ask)
        self._waiting: dict[int, tuple[memoryview, int]] = {}

    def add(self, block: int, body: memoryview, flags: int) -> None:
        """The rack's total of a block."""
        self._begin_watch()
        self._waiting[block] = (body, flags)
        self.stream.submit([1])
        self.stream.await_blocks(self.stream.num_done + 1)

    def readable(self) -> None:
        self.stream.readable()
        self.stream.await_blocks(self.stream.num_done + 1)
        if self.stream.wire.is_cut:
            raise AggregatorGoneError("the root closed the connection for blocks")

    def give(self, block: int) -> tuple[memoryview, memoryview, int] | None:
        body, flags = self._waiting[block]
        return body, body, flags

    def took(self, block: int) -> None:
        del self._waiting[block]
        assert self.job is not None
        self.job.finished(block)

    def _ask(self, block: int) -> None:
        self.joined.control.say(ask=block)


def uplink_of(joined: Joined) -> PacketUplink | FlowUplink:
    return FlowUplink(joined) if isinstance(joined.wire, Connection) else PacketUplink(joined)
