"""Where rows are, by the first eight bytes of their keys.

Owns `Index`: sixteen bytes a row, all keys of a request looked up at once. One thread may change it while others look
up: what they see is the state before or after a change. Two rows whose keys begin alike hide one another, so whoever
reads a row compares the whole key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

ABSENT = -1
# Rows that are looked up one by one until they are merged with the others: a quarter of those, within these.
_MERGE_FROM, _MERGE_AT = 4096, 1 << 17


def place(segment: int, position: int) -> int:
    """Segment and position as one number."""
    return segment << 32 | position


class Index:
    """Hash → place. What was added last counts."""

    def __init__(self) -> None:
        # Sorted hashes, their places, and what came since; replaced as a whole.
        self._state: tuple[Hashes, Places, dict[int, int]] = (np.empty(0, np.uint64), np.empty(0, np.int64), {})

    def find(self, hashes: Hashes) -> Places:
        """The place of each, or ABSENT."""
        known, places, recent = self._state
        found = np.full(len(hashes), ABSENT, np.int64)
        if len(known):
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            found = np.where(known[at] == hashes, places[at], found)
        if recent:
            for number, each in enumerate(hashes.tolist()):
                found[number] = recent.get(each, found[number])
        return found

    def add(self, hashes: Hashes, segment: int, position: int) -> None:
        """Rows that lie one after the other from this position on."""
        first = place(segment, position)
        if len(hashes) >= _MERGE_FROM:
            self._merge(hashes, np.arange(first, first + len(hashes), dtype=np.int64))
            return
        recent = self._state[2]
        recent.update(zip(hashes.tolist(), range(first, first + len(hashes)), strict=True))
        if len(recent) > max(_MERGE_FROM, min(len(self._state[0]) // 4, _MERGE_AT)):
            self._merge()

    def add_all(self, parts: Sequence[tuple[Hashes, int]]) -> None:
        """Whole segments, sorted once; of each its hashes and its number."""
        if parts:
            places = [np.arange(len(hashes), dtype=np.int64) + place(segment, 0) for hashes, segment in parts]
            self._merge(np.concatenate([hashes for hashes, _ in parts]), np.concatenate(places))

    def forget(self, hashes: Hashes) -> None:
        """These are no longer where they were."""
        self._state[2].update(dict.fromkeys(hashes.tolist(), ABSENT))

    def drop(self, segment: int) -> None:
        """All of a segment's rows are gone."""
        self._merge()
        known, places, recent = self._state
        stays = places >> 32 != segment
        recent = {each: at for each, at in dict(recent).items() if at >> 32 != segment}
        self._state = known[stays], places[stays], recent

    def _merge(self, hashes: Hashes | None = None, places: Places | None = None) -> None:
        known, before, recent = self._state
        new = dict(recent)  # a copy: others may forget meanwhile
        later = [np.fromiter(new.keys(), np.uint64, len(new))] + ([] if hashes is None else [hashes])
        after = [np.fromiter(new.values(), np.int64, len(new))] + ([] if places is None else [places])
        every, where = np.concatenate([known, *later]), np.concatenate([before, *after])
        order = np.argsort(every, kind="stable")
        every, where = every[order], where[order]
        last = np.append(every[1:] != every[:-1], True)[: len(every)] & (where != ABSENT)
        # What somebody forgot meanwhile stays forgotten.
        since = {each: at for each, at in dict(recent).items() if new.get(each) != at}
        self._state = every[last], where[last], since
