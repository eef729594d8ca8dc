"""Rows handed over as files, where a node and a trainer see the same folder: they cross no wire.

Owns the file's form, who may leave one, and how it is read. A file has the tensors one after the other, as they are in
memory, each beginning at a multiple of 4,096 bytes, so that it can be read past the page cache (`O_DIRECT`) into memory
that is aligned alike. What is in it is told on the wire (`Handed`). May not import torch, `node` or `train`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.spec import Boundary
from headwater.errors import ConfigError, DamagedError

ALIGN = 4096
KEEP_S = 120.0  # a trainer takes a file as soon as it is told of it; one that is still there was not wanted
SWEEP_S = KEEP_S / 4
MOST_BYTES = 1 << 30  # that may lie there at once; what comes then takes the wire, which a slow trainer slows down
_SUFFIX = ".headwater-rows"
_NAME = re.compile(rf"[0-9a-f]+{re.escape(_SUFFIX)}")
_MARK = ".headwater-mark-"
_MARK_BYTES = 1 << 10  # of a mark that are read; it has 32
# Whoever can write to the folder may have put a link or a pipe there.
_PLAINLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class Handed:
    """Some rows in a file: its name, whose rows, and the sum of its 64-bit words."""

    name: str
    ids: tuple[int, ...]
    checksum: int

    def to_json(self) -> list[Any]:
        return [self.name, list(self.ids), self.checksum]

    @classmethod
    def from_json(cls, data: object) -> Handed:
        """What a node said of a file; DamagedError if it says something else, or names a file elsewhere."""
        if not isinstance(data, list) or len(data) != 3:
            raise DamagedError("a file of rows is told as [name, ids, checksum]")
        name, ids, checksum = data
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DamagedError("a file of rows has a name that no node gives")
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 2**63 for each in ids):
            raise DamagedError("a file of rows is told with ids, which are whole numbers from 0 to 2**63 - 1")
        if type(checksum) is not int:
            raise DamagedError("a file of rows is told with a checksum, which is a whole number")
        return cls(name, tuple(ids), checksum)


def _checksum(whole: memoryview) -> int:
    """The sum of its 64-bit words. A gigabyte takes a tenth of what a CRC takes: what a file is for is to cost less
    than the wire.

    It notices any one flipped bit, and a part that is zero or another file's, unless that has the same sum. It does not
    notice words that changed places, such as two blocks exchanged, nor changes that add up to nothing. It is there for
    disks that err: whoever can write to the folder can make another file of the same sum.
    """
    return int(np.frombuffer(whole, np.uint64).sum(dtype=np.uint64))


def _sizes(num_rows: int, boundary: Boundary) -> list[int]:
    """Bytes of each tensor in a file, with what fills it up."""
    return [-(-num_rows * spec.row_bytes // ALIGN) * ALIGN for spec in boundary]


def _read_mark(path: Path) -> bytes:
    """No more than a mark has, whatever lies there."""
    file = os.open(path, _PLAINLY)
    try:
        return os.read(file, _MARK_BYTES)
    finally:
        os.close(file)


class Outbox:
    """A folder that trainers see, too. What they don't take is taken away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        folder = self.folder
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._left: deque[tuple[float, str, int]] = deque()  # when, what, its bytes
        self._is_direct = True
        self._secret, self._mark = secrets.token_hex(16), f"{_MARK}{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self._mark).write_text(self._secret)
        except OSError as error:
            raise ConfigError(f"rows can't be handed over in {folder}: {error.strerror}; choose another folder with "
                              "--hand-over") from None  # fmt: skip
        self.sweep()
        threading.Thread(target=self._sweep_on, name="hand-over", daemon=True).start()

    def to_json(self) -> dict[str, str]:
        """By this a trainer can tell that it sees the same folder."""
        return {"folder": str(self.folder), "mark": self._mark, "secret": self._secret}

    def leave(self, ids: np.ndarray, tensors: Sequence[np.ndarray], boundary: Boundary) -> Handed | None:
        """Write these rows to a file; None if there is no room, and they have to take the wire."""
        sizes = _sizes(len(ids), boundary)
        if not self._has_room(sum(sizes)):
            return None
        room = mmap.mmap(-1, max(sum(sizes), ALIGN))  # anonymous memory is aligned to pages
        at = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            data = np.ascontiguousarray(tensor).view(np.uint8).reshape(-1)
            np.frombuffer(room, np.uint8, len(data), at)[:] = data
            at += size
        name = f"{secrets.token_hex(12)}{_SUFFIX}"
        whole = memoryview(room)
        try:
            self._write(self.folder / name, whole)
            checksum = _checksum(whole)
        except OSError:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
            return None  # a full disk costs the short way, not the rows
        finally:
            whole.release()
        with self._lock:
            self._left.append((time.monotonic(), name, sum(sizes)))
        return Handed(name, tuple(ids.tolist()), checksum)

    def _write(self, path: Path, whole: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(path, flags | (os.O_DIRECT if self._is_direct else 0), 0o644)
        except OSError as error:
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
            self._is_direct = False  # such as memory that looks like a disk
            path.unlink(missing_ok=True)
            file = os.open(path, flags, 0o644)
        try:
            done = 0
            while done < len(whole):
                done += os.write(file, whole[done:])
        finally:
            os.close(file)

    def _has_room(self, num_bytes: int) -> bool:
        """Among what was left and is still there."""
        with self._lock:
            left = list(self._left)
        gone = [each for each in left if not (self.folder / each[1]).exists()]
        with self._lock:
            for each in gone:
                with contextlib.suppress(ValueError):
                    self._left.remove(each)
            return sum(size for _, _, size in self._left) + num_bytes <= MOST_BYTES

    def sweep(self) -> None:
        """Take away what nobody has taken, and what a node that was killed has left here."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / self._mark)
        for path in [*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f"{_MARK}*")]:
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > KEEP_S:
                    path.unlink()

    def _sweep_on(self) -> None:
        while not self._closed.wait(SWEEP_S):
            self.sweep()

    def close(self) -> None:
        """Take everything away."""
        self._closed.set()
        with self._lock:
            left, self._left = list(self._left), deque()
        for name in [self._mark, *(name for _, name, _ in left)]:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()


class Inbox:
    """The same folder, seen from a trainer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_direct = True
        self._kept = threading.local()  # memory that is fetched anew is cleared by the kernel first

    @classmethod
    def found(cls, told: object) -> Inbox | None:
        """The folder that a node told of, if this machine sees it."""
        if not isinstance(told, dict) or not all(
            isinstance(told.get(name), str) for name in ("folder", "mark", "secret")
        ):
            return None
        mark = told["mark"]
        if os.path.basename(mark) != mark or not mark.startswith(_MARK):
            return None
        folder = Path(told["folder"])
        try:
            is_same = _read_mark(folder / mark) == told["secret"].encode()
        except (OSError, ValueError):
            return None
        # Who can't delete what was taken would soon leave no room.
        may_take = is_same and os.access(folder, os.W_OK | os.X_OK)
        return cls(folder) if may_take else None

    def take(self, handed: Handed, boundary: Boundary) -> tuple[np.ndarray, list[np.ndarray]]:
        """The rows, until this thread asks again, and the file is gone; DamagedError if they are not what was
        written."""
        path, sizes = self._folder / handed.name, _sizes(len(handed.ids), boundary)
        try:
            room = self._read(path, max(sum(sizes), ALIGN))
        except OSError as error:
            raise DamagedError(
                f"rows that were handed over in {self._folder} can't be read: {error.strerror}"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        if _checksum(room) != handed.checksum:
            raise DamagedError(f"rows that were handed over in {self._folder} are not those that were written")
        tensors, at = [], 0
        for spec, size in zip(boundary, sizes, strict=True):
            count = len(handed.ids) * spec.num_items
            tensors.append(np.frombuffer(room, spec.dtype, count, at).reshape(len(handed.ids), *spec.shape))
            at += size
        return np.array(handed.ids, np.int64), tensors

    def _room(self, num_bytes: int) -> memoryview:
        """Memory that is aligned to pages, the same again and again."""
        kept: mmap.mmap | None = getattr(self._kept, "room", None)
        if kept is None or len(kept) < num_bytes:
            kept = self._kept.room = mmap.mmap(-1, num_bytes)
        return memoryview(kept)[:num_bytes]

    def _read(self, path: Path, num_bytes: int) -> memoryview:
        """Into memory of our own; past the page cache, where the file system can."""
        file = self._open(path)
        try:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode) or about.st_size != num_bytes:
                raise OSError(errno.EIO, f"it is no file of {num_bytes:,} bytes")
            room, done = self._room(num_bytes), 0
            while done < num_bytes:
                got = os.preadv(file, [room[done:]], done)
                if not got:
                    raise OSError(errno.EIO, "it ends too early")
                done += got
            return room
        finally:
            os.close(file)

    def _open(self, path: Path) -> int:
        if self._is_direct:
            try:
                return os.open(path, _PLAINLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # such as memory that looks like a disk
        return os.open(path, _PLAINLY)
