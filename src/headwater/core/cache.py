"""What a node answers from its disk: by what a row is named, whose draw an epoch uses, what goes for want of room.

Owns `Shelf`, `row_key`, `draw_epoch` and `Keeping`, which decides; `node.cache` has the files.

What holds for `Keeping`, whatever happens and in whatever order (tests/core/test_cache.py):
1. What is kept never takes more than the budget.
2. A job pushes out only what nobody has used since that job began, the least recently used first. So a job never
   pushes out its own rows: of a data set that is larger than the budget a fixed part stays and is served in every
   epoch, where plain "least recently used" would push each row out just before its turn comes again.
3. Nothing is pushed out that need not be.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import cached_property

from headwater.core.codecs import wire_columns
from headwater.core.spec import Boundary, row_bytes

KEY_BYTES = 16
MAX_JOBS = 1024  # remembered; one that is forgotten counts as new


def draw_epoch(epoch: int, views: int) -> int:
    """The epoch whose random draws this epoch uses: with `views`, they come round again after so many; 0: never."""
    return epoch % views if views else epoch


@dataclass(frozen=True)
class Shelf:
    """Everything that a row depends on, but for its sample. Rows of a shelf are alike: same columns, same bytes.

    `url`, `transforms` (a digest), `prefix` (a digest; None: rows are pixels, or the floats that the model takes) and
    `outputs`, `boundary`, `precision` and `codec` are the request's. `maker` names whatever else has a say in the
    numbers: versions of decoder and engine. `draw` is (seed, epoch) where the transforms draw at random, else None.
    """

    url: str
    transforms: str
    prefix: str | None
    outputs: tuple[str, ...] | None
    boundary: Boundary
    precision: str
    codec: str
    maker: str
    draw: tuple[int, int] | None

    @cached_property
    def name(self) -> str:
        """The same for equal shelves, another one for all others."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["boundary"] = [spec.to_json() for spec in self.boundary]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]

    @cached_property
    def columns(self) -> Boundary:
        """What a row consists of, as it goes over the wire."""
        return wire_columns(self.codec, self.boundary)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.columns)


def row_key(shelf: Shelf, key: str, offset: int, length: int, etag: str, sample: int) -> bytes:
    """The name of one row: of its shelf and its sample. The id `sample` counts only where something is drawn for it."""
    name = key.encode(errors="surrogatepass")
    drawn_for = -1 if shelf.draw is None else sample
    numbers = struct.pack("<4q", offset, length, drawn_for, len(name))  # the name's length tells it from the etag
    text = numbers + name + etag.encode(errors="surrogatepass")
    return hashlib.blake2b(text, key=shelf.name.encode(), digest_size=KEY_BYTES).digest()


@dataclass
class _Segment:
    num_bytes: int
    used: int  # when; counts what happened


@dataclass(frozen=True)
class Room:
    """For `num_rows` of the rows that were offered, once these segments are gone."""

    num_rows: int
    drop: tuple[int, ...] = ()


class Keeping:
    """Which segments (numbered files of rows) stay within `budget_bytes`."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.dropped_bytes = 0  # so far, to make room
        self._segments: OrderedDict[int, _Segment] = OrderedDict()  # the least recently used first
        self._began: OrderedDict[str, int] = OrderedDict()  # job → when it was first heard of
        self._now = 0

    def found(self, segment: int, num_bytes: int) -> None:
        """Here since before; told in the order of their last use, the oldest first."""
        self._segments[segment] = _Segment(num_bytes, self._tick())
        self.num_bytes += num_bytes

    def shrink(self) -> tuple[int, ...]:
        """What must go because the budget is smaller than it was."""
        return self._drop_until(0)

    def give_back(self, num_bytes: int) -> tuple[int, ...]:
        """What goes so that others have room on the disk: the least recently used, at least so much."""
        return self._drop_until(self.budget_bytes - self.num_bytes + min(num_bytes, self.num_bytes))

    def asked(self, job: str) -> None:
        """A job asks for rows."""
        if job not in self._began:
            self._began[job] = self._tick()
            if len(self._began) > MAX_JOBS:
                self._began.popitem(last=False)

    def used(self, segment: int) -> None:
        """Rows of it were read, or are about to be added."""
        if segment in self._segments:
            self._segments[segment].used = self._tick()
            self._segments.move_to_end(segment)

    def room(self, num_rows: int, row_bytes: int, job: str) -> Room:
        """For how many of these rows there is room, and what goes for it; that counts as gone from now on."""
        self.asked(job)
        began = self._began[job]
        idle_bytes = sum(held.num_bytes for held in self._segments.values() if held.used < began)
        fits = min(num_rows, (self.budget_bytes - self.num_bytes + idle_bytes) // row_bytes)
        return Room(fits, self._drop_until(fits * row_bytes))

    def grown(self, segment: int, num_bytes: int) -> None:
        """So much was added to it; there was room."""
        held = self._segments.setdefault(segment, _Segment(0, 0))
        held.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self.used(segment)
        assert self.num_bytes <= self.budget_bytes

    def gone(self, segment: int) -> None:
        """It was lost."""
        if segment in self._segments:
            self.num_bytes -= self._segments.pop(segment).num_bytes

    def _drop_until(self, wanted_bytes: int) -> tuple[int, ...]:
        """The least recently used segments, until so much is free."""
        dropped = []
        while self.budget_bytes - self.num_bytes < wanted_bytes:
            dropped.append(next(iter(self._segments)))
            self.dropped_bytes += self._segments[dropped[-1]].num_bytes
            self.gone(dropped[-1])
        return tuple(dropped)

    def _tick(self) -> int:
        self._now += 1
        return self._now
