"""One sample of a shard: a header of 64 bytes, then its pixels as they lie in memory (height × width × RGB).

Owns the bytes of a record. The header says which steps of the transforms were done, so whoever has the bytes can go on
from there and needs to be told nothing. Little-endian; the checksum covers header and pixels.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.errors import BadSampleError

SUFFIX = ".hws"
MAGIC = b"\x89HWREC1\n"  # no picture format begins so
ALIGN = 64  # a cache line: headers, and so pixels, begin on one
_HEADER = struct.Struct("<8sIII16s")  # magic, height, width, number of steps done, digest of those steps
_SUM = struct.Struct("<I")
HEADER_BYTES = 64
_UNUSED = bytes(HEADER_BYTES - _HEADER.size - _SUM.size)
WAY_OUT = "`headwater pack SRC DST --verify` finds every damaged shard and packs it again"


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was read. `pixels` is a view of the bytes it was read from."""

    pixels: np.ndarray
    num_steps: int
    digest: bytes


def record_bytes(height: int, width: int) -> int:
    """Of a record, without what fills it up to the next one's place."""
    return HEADER_BYTES + height * width * 3


def padding(num_bytes: int) -> int:
    """How many bytes are between the end of a record and the next place where one may begin."""
    return -num_bytes % ALIGN


def header_of(pixels: np.ndarray, num_steps: int, digest: bytes) -> tuple[bytes, int]:
    """The header of these pixels, and their checksum."""
    height, width, channels = pixels.shape
    assert channels == 3
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    head = _HEADER.pack(MAGIC, height, width, num_steps, digest)
    checksum = zlib.crc32(pixels.data, zlib.crc32(head))
    return head + _SUM.pack(checksum) + _UNUSED, checksum


def is_record(data: Any) -> bool:
    """Whether these bytes are a record and not a picture's file."""
    return bytes(memoryview(data)[: len(MAGIC)]) == MAGIC


def read_record(data: Any, key: str) -> Record:
    """The record in these bytes. Its checksum is not looked at; see `check_record`."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise BadSampleError(key, f"a record of {len(view)} bytes, shorter than its header; {WAY_OUT}")
    magic, height, width, num_steps, digest = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise BadSampleError(key, f"no record begins there (found {magic!r}): the shard is damaged; {WAY_OUT}")
    if len(view) != record_bytes(height, width):
        raise BadSampleError(
            key, f"a record of {height}×{width} pixels in {len(view):,} bytes: the shard is damaged; {WAY_OUT}"
        )
    pixels = np.frombuffer(view, np.uint8, offset=HEADER_BYTES).reshape(height, width, 3)
    return Record(pixels, num_steps, digest)


def check_record(data: Any, key: str, offset: int, crc32: int | None = None) -> None:
    """BadSampleError if header or pixels are not those that were written, or not those of the record `crc32`."""
    read_record(data, key)
    view = memoryview(data)
    (written,) = _SUM.unpack_from(view, _HEADER.size)
    found = zlib.crc32(view[HEADER_BYTES:], zlib.crc32(view[: _HEADER.size]))
    if found != written:
        raise BadSampleError(
            key,
            f"the record at byte {offset:,} is damaged (checksum {found:08x}, written as {written:08x}); {WAY_OUT}",
        )
    check_which(data, key, offset, crc32)


def check_which(data: Any, key: str, offset: int, crc32: int | None) -> None:
    """BadSampleError if a whole record is not the one with this checksum; None: it is not known which it should be."""
    written = int.from_bytes(memoryview(data)[_HEADER.size : _HEADER.size + _SUM.size], "little")
    if crc32 is not None and crc32 != written:
        raise BadSampleError(
            key,
            f"the record at byte {offset:,} is whole, and not the one that the index has there (checksum "
            f"{written:08x}, not {crc32:08x}): the shard is of another pack, or took another one's place; {WAY_OUT}",
        )
