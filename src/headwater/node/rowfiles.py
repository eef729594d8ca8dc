"""Rows in files: what a record looks like, and the pair of files that records are added to.

Owns the format (`FORMAT`) of a segment. `NUMBER.rows` has records of one size, one after the other: a checksum, the
row's key, then its columns as they go over the wire. `NUMBER.keys` has the first eight bytes of each record's key, so
that a segment is searched without reading its rows. A record's key is written after the record, so what was cut short
by a kill has no key and is cut off; whatever else may have happened to a record, its checksum tells.
"""

from __future__ import annotations

import contextlib
import os
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headwater.core.cache import KEY_BYTES
from headwater.core.spec import Boundary

FORMAT = "headwater-rows 1"  # another number for other files: those of another format are removed
HASH_BYTES = 8
_SUM_BYTES = 4
HEAD_BYTES = _SUM_BYTES + KEY_BYTES
_NUMPY = {"bfloat16": "uint16"}  # as codecs have it


def pack(keys: np.ndarray, columns: Sequence[np.ndarray], specs: Boundary) -> np.ndarray:
    """Records, one a line; `keys` has two 64-bit numbers for each."""
    count = len(keys)
    records = np.empty((count, HEAD_BYTES + sum(spec.row_bytes for spec in specs)), np.uint8)
    records[:, _SUM_BYTES:HEAD_BYTES] = np.ascontiguousarray(keys).view(np.uint8).reshape(count, KEY_BYTES)
    start = HEAD_BYTES
    for values, spec in zip(columns, specs, strict=True):
        stop = start + spec.row_bytes
        records[:, start:stop] = np.ascontiguousarray(values).reshape(count, -1).view(np.uint8)
        start = stop
    records[:, :_SUM_BYTES] = _sums(records)
    return records


def unpack(records: np.ndarray, specs: Boundary) -> list[np.ndarray]:
    """The columns of records that are whole."""
    columns, start = [], HEAD_BYTES
    for spec in specs:
        stop = start + spec.row_bytes
        values = np.ascontiguousarray(records[:, start:stop]).view(_NUMPY.get(spec.dtype, spec.dtype))
        columns.append(values.reshape(len(records), *spec.shape))
        start = stop
    return columns


def whole(records: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which records are as they were written, and the rows of these keys."""
    right = (records[:, _SUM_BYTES:HEAD_BYTES] == keys.view(np.uint8).reshape(len(keys), KEY_BYTES)).all(axis=1)
    return right & (records[:, :_SUM_BYTES] == _sums(records)).all(axis=1)


def _sums(records: np.ndarray) -> np.ndarray:
    sums = np.fromiter((zlib.crc32(record[_SUM_BYTES:]) for record in records), "<u4", len(records))
    return sums.view(np.uint8).reshape(len(records), _SUM_BYTES)


class Segment:
    """A pair of files. One thread may add while others read."""

    def __init__(self, folder: Path, number: int, record_bytes: int) -> None:
        """Opens or makes it. What is not whole at its end is cut off."""
        self.number = number
        self._record_bytes = record_bytes
        rows_path, self.keys_path = segment_paths(folder, number)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._rows = os.open(rows_path, flags, 0o600)
        # Closed when the last reader has let go of it, which may be after it was deleted.
        weakref.finalize(self, os.close, self._rows)
        self._keys = os.open(self.keys_path, flags, 0o600)
        weakref.finalize(self, os.close, self._keys)
        sizes = os.fstat(self._rows).st_size, os.fstat(self._keys).st_size
        self.num_rows = min(sizes[0] // record_bytes, sizes[1] // HASH_BYTES)
        self._cut_off()

    def hashes(self) -> np.ndarray:
        """The first eight bytes of every key."""
        return np.frombuffer(os.pread(self._keys, self.num_rows * HASH_BYTES, 0), "<u8")

    def read(self, position: int, into: np.ndarray) -> None:
        """One record; `into` stays as it is, and is not a whole record, where that can't be read."""
        with contextlib.suppress(OSError):
            os.preadv(self._rows, [into.data], position * self._record_bytes)

    def add(self, records: np.ndarray) -> None:
        """Add records at the end: all of them, or none and the system's error."""
        hashes = np.ascontiguousarray(records[:, _SUM_BYTES : _SUM_BYTES + HASH_BYTES])
        try:
            _write(self._rows, np.ascontiguousarray(records), self.num_rows * self._record_bytes)
            _write(self._keys, hashes, self.num_rows * HASH_BYTES)
        except OSError:
            self._cut_off()
            raise
        self.num_rows += len(records)

    def _cut_off(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._keys, self.num_rows * HASH_BYTES)
            os.ftruncate(self._rows, self.num_rows * self._record_bytes)


def segment_paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"{number}.rows", folder / f"{number}.keys"


def _write(file: int, data: np.ndarray, offset: int) -> None:
    left = data.data.cast("B")
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
