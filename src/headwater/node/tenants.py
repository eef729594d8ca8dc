"""Tenants of a node and their memory: what each needs, from what was measured, and how a request gets in.

Owns the budget and the memory lines; `node.rooms` holds the queue. A tenant is a job with one of its prefixes: a job
that goes over to another cut is a new one, and the old one falls silent.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from headwater.core.admission import Need
from headwater.core.spec import ITEM_BYTES
from headwater.core.tuning import Tuned
from headwater.data import tokenizerfile
from headwater.data.memory import memory_bytes, resident_bytes
from headwater.data.samples import WHOLE
from headwater.data.wire import Chunk
from headwater.errors import ConfigError
from headwater.node.engine import Engine
from headwater.node.prefixes import Prefixes, Wanted
from headwater.node.rooms import Room, Rooms

# Kept out of the budget: what no line tells of (the wire's buffers, the kernel's, a heap's gaps), as a part of it all;
# engines' libraries, once they are used (measured: 53 MB); for each thread the floats of a piece; and pictures that are
# being decoded (`picture_bytes`).
MARGIN = 0.1
LIBRARY_BYTES = 56 << 20
FLOAT_BYTES = 8 << 20
# Pictures: an eighth of it all, so that each thread of a node with 1 GB a core may have one of 12 megapixels at
# `data.decode`'s 10 bytes each. A small node gives up to a quarter for one of 24 megapixels, as cameras make them, and
# one with many threads 3 megapixels for each.
PICTURE_PART, MOST_PICTURE_PART = 8, 4
PICTURE_BYTES = 240 << 20
THREAD_PICTURE_BYTES = 32 << 20
LEAST_BYTES = 64 << 20  # of a budget: less than that runs no model
# Until it is measured: a child that tries engines takes this much by itself (measured: 150 MB with both of them), and
# this many times the model's file; a row of ResNet50, more than of most, takes this much in an engine (measured).
# Where no trial succeeded, a row is taken for six times as large, and goes by itself.
CHILD_BYTES = 160 << 20
TIMES_MODEL = 3
ROW_BYTES = 16 << 20
UNMEASURED = 6
TRIAL_ROWS = 32  # what the largest trial has at once

Start = Callable[..., Future[Any]]
While = Callable[[Future[Any]], Iterator[None]]


def node_bytes(limit_bytes: int | None) -> int:
    """What the machine or its control group has, or less if told so."""
    return min(memory_bytes(), limit_bytes or memory_bytes())


def picture_bytes(limit_bytes: int | None, num_threads: int) -> int:
    """Of that, what pictures may take while they are decoded; the budget is without it."""
    total = node_bytes(limit_bytes)
    return max(num_threads * THREAD_PICTURE_BYTES, total // PICTURE_PART,
               min(total // MOST_PICTURE_PART, PICTURE_BYTES))  # fmt: skip


def budget(limit_bytes: int | None, num_threads: int) -> int:
    """Bytes for tenants: what the node has, without what it takes itself."""
    total = node_bytes(limit_bytes)
    own = resident_bytes() + LIBRARY_BYTES + int(MARGIN * total) + num_threads * FLOAT_BYTES
    own += picture_bytes(limit_bytes, num_threads)
    if total - own < LEAST_BYTES:
        raise ConfigError(
            f"{total / 1e6:,.0f} MB of memory are too little for a node with {num_threads} threads: it takes "
            f"{own / 1e6:,.0f} MB before the first job; give it more (--memory, or its control group), or fewer threads"
        )
    return total - own


class Tenants:
    """What a node's requests need, and their way in."""

    def __init__(self, prefixes: Prefixes, num_threads: int, limit_bytes: int | None, adapt: bool = True) -> None:
        """`adapt=False` lets every request have groups as large as it asks for, whatever memory there is: for
        benchmarks alone."""
        self._prefixes = prefixes
        self._num_threads = num_threads
        self.rooms = Rooms(budget(limit_bytes, num_threads) if adapt else None, prefixes)
        self._errands = itertools.count(1)
        self._lock = threading.Lock()
        self._loading: dict[Wanted, Future[Any]] = {}

    def open(self, chunk: Chunk, weight: float = 1.0) -> Room:
        """A room for this request, of a job with this weight."""
        engine = Wanted.of(chunk.extraction).name if chunk.extraction.prefix else ""
        return self.rooms.open(f"{chunk.job} {engine}".strip(), replace(self._need(chunk), weight=weight))

    def errand(self, what: str, num_bytes: int, rows: int = 1, row_bytes: int = 0) -> Room:
        """A room for work in a child, or for a moment: so many bytes, and more for up to so many rows if there are."""
        need = Need("", num_bytes, row_bytes, 0, rows)
        return self.rooms.open(f"{what} {next(self._errands)}", need, errand=True)

    def child(self, what: str, digest: str | None, rows: int, more_bytes: int = 0) -> Room:
        """The same for a child that runs a prefix."""
        model = TIMES_MODEL * self._prefixes.num_bytes(digest) if digest else 0
        return self.errand(what, CHILD_BYTES + model + more_bytes, rows, ROW_BYTES)

    def enter(
        self,
        chunk: Chunk,
        room: Room,
        start: Start,
        while_: While,
        pause_s: float,
        abandoned: Callable[[], bool],
        weight: float = 1.0,
    ) -> Generator[tuple[int, int] | None, None, Engine | None]:
        """Says when to give a sign of life, with the place in the queue, until the room is in, and its tokenizer and
        its engine loaded.

        The generator's value is the engine; None without a prefix.
        """
        want = chunk.extraction
        while True:
            if not room.is_in:
                room.holds = None  # as the engine, below
            yield from self.wait(room, pause_s, abandoned)
            if abandoned():
                return None
            if (text := want.transforms.text) is not None and room.holds is None:
                room.holds = tokenizerfile.KEPT.get(text.needs)
                if room.holds is None:
                    loading = start(text.loaded)
                    for _ in while_(loading):
                        yield None
                    room.holds = loading.result()
                    del loading
                room.needs(replace(self._need(chunk), weight=weight))
                if not room.is_in:
                    continue
            if not want.prefix:
                return None
            wanted = Wanted.of(want)
            engine: Engine | None = self._prefixes.ready(wanted)
            if engine is None:
                room.needs(replace(self._to_prepare(chunk), weight=weight))
                if not room.is_in:
                    continue
                loading = self._load(wanted, room.granted_bytes, start)
                for _ in while_(loading):
                    yield None
                engine = loading.result()
                del loading
            room.needs(replace(self._need(chunk), weight=weight), measured=True)
            if room.is_in:
                return engine
            engine = None  # not held while others may need its memory

    def _load(self, wanted: Wanted, granted_bytes: int | None, start: Start) -> Future[Any]:
        """The engine to come: one thread loads it, however many requests wait for it."""
        with self._lock:
            loading = self._loading.get(wanted)
            if loading is None:
                loading = self._loading[wanted] = start(partial(self._prefixes.engine, wanted, granted_bytes))
        # Not kept once it is there: it would keep the engine's memory, too, after the engine was unloaded.
        loading.add_done_callback(lambda done: self._loaded(wanted, done))
        return loading

    def _loaded(self, wanted: Wanted, done: Future[Any]) -> None:
        with self._lock:
            if self._loading.get(wanted) is done:
                del self._loading[wanted]

    def wait(self, room: Room, pause_s: float, abandoned: Callable[[], bool]) -> Iterator[tuple[int, int] | None]:
        """Says when to give a sign of life, with the place in the queue, until the room is in."""
        waited_s = pause_s  # the first at once: the trainer should know why nothing comes
        while not room.wait(0.25 if waited_s else 0.0):
            if abandoned():
                return
            waited_s += 0.25
            if waited_s >= pause_s:
                waited_s = 0.25
                yield room.place

    def _need(self, chunk: Chunk) -> Need:
        want = chunk.extraction
        wanted = min(want.node_batch, len(chunk.samples))
        pixels = want.transforms.pixel_spec.row_bytes
        crosses = sum(spec.row_bytes for spec in want.boundary)
        # The largest: any group may consist of such, and what they are on average says nothing of one.
        sample = max(ref.size if ref.length == WHOLE else ref.length for ref in chunk.samples)
        hold = sample + pixels + 2 * crosses  # the second as the wire has it
        if not want.prefix:
            return Need("", self._tokenizer_bytes(chunk), 0, hold, wanted)
        tuned = self._prefixes.tuned(Wanted.of(want))
        if tuned is None:
            return self._to_prepare(chunk)
        fixed, row = tuned.memory or self._guess(want.prefix)
        fixed += self._tokenizer_bytes(chunk)
        work = (row + self._float_bytes(chunk)) * self._at_once(tuned)
        piece = tuned.candidate.batch
        return Need(Wanted.of(want).name, fixed, work, hold, wanted, rates=tuned.rates, piece=piece)

    def _to_prepare(self, chunk: Chunk) -> Need:
        """While engines are tried and one is loaded."""
        want = chunk.extraction
        assert want.prefix is not None
        model = TIMES_MODEL * self._prefixes.num_bytes(want.prefix)
        fixed = CHILD_BYTES + model + self._tokenizer_bytes(chunk)
        return Need(Wanted.of(want).name, fixed, ROW_BYTES, 0, TRIAL_ROWS * self._num_threads)

    def _tokenizer_bytes(self, chunk: Chunk) -> int:
        """Of each job that uses it, though several may use the same."""
        text = chunk.extraction.transforms.text
        return 0 if text is None else tokenizerfile.needs_bytes(text.needs)

    def _guess(self, digest: str) -> tuple[int, int]:
        """Where nothing could be measured."""
        return TIMES_MODEL * self._prefixes.num_bytes(digest), UNMEASURED * ROW_BYTES

    def _at_once(self, tuned: Tuned) -> int:
        return self._num_threads if tuned.candidate.threads == 1 else 1

    def _float_bytes(self, chunk: Chunk) -> int:
        spec = chunk.extraction.transforms.output_spec
        return math.prod(spec.shape) * max(ITEM_BYTES["float32"], ITEM_BYTES[spec.dtype])
