"""The log of a part's steps: what was done since the checkpoint, so that it can be done again after a kill.

Owns the form of a record (a head with version, length and checksums, then the step's message as it came) and the file.
A record that was cut short, and all behind it, never happened: `StepLog` cuts them off when it opens the file.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<4sIQQI")  # mark, checksum of the body, version, length of the body, checksum of this head
_MARK = b"hws1"


class StepLog:
    """Steps in the order of their versions, one after the other."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._ends: dict[int, int] = {}  # where each version's record ends
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._written = self._synced = 0  # counted in appends
        for version, start, length in self._scan():
            self._ends[version] = self.num_bytes = start + length
        os.ftruncate(self._file, self.num_bytes)

    def append(self, version: int, body: Any) -> None:
        """With the kernel: a kill of this process loses it no more. OSError, with nothing appended, on a full disk."""
        view = memoryview(body)
        head = _HEAD.pack(_MARK, zlib.crc32(view), version, len(view), 0)
        head = head[:-4] + struct.pack("<I", zlib.crc32(head[:-4]))
        try:
            _write(self._file, head, self.num_bytes)
            _write(self._file, view, self.num_bytes + len(head))
        except OSError:
            os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes += len(head) + len(view)
        self._ends[version] = self.num_bytes
        self._written += 1

    def sync(self) -> None:
        """With the disk: a power cut loses it no more."""
        with self._lock:
            written = self._written
            if self._synced < written:
                os.fdatasync(self._file)
                self._synced = written

    def steps(self) -> Iterator[tuple[int, bytes]]:
        """(version, message) of each."""
        for version, start, length in self._scan():
            yield version, os.pread(self._file, length, start)

    def cut(self, version: int) -> None:
        """Forget what came after that version."""
        self._ends = {each: end for each, end in self._ends.items() if each <= version}
        self.num_bytes = max(self._ends.values(), default=0)
        os.ftruncate(self._file, self.num_bytes)
        os.fdatasync(self._file)

    def clear(self) -> None:
        self.cut(-1)

    def close(self) -> None:
        os.close(self._file)

    def _scan(self) -> Iterator[tuple[int, int, int]]:
        """(version, start of the body, its length) of whole records, in order."""
        size, place, before = os.fstat(self._file).st_size, 0, None
        while place + _HEAD.size <= size:
            head = os.pread(self._file, _HEAD.size, place)
            mark, body_sum, version, length, head_sum = _HEAD.unpack(head)
            start = place + _HEAD.size
            if mark != _MARK or head_sum != zlib.crc32(head[:-4]) or start + length > size:
                return
            if zlib.crc32(os.pread(self._file, length, start)) != body_sum or (before is not None and version != before + 1):
                return
            yield version, start, length
            before, place = version, start + length


def _write(file: int, data: Any, place: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        num = os.pwrite(file, view, place)
        view, place = view[num:], place + num
