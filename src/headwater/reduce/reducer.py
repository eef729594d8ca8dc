"""Sums of arrays over all workers of a job. Owns `Reducer`: a worker's side of the aggregator, with no torch in it.

    with Reducer("10.0.0.5:8816", rank=0, num_workers=4, key=…) as reducer:
        reducer.all_reduce(array)          # in place; every worker gets the same bits

All workers call it in the same order with arrays of the same size and type. Nothing runs in the background: packets
move while `all_reduce`, or `pump`, runs. One thread at a time may use it.
"""

from __future__ import annotations

import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.agree import is_settled
from headwater.core.sums import EXPONENTS, SCALED, Format, exponents, format_of
from headwater.errors import AggregatorGoneError, ConfigError, ReduceError, WorkerGoneError
from headwater.reduce.call import Call
from headwater.reduce.connection import GONE_EVENTS, Connection
from headwater.reduce.control import address, key_bytes, said_of
from headwater.reduce.flow import Flow
from headwater.reduce.joining import LANES, TCP, UDP, Joined, Ticket, join
from headwater.reduce.packets import Layout, Packets
from headwater.reduce.stream import Stream
from headwater.reduce.wire import Wire

JOIN_S = 60.0  # until all workers have joined
TIMEOUT_S = 60.0  # without progress, while the aggregator answers: somebody else does not come
SILENT_S = 5.0  # without any answer of the aggregator, though it is asked
LATE_S = (0.02, 0.25)  # the least and the most that is taken for usual, before the first doubling
_FIRST_LATE_S = 0.1  # before anything is known
_LATE = 4.0  # times the usual: from then on a block is late
_NEWEST = 0.125  # weight of the newest in what is usual


_CUT_S = 1.0  # for the reason to come over the other connection
_READABLE = select.POLLIN | getattr(select, "POLLRDHUP", 0)


class StalledError(WorkerGoneError):
    """The aggregator is there, and another worker does not take part: nothing else would help either."""


def checked_lane(lane: str) -> str:
    if lane not in LANES:
        raise ConfigError(f"lane is {lane!r}; it must be one of {', '.join(LANES)}")
    return lane


class Reducer:
    """A worker of a job on an aggregator; joins as it is made, and waits there for the others."""

    def __init__(
        self,
        switch: str,
        *,
        rank: int,
        num_workers: int,
        key: str | None = None,
        job: str = "default",
        lane: str = TCP,
        session: str = "",
        timeout_s: float = TIMEOUT_S,
        join_s: float = JOIN_S,
        make_wire: Callable[[socket.socket, Layout], Wire] = Wire,
    ) -> None:
        """ConfigError for arguments that make no sense, AggregatorGoneError where nobody answers, JoinRefusedError with
        the aggregator's reason, WorkerGoneError if the others do not come.

        switch             HOST:PORT of the aggregator
        rank, num_workers  which worker this is (from 0), and of how many
        key                the job's, by default that in HEADWATER_REDUCE_KEY
        job                its name, where an aggregator serves several with one key
        lane               how blocks travel: "tcp" or "udp"
        session            the same on all workers of one start of the job, where it may be started again while it runs
        timeout_s          how long to wait for another worker
        join_s             how long to wait until all have joined
        make_wire          makes the wire of lane "udp"; for tests
        """
        if not 0 <= rank < num_workers:
            raise ConfigError(f"worker {rank} of {num_workers}; ranks are 0 to {num_workers - 1}")
        if make_wire is not Wire and lane != UDP:
            raise ConfigError('make_wire is for lane="udp"')
        ticket = Ticket(job, session, rank, num_workers, key=key_bytes(key), lane=checked_lane(lane))
        self._open(switch, join(address(switch, "switch"), ticket, join_s, make_wire), rank, timeout_s)

    @classmethod
    def of(cls, switch: str, joined: Joined, rank: int, timeout_s: float = TIMEOUT_S) -> Reducer:
        """For whoever has joined already."""
        made = cls.__new__(cls)
        made._open(switch, joined, rank, timeout_s)
        return made

    def _open(self, switch: str, joined: Joined, rank: int, timeout_s: float) -> None:
        self.switch, self.rank, self.total = switch, rank, joined.total
        self._joined, self._timeout_s = joined, timeout_s
        self.layout = joined.layout
        self.stream: Stream | Flow
        if isinstance(joined.wire, Connection):
            self.stream = Flow(joined.wire, joined.num_slots, self, self._ask)
            # Per slot, its last sum, unless that is in an array under way (core.agree).
            self._held = [memoryview(bytearray(joined.layout.block_bytes)) for _ in range(joined.num_slots)]
        else:
            self.stream = Stream(joined.wire, joined.layout, joined.num_slots, joined.up_tag, joined.down_tag, self)
        self._cut_at: float | None = None  # when the connection for blocks ended
        self._calls: list[Call] = []  # under way, in order
        self._failed: ReduceError | None = None
        self._usual_s = _FIRST_LATE_S / _LATE
        self._sent_at: dict[int, float] = {}
        self._progress_at = self._heard_at = self._asked_at = time.monotonic()
        self._progress = self._heard = 0
        self._num_asked = 0
        self._left = 0  # workers that said that they are done
        self._poll = select.poll()
        self._poll.register(joined.control, select.POLLIN)
        self._wire_events = _READABLE
        self._poll.register(joined.wire, self._wire_events)
        self._wire_fd, self._control_fd = joined.wire.fileno(), joined.control.fileno()
        self._is_open = True

    # Sums

    def all_reduce(self, array: npt.NDArray[Any], *, mean: bool = False, integers: bool = False) -> npt.NDArray[Any]:
        """The sum over all workers (with `mean` their mean), in place; the array.

        All workers call it in the same order with arrays of one size and type: float32, float64, float16, int32 or
        int64, contiguous and writeable. ConfigError for others, ReduceError if the sum can't be had. `integers` adds
        fp32 as a switch does, as int32 with a shared exponent a block: see `core.sums` for its error.
        """
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ConfigError("all_reduce works in place and needs a contiguous array that can be written; "
                              "give np.ascontiguousarray(array)")  # fmt: skip
        call = self.begin(array.reshape(-1), mean=mean, number=SCALED if integers else None)
        while not call.is_done:
            self.pump(self._timeout_s)
        return array

    def begin(
        self,
        values: npt.NDArray[Any],
        *,
        mean: bool = False,
        number: Format | None = None,
        finished: Callable[[Call], None] | None = None,
    ) -> Call:
        """Begin to add a flat array up, in place; `pump` goes on with it. `number` is what travels, by default the
        array's own type."""
        if self._failed is not None:
            raise self._failed
        number = number or format_of(values.dtype)
        if number is None:
            raise ConfigError(
                f"arrays of {values.dtype} can't be added; float32, float64, float16, int32 and int64 can"
            )
        if number is SCALED and values.dtype != np.float32:
            raise ConfigError(f"integers=True is for float32; this array is {values.dtype}")
        if mean and number.added.kind == "i" and number is not SCALED:
            raise ConfigError(f"a mean of {values.dtype} is no {values.dtype}; ask for the sum, and divide it")
        if self.stream.machine.is_idle:
            self._progress_at = self._heard_at = self._asked_at = time.monotonic()
            self._num_asked = 0
        first = self.stream.machine.submitted
        call = Call(values, number, self.layout, first, mean=mean, total=self.total, finished=finished)
        if number is SCALED:
            ahead = exponents(values, call.block_values) if len(values) else np.zeros(1, np.int16)

            def known(done: Call) -> None:
                call.exponents, blocks, call.held = done.values, call.held, []
                if self._is_open:
                    self.stream.send_held(dict.fromkeys(blocks))

            self._submit(Call(ahead, EXPONENTS, self.layout, first, mean=False, total=self.total, finished=known))
            call.first = self.stream.machine.submitted
        self._submit(call)
        return call

    def _submit(self, call: Call) -> None:
        self._calls.append(call)
        self.stream.submit(call.sizes())

    @property
    def is_idle(self) -> bool:
        return not self._calls

    @property
    def counts(self) -> Counter[str]:
        """Packets that were dropped, by why (foreign, stale, repeat, …), asks, and pieces that were sent again."""
        return self.stream.counts

    # The loop around it

    def watch(self, fd: int) -> None:
        """`pump` returns when something can be read here."""
        self._poll.register(fd, select.POLLIN)

    def pump(self, wait_s: float) -> None:
        """Move packets, waiting up to so long for the first; ReduceError once that makes no sense any more."""
        if self._failed is not None:
            raise self._failed
        try:
            self._pump(wait_s)
        except ReduceError as error:
            self._failed = error
            raise

    def _pump(self, wait_s: float) -> None:
        stream = self.stream
        if self._cut_at is None:
            wanted = _READABLE | select.POLLOUT if stream.wants_to_send else _READABLE
            if wanted != self._wire_events:
                self._poll.modify(self._wire_fd, wanted)
                self._wire_events = wanted
            if isinstance(stream, Flow) and self._calls:
                stream.await_blocks(self._calls[0].stop)
        else:
            wait_s = min(wait_s, _CUT_S)
        if stream.machine.num_out:
            wait_s = min(wait_s, self._late_s)
        for fd, event in self._poll.poll(max(0.0, wait_s) * 1000):
            if fd == self._wire_fd:
                if event & select.POLLOUT:
                    stream.writable()
                if event & ~select.POLLOUT:
                    stream.readable()
                if isinstance(stream, Flow) and (event & GONE_EVENTS or stream.wire.is_cut):
                    self._cut_at = time.monotonic()
                    self._poll.unregister(self._wire_fd)
            elif fd == self._control_fd:
                self._hear()
        if self._joined.heard:
            self._hear()
        self._look_at_the_clock(time.monotonic())

    @property
    def _late_s(self) -> float:
        least, most = LATE_S
        if isinstance(self.stream, Flow):  # nothing is lost there, and sums are taken many at a time
            return most * self.stream.machine.patience
        return min(max(_LATE * self._usual_s, least), most) * self.stream.machine.patience

    def _look_at_the_clock(self, now: float) -> None:
        stream = self.stream
        if stream.num_done != self._progress:
            self._progress, self._progress_at, self._num_asked = stream.num_done, now, 0
        if stream.num_heard != self._heard:
            self._heard, self._heard_at = stream.num_heard, now
        if self._cut_at is not None and now - self._cut_at > _CUT_S:
            raise AggregatorGoneError(f"the aggregator at {self.switch} closed the connection for blocks, and does not "
                                      "say why")  # fmt: skip
        if not stream.machine.num_out:
            return
        if now - max(self._progress_at, self._asked_at) >= self._late_s:
            self._asked_at = now
            self._num_asked += 1
            stream.late()
        if self._num_asked >= 3 and now - self._heard_at > SILENT_S:
            raise AggregatorGoneError(f"the aggregator at {self.switch} has not answered worker {self.rank} for "
                                      f"{SILENT_S:g} s, though it was asked {self._num_asked} times")  # fmt: skip
        if stream.machine.awaited & self._left:
            raise StalledError(f"worker {(stream.machine.awaited & self._left).bit_length() - 1} has left the job, and "
                                  f"worker {self.rank} waits for a sum that it takes no part in")  # fmt: skip
        if now - self._progress_at > self._timeout_s:
            missing = [str(rank) for rank in range(stream.machine.awaited.bit_length())
                       if stream.machine.awaited >> rank & 1]  # fmt: skip
            who = f"worker {', '.join(missing)} has" if missing else "other workers have"
            raise StalledError(f"no sum came for {self._timeout_s:g} s (timeout_s): {who} not sent a part of it; "
                                  "look at what they do, or allow more time")  # fmt: skip

    def _hear(self) -> None:
        said = self._joined.control.hear()
        if said is None:
            raise AggregatorGoneError(f"the aggregator at {self.switch} is gone: it closed the connection")
        for each in [*self._joined.heard, *said]:
            if "fault" in each:
                raise ReduceError(said_of(each["fault"]))
            if "stopped" in each:
                raise AggregatorGoneError(said_of(each["stopped"]))
            if "gone" in each:
                raise WorkerGoneError(said_of(each["gone"]))
            if type(left := each.get("left")) is int and 0 <= left < self.total:
                self._left |= 1 << left
            block, workers = each.get("waits"), each.get("workers")
            if isinstance(self.stream, Flow) and type(block) is int and type(workers) is int:
                self.stream.waiting(block, workers & ((1 << self.total) - 1))
        self._joined.heard.clear()

    # What the stream asks for

    def fill(self, block: int, first: int, count: int, packets: Packets) -> tuple[int, int] | None:
        self._sent_at.setdefault(block, time.monotonic())
        return self._call_of(block).fill(block, first, count, packets)

    def take(self, block: int, packets: Packets, num_pieces: int, last_bytes: int) -> None:
        taken_s = time.monotonic() - self._sent_at.pop(block)
        self._usual_s += _NEWEST * (taken_s - self._usual_s)
        call = self._call_of(block)
        if not call.take(block, packets, num_pieces, last_bytes):
            raise ReduceError(f"the sum of block {block} has another length than what worker {self.rank} sent; all "
                              "workers must add up arrays of the same size, in the same order")  # fmt: skip
        if call.is_done:
            self._calls.remove(call)

    def give(self, block: int) -> tuple[memoryview, memoryview, int] | None:
        return self._call_of(block).give(block, self._held[block % len(self._held)])

    def took(self, block: int) -> None:
        call = self._call_of(block)
        if call.num_left == 1:
            self._keep_sums(call)  # before whoever waits for them may write over them
        call.took(block, self._held[block % len(self._held)])
        if call.is_done:
            self._calls.remove(call)

    def _keep_sums(self, call: Call) -> None:
        for block in range(max(call.first, call.stop - len(self._held)), call.stop):
            if (found := call.sum_in_array(block)) is not None:
                self._held[block % len(self._held)][: len(found)] = found

    def _ask(self, block: int) -> None:
        self._joined.control.say(ask=block)

    def _call_of(self, block: int) -> Call:
        for call in self._calls:
            if block < call.stop:
                return call
        raise AssertionError(f"block {block} is of no call")

    # What workers do when the aggregator is gone (reduce.fallback)

    def held(self, block: int) -> npt.NDArray[np.uint8]:
        """The bytes of the last sum of that block's slot; behind a short one there may be anything."""
        if isinstance(self.stream, Stream):
            return self.stream.held(block)
        found = np.array(self._held[block % len(self._held)], np.uint8)
        for call in self._calls:
            if call.first <= block < call.stop and (own := call.sum_in_array(block)) is not None:
                found[: len(own)] = np.frombuffer(own, np.uint8)
        return found

    def accept(self, block: int, body: npt.NDArray[np.uint8]) -> None:
        """The sum of a block, from another worker, if it is not here yet."""
        if self.stream.machine.is_done(block):
            return
        call = self._call_of(block)
        start, stop = call.span(block)
        num_bytes = (stop - start) * call.number.wire.itemsize
        packets = Packets(self.layout)
        whole, rest = divmod(num_bytes, self.layout.piece_bytes)
        packets.body[:whole] = body[: whole * self.layout.piece_bytes].reshape(whole, -1)
        if rest:
            packets.body[whole, :rest] = body[whole * self.layout.piece_bytes : num_bytes]
        call.take(block, packets, 0, rest or (self.layout.piece_bytes if whole else 0))

    def unsettled(self, done: Sequence[int]) -> Iterator[tuple[Call, list[tuple[int, int]]]]:
        """Calls that are under way, and from where to where their values have no sum, where all workers have `done`."""
        for call in self._calls:
            spans: list[tuple[int, int]] = []
            for block in range(call.first, call.stop):
                if not is_settled(block, done):
                    start, stop = call.span(block)
                    if spans and spans[-1][1] == start:
                        start = spans.pop()[0]
                    spans.append((start, stop))
            yield call, spans

    # The end

    def close(self) -> None:
        """Leave the job. Others that still wait for a sum of this worker's get an error."""
        if self._is_open:
            self._is_open = False
            self._joined.close("done")

    def say_goodbye(self) -> None:
        """Say that this worker is done, and leave all open: for a process that ends."""
        self._joined.control.say(leave="done")

    def abandon(self) -> None:
        """Close the connection without a word: to the aggregator, and so to the others, this worker is gone. What is in
        memory stays."""
        if self._is_open:
            self._is_open = False
            self._joined.close()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()
