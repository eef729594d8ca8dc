"""Rows that were made once, kept on the node's disk and sent again.

Owns `Cache`: the folder, its lock, the thread that writes, and the counts. `core.cache` decides what a row is named by
and what goes for want of room; `node.rowfiles` knows the files. Whatever goes wrong here costs time, never a row: what
can't be read is made again, and what can't be written is not kept.

    FOLDER/lock            held by the one node that uses the folder
    FOLDER/format          of everything beside it; files of another format are removed
    FOLDER/SHELF/about     what the shelf's rows are, as JSON
    FOLDER/SHELF/N.rows    see `node.rowfiles`
    FOLDER/SHELF/N.keys
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.cache import Keeping, Shelf, row_key
from headwater.core.index import Index
from headwater.data.wire import Chunk
from headwater.node.rowfiles import FORMAT, HASH_BYTES, HEAD_BYTES, Segment, pack, segment_paths, unpack, whole

DEFAULT_BYTES = 10 * 10**9
SEGMENTS = 64  # that a full cache consists of, about: what goes at once is a part of the budget, and files stay few
# Shelves whose files are open and whose keys are in memory: each has a segment that is not full, and all of them share
# the full ones, so that is 2 × (64 + 64) files. A process often gets no more than 1,024.
MAX_OPEN = 64
PIECE_BYTES = 4 << 20  # of rows that are read and sent together
QUEUE_BYTES = 16 << 20  # of rows that wait to be written; more are not kept
TOUCH_EVERY_S = 60.0  # how exactly a restarted node knows what was used last
CLOSE_WITHIN_S = 2.0
TRY_EVERY_S = 5.0  # how soon a folder is taken over from a node that has ended
_SHELF = re.compile(r"[0-9a-f]{32}")
_SEGMENT = re.compile(r"(\d{1,9})\.keys")

log = logging.getLogger(__name__)


@dataclass
class _Open:
    """A shelf in use."""

    shelf: Shelf
    folder: Path
    index: Index = field(default_factory=Index)
    segments: dict[int, Segment] = field(default_factory=dict)
    last: Segment | None = None  # that rows are added to
    touched: dict[int, float] = field(default_factory=dict)

    @property
    def record_bytes(self) -> int:
        return HEAD_BYTES + self.shelf.row_bytes


class Cache:
    """Rows on disk, within `budget_bytes`; by default 10 GB, or half of what is free where that is less.

    Where another node uses the folder, the first of `others` that is free is taken. Where there is none, it is looked
    for again from time to time while rows are asked for.
    """

    def __init__(self, folder: Path, budget_bytes: int | None = None, others: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.why_off: str | None = None  # nothing is kept any more
        self._folders = (folder, *others)
        self._wanted_bytes = budget_bytes
        self._try_at: float | None = None  # when to look for a free folder again
        self._is_readable = False
        self._keeping = Keeping(0)
        self._lock = threading.RLock()
        self._shelves: OrderedDict[str, _Open] = OrderedDict()  # the least recently used first
        self._writing: str | None = None  # the shelf that rows were added to last, and perhaps still are
        self._shelf_of: dict[int, str] = {}  # segment → shelf
        self._next = 1
        self._num_hits = self._num_misses = self._num_damaged = self._num_unkept = 0
        self._said_full = False
        self._queue: queue.SimpleQueue[tuple[Shelf, np.ndarray, Sequence[np.ndarray], str] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._idle = threading.Event()
        self._idle.set()
        self._lock_file: int | None = None
        if budget_bytes == 0:
            self.why_off = "the size it may have is 0"
            return
        self._begin()

    def to_json(self) -> dict[str, Any]:
        """Counts since the start, and what is on disk."""
        with self._lock:
            return {
                "num_cache_hits": self._num_hits,
                "num_cache_misses": self._num_misses,
                "num_cache_damaged": self._num_damaged,
                "num_cache_unkept": self._num_unkept,
                "cache_bytes": self._keeping.num_bytes,
                "cache_budget_bytes": self._keeping.budget_bytes,
                "cache_evicted_bytes": self._keeping.dropped_bytes,
                "cache_full": int(self._said_full),
            }

    def look_up(self, chunk: Chunk, maker: str) -> Lookup | None:
        """What there is of a chunk; None if nothing is, or may be, kept for it."""
        if not chunk.reuse:
            return None
        if self._try_at is not None:
            self._try_again()
        if not self._is_readable:
            return None
        want = chunk.extraction
        draw = (chunk.seed, chunk.epoch) if want.transforms.is_random else None
        shelf = Shelf(want.url, want.transforms.digest, want.prefix, want.outputs, want.boundary, want.precision,
                      want.codec, maker, draw)  # fmt: skip
        with self._lock:
            self._keeping.asked(chunk.job)
        return Lookup(self, shelf, chunk)

    def pieces(self, shelf: Shelf, keys: np.ndarray) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """The kept rows among these, some at a time: which they are, and their columns."""
        there = self._open(shelf)
        if there is None:
            return
        places = there.index.find(keys[:, 0])
        kept = np.flatnonzero(places >= 0)
        self._note_use(there, np.unique(places[kept] >> 32).tolist())
        num_rows = max(1, PIECE_BYTES // there.record_bytes)
        for start in range(0, len(kept), num_rows):
            numbers = kept[start : start + num_rows]
            records = np.zeros((len(numbers), there.record_bytes), np.uint8)
            for record, at in zip(records, places[numbers].tolist(), strict=True):
                segment = there.segments.get(at >> 32)
                if segment is not None:
                    segment.read(at & 0xFFFFFFFF, record)
            good = whole(records, keys[numbers])
            if not good.all():
                held = np.array([at >> 32 in there.segments for at in places[numbers].tolist()])
                if (~good & held).any():  # others were pushed out just now
                    self._note_damage(there, keys[numbers[~good & held], 0])
                numbers, records = numbers[good], records[good]
            if len(numbers):
                yield numbers, unpack(records, shelf.columns)

    def keep(self, shelf: Shelf, keys: np.ndarray, columns: Sequence[np.ndarray], job: str) -> None:
        """Rows to be written when there is time; where too many wait already, they are not."""
        if self.why_off is not None or not len(keys):
            return
        num_bytes = sum(values.nbytes for values in columns)
        with self._lock:
            if self._queued_bytes and self._queued_bytes + num_bytes > QUEUE_BYTES:
                self._num_unkept += len(keys)
                return
            self._queued_bytes += num_bytes
            self._idle.clear()
        self._queue.put((shelf, keys, columns, job))

    def count(self, num_hits: int, num_misses: int) -> None:
        with self._lock:
            self._num_hits += num_hits
            self._num_misses += num_misses

    def wait(self, within_s: float) -> None:
        """Until everything is written that was to be kept."""
        self._idle.wait(within_s)

    def close(self) -> None:
        """Write what waits, and let go of the folder."""
        with self._lock:
            self._try_at = None
            if not self._is_readable:
                return
        self._queue.put(None)
        self._thread.join(CLOSE_WITHIN_S)
        self._is_readable = False
        with self._lock:
            self.why_off = self.why_off or "the node has ended"
            self._shelves.clear()
            if self._lock_file is not None and not self._thread.is_alive():  # who still writes still holds the folder
                os.close(self._lock_file)
                self._lock_file = None

    # The folder

    def _begin(self) -> None:
        """Take the first folder that nobody uses."""
        for folder in self._folders:
            self.folder = folder
            try:
                self._enter(self._wanted_bytes)
            except _InUseError:
                continue
            except OSError as error:
                self.why_off = self._try_at = None
                self._turn_off(f"{folder} can't be used: {error.strerror or error}; name another folder (--cache-dir), "
                               "or for a node that your script starts XDG_CACHE_HOME")  # fmt: skip
                return
            self.why_off = self._try_at = None
            self._is_readable = True
            self._thread = threading.Thread(target=self._work, name="cache", daemon=True)
            self._thread.start()
            return
        self.folder = self._folders[0]
        self._try_at = time.monotonic() + TRY_EVERY_S
        self._turn_off(f"another node uses {self.folder}, which is taken over once that node has ended; let one "
                       "`headwater serve` serve both, or give each a folder of its own (--cache-dir)")  # fmt: skip

    def _try_again(self) -> None:
        """Another node used the folder; does it still?"""
        with self._lock:
            if self._try_at is None or time.monotonic() < self._try_at:
                return
            self._begin()
            if self._is_readable:
                log.warning("rows are kept in %s from now on: the other node has ended", self.folder)

    def _enter(self, budget_bytes: int | None) -> None:
        """Lock the folder, remove what is not ours to use, and see what is there. Rows are not looked at yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_file)
            self._lock_file = None
            if isinstance(error, BlockingIOError):
                raise _InUseError from None
            raise
        shelves = [path for path in self.folder.iterdir() if _SHELF.fullmatch(path.name) and path.is_dir()]
        about = self.folder / "format"
        written_as = _text(about)
        if written_as != FORMAT:
            if shelves:
                log.warning("%s was written by another version (%s, this is %s) and is made anew", self.folder,
                            written_as[:40] or "unknown", FORMAT)  # fmt: skip
            for path in shelves:
                shutil.rmtree(path, ignore_errors=True)
            shelves = []
            about.write_text(FORMAT)
        found = [each for path in shelves for each in self._scan(path)]
        if budget_bytes is None:
            own = sum(num_bytes for _, _, num_bytes in found)
            budget_bytes = min(DEFAULT_BYTES, (shutil.disk_usage(self.folder).free + own) // 2)
        self._keeping = Keeping(budget_bytes)
        for _, number, num_bytes in sorted(found):
            self._keeping.found(number, num_bytes)
            self._next = max(self._next, number + 1)
        for number in self._keeping.shrink():
            self._remove(number)

    def _scan(self, folder: Path) -> list[tuple[float, int, int]]:
        """(last used, number, bytes) of a shelf's segments; what can't be of use is removed."""
        record_bytes = _record_bytes(folder)
        if record_bytes is None:
            log.warning("%s is damaged and is removed; its rows are made again", folder)
            shutil.rmtree(folder, ignore_errors=True)
            return []
        found = []
        for path in folder.iterdir():
            if path.name == "about":
                continue
            match = _SEGMENT.fullmatch(path.name)
            number = int(match[1]) if match else -1
            rows, keys = segment_paths(folder, number)
            if match is None:
                if path.suffix != ".rows" or not path.with_suffix(".keys").exists():
                    with contextlib.suppress(OSError):
                        path.unlink()
                continue
            with contextlib.suppress(OSError):
                num_rows = min(rows.stat().st_size // record_bytes if rows.exists() else 0,
                               keys.stat().st_size // HASH_BYTES)  # fmt: skip
                if num_rows == 0 or number in self._shelf_of:
                    rows.unlink(missing_ok=True)
                    keys.unlink(missing_ok=True)
                    continue
                self._shelf_of[number] = folder.name
                found.append((keys.stat().st_mtime, number, num_rows * (record_bytes + HASH_BYTES)))
                for file, size in ((rows, num_rows * record_bytes), (keys, num_rows * HASH_BYTES)):
                    if file.stat().st_size > size:
                        os.truncate(file, size)  # what a kill left behind the last whole row is in no budget
        if not found:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def _open(self, shelf: Shelf, make: bool = False) -> _Open | None:
        """The shelf, with its keys in memory; None if there is none and none is to be made, or if it can't be read."""
        with self._lock:
            there = self._shelves.get(shelf.name)
            if there is None and not make and shelf.name not in self._shelf_of.values():
                return None
            if there is None:
                there = _Open(shelf, self.folder / shelf.name)
                try:
                    self._load(there)
                except OSError as error:
                    self._turn_off(f"{there.folder} can't be read: {error.strerror or error}")
                    return None
                self._shelves[shelf.name] = there
            self._shelves.move_to_end(shelf.name)
            if make:
                self._writing = shelf.name
            self._close_unused()
            return there

    def _close_unused(self) -> None:
        """Let go of shelves beyond `MAX_OPEN`; files are closed once nobody reads them. The lock is held.

        Never of the one that rows are added to: a segment that is opened a second time cuts off what is not whole.
        """
        unused = [name for name in self._shelves if name != self._writing]
        for name in unused[: max(0, len(self._shelves) - MAX_OPEN)]:
            del self._shelves[name]

    def _load(self, there: _Open) -> None:
        numbers = sorted(number for number, name in self._shelf_of.items() if name == there.folder.name)
        if not numbers:
            return
        if _record_bytes(there.folder) != there.record_bytes:
            log.warning("%s has rows of another size and is removed", there.folder)
            for number in numbers:
                self._keeping.gone(number)
                self._remove(number)
            return
        for number in numbers:
            there.segments[number] = there.last = Segment(there.folder, number, there.record_bytes)
        there.index.add_all([(segment.hashes(), number) for number, segment in there.segments.items()])

    def _remove(self, number: int) -> None:
        """A segment and, with the last one, its shelf."""
        name = self._shelf_of.pop(number)
        there = self._shelves.get(name)
        if there is not None:
            there.segments.pop(number, None)
            there.index.drop(number)
            if there.last is not None and there.last.number == number:
                there.last = None
        folder = self.folder / name
        with contextlib.suppress(OSError):
            for path in segment_paths(folder, number):
                path.unlink(missing_ok=True)
            if name not in self._shelf_of.values():
                (folder / "about").unlink(missing_ok=True)
                folder.rmdir()

    # Using and writing

    def _note_use(self, there: _Open, segments: list[int]) -> None:
        now = time.monotonic()
        with self._lock:
            for number in segments:
                self._keeping.used(number)
        for number in segments:
            if now - there.touched.get(number, -TOUCH_EVERY_S) >= TOUCH_EVERY_S:
                there.touched[number] = now
                with contextlib.suppress(OSError):
                    os.utime(segment_paths(there.folder, number)[1])

    def _note_damage(self, there: _Open, hashes: np.ndarray) -> None:
        there.index.forget(hashes)
        with self._lock:
            is_first = self._num_damaged == 0
            self._num_damaged += len(hashes)
        if is_first:
            log.warning("%d kept rows in %s are damaged and are made again; is the disk failing?", len(hashes),
                        there.folder)  # fmt: skip

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            shelf, keys, columns, job = item
            try:
                if self.why_off is None:
                    self._write(shelf, keys, columns, job)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._give_back()
                self._turn_off(f"writing to {self.folder} failed: {error.strerror or error}")
            except Exception:
                log.exception("unexpected error while rows were written")
                self._turn_off("of an unexpected error")
            with self._lock:
                self._queued_bytes -= sum(values.nbytes for values in columns)
                if self._queue.empty():
                    self._idle.set()
            del item, columns  # don't hold them while waiting

    def _write(self, shelf: Shelf, keys: np.ndarray, columns: Sequence[np.ndarray], job: str) -> None:
        there = self._open(shelf, make=True)
        if there is None:
            return
        new = there.index.find(keys[:, 0]) < 0  # two requests may have made the same row
        if not new.any():
            return
        records = pack(keys[new], [values[new] for values in columns], shelf.columns)
        cost = there.record_bytes + HASH_BYTES
        while len(records):
            with self._lock:
                most = max(1, self._keeping.budget_bytes // SEGMENTS // cost)
                if there.last is not None and there.last.num_rows >= most:
                    there.last = None
                room_in_last = most - (there.last.num_rows if there.last is not None else 0)
                if there.last is not None:
                    self._keeping.used(there.last.number)
                room = self._keeping.room(min(len(records), room_in_last), cost, job)
                for number in room.drop:
                    self._remove(number)
                if room.num_rows == 0:
                    self._note_full(len(records), cost)
                    return
                segment = there.last if there.last is not None else self._new_segment(there)
            position = segment.num_rows
            segment.add(records[: room.num_rows])
            with self._lock:
                self._keeping.grown(segment.number, room.num_rows * cost)
            there.index.add(keys[new][: room.num_rows, 0], segment.number, position)
            keys, new = keys[new][room.num_rows :], np.ones(len(records) - room.num_rows, bool)
            records = records[room.num_rows :]

    def _new_segment(self, there: _Open) -> Segment:
        there.folder.mkdir(exist_ok=True)
        about = {"record_bytes": there.record_bytes, "prefix": there.shelf.prefix, "codec": there.shelf.codec,
                 "precision": there.shelf.precision, "made_by": there.shelf.maker}  # fmt: skip
        scratch = there.folder / "about.part"
        scratch.write_text(json.dumps(about))
        scratch.replace(there.folder / "about")
        segment = Segment(there.folder, self._next, there.record_bytes)
        self._next += 1
        self._shelf_of[segment.number] = there.folder.name
        there.segments[segment.number] = there.last = segment
        return segment

    def _note_full(self, num_rows: int, cost: int) -> None:
        """The lock is held."""
        if not self._said_full:
            self._said_full = True
            budget = self._keeping.budget_bytes
            if cost > budget:
                log.warning("a row takes %s bytes, and all of the cache may take %s: nothing is kept; give it more "
                            "(--cache-size)", f"{cost:,}", f"{budget:,}")  # fmt: skip
            else:
                log.warning("the cache is full (%s bytes): the rest of the rows is made again in each epoch; give it "
                            "more (--cache-size)", f"{budget:,}")  # fmt: skip
        self._num_unkept += num_rows

    def _give_back(self) -> None:
        """Some of a disk that is full, which is not ours alone: prefixes are uploaded to it."""
        with self._lock:
            for number in self._keeping.give_back(self._keeping.budget_bytes // SEGMENTS):
                self._remove(number)

    def _turn_off(self, why: str) -> None:
        """Once, with one warning. What was kept until then is still used."""
        with self._lock:
            if self.why_off is not None:
                return
            self.why_off = why
        log.warning("no rows are kept on disk from now on, which costs time and nothing else: %s", why)


class Lookup:
    """One chunk, and what is kept of it."""

    def __init__(self, cache: Cache, shelf: Shelf, chunk: Chunk) -> None:
        self._cache = cache
        self._shelf = shelf
        self._job = chunk.job
        # Without an etag nothing tells a sample from another one that took its place.
        self._named = np.array([bool(ref.etag) for ref in chunk.samples])
        joined = b"".join(row_key(shelf, ref.key, ref.offset, ref.length, ref.etag, ref.id) for ref in chunk.samples)
        self._keys = np.frombuffer(joined, "<u8").reshape(-1, 2)
        self._ids = np.fromiter((ref.id for ref in chunk.samples), np.int64, len(chunk.samples))
        self._missing = np.ones(len(chunk.samples), bool)

    def pieces(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Ids and columns of kept rows, some at a time."""
        named = np.flatnonzero(self._named)
        for numbers, columns in self._cache.pieces(self._shelf, self._keys[named]):
            self._missing[named[numbers]] = False
            yield self._ids[named[numbers]], columns
        num_missing = int(self._missing.sum())
        self._cache.count(len(self._ids) - num_missing, num_missing)

    def missing(self) -> np.ndarray:
        """The places in the chunk of samples that had no row, once all pieces were taken."""
        return np.flatnonzero(self._missing)

    def keep(self, ids: np.ndarray, columns: Sequence[np.ndarray]) -> None:
        """Rows that were made meanwhile."""
        order = np.argsort(self._ids, kind="stable")
        places = order[np.searchsorted(self._ids, ids, sorter=order)]
        chosen = self._named[places]
        if not chosen.all():
            columns = [values[chosen] for values in columns]
        self._cache.keep(self._shelf, self._keys[places[chosen]], columns, self._job)


class _InUseError(Exception):
    """Another process holds the lock."""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _record_bytes(folder: Path) -> int | None:
    """What a shelf says of itself; None if that can't be read."""
    try:
        found = json.loads(_text(folder / "about"))["record_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if type(found) is int and found > HEAD_BYTES else None
