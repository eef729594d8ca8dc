"""Sums in the network: what reaches an aggregator, by either lane, and what an aggregator may say to a worker."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.fuzz.target import Harness, Room, Target, join, split
from headwater.core.sums import FORMATS, FP32, SCALED
from headwater.errors import ReduceError
from headwater.reduce import aggregator as aggregating
from headwater.reduce import joining
from headwater.reduce.aggregator import Aggregator
from headwater.reduce.connection import BLOCK_BYTES, BLOCK_HEAD, Connection
from headwater.reduce.control import PROTOCOL, Lines, proof
from headwater.reduce.flowjob import FlowJob, FlowMember
from headwater.reduce.gathering import Guest
from headwater.reduce.joining import Joined, Ticket
from headwater.reduce.packets import ASK, BUFFER_BYTES, DATA, MEAN, NEED, RESULT, WAIT, Layout, Packets, flags_of, word
from headwater.reduce.packets import message as told
from headwater.reduce.reducer import Reducer
from headwater.reduce.slotjob import Member, MisfitError, SlotJob

_KEY = b"k" * 16
_NONCE = "n" * 32
_TAG = 0x1122334455667788
_SLOTS = 2


class _Socket:
    """A connection on which these bytes have come, and no more will; or it `ends` behind them. Whoever waits for it is
    woken at once."""

    def __init__(self, data: bytes = b"", *, ends: bool = False) -> None:
        self._data, self._ends = data, ends
        self._fd = os.eventfd(1, os.EFD_NONBLOCK)

    def recv(self, size: int) -> bytes:
        found, self._data = self._data[:size], self._data[size:]
        if not found and not self._ends:
            raise BlockingIOError
        return found

    def send(self, data: bytes) -> int:
        return len(data)

    def sendmsg(self, parts: Sequence[memoryview], *more: Any) -> int:
        return sum(map(len, parts))

    def recvmsg_into(self, places: Sequence[memoryview], *more: Any) -> tuple[int, list[Any], int, None]:
        count = 0
        for place in places:
            found, self._data = self._data[: len(place)], self._data[len(place) :]
            place[: len(found)] = found
            count += len(found)
        return count, [], 0, None

    @property
    def num_waiting(self) -> int:
        return len(self._data)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def getsockopt(self, *option: int) -> int:
        return 1 << 22

    def setsockopt(self, *option: int) -> None:
        pass

    def setblocking(self, flag: bool) -> None:
        pass

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Blocks(Connection):
    """The same, for blocks; what has come is counted without asking the kernel."""

    @property
    def num_waiting(self) -> int:
        return int(self.sock.num_waiting)  # type: ignore[attr-defined]


class _Wire:
    """A flow of packets: each of these buffers comes by one call, with the size of the packets in it."""

    receive_bytes = 1 << 22

    def __init__(self, buffers: Sequence[tuple[int, bytes]] = ()) -> None:
        self._buffers = list(buffers)
        self.sock = _Socket()

    def receive(self, packets: Packets) -> tuple[int, int]:
        if not self._buffers:
            return 0, 0
        size, data = self._buffers.pop(0)
        data = data[: min(len(packets.memory), BUFFER_BYTES)]
        packets.memory[: len(data)] = data
        return len(data), min(size, len(data)) or len(data)

    def send(self, memory: Any) -> bool:
        return True

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()


def _objects(data: bytes) -> list[Any]:
    try:
        tree = json.loads(data)
        json.dumps(tree)
    except (ValueError, RecursionError):
        return []
    return tree if isinstance(tree, list) else [tree]


def _guest(room: Room) -> Harness:
    """What up to three guests of an aggregator say, as a list of [who, object] or of [who, text]; "@PROOF@" is the
    proof that is right."""
    server = Aggregator(("127.0.0.1", 0), keys=[_KEY])

    def harness(data: bytes) -> None:
        with patch.object(aggregating, "open_wire", lambda *given, **more: _Wire()):
            take(data)

    def take(data: bytes) -> None:
        guests: dict[Any, Guest] = {}
        try:
            for each in _objects(data)[:30]:
                who, said = (each[0], each[1]) if isinstance(each, list) and len(each) == 2 else (0, each)
                who = who if who in (0, 1, 2) else 0
                if who not in guests:
                    guests[who] = Guest(Lines(_Socket()), f"10.0.0.{who}", _NONCE)  # type: ignore[arg-type]
                    fd = guests[who].lines.fileno()
                    server._guests[fd] = guests[who]
                    server._watch(fd, lambda event: None)
                _hear(server, guests[who], said)
        finally:
            for place in list(server._jobs):
                server._end(place, "over")
            for guest in guests.values():
                server._dismiss(guest)
                guest.lines.close()
        assert not server._guests
        assert len(server._calls) == 3, "nothing of a guest is left"

    return harness


def _hear(server: Aggregator, guest: Guest, said: Any) -> None:
    """As the aggregator hears it, but for what it catches."""
    if guest.lines.fileno() not in server._guests:
        return
    text = said.encode(errors="replace") if isinstance(said, str) else json.dumps(_proven(server, said)).encode()
    guest.lines.sock._data = text + b"\n"  # type: ignore[attr-defined]
    heard = guest.lines.hear()
    if heard is None:
        server._gone(guest)
    else:
        server._listen_to(guest, heard)


def _proven(server: Aggregator, said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    said = dict(said)
    if said.get("blocks") == "@JOB@":
        said["blocks"] = next((each.job.job_id for each in server._running if isinstance(each.job, FlowJob)), "none")
    if said.get("proof") == "@PROOF@":
        names = ("nonce", "join", "session", "rank", "workers", "weight", "lane", "port")
        facts = ("join", _NONCE, *(said.get(name) for name in names))
        if "blocks" in said:
            facts = ("blocks", _NONCE, said.get("nonce"), said["blocks"], said.get("rank"))
        with suppress(ValueError, RecursionError):  # what can't be written out
            said["proof"] = proof(_KEY, *facts)
    return said


def _joining(rank: int, **more: Any) -> dict[str, Any]:
    return {"join": "job", "session": "s", "rank": rank, "workers": 2, "weight": 1, "lane": "tcp", "port": 0,
            "nonce": "m" * 32, "proof": "@PROOF@", **more}  # fmt: skip


def _guest_seeds() -> Sequence[bytes]:
    blocks = {"blocks": "@JOB@", "rank": 1, "nonce": "m", "proof": "@PROOF@"}
    seeds: list[Any] = [
        [[0, _joining(0)], [1, _joining(1)], [2, blocks], [0, {"ask": 0}], [0, {"leave": "done"}], [1, {"leave": "x"}]],
        [[0, _joining(0, lane="udp", port=9)], [1, _joining(1, lane="udp", port=9)], [2, _joining(5, workers=9)]],
        [[0, _joining(0, proof="0" * 64)], [1, _joining(0)], [2, _joining(0)], [1, {"leave": 1}], [1, _joining(1)]],
        [[0, "[1]"], [1, '{"join": "x"'], [1, "}"], [2, _joining(0, session="t")], [0, _joining(1, session="u")]],
    ]
    return [json.dumps(each).encode() for each in seeds]


def _blocks(room: Room) -> Harness:
    """Bytes that two workers send on their connections for blocks."""

    def harness(data: bytes) -> None:
        members = []
        for rank, sent in enumerate(split(data, 2)):
            control = Lines(_Socket())  # type: ignore[arg-type]
            members.append(FlowMember(rank, 1, control, _Blocks(_Socket(sent))))  # type: ignore[arg-type]
        job = FlowJob("job", "id", members, _SLOTS, 2)
        try:
            for _ in range(4):
                for member in members:
                    job.readable(member.rank)
                    job.writable(member.rank)
        finally:
            job.close()

    return harness


def _block(block: int, flags: int, body: bytes, kind: int = DATA) -> bytes:
    return BLOCK_HEAD.pack(word(kind, block, 0, 1, flags), len(body)) + body


def _blocks_seeds() -> Sequence[bytes]:
    values, seeds = np.arange(6, dtype=np.float32).tobytes(), []
    for number in FORMATS:
        flags = flags_of(number, number.added.kind == "f")
        seeds.append(join(*[b"".join(_block(each, flags, values) for each in range(_SLOTS))] * 2))
    first = _block(0, flags_of(FP32, False), values)
    mean = _block(0, MEAN | flags_of(SCALED, False), values)
    return [*seeds, join(first, _block(0, flags_of(FP32, False), values[:8])), join(first[:20], first),
            join(mean, mean)]  # fmt: skip


def _buffers(data: bytes, count: int) -> list[list[tuple[int, bytes]]]:
    """For each of so many workers, the buffers that come: one after the other, led by whose it is, the size of its
    packets, and its own."""
    found: list[list[tuple[int, bytes]]] = [[] for _ in range(count)]
    while len(data) > 5:
        who, size, length = struct.unpack_from(">BHH", data)
        found[who % count].append((size, data[5 : 5 + length]))
        data = data[5 + length :]
    return found


def _buffer(who: int, data: bytes, size: int = 0) -> bytes:
    return struct.pack(">BHH", who, size, len(data)) + data


def _packets(room: Room) -> Harness:
    """Buffers of packets that two workers send, which know the tags of their job."""
    layout = Layout()

    def harness(data: bytes) -> None:
        sent = _buffers(data, 2)
        members = []
        for rank in range(2):
            control = Lines(_Socket())  # type: ignore[arg-type]
            members.append(Member(rank, 1, control, _Wire(sent[rank]), _TAG))  # type: ignore[arg-type]
        job = SlotJob("job", members, layout, _SLOTS, 2, _TAG)
        try:
            for _ in range(4):
                for member in members:
                    job.readable(member.rank)
                    job.writable(member.rank)
        finally:
            job.close()

    return harness


def _packet(block: int, piece: int, num_pieces: int, body: bytes, kind: int = DATA, flags: int = 0) -> bytes:
    return struct.pack("<QQ", _TAG, word(kind, block, piece, num_pieces, flags)) + body


def _packets_seeds() -> Sequence[bytes]:
    layout, flags = Layout(), flags_of(FP32, True)
    full = np.ones(layout.piece_bytes // 4, np.float32).tobytes()
    burst = b"".join(_packet(0, piece, 3, full if piece < 2 else full[:80], DATA, flags) for piece in range(3))
    seeds = [b"".join(_buffer(rank, burst, layout.packet_bytes) for rank in range(2))]
    for number in FORMATS:
        small = [_packet(block, 0, 1, full[:40], DATA, flags_of(number, False)) for block in range(5)]
        seeds.append(b"".join(_buffer(rank, each) for each in small for rank in range(2)))
    asks = [told(_TAG, ASK, block, 1) for block in range(3)]
    two = _packet(0, 0, 2, full) + _packet(1, 0, 2, full) + _packet(0, 1, 2, full[:8])
    seeds.append(b"".join(_buffer(0, each) for each in asks) + _buffer(1, b"".join(asks), 24)
                 + _buffer(0, two, layout.packet_bytes) + _buffer(0, b"short"))  # fmt: skip
    return seeds


def _sums(room: Room) -> Harness:
    """A word for the lane, lines on the one connection, and what comes on the other, to a worker with two arrays under
    way."""

    def harness(data: bytes) -> None:
        lane, lines, sums = split(data, 3)
        control = Lines(_Socket(lines))  # type: ignore[arg-type]
        wire: Any
        if lane == b"udp":
            wire, layout = _Wire(_buffers(sums, 1)[0]), Layout()
        else:
            wire, layout = _Blocks(_Socket(sums)), Layout(BLOCK_BYTES)  # type: ignore[arg-type]
        joined = Joined(control, wire, layout, _SLOTS, 2, "id", _TAG, _TAG, [])
        reducer = Reducer.of("127.0.0.1:1", joined, 0, 0.0)
        try:
            with np.errstate(all="ignore"):
                reducer.begin(np.zeros(6, np.float32), mean=True)
                reducer.begin(np.zeros(6, np.float32), number=SCALED)
                reducer.stream.late()
                for _ in range(3):
                    reducer.stream.readable()
                    reducer._hear()
                reducer._look_at_the_clock(reducer._progress_at)
        finally:
            for each in (control, wire):
                each.close()

    return harness


def _sums_seeds() -> Sequence[bytes]:
    values, exponents = np.ones(6, np.float32).tobytes(), np.zeros(1, np.int16).tobytes()
    flags = [flags_of(FP32, True), flags_of(FORMATS[7], False), flags_of(SCALED, False)]
    bodies = [values, exponents, np.ones(6, np.int32).tobytes()]
    words = [{"waits": 0, "workers": 2}, {"left": 1}, {"stopped": "why"}, {"gone": "who"}, {"fault": "no"}]
    lines = [b"", *(json.dumps(each).encode() + b"\n" for each in words)]
    blocks = b"".join(_block(number, *each, RESULT) for number, each in enumerate(zip(flags, bodies, strict=True)))
    packets = [_packet(number, 0, 1, body, RESULT, flag)
               for number, (flag, body) in enumerate(zip(flags, bodies, strict=True))]  # fmt: skip
    others = [told(_TAG, NEED, 0, 1), told(_TAG, WAIT, 0, 2), *packets]
    return [*(join(b"tcp", line, blocks) for line in lines),
            *(join(b"udp", line, b"".join(_buffer(0, each) for each in others)) for line in lines[:2])]  # fmt: skip


def _joins(room: Room) -> Harness:
    """The lines that answer a worker which joins, on its first connection and on its second, as lists of objects or
    texts; "@PROOF@" is the proof that is right."""
    ticket = Ticket("job", "s", 0, 2, key=_KEY)

    def harness(data: bytes) -> None:
        tree = _objects(data)
        pair = [each if isinstance(each, list) else [each] for each in [*tree, [], []][:2]]
        opened = [_Socket(b"".join(map(_line, lines)), ends=True) for lines in pair]
        coming = iter(opened)
        sockets = SimpleNamespace(create_connection=lambda *given, **more: next(coming))
        try:
            with patch.object(joining, "socket", sockets), patch.object(joining, "nonce", lambda: _NONCE):
                joined = joining.join(("127.0.0.1", 1), ticket, 1.0)
            reducer = Reducer.of("127.0.0.1:1", joined, 0)
            assert not reducer.stream.machine.num_out
        finally:
            for each in opened:
                each.close()

    return harness


def _line(said: Any) -> bytes:
    if isinstance(said, str):
        return said.encode(errors="replace") + b"\n"
    if isinstance(said, dict) and said.get("proof") == "@PROOF@":
        facts = (said.get(name) for name in ("start", "slots", "piece_bytes", "total"))
        with suppress(ValueError, RecursionError):
            said = {**said, "proof": proof(_KEY, "start", _NONCE, *facts)}
    if isinstance(said, dict) and said.get("open") == "@PROOF@":
        said = {**said, "open": proof(_KEY, "open", _NONCE, "id", 0)}
    return json.dumps(said).encode() + b"\n"


def _joins_seeds() -> Sequence[bytes]:
    hello = {"headwater-reduce": PROTOCOL, "nonce": "m" * 32}
    start = {"start": "id", "slots": 2, "piece_bytes": BLOCK_BYTES, "total": 2, "proof": "@PROOF@"}
    second = [hello, {"open": "@PROOF@"}]
    seeds = [[[hello, start], second], [[hello, start, {"left": 1}], [hello, {"refused": "why"}]],
             [[hello, {"refused": "no"}]], [[hello, {"gone": "who"}]], [["220 mail.example ESMTP"]]]  # fmt: skip
    return [json.dumps(each).encode() for each in seeds]


TARGETS = (
    Target("guest", "what a stranger says to an aggregator", _guest, _guest_seeds, (), 60, "json"),
    Target("blocks", "blocks of a worker over TCP", _blocks, _blocks_seeds, (MisfitError,), 30),
    Target("packets", "packets of a worker over UDP", _packets, _packets_seeds, (MisfitError,), 30),
    Target("joins", "what an aggregator says to a worker that joins", _joins, _joins_seeds, (ReduceError,), 30, "json"),
    Target("sums", "what an aggregator sends to a worker", _sums, _sums_seeds, (ReduceError,), 30),
)
