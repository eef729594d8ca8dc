"""A leaf's way to its root. Owns `Uplink`: the sums of a rack go on as those of one worker.

Blocks keep their numbers, and leaf and root have as many slots: a rack's workers send block b + W once they have the
root's sum of b, so the leaf has it, too, and its window is never in the way. Totals that come out of order, after a
loss, wait for those before them.
"""

from __future__ import annotations

import time

from headwater.errors import AggregatorGoneError
from headwater.reduce.joining import Joined
from headwater.reduce.packets import Packets
from headwater.reduce.reducer import LATE_S, SILENT_S
from headwater.reduce.slotjob import SlotJob
from headwater.reduce.stream import Stream


class Uplink:
    """The leaf as a worker of the root, for one job."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.job: SlotJob | None = None
        self.stream = Stream(joined.wire, joined.layout, joined.num_slots, joined.up_tag, joined.down_tag, self)
        self._waiting: dict[int, tuple[Packets, int, int, int]] = {}  # totals, until the root has added them up
        self._next = 0  # block to submit
        self._progress = self._heard = 0
        self._progress_at = self._heard_at = time.monotonic()

    def add(self, block: int, packets: Packets, num_pieces: int, last_bytes: int, flags: int) -> None:
        """The rack's total of a block. Its packets stay as they are until the root's sum is there."""
        if self.stream.machine.is_idle:
            self._progress_at = self._heard_at = time.monotonic()
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
                raise AggregatorGoneError(f"the root ended the job: {why}")
        self.joined.heard.clear()

    def close(self) -> None:
        self.joined.close("done")
