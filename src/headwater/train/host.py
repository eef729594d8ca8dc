"""The trainer's own threads as a worker: nothing moves to the storage, pictures are read and decoded here.

Owns `HostWorker`. It gives pixels, never a prefix: the whole model runs on the trainer anyway. Where nodes decode as
well, it is the trainer's prong (`core.prongs`).
"""

from __future__ import annotations

import os
import time
from threading import Event

from headwater.core import codecs
from headwater.data.extract import Extractor
from headwater.data.store import Store
from headwater.data.wire import Chunk
from headwater.errors import UnreachableError
from headwater.train.reply import Gathering, Heard, Reply
from headwater.train.trace import Trace


class HostWorker:
    """Reads and decodes in this process."""

    name = "host"

    def __init__(self, store: Store, num_threads: int | None = None, *, beside_nodes: bool = False) -> None:
        """`beside_nodes`, whose rows come over the same link: reads that crowd it become fewer."""
        self._store = store
        self._extractor = Extractor(num_threads or len(os.sched_getaffinity(0)), is_far=beside_nodes)
        self.trace: Trace | None = None
        self._heard: dict[int, Heard] = {}  # by the id() of the request

    @property
    def made(self) -> tuple[float, float]:
        """Seconds of its threads so far, and rows they made."""
        return self._extractor.busy.decode_s, float(self._extractor.busy.num_rows)

    @property
    def read_bytes(self) -> int:
        """Of samples, so far."""
        return self._extractor.busy.read_bytes

    def heard(self, chunk: Chunk) -> Heard | None:
        return self._heard.get(id(chunk))

    def prepare(self) -> None:
        """Always there."""

    def rows(self, chunk: Chunk, stopped: Event) -> Reply:
        self._heard[id(chunk)] = heard = Heard(len(chunk.samples))
        try:
            return self._rows(chunk, stopped, heard)
        finally:
            self._heard.pop(id(chunk), None)

    def _rows(self, chunk: Chunk, stopped: Event, heard: Heard) -> Reply:
        gathering = Gathering(chunk, chunk.extraction.boundary)
        trace = self.trace

        def note(stage: str, start: float, end: float) -> None:
            heard.came_s = time.monotonic()  # a group may be large: a sample that is read or decoded counts as well
            if trace is not None:
                trace.add(stage, start, end, chunk=chunk.index)

        want = chunk.extraction
        for part in self._extractor.rows(self._store, chunk, None, stopped.is_set, note=note):
            tensors = part.tensors
            if want.codec != "raw":  # what a row is must not depend on who made it
                tensors = codecs.decode(want.codec, codecs.encode(want.codec, tensors, want.boundary), want.boundary)
            gathering.add(part.ids, tensors, keep=True)
            gathering.add_bad(part.bad)
            heard.came(gathering.num_seen)
        if stopped.is_set():
            raise UnreachableError("stopped")
        read_bytes = sum(ref.size if ref.length < 0 else ref.length for ref in chunk.samples)
        return gathering.reply(read_bytes)

    def stop(self, stopped: Event) -> None:
        """`rows` looks at the event by itself."""

    def close(self) -> None:
        """End the threads."""
        self._extractor.close()
