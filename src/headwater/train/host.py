"""The trainer's own threads as a worker: nothing moves to the storage, pictures are read and decoded here.

Owns `HostWorker`. It gives pixels, never a prefix: the whole model runs on the trainer anyway. Where nodes decode as
well, it is the trainer's prong (`core.prongs`).
"""

from __future__ import annotations

import os
from threading import Event
from typing import Any

from headwater.core import codecs
from headwater.data.extract import Extractor
from headwater.data.store import Store
from headwater.data.wire import Chunk
from headwater.errors import UnreachableError
from headwater.train.reply import Gathering, Reply
from headwater.train.trace import Trace


class HostWorker:
    """Reads and decodes in this process."""

    name = "host"
    is_waiting = False
    rows_came_s = 0.0

    def __init__(self, store: Store, num_threads: int | None = None, *, beside_nodes: bool = False) -> None:
        """`beside_nodes`, whose rows come over the same link: reads that crowd it become fewer."""
        self._store = store
        self._extractor = Extractor(num_threads or len(os.sched_getaffinity(0)), is_far=beside_nodes)
        self.trace: Trace | None = None

    @property
    def made(self) -> tuple[float, float]:
        """Seconds of its threads so far, and rows they made."""
        return self._extractor.busy.decode_s, float(self._extractor.busy.num_rows)

    @property
    def read_bytes(self) -> int:
        """Of samples, so far."""
        return self._extractor.busy.read_bytes

    def prepare(self) -> None:
        """Always there."""

    def rows(self, chunk: Chunk, stopped: Event) -> Reply:
        gathering = Gathering(chunk, chunk.extraction.boundary)
        trace = self.trace
        options: dict[str, Any] = {}
        if trace is not None:
            options["note"] = lambda stage, start, end: trace.add(stage, start, end, chunk=chunk.index)
        want = chunk.extraction
        for part in self._extractor.rows(self._store, chunk, None, stopped.is_set, **options):
            tensors = part.tensors
            if want.codec != "raw":  # what a row is must not depend on who made it
                tensors = codecs.decode(want.codec, codecs.encode(want.codec, tensors, want.boundary), want.boundary)
            gathering.add(part.ids, tensors, keep=True)
            gathering.add_bad(part.bad)
        if stopped.is_set():
            raise UnreachableError("stopped")
        read_bytes = sum(ref.size if ref.length < 0 else ref.length for ref in chunk.samples)
        return gathering.reply(read_bytes)

    def stop(self, stopped: Event) -> None:
        """`rows` looks at the event by itself."""

    def close(self) -> None:
        """End the threads."""
        self._extractor.close()
