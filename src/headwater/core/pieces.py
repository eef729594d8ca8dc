"""An epoch's entries cut into pieces that one node can do, and put together again in order.

Owns `Pieces`. Where all nodes read the same store, pieces are simply consecutive entries. Where nodes have disks of
their own, a piece has entries that the same nodes hold: consecutive among those, with gaps between them that other
pieces fill. Pieces are numbered by their first entry, and come back in that order.

What holds (tests/core/test_pieces.py): every entry is in one piece; all entries of a piece have the same holders; once
the pieces 0 to n are here, so are all entries before the first one of piece n + 1; `complete` says how many that is.
"""

from __future__ import annotations

import numpy as np


class Pieces:
    """`groups` has for each entry the number of its set of holders; None: all entries are alike."""

    def __init__(self, num_entries: int, rows: int, groups: np.ndarray | None = None) -> None:
        assert rows >= 1
        assert groups is None or len(groups) == num_entries
        self._rows = rows
        self._num_entries = num_entries
        self._entries: list[np.ndarray] | None = None
        if groups is not None:
            found = []
            for group in np.unique(groups):
                (members,) = np.nonzero(groups == group)
                found += [members[start : start + rows] for start in range(0, len(members), rows)]
            self._entries = sorted(found, key=lambda members: int(members[0]))

    def __len__(self) -> int:
        return -(-self._num_entries // self._rows) if self._entries is None else len(self._entries)

    def entries(self, piece: int) -> np.ndarray:
        """Which entries it has, ascending."""
        if self._entries is not None:
            return self._entries[piece]
        return np.arange(piece * self._rows, min((piece + 1) * self._rows, self._num_entries))

    def complete(self, piece: int) -> int:
        """How many entries, from the first on, are here once this piece and all before it are."""
        if self._entries is None:
            return min((piece + 1) * self._rows, self._num_entries)
        return int(self._entries[piece + 1][0]) if piece + 1 < len(self._entries) else self._num_entries
