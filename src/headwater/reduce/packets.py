"""Packets of a job, laid end to end in one buffer. Owns the header, `Layout`, `Packets` and `split`.

A packet is 16 bytes of header and a piece of a block:

    tag    8 bytes   whose it is: of this worker in this start of this job; results carry one that all workers share
    word   8 bytes   block (32 bits) · piece (8) · pieces of the block (8) · kind (4), mean (1), format (3) · unused (8)

Little-endian throughout. Pieces of one block differ in their word by a constant, so that a run of packets which one
system call brought is checked by two comparisons, however many there are. ASK, NEED and WAIT have 8 bytes for a bitmap
instead of a piece.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.slots import MAX_PIECES
from headwater.core.sums import FORMATS, Format

HEADER_BYTES = 16
BUFFER_BYTES = 1 << 16  # the kernel hands over no more at once
DATA, RESULT, ASK, NEED, WAIT = range(5)
MEAN = 0x10  # a flag: the sum is divided by the number of workers
DEFAULT_PIECE_BYTES = 1400  # with all headers 1,458 bytes on Ethernet: passes tunnels that leave 1,450 of 1,500
BURST_BYTES = 47_000  # of packets sent by one call: what a link of 100 Mbit/s lets pass at once is about this
_BLOCK, _PIECE, _PIECES, _FLAGS = 0, 32, 40, 48
_MESSAGE = struct.Struct("<QQQ")

Run = tuple[int, int, int, int]  # first row, rows, word of the first, bytes of the last one's piece


def word(kind: int, block: int, piece: int = 0, num_pieces: int = 0, flags: int = 0) -> int:
    return block | piece << _PIECE | num_pieces << _PIECES | (kind | flags) << _FLAGS


def read_word(said: int) -> tuple[int, int, int, int, int]:
    """Kind, block, piece, pieces, flags."""
    about = said >> _FLAGS & 0xFF
    return about & 0x0F, said & 0xFFFFFFFF, said >> _PIECE & 0xFF, said >> _PIECES & 0xFF, about & 0xF0


def flags_of(number: Format, mean: bool) -> int:
    return number.code << 5 | (MEAN if mean else 0)


def format_of_flags(flags: int) -> Format:
    return FORMATS[flags >> 5]


def message(tag: int, kind: int, block: int, bitmap: int) -> bytes:
    return _MESSAGE.pack(tag, word(kind, block), bitmap)


class Layout:
    """How a block is cut into pieces."""

    def __init__(self, piece_bytes: int = DEFAULT_PIECE_BYTES) -> None:
        assert piece_bytes % 8 == 0
        self.piece_bytes = piece_bytes
        self.packet_bytes = piece_bytes + HEADER_BYTES
        self.pieces = max(1, min(MAX_PIECES, BURST_BYTES // self.packet_bytes))  # of a full block
        self.block_bytes = self.pieces * piece_bytes
        self.rows = -(-BUFFER_BYTES // self.packet_bytes)  # of a buffer; the kernel may fill all but a part of the last
        self.steps = np.arange(self.rows, dtype=np.uint64) << np.uint64(_PIECE)
        self.step_bytes = [self.steps[:count].tobytes() for count in range(self.rows + 1)]

    def num_pieces(self, num_bytes: int) -> int:
        return -(-num_bytes // self.piece_bytes)

    def on_wire(self, count: int, last_bytes: int) -> int:
        """Bytes of so many packets, of which the last has a piece of so many bytes."""
        return (count - 1) * self.packet_bytes + HEADER_BYTES + last_bytes


class Packets:
    """A buffer that the kernel reads from and writes to, and the same memory as headers and numbers."""

    __slots__ = ("_values", "body", "heads", "layout", "memory", "raw")

    def __init__(self, layout: Layout, tag: int = 0) -> None:
        self.layout = layout
        self.raw = np.zeros(layout.rows * layout.packet_bytes, np.uint8)
        self.memory: memoryview = self.raw.data
        grid = self.raw.reshape(layout.rows, layout.packet_bytes)
        self.heads: npt.NDArray[np.uint64] = grid[:, :HEADER_BYTES].view("<u8")
        self.body = grid[:, HEADER_BYTES:]
        self._values: dict[int, npt.NDArray[Any]] = {}
        self.heads[:, 0] = tag

    def values(self, number: Format) -> npt.NDArray[Any]:
        """Row by row, the pieces as numbers."""
        found = self._values.get(number.code)
        if found is None:
            found = self._values[number.code] = self.body.view(number.wire)
        return found

    def set_words(self, first: int, count: int) -> None:
        """Headers of so many packets, the first of which has this word."""
        np.add(self.layout.steps[:count], np.uint64(first), out=self.heads[:count, 1])

    def bitmap(self) -> int:
        """Of a message."""
        return int.from_bytes(self.memory[HEADER_BYTES : HEADER_BYTES + 8], "little")


def split(packets: Packets, num_bytes: int, packet_bytes: int, tag: bytes) -> tuple[list[Run], int]:
    """The runs of consecutive pieces that a call of the kernel brought, and how many packets were not of this tag.

    `packet_bytes` is the size of each packet but the last. Messages, and packets of an odd size, come one at a time.
    """
    layout = packets.layout
    size = layout.packet_bytes
    if num_bytes < HEADER_BYTES:
        return [], 1
    if num_bytes <= packet_bytes:  # one packet
        if packets.memory[:8] != tag:
            return [], 1
        return ([(0, 1, int(packets.heads[0, 1]), num_bytes - HEADER_BYTES)], 0) if num_bytes <= size else ([], 1)
    if packet_bytes != size:
        raise OddSizeError
    count = -(-num_bytes // size)
    last = num_bytes - (count - 1) * size - HEADER_BYTES
    heads = packets.heads[:count]
    words = heads[:, 1]
    if heads[:, 0].tobytes() == tag * count and (words - words[0]).tobytes() == layout.step_bytes[count] and last >= 0:
        return [(0, count, int(words[0]), last)], 0
    # From another block, or another sender: the kernel has put together what came in a row.
    mine = heads[:, 0] == np.frombuffer(tag, "<u8")[0]
    if last < 0:
        mine[-1] = False
    runs: list[Run] = []
    row = 0
    while row < count:
        if not mine[row]:
            row += 1
            continue
        end = row + 1
        while end < count and mine[end] and int(words[end]) - int(words[end - 1]) == 1 << _PIECE:
            end += 1
        runs.append((row, end - row, int(words[row]), last if end == count else layout.piece_bytes))
        row = end
    return runs, int(count - mine.sum())


class OddSizeError(Exception):
    """Several packets of a size that is not the layout's, one behind the other: take them one at a time."""


def one_by_one(packets: Packets, num_bytes: int, packet_bytes: int, spare: Packets) -> Any:
    """Each packet alone, at the beginning of `spare`; yields its bytes."""
    for start in range(0, num_bytes, packet_bytes):
        piece = packets.memory[start : min(start + packet_bytes, num_bytes)]
        spare.memory[: len(piece)] = piece
        yield len(piece)
