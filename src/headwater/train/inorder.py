"""Rows that came in pieces with gaps between them, put in order. Owns `in_order`; `core.pieces` has the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headwater.core.pieces import Pieces
from headwater.train.reply import Reply


@dataclass
class _Here:
    """What is left of a piece."""

    entries: np.ndarray
    reply: Reply
    used: int = 0  # of its entries
    used_rows: int = 0  # of its good ones


def in_order(replies: Iterator[Reply], pieces: Pieces, ids: np.ndarray) -> Iterator[Reply]:
    """Replies of consecutive entries, from replies of pieces in their order."""
    here: list[_Here] = []
    begin = 0
    try:
        for number, reply in enumerate(replies):
            here.append(_Here(pieces.entries(number), reply))
            end = pieces.complete(number)
            if end > begin:
                yield _take(here, begin, end, ids)
                here = [each for each in here if each.used < len(each.entries)]
                begin = end
            # Bytes are counted once, with the first rows of a piece.
    finally:
        close = getattr(replies, "close", None)
        if close is not None:
            close()


def _take(here: list[_Here], begin: int, end: int, ids: np.ndarray) -> Reply:
    good = np.zeros(end - begin, bool)
    parts: list[tuple[np.ndarray, list[np.ndarray]]] = []
    bad, num_bytes = [], 0
    for each in here:
        stop = int(np.searchsorted(each.entries, end))
        if stop == each.used:
            continue
        if each.used == 0:
            num_bytes += each.reply.num_bytes
        entries, fine = each.entries[each.used : stop], each.reply.good[each.used : stop]
        rows = slice(each.used_rows, each.used_rows + int(fine.sum()))
        good[entries - begin] = fine
        parts.append((entries[fine] - begin, [tensor[rows] for tensor in each.reply.tensors]))
        missing = set(ids[entries[~fine]].tolist())
        bad += [one for one in each.reply.bad if one.sample in missing]
        each.used, each.used_rows = stop, rows.stop
    place = np.cumsum(good) - 1  # of an entry among the good rows
    tensors = []
    for column in range(len(parts[0][1])):
        sample = parts[0][1][column]
        joined = np.empty((int(good.sum()), *sample.shape[1:]), sample.dtype)
        for entries, own in parts:
            joined[place[entries]] = own[column]
        tensors.append(joined)
    return Reply(good, tensors, tuple(bad), num_bytes)
