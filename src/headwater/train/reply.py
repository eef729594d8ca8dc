"""The rows of one chunk, as the trainer wants them, and the ways to get them.

Owns `Reply` and the `Worker` protocol. Four workers exist: a node on the wire (`client`), a node beside the trainer
(`own`), the trainer's own threads (`host`), and the slow, obvious one that defines correct (`inline`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Protocol

import numpy as np

from headwater.core.spec import Boundary
from headwater.data.wire import Bad, Chunk
from headwater.errors import DamagedError

QUIET_S = 60.0  # patience with nodes that answer, for jobs that have none (0) with those that don't
SILENT_TIMES = 10  # of patience: a trainer that has got nothing for so long stops, though its nodes give signs of life


@dataclass(frozen=True)
class Reply:
    """A chunk's rows in the order of its samples. `good[i]` says whether sample i has a row."""

    good: np.ndarray
    tensors: Sequence[np.ndarray]
    bad: tuple[Bad, ...]
    num_bytes: int = 0  # what crossed the wire for it, both ways
    chunk: int = -1  # which one this is, where a feed has passed it on


@dataclass(eq=False)
class Heard:
    """How a request for rows gets on, while it is under way."""

    num_rows: int  # that were asked for
    num_came: int = 0
    came_s: float = 0.0  # when something last came of it, by time.monotonic
    waits_for: str = ""  # by the worker's own word, so that silence is no fault

    def came(self, num_rows: int) -> None:
        """So many rows are there by now."""
        if num_rows > self.num_came:
            self.num_came, self.came_s = num_rows, time.monotonic()


class Worker(Protocol):
    """Somebody who turns chunks into replies."""

    name: str

    def heard(self, chunk: Chunk) -> Heard | None:
        """How this very request gets on; None if it is not under way."""

    def prepare(self) -> None:
        """Answer, or raise: called before the first chunk and whenever the worker was taken for dead."""

    def rows(self, chunk: Chunk, stopped: Event) -> Reply:
        """The chunk's rows. May be called from several threads at once; raises soon after `stopped` is set."""

    def stop(self, stopped: Event) -> None:
        """Wake whoever waits in `rows` with this event, which was just set."""


class Gathering:
    """Puts parts of a chunk, in any order, into one reply; whatever does not fit the request is a DamagedError."""

    def __init__(self, chunk: Chunk, boundary: Boundary) -> None:
        self._place = {ref.id: place for place, ref in enumerate(chunk.samples)}
        count = len(chunk.samples)
        self._seen, self._num_seen = np.zeros(count, bool), 0
        self._good = np.zeros(count, bool)
        self._bad: list[Bad] = []
        self._boundary = boundary
        self._tensors: list[np.ndarray] | None = None

    def add(self, ids: np.ndarray, tensors: Sequence[np.ndarray], *, keep: bool = False) -> None:
        """Some rows. With `keep` the arrays are ours from now on: if they are all rows, in order, none is copied."""
        places = self._places(ids.tolist())
        if not places:  # a sign of life
            return
        self._good[places] = True
        if keep and places == list(range(len(self._seen))):
            self._tensors = list(tensors)
            return
        for target, rows in zip(self._room(), tensors, strict=True):
            target[places] = rows

    def add_bad(self, bad: Sequence[Bad]) -> None:
        """Some samples that have no row."""
        self._places([each.sample for each in bad])
        self._bad += bad

    @property
    def num_seen(self) -> int:
        """Samples that have come so far, with a row or with the reason why they have none."""
        return self._num_seen

    def reply(self, num_bytes: int = 0) -> Reply:
        """The whole chunk."""
        if missing := int((~self._seen).sum()):
            raise DamagedError(f"{missing} of {len(self._seen)} rows did not arrive")
        if self._good.all():
            return Reply(self._good, self._room(), (), num_bytes)
        return Reply(self._good, [tensor[self._good] for tensor in self._room()], tuple(self._bad), num_bytes)

    def _room(self) -> list[np.ndarray]:
        if self._tensors is None:
            self._tensors = [np.empty((len(self._seen), *spec.shape), spec.dtype) for spec in self._boundary]
        return self._tensors

    def _places(self, ids: Sequence[int]) -> list[int]:
        try:
            places = [self._place[sample] for sample in ids]
        except KeyError as error:
            raise DamagedError(f"a row of sample {error} arrived that nobody asked for") from None
        if self._seen[places].any() or len(set(places)) != len(places):
            raise DamagedError("a row arrived twice")
        self._seen[places] = True
        self._num_seen += len(places)
        return places
