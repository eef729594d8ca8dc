"""The log of a part's steps: what was done since the checkpoint, so that it can be done again after a kill.

Owns the form of a record (a head with version, length and checksums, then the step's message as it came) and the file.
A record that was cut short, and all behind it, never happened: `StepLog` cuts them off when it opens the file.

What the disk failed to keep never happened either. Linux tells of a failed write once, and takes the pages for clean
from then on: a later sync says that all is well, over a hole. So the first failure is the last word: `fault` says why,
the file is cut back to what is on the disk, and nothing more is taken until the log is opened anew.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater.data.tablewire import MAX_MESSAGE_BYTES

_HEAD = struct.Struct("<4sIQQI")  # mark, checksum of the body, version, length of the body, checksum of this head
_MARK = b"hws1"
_PAGE = mmap.PAGESIZE


class StepLog:
    """Steps in the order of their versions: those in the file before this one, if it is there, then those in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._old = path, path.with_name(f"{path.name}.old")
        self._lock = threading.Lock()
        self._written = self._synced = 0  # counted in appends
        self._is_closed = False
        self.fault: str | None = None  # why the disk did not keep what it was given
        self._open()

    def _open(self) -> None:
        """All that is there is with the disk then, and so is the file's name."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            ends = {version: start + length for version, start, length in _scan(file)}
            num_bytes = max(ends.values(), default=0)
            os.ftruncate(file, num_bytes)
            os.fdatasync(file)  # a kill may have come between a record and its sync
            sync_folder(self._path.parent)
        except BaseException:
            os.close(file)
            raise
        self._file, self._ends = file, ends  # where each version's record ends
        self.num_bytes = self._kept_bytes = num_bytes  # written, and certain to be on the disk

    def append(self, version: int, body: Any) -> None:
        """With the kernel: a kill of this process loses it no more. OSError, with nothing appended, on a full disk."""
        self._check()
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
        if self.fault is not None:  # meanwhile
            self._cut_back()
            self._check()

    def sync(self) -> None:
        """With the disk: a power cut loses it no more. OSError, now and ever after, if the disk has not kept it."""
        with self._lock:
            if self._is_closed:  # which did it, unless there is a fault
                self._check()
                return
            self._sync()

    def _sync(self) -> None:
        self._check()
        written, num_bytes = self._written, self.num_bytes
        if self._synced < written:
            try:
                os.fdatasync(self._file)
            except OSError as error:
                self.fault = error.strerror or "unknown"
                self._cut_back()
                raise
            # Nobody reads it but after a kill: the kernel's memory is for what is read. The page that the next record
            # begins on stays, or it would have to be read for that.
            first, stop = self._kept_bytes // _PAGE * _PAGE, num_bytes // _PAGE * _PAGE
            if stop > first:
                os.posix_fadvise(self._file, first, stop - first, os.POSIX_FADV_DONTNEED)
            self._synced, self._kept_bytes = written, num_bytes

    def _check(self) -> None:
        if self.fault is not None:
            raise OSError(errno.EIO, self.fault)

    def _cut_back(self) -> None:
        """Whoever opens the file must not take for kept what the kernel alone has."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._kept_bytes)

    def steps(self) -> Iterator[tuple[int, bytes]]:
        """(version, message) of each."""
        if self._old.exists():
            file = os.open(self._old, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for version, start, length in _scan(file):
                    yield version, os.pread(file, length, start)
            finally:
                os.close(file)
        for version, start, length in _scan(self._file):
            yield version, os.pread(self._file, length, start)

    def turn(self) -> None:
        """What is in the log becomes the old one, and goes when a checkpoint has it. If there is an old one already, of
        a checkpoint that failed, both stay."""
        if self._old.exists():
            return
        with self._lock:
            self._sync()
            self._path.rename(self._old)
            before = self._file
            try:
                self._open()
            except BaseException:
                self._old.rename(self._path)
                raise
            os.close(before)

    def drop_old(self) -> None:
        self._old.unlink(missing_ok=True)

    def cut(self, version: int) -> None:
        """Forget what came after that version; it is in the newer file, or all of that goes."""
        self._check()
        self._ends = {each: end for each, end in self._ends.items() if each <= version}
        self.num_bytes = max(self._ends.values(), default=0)
        os.ftruncate(self._file, self.num_bytes)
        with self._lock:
            self._kept_bytes = min(self._kept_bytes, self.num_bytes)
            self._written += 1
            self._sync()
        if self._old.exists():
            file = os.open(self._old, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(
                    file, max((start + length for each, start, length in _scan(file) if each <= version), default=0)
                )
                os.fdatasync(file)
            finally:
                os.close(file)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            try:
                with contextlib.suppress(OSError):  # what was not kept was not confirmed
                    self._sync()
            finally:
                os.close(self._file)


def sync_folder(folder: Path) -> None:
    """The names in it, with the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _scan(file: int) -> Iterator[tuple[int, int, int]]:
    """(version, start of the body, its length) of whole records, in order."""
    size, place, before = os.fstat(file).st_size, 0, None
    while place + _HEAD.size <= size:
        head = os.pread(file, _HEAD.size, place)
        mark, body_sum, version, length, head_sum = _HEAD.unpack(head)
        start = place + _HEAD.size
        if mark != _MARK or head_sum != zlib.crc32(head[:-4]) or not length <= min(size - start, MAX_MESSAGE_BYTES):
            return
        if zlib.crc32(os.pread(file, length, start)) != body_sum or (before is not None and version != before + 1):
            return
        yield version, start, length
        before, place = version, start + length


def _write(file: int, data: Any, place: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        num = os.pwrite(file, view, place)
        view, place = view[num:], place + num
