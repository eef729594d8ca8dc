"""Which vectors of a table a node holds in memory, and which of them go when others come.

Owns `Hot`: a bounded set of **places** (of vectors on disk), each in a **slot** (of the arrays in memory). It holds no
vectors. A vector that was trained since the last checkpoint is *dirty*: what is on the disk is not it, so it stays.

Slots are found through a hash table of open addressing, all ids of a batch at once. When slots run out, an eighth of
them, those that were used longest ago, go together; so the cost of choosing is spread over many batches.

What holds (tests/core/test_hot.py): a place has one slot; a dirty one is never let go; no more than `capacity` are
held; among those that may go, none goes that was used after one that stays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headwater.core.table import Ids

_EMPTY = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Hot:
    def __init__(self, capacity: int) -> None:
        assert capacity >= 1
        self.capacity = capacity
        bits = max(3, (2 * capacity - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._mask = np.int64((1 << bits) - 1)
        self._table = np.full(1 << bits, _EMPTY, np.int32)  # → slot
        self._places = np.full(capacity, _EMPTY, np.int64)  # of slots
        self._used = np.zeros(capacity, np.int64)
        self._dirty = np.zeros(capacity, np.bool_)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity
        self._tick = 0
        self.num_found = self.num_asked = 0

    @property
    def num_held(self) -> int:
        return self.capacity - self._num_free

    @property
    def num_dirty(self) -> int:
        return int(self._dirty.sum())

    def find(self, places: Ids) -> npt.NDArray[np.int64]:
        """The slot of each of these distinct places, or -1; those found count as used now."""
        slots = self._find(places)
        self._tick += 1
        found = slots >= 0
        self._used[slots[found]] = self._tick
        self.num_asked += len(places)
        self.num_found += int(found.sum())
        return slots

    def room(self, num: int) -> bool:
        """Make room for so many more, if what may go is enough; otherwise nothing changes. What was asked for last
        stays."""
        if num <= self._num_free:
            return True
        held = np.flatnonzero(self._places != _EMPTY)
        may_go = held[~self._dirty[held] & (self._used[held] < self._tick)]
        if num > self._num_free + len(may_go):
            return False
        want = min(len(may_go), max(num - self._num_free, self.capacity // 8))
        oldest = may_go[np.argpartition(self._used[may_go], want - 1)[:want]]
        self._let_go(oldest)
        return True

    def take(self, places: Ids) -> npt.NDArray[np.int64]:
        """Slots for these distinct places, none of which has one; there is room."""
        num = len(places)
        assert num <= self._num_free
        slots = self._free[self._num_free - num : self._num_free][::-1].astype(np.int64)
        self._num_free -= num
        self._places[slots] = places
        self._used[slots] = self._tick
        self._enter(slots)
        return slots

    def touch(self, slots: npt.NDArray[np.int64]) -> None:
        """These were trained."""
        self._dirty[slots] = True

    def dirty(self) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Places and slots of what is dirty, by place."""
        slots = np.flatnonzero(self._dirty)
        slots = slots[np.argsort(self._places[slots], kind="stable")]
        return self._places[slots], slots

    def clean(self, slots: npt.NDArray[np.int64]) -> None:
        """These are on the disk now as they are here."""
        self._dirty[slots] = False

    def _hash(self, places: Ids) -> npt.NDArray[np.int64]:
        return ((places.astype(np.uint64) * _MIX) >> self._shift).astype(np.int64)

    def _find(self, places: Ids) -> npt.NDArray[np.int64]:
        slots = np.full(len(places), _EMPTY, np.int64)
        open_, cell = np.arange(len(places)), self._hash(places)
        while len(open_):
            slot = self._table[cell].astype(np.int64)
            right = (slot >= 0) & (self._places[slot] == places[open_])
            slots[open_[right]] = slot[right]
            on = (slot >= 0) & ~right
            open_, cell = open_[on], (cell[on] + 1) & self._mask
        return slots

    def _enter(self, slots: npt.NDArray[np.int64]) -> None:
        """Write slots into the hash table. Where two want one cell, one gets it, and the other looks further."""
        cell = self._hash(self._places[slots])
        while len(slots):
            free = self._table[cell] == _EMPTY
            self._table[cell[free]] = slots[free]
            on = self._table[cell] != slots
            slots, cell = slots[on], (cell[on] + 1) & self._mask

    def _let_go(self, slots: npt.NDArray[np.int64]) -> None:
        self._places[slots] = _EMPTY
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
        self._table[:] = _EMPTY  # a gap would hide what was entered beyond it
        self._enter(np.flatnonzero(self._places != _EMPTY))
