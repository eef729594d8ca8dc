"""One part of an embedding table on this node's disk: read, train, and be whole again after a kill.

Owns a folder:

    table.json   the table's spec, which part this is, its lease, the version of its checkpoint (replaced whole)
    vectors      records, one a vector: its numbers, a mark (1), the optimizer's number
    seats        for each place, which record is its vector's, counted from 1; 0 until it was trained
    log          the steps since the checkpoint, as they came; `log.old` while a checkpoint is being written
    journal      meanwhile: what is to go into `vectors`

Records are in the order in which vectors were first trained: popular ones, which come first, share pages of the disk,
and what is new is appended. Vectors that nobody trained have none, take no room, and are computed.

Steps change memory alone (`core.hot` says which vectors are there); so `vectors` is always that of the checkpoint, and
a part that was killed reads its log and does those steps again, each whole or not at all. A checkpoint writes all
changed vectors to the journal, then into `vectors`, so that it, too, is finished or did not happen; steps go on
meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.bags import Bags, Sorting, gradients, pool
from headwater.core.bags import step as take_step
from headwater.core.form import from_json, to_json
from headwater.core.hot import Hot
from headwater.core.once import Apply, Once, Refuse
from headwater.core.table import TableSpec, initial
from headwater.data import tablespeed, tablewire
from headwater.data.tablewire import UNKNOWN_BATCH, bags_of, places, unpack, vectors_of, whole
from headwater.errors import ConfigError, DamagedError, RefusedError
from headwater.node.steplog import StepLog, sync_folder

MAX_STAGED_IDS = 1 << 22  # of all of them
MAX_STAGED = 16  # batches; a trainer that forgot some has them thrown away
LOG_BYTES = 256 << 20  # of steps, before a checkpoint is written: after a kill they are done again
MOST_LOGS = 4  # times that: where no checkpoint can be written, no further step is taken
MAX_HEAD_BYTES = 1 << 16
DIRTY = 0.5  # of the vectors in memory; with more, a checkpoint is written
SLOT_BYTES = 8 + 8 + 8 + 1 + 4 + 4 * 4  # of `Hot` and of what is beside it, for each vector in memory
FILES = ("vectors", "seats", "log", "log.old", "journal", "journal.new", "table.json.new", "probe")  # beside the head
_MAX_LR = 1e6
_PAGE = mmap.PAGESIZE
_SEAT_BYTES = 4
_STAND_BACK_S = 1.0  # of a piece of a checkpoint, while a call is under way
_SYNC_BYTES = 4 << 20  # of a checkpoint, between two syncs
_PIECE = 1024  # items that are written at once, at most: with what lies between them, some MB
_JOURNAL = struct.Struct("<4sIQQ")  # mark, checksum, version, number of records
_MARK = b"hwj1"
_MOST_VERSION = 2**62


@dataclass(frozen=True)
class Staged:
    """Bags that a step or a question may refer to."""

    bags: Bags
    sorting: Sorting


class ClosedError(RefusedError):
    """The part was closed while somebody waited for it: its files may be others' by now."""


class Part:
    """Opened; one process has it at a time."""

    def __init__(self, folder: Path, cache_bytes: int, make: tuple[TableSpec, int] | None = None) -> None:
        """`make`: the table's spec, and which part; nothing may be there yet."""
        self.folder = folder
        self.lock = threading.RLock()
        self._num_seats = 0  # records in `vectors`
        self._on_disk = 0  # the version that `vectors`, with the journal if there is one, is of
        self._writing: _Writer | None = None
        self._calm = threading.Event()  # no call is under way
        self._calm.set()
        self._is_closed = False
        self._head_lock = threading.Lock()
        self._guard = _guard(folder)
        try:
            if make is not None:
                self.spec, self.part = make
                self.once = Once()
                _check_size(self.spec, self.part)
                for name in FILES:  # without a head they are of a table that was being dropped when the node ended
                    (folder / name).unlink(missing_ok=True)
                (folder / "vectors").touch(mode=0o600)
                (folder / "seats").touch(mode=0o600)
                self._write_head()
            with ExitStack() as stack:
                self._read_head()
                self._open(cache_bytes, stack)
                stack.pop_all()
        except OSError as error:
            os.close(self._guard)
            raise RefusedError(f"the files of {folder} can't be opened ({error.strerror}); make room on the node's "
                               "disk, or load a saved table") from None  # fmt: skip
        except BaseException:
            os.close(self._guard)
            raise

    def _open(self, cache_bytes: int, stack: ExitStack) -> None:
        """What is on `stack` lets go of everything, should it end halfway."""
        self._columns = self.spec.dim + (1 if self.spec.optimizer == "sgd" else 2)
        self._record_bytes = self._columns * np.dtype(self.spec.dtype).itemsize
        self._file = os.open(self.folder / "vectors", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, self._file)
        self._seats_file = os.open(self.folder / "seats", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, self._seats_file)
        _check_size(self.spec, self.part)
        self._maps: tuple[mmap.mmap, mmap.mmap] | None = None
        if self._read_journal():
            self.once.version = self.once.settled = self.once.checkpoint = self._on_disk
        self._map_files()
        stack.callback(self._unmap)
        self._remember(max(64, min(self.spec.num_in(self.part), cache_bytes // (self._record_bytes + SLOT_BYTES))))
        self.cache_bytes = self.hot.capacity * (self._record_bytes + SLOT_BYTES)
        self._staged: OrderedDict[int, Staged] = OrderedDict()
        self.log = StepLog(self.folder / "log")
        stack.callback(self.log.close)
        self._replay()

    def settle(self, lease: str) -> None:
        """The trainer ends, and all parts are at this version: nothing is left to be done again."""
        with self.lock:
            self._owned(lease)
            self._checkpoint(anyway=True)
            self._finish()

    def close(self) -> None:
        """What is in memory is in the log, too."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            writing, self._writing = self._writing, None
            if writing is not None:
                writing.join()
            self._unmap()
            self.log.close()
            os.close(self._file)
            os.close(self._seats_file)
            os.close(self._guard)

    # Whose it is, and where it stands

    def open(self, lease: str) -> dict[str, Any]:
        """A trainer takes over."""
        with self.lock:
            self._check_open()
            self.once.opened(lease)
            self._staged.clear()
            self._write_head()
            return self.about()

    def about(self) -> dict[str, Any]:
        with self.lock:
            self._check_open()
            return self._about()

    def _about(self) -> dict[str, Any]:
        return {"spec": to_json(self.spec), "part": self.part, "version": self.once.version,
                "checkpoint": self.once.checkpoint, "cache_vectors": self.hot.capacity,
                "cache_found": self.hot.num_found, "cache_asked": self.hot.num_asked,
                "disk_bytes": sum(os.fstat(each).st_blocks for each in (self._file, self._seats_file)) * 512,
                 "log_bytes": self.log.num_bytes}  # fmt: skip

    def back(self, lease: str, version: int) -> None:
        """Go back to this version: other parts have not got further."""
        with self.lock:
            self._owned(lease)
            if version == self.once.version:
                return
            if not self.once.may_go_back(version):
                raise RefusedError(f"part {self.part} is at version {self.once.version} and can go back to "
                                   f"{self.once.checkpoint} at most, not to {version}; load a saved table")  # fmt: skip
            self._check_log()
            self._finish()
            try:
                self.log.cut(version)
            except OSError as error:
                self._check_log()
                raise _full(error) from None
            self.once.went_back(version)
            self._forget()
            self._replay()

    def grow(self, lease: str, num_embeddings: int) -> None:
        """More vectors; new ones are what they are initially."""
        with self.lock:
            self._owned(lease)
            if num_embeddings < self.spec.num_embeddings:
                raise RefusedError(f"the table has {self.spec.num_embeddings:,} vectors and can't shrink to "
                                   f"{num_embeddings:,}; make a new one")  # fmt: skip
            if num_embeddings == self.spec.num_embeddings:
                return
            spec = replace(self.spec, num_embeddings=num_embeddings)
            _check_size(spec, self.part)
            self._finish()
            self.spec = spec
            self._write_head()
            self._unmap()
            self._map_files()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A call that a trainer waits for; a checkpoint stands back."""
        with self.lock:
            self._calm.clear()
            try:
                yield
            finally:
                self._calm.set()

    def _give_way(self) -> None:
        """Between two pieces of a checkpoint: a call that is under way goes first, but for one that waits for this."""
        if threading.current_thread() is self._writing:
            self._calm.wait(_STAND_BACK_S)

    def check_owner(self, lease: str) -> None:
        """RefusedError, unless the trainer with this lease has it."""
        with self.lock:
            self._owned(lease)

    def _check_open(self) -> None:
        """Under the lock, before anything is read or written: a closed file's number may be another file's by now."""
        if self._is_closed:
            raise ClosedError(f"part {self.part} of the table was closed or dropped meanwhile; open the table again")

    def _owned(self, lease: str) -> None:
        self._check_open()
        if (why := self.once.look(lease, self.once.version)) is not None:
            raise RefusedError(why)

    # Bags

    def stage(self, lease: str, number: int, bags: Bags) -> None:
        """Hold on to these bags, and have their vectors in memory."""
        with self._working():
            self._owned(lease)
            staged = Staged(bags, Sorting.of(bags.ids))
            self._check_memory(len(staged.sorting.unique))
            self._staged[number] = staged
            while len(self._staged) > MAX_STAGED or self._num_staged_ids > MAX_STAGED_IDS:
                self._staged.popitem(last=False)
            self._find(staged.sorting.unique)

    def pooled(self, lease: str, number: int, version: int, since: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the staged bags have changed since, and what they add up to at this version."""
        with self._working():
            self._check_open()
            if (why := self.once.look(lease, version)) is not None:
                raise RefusedError(why)
            staged = self._of(number)
            bags, sorting = staged.bags, staged.sorting
            slots, records = self._find(sorting.unique)
            if records is None:  # they are added up from where they lie
                records, home = self._records, slots
            else:
                home = np.arange(len(slots))
            vectors = records[:, : self.spec.dim]
            if since < 0:
                return np.arange(len(bags)), pool(vectors, bags, home[sorting.inverse])
            changed = (slots < 0) | (self._changed[slots] > since)
            touched = changed[sorting.inverse]
            if not touched.any():
                return np.empty(0, np.int64), np.empty((0, self.spec.dim), self.spec.dtype)
            which = np.flatnonzero(np.logical_or.reduceat(touched, bags.starts))
            if len(which) == len(bags):
                return which, pool(vectors, bags, home[sorting.inverse])
            some = bags.some(which)
            return which, pool(vectors, some, home[np.searchsorted(sorting.unique, some.ids)])

    def measure(self, lease: str, bags: Bags) -> dict[str, float]:
        """What a batch with these bags takes here, in seconds; nothing of the table is changed."""
        with self.lock:
            self._owned(lease)
            unique = Sorting.of(bags.ids).unique
            self._check_memory(len(unique))
            asked, start = self.hot.num_asked - self.hot.num_found, time.perf_counter()
            slots, records = self._find(unique)
            first_s, start = time.perf_counter() - start, time.perf_counter()
            num_cold = self.hot.num_asked - self.hot.num_found - asked
            if records is None:
                records = self._records
                self._find(unique)
                first_s -= time.perf_counter() - start
            else:
                slots = np.arange(len(unique))
            rates = tablespeed.measure(self.spec, bags, records, slots)
            outside = max(0.0, 1 - self.hot.capacity / max(1, self.spec.num_in(self.part)))
            num_bytes = len(bags) * self.spec.vector_bytes + bags.ids.nbytes
            return {"id_s": rates.id_s, "vector_s": rates.vector_s, "disk_s": self._disk_s(num_bytes),
                    "cold_s": max(0.0, first_s) / max(1, num_cold), "outside": outside}  # fmt: skip

    def _disk_s(self, num_bytes: int) -> float:
        """Until so many bytes are with the disk, as a step's record in the log."""
        path, found = self.folder / "probe", []
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for place in range(3):
                start = time.perf_counter()
                _write_at(file, memoryview(bytes(num_bytes)), place * num_bytes)
                os.fdatasync(file)
                found.append(time.perf_counter() - start)
        except OSError as error:
            raise _full(error) from None
        finally:
            os.close(file)
            path.unlink(missing_ok=True)
        return sorted(found)[1]

    @property
    def _num_staged_ids(self) -> int:
        return sum(len(each.bags.ids) for each in self._staged.values())

    def _check_memory(self, num: int) -> None:
        if num > self.hot.capacity:
            raise RefusedError(f"a batch has {num:,} distinct vectors, the node memory for {self.hot.capacity:,} of "
                               "this table; use smaller batches, or give the table more (cache=…)")  # fmt: skip

    def _of(self, number: int) -> Staged:
        if number not in self._staged:
            raise RefusedError(f"{UNKNOWN_BATCH} {number}: it was not staged here, or the node was started again")
        return self._staged[number]

    # Steps

    def step(self, lease: str, message: Any) -> None:
        """Do what the message says, if it was not done before. It is in the log when this returns, not yet synced."""
        header, arrays = unpack(message)
        version, settled = whole(header, "version", 1), whole(header, "settled")
        with self._working():
            self._check_open()
            answer = self.once.step(lease, version, settled)
            if isinstance(answer, Refuse):
                raise RefusedError(answer.reason)
            if isinstance(answer, Apply):
                self._check_log()
                do = self._prepared(header, arrays)
                self._check_memory(len(do.places))
                self._settle_disk()
                if self._writing is None and (
                    self.log.num_bytes > LOG_BYTES or self.hot.num_dirty > DIRTY * self.hot.capacity
                ):
                    self._checkpoint()
                self._bound_log()
                slots, records = self._resident(do.places)
                records = do.records(records)  # what can go wrong has gone wrong by now
                body = message if header.get("what") == "put" or "ids" in arrays else self._with_bags(header, arrays)
                try:
                    self.log.append(version, body)
                except OSError as error:
                    raise RefusedError(f"the step can't be kept: {error.strerror}; make room on the node's disk, and "
                                       "go on") from None  # fmt: skip
                self._put(slots, records, version)
                self.once.applied(version)

    def sync(self) -> None:
        """What `step` has done is with the disk when this returns; only then it may be confirmed."""
        try:
            self.log.sync()
        except OSError:
            self._check_log()
            raise

    def _check_log(self) -> None:
        """A part that has steps in memory which its disk did not keep goes no further with them."""
        if self.log.fault is not None:
            raise RefusedError(f"part {self.part} of the table takes no more steps: the node's disk failed to keep the "
                               f"last one ({self.log.fault}), which is not confirmed; look at that disk, then open the "
                               "table again, which is at the step before")  # fmt: skip

    def _bound_log(self) -> None:
        """Steps that come faster than checkpoints are written wait; those that nobody ever confirms are refused."""
        if self.log.num_bytes > 2 * LOG_BYTES:
            self._checkpoint()
        if self.log.num_bytes > MOST_LOGS * LOG_BYTES:
            raise RefusedError(f"the log of part {self.part} has {self.log.num_bytes / 1e6:,.0f} MB of steps that the "
                               "trainer does not say all parts have; open the table again")  # fmt: skip

    def _with_bags(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
        """The step with the bags that it only named: the log must know them. What else the message had is left out, so
        that it can be read again: a message has limits."""
        staged = self._of(whole(header, "number"))
        said = {name: header.get(name) for name in ("what", "version", "settled", "number", "lr")}
        body = tablewire.pack(said, {"grads": arrays["grads"], **tablewire.bags_arrays(staged.bags)})
        if len(body) > tablewire.MAX_MESSAGE_BYTES:
            raise ConfigError(f"a step with its bags has {len(body):,} bytes; the limit is "
                              f"{tablewire.MAX_MESSAGE_BYTES:,}: use smaller batches")  # fmt: skip
        return body

    def _prepared(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> _Training | _Writing:
        spec = self.spec
        if header.get("what") == "put":
            where = places(arrays, "places")
            tablewire.check_places(where, spec, self.part)
            if len(where) > 1 and not (np.diff(where) > 0).all():
                raise ConfigError("places to be written must ascend, each once")
            return _Writing(where, vectors_of(arrays, "records", (len(where), self._columns), spec.dtype), spec.dim)
        if "ids" in arrays:  # from the log, or of a batch that the node has forgotten
            bags = bags_of(arrays, spec, self.part)
            staged = Staged(bags, Sorting.of(bags.ids))
        else:
            staged = self._of(whole(header, "number"))
        grads = vectors_of(arrays, "grads", (len(staged.bags), spec.dim), spec.dtype)
        lr = tablewire.number(header, "lr", _MAX_LR)
        return _Training(spec, lr, staged, grads)

    def _put(self, slots: np.ndarray, records: np.ndarray, version: int) -> None:
        self._records[slots] = records
        self._changed[slots] = version
        self.hot.touch(slots)

    def _resident(self, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots of these vectors, and what they hold; all of them are in memory."""
        slots, records = self._hold(where)
        if len(slots) and slots.min() < 0:
            self._finish()
            slots, records = self._hold(where)
        if len(slots) and slots.min() < 0:
            self._checkpoint()
            self._finish()
            slots, records = self._hold(where)
        while len(slots) and slots.min() < 0:
            if not self._is_replaying:
                raise RefusedError("the vectors in memory wait for other parts to confirm their steps, and there is no "
                                   "room for more")  # fmt: skip
            self._enlarge()  # the node was started with less memory
            slots, records = self._hold(where)
        return slots, records

    def _replay(self) -> None:
        """The steps of the log, again. Nothing is settled meanwhile, so no checkpoint is written."""
        self._is_replaying = True
        for version, body in self.log.steps():
            if version <= self.once.checkpoint:
                continue
            if version != self.once.version + 1:
                raise DamagedError(f"{self.folder}: the log goes on with step {version} after version "
                                   f"{self.once.version}; load a saved table")  # fmt: skip
            try:
                do = self._prepared(*unpack(body))
            except (ConfigError, RefusedError) as error:
                raise DamagedError(f"{self.folder}: step {version} of the log can't be done again ({error}); load a "
                                   "saved table") from None  # fmt: skip
            slots, records = self._resident(do.places)
            self._put(slots, do.records(records), version)
            self.once.applied(version)
        self._is_replaying = False

    # Vectors in memory

    def _remember(self, num: int) -> None:
        """Nothing yet, of up to so many."""
        self.hot = Hot(num)
        self._records = np.empty((num, self._columns), self.spec.dtype)
        self._changed = np.zeros(num, np.int64)  # the version that changed it last, as far as that is known

    def _enlarge(self) -> None:
        """Twice the room; what is dirty stays."""
        where, slots = self.hot.dirty()
        records = self._records[slots]
        self._remember(2 * self.hot.capacity)
        self._put(self.hot.take(where), records, self.once.version)

    def _find(self, where: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The slots of these distinct vectors, ascending; -1 for those there was no room for, and then a copy of all
        their records."""
        slots = self.hot.find(where)
        missing = np.flatnonzero(slots < 0)
        if not len(missing):
            return slots, None
        fresh = self._load(where[missing])
        if self.hot.room(len(missing)):
            slots[missing] = taken = self.hot.take(where[missing])
            self._records[taken] = fresh
            self._changed[taken] = self.once.version
            return slots, None
        records = np.empty((len(where), self._columns), self.spec.dtype)
        found = slots >= 0
        records[found] = self._records[slots[found]]
        records[missing] = fresh
        return slots, records

    def _hold(self, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same, with a copy of their records in any case."""
        slots, records = self._find(where)
        return slots, self._records.take(slots, axis=0) if records is None else records

    def _load(self, where: np.ndarray) -> np.ndarray:
        self._expect(1, where, _SEAT_BYTES)
        seats = self._seats[where].astype(np.int64) - 1
        records = np.zeros((len(where), self._columns), self.spec.dtype)
        old, new = np.flatnonzero(seats >= 0), np.flatnonzero(seats < 0)
        if len(old):
            if int(seats.max()) >= len(self._vectors):
                raise DamagedError(f"{self.folder}/seats names records that are not there; load a saved table")
            self._expect(0, seats[old], self._record_bytes)
            records[old] = self._vectors[seats[old]]
        if len(new):
            records[new, : self.spec.dim] = initial(self.spec, self.spec.ids_of(self.part, where[new]))
        return records

    def _expect(self, which: int, numbers: np.ndarray, item_bytes: int) -> None:
        """Tell the kernel of all pages of a mapping that these items are on: a disk reads many in the time of one."""
        assert self._maps is not None
        first, last = numbers * item_bytes // _PAGE, ((numbers + 1) * item_bytes - 1) // _PAGE
        for begin, stop in _runs(np.unique(np.concatenate([first, last]))):
            self._maps[which].madvise(mmap.MADV_WILLNEED, begin * _PAGE, (stop - begin) * _PAGE)

    def read(self, lease: str, where: np.ndarray) -> np.ndarray:
        """Records as they are now."""
        with self.lock:
            self._owned(lease)
            tablewire.check_places(where, self.spec, self.part)
            unique, inverse = np.unique(where, return_inverse=True)
            slots = self.hot.find(unique)
            records = np.empty((len(unique), self._columns), self.spec.dtype)
            found = slots >= 0
            records[found] = self._records[slots[found]]
            if not found.all():
                records[~found] = self._load(unique[~found])
            return records[inverse.reshape(-1)]

    def trained(self, lease: str, start: int, most: int) -> tuple[np.ndarray, int | None]:
        """Places from `start` of up to `most` vectors that were trained, and where to go on; None: there are no more.

        Holes of the file are skipped without reading them. The table is as of its checkpoint, which is written first.
        """
        with self.lock:
            self._owned(lease)
            self._checkpoint(anyway=True)
            self._finish()
            num, found, count = self.spec.num_in(self.part), [], 0
            start = min(start, num)
            for low, high in self._extents(start * _SEAT_BYTES):
                first, stop = max(start, low // _SEAT_BYTES), min(num, -(-high // _SEAT_BYTES))
                for at in range(first, stop, 1 << 14):
                    upto = min(stop, at + (1 << 14))
                    marks = np.flatnonzero(self._seats[at:upto]) + at
                    start = max(start, upto)
                    found.append(marks[: most - count])
                    if count + len(marks) > most:
                        return np.concatenate(found), int(marks[most - count])
                    count += len(marks)
            return (np.concatenate(found) if found else np.empty(0, np.int64)), None

    def _extents(self, place: int) -> Iterator[tuple[int, int]]:
        while True:
            try:
                low = os.lseek(self._seats_file, place, os.SEEK_DATA)
            except OSError:  # nothing but a hole to the end
                return
            place = os.lseek(self._seats_file, low, os.SEEK_HOLE)
            yield low, place

    # The disk

    def _checkpoint(self, *, anyway: bool = False) -> None:
        """Begin to put everything up to now into `vectors`; a thread goes on with it, while steps do.

        Nothing happens while somebody may have to go back behind it, and a checkpoint before this one is finished
        first. `anyway`: the trainer says that all parts are at this version.
        """
        self._check_log()
        self._finish()
        if anyway:
            self.once.settled = self.once.version
        if not self.once.may_checkpoint:
            return
        where, slots = self.hot.dirty()
        try:
            self._read_journal()  # of a checkpoint that failed in the middle
            self._reserve(where)
            self.log.turn()
        except OSError as error:
            self._check_log()
            raise _full(error) from None
        self._expect(1, where, _SEAT_BYTES)
        seats = self._seats[where].astype(np.int64) - 1
        new = np.flatnonzero(seats < 0)
        seats[new] = self._num_seats + np.arange(len(new))
        order = np.argsort(seats)
        records = self._records[slots[order]]
        records[:, self.spec.dim] = 1
        self.once.checkpointed()
        self._writing = _Writer(self._write, self.once.version, slots, np.stack([where[order], seats[order]]), records)
        self._writing.start()

    def _write(self, version: int, homes: np.ndarray, records: np.ndarray) -> None:
        """The checkpoint's thread: the journal makes it certain, the rest makes it so. `homes`: places, and seats."""
        self._write_journal(version, homes, records)
        self._write_down(version, homes, _bytes(records), self._num_seats)
        self.log.drop_old()

    def _write_down(self, version: int, homes: np.ndarray, data: memoryview, num_before: int = 0) -> None:
        """What is in the journal, into the files. `num_before` seats are known to be there already."""
        where, seats = homes
        self._num_seats = max(self._num_seats, int(seats.max(initial=-1)) + 1)
        self._write_head(version)
        if self._maps is not None:
            # What a page had before is read, for all pages at once.
            self._expect(0, seats[seats < num_before], self._record_bytes)
        if len(seats):  # a part may have had none of the steps' vectors
            self._write_records(seats, data)
        if len(new := np.flatnonzero(seats >= num_before)):
            self._write_seats(where[new], seats[new])
        os.fdatasync(self._file)
        os.fdatasync(self._seats_file)
        (self.folder / "journal").unlink()

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written; what it has written may leave memory then."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        self._calm.set()
        writing.join()
        if writing.fault is not None:  # all of it is dirty still, and the log has it: the next one has it, too
            self.once.checkpoint = self._on_disk
            if isinstance(writing.fault, OSError):
                raise _full(writing.fault)
            raise writing.fault
        self.hot.clean(writing.slots[self._changed[writing.slots] <= writing.version])

    def _settle_disk(self) -> None:
        """Take note of a checkpoint that has been finished meanwhile."""
        if self._writing is not None and not self._writing.is_alive():
            self._finish()

    def _write_journal(self, version: int, homes: np.ndarray, records: np.ndarray) -> None:
        path = self.folder / "journal.new"
        pieces = [each[at : at + _SYNC_BYTES] for each in (_bytes(homes), _bytes(records))
                  for at in range(0, len(each), _SYNC_BYTES)]  # fmt: skip
        check = 0
        for piece in pieces:
            self._give_way()
            check = zlib.crc32(piece, check)
        with path.open("wb") as file:
            file.write(_JOURNAL.pack(_MARK, check, version, len(records)))
            for piece in pieces:
                self._give_way()
                file.write(piece)
                file.flush()
                os.fdatasync(file.fileno())
            file.flush()
            os.fdatasync(file.fileno())
            # Nobody reads it but after a kill: the kernel's memory is for what is read.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path.rename(self.folder / "journal")
        self._sync_folder()

    def _read_journal(self) -> bool:
        """What a checkpoint was about to write when it ended, now, as often as it takes; whether there was any."""
        path = self.folder / "journal"
        if not path.exists():
            return False
        num_in, size = self.spec.num_in(self.part), 2 * 8 + self._record_bytes
        with path.open("rb") as file:
            head = file.read(_JOURNAL.size).ljust(_JOURNAL.size, b"\0")
            mark, check, version, num = _JOURNAL.unpack(head)
            right = mark == _MARK and version <= _MOST_VERSION and num <= num_in
            data = file.read(num * size + 1) if right else b""
        # It was renamed after it was whole on the disk.
        if not right or len(data) != num * size or zlib.crc32(data) != check:
            raise DamagedError(f"{path} is damaged; load a saved table")
        homes = np.frombuffer(data, np.int64, 2 * num).reshape(2, num)
        if num and not (homes.min() >= 0 and homes.max() < num_in):
            raise DamagedError(f"{path} has vectors that the table has not; load a saved table")
        self._write_down(version, homes, memoryview(data)[2 * num * 8 :])
        return True

    def _write_records(self, seats: np.ndarray, data: memoryview) -> None:
        """Into the file, which is not the mapping: a full disk would end the process."""
        records = np.frombuffer(data, self.spec.dtype).reshape(-1, self._columns)
        self._write_items(self._file, seats, records)

    def _write_seats(self, where: np.ndarray, seats: np.ndarray) -> None:
        order = np.argsort(where)
        self._write_items(self._seats_file, where[order], (seats[order] + 1).astype(np.uint32)[:, None])

    def _write_items(self, file: int, numbers: np.ndarray, items: np.ndarray) -> None:
        """By their ascending numbers. Pages that touch are written together, with what else is on them: single writes
        would take steps their time."""
        item_bytes, num_bytes = items.strides[0], 0
        for first, stop in _side_by_side(numbers, item_bytes):
            self._give_way()
            low, high, some = int(numbers[first]), int(numbers[stop - 1]) + 1, items[first:stop]
            if high - low > len(some):
                found = os.pread(file, (high - low) * item_bytes, low * item_bytes)
                now = np.zeros((high - low, items.shape[1]), items.dtype)
                _bytes(now)[: len(found)] = found
                now[numbers[first:stop] - low] = some
                some = now
            _write_at(file, _bytes(some), low * item_bytes)
            num_bytes += some.nbytes
            if num_bytes > _SYNC_BYTES:  # a disk that is busy with much more keeps the log's sync waiting
                os.fdatasync(file)
                num_bytes = 0

    def _reserve(self, where: np.ndarray) -> None:
        """Is there room for pages that are new? A full disk in the middle of a checkpoint would leave it unfinished."""
        free = os.statvfs(self.folder)
        most = len(where) * (2 * self._record_bytes + 16 + _PAGE)
        if free.f_bavail * free.f_frsize < most:
            raise OSError(28, f"{most / 1e6:,.0f} MB may be needed, and less is free")

    def _map_files(self) -> None:
        """Both, as long as they are if every vector was trained; what was not written takes no room."""
        maps, num = [], self.spec.num_in(self.part)
        for file, item_bytes in ((self._file, self._record_bytes), (self._seats_file, _SEAT_BYTES)):
            num_bytes = max(1, num) * item_bytes
            if os.fstat(file).st_size < num_bytes:
                os.ftruncate(file, num_bytes)
            maps.append(mmap.mmap(file, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
            maps[-1].madvise(mmap.MADV_RANDOM)
        self._maps = maps[0], maps[1]
        self._vectors = np.frombuffer(maps[0], self.spec.dtype).reshape(-1, self._columns)
        self._seats = np.frombuffer(maps[1], np.uint32)

    def _unmap(self) -> None:
        if self._maps is not None:
            del self._vectors, self._seats
            for each in self._maps:
                each.close()
            self._maps = None

    def _forget(self) -> None:
        """What is in memory; the disk is at the checkpoint."""
        self._remember(self.hot.capacity)
        self._staged.clear()
        self.once.version = self.once.checkpoint

    def _read_head(self) -> None:
        path = self.folder / "table.json"
        try:
            with path.open("rb") as file:
                data = json.loads(file.read(MAX_HEAD_BYTES))
            self.spec = from_json(TableSpec, data["spec"], str(path))
            self.part = whole(data, "part", 0, self.spec.num_parts - 1)
            version = self._on_disk = whole(data, "checkpoint", 0, _MOST_VERSION)
            self._num_seats = whole(data, "num_seats", 0, self.spec.num_in(self.part))
            self.once = Once(str(data["lease"]), version, version, version)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
            raise DamagedError(f"{path} can't be read ({str(error)[:500]}); load a saved table") from None

    def _write_head(self, checkpoint: int | None = None) -> None:
        with self._head_lock:  # a checkpoint's thread writes it, and a trainer that takes over
            self._on_disk = self._on_disk if checkpoint is None else checkpoint
            new = self.folder / "table.json.new"
            said = {"spec": to_json(self.spec), "part": self.part, "lease": self.once.lease,
                    "checkpoint": self._on_disk, "num_seats": self._num_seats}  # fmt: skip
            with new.open("w") as file:
                file.write(json.dumps(said))
                file.flush()
                os.fsync(file.fileno())
            new.rename(self.folder / "table.json")
            self._sync_folder()

    def _sync_folder(self) -> None:
        sync_folder(self.folder)


class _Writer(threading.Thread):
    """A checkpoint that is being written: of which version, which slots it has, and what went wrong."""

    def __init__(self, write: Any, version: int, slots: np.ndarray, homes: np.ndarray, records: np.ndarray) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.version, self.slots = version, slots
        self.fault: BaseException | None = None
        self._do: Any = lambda: write(version, homes, records)

    def run(self) -> None:
        try:
            self._do()
        except BaseException as error:
            self.fault = error
        self._do = None  # nor what it has written


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Of ascending numbers, those that follow each other: (first, one beyond the last)."""
    if len(numbers):
        ends = np.flatnonzero(np.diff(numbers) > 1)
        firsts, lasts = numbers[np.append(0, ends + 1)], numbers[np.append(ends, len(numbers) - 1)]
        yield from zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)


def _side_by_side(numbers: np.ndarray, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Items with these ascending numbers, in pieces (from, to) that touch pages with no other one between them."""
    if len(numbers):
        first, last = numbers * item_bytes // _PAGE, ((numbers + 1) * item_bytes - 1) // _PAGE
        begins = np.append(0, np.flatnonzero(first[1:] > last[:-1] + 1) + 1)
        begins = np.union1d(begins, np.arange(0, len(numbers), _PIECE))
        yield from zip(begins.tolist(), np.append(begins[1:], len(numbers)).tolist(), strict=True)


def _write_at(file: int, data: memoryview, place: int) -> None:
    while len(data):
        num = os.pwrite(file, data, place)
        data, place = data[num:], place + num


def _bytes(values: np.ndarray) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


def _full(error: OSError) -> RefusedError:
    return RefusedError(f"the table can't be written: {error.strerror}; make room on the node's disk, and go on")


@dataclass(frozen=True)
class _Training:
    """A step of the optimizer."""

    spec: TableSpec
    lr: float
    staged: Staged
    grads: np.ndarray

    @property
    def places(self) -> np.ndarray:
        return self.staged.sorting.unique

    def records(self, before: np.ndarray) -> np.ndarray:
        """What they become, in the same array."""
        dim = self.spec.dim
        grads = gradients(self.staged.bags, self.staged.sorting, self.grads)
        state = before[:, dim + 1] if self.spec.state_bytes else None
        take_step(self.spec, self.lr, before[:, :dim], state, grads)
        before[:, dim] = 1
        return before


@dataclass(frozen=True)
class _Writing:
    """Values that are given."""

    places: np.ndarray
    given: np.ndarray

    dim: int

    def records(self, before: np.ndarray) -> np.ndarray:
        after = self.given.copy()
        after[:, self.dim] = 1
        return after


def _check_size(spec: TableSpec, part: int) -> None:
    if spec.num_in(part) >= 2**32 - 1:  # what a seat can count
        raise RefusedError(f"a part of {spec.num_in(part):,} vectors is too large; deal the table to more nodes")


def _guard(folder: Path) -> int:
    """A lock that goes with the process."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise RefusedError(f"the table in {folder.name} is open in another node's process; stop that one") from None
    return file
