"""A node that trains a prefix, as seen from the trainer: one call, with messages both ways.

Owns `Peer`: the threads that write and read, so that a slow link holds up neither the suffix nor other nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headwater.data import wire
from headwater.data.parcel import SCHEMA, Parcel
from headwater.errors import DamagedError, HeadwaterError, RefusedError, UnreachableError
from headwater.train.client import NodeClient

GOODBYE_S = 5.0
SILENT_S = 60.0  # a node says something every five seconds, whatever it does
Event = tuple["Peer", Parcel | HeadwaterError]
_SESSIONS = itertools.count()


class SilentError(UnreachableError):
    """It lives, and gets nothing done."""


class Peer:
    """A session on one node. What comes is put into `events`, with this object; the last of it is an error."""

    def __init__(self, number: int, client: NodeClient, events: queue.SimpleQueue[Event]) -> None:
        self.number = number
        self.session = next(_SESSIONS)  # no other one has this number
        self.client = client
        self.version = -1  # of its weights, as far as they were sent
        self.received_bytes = self.sent_bytes = 0
        self._events = events
        self._outbox: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self.heard = time.monotonic()
        self.moved = self.heard  # when something other than a sign of life last came, or had been sent
        self._writer, self._reader = client.exchange()
        self._threads = [threading.Thread(target=work, name=f"peer-{work.__name__}-{client.name}", daemon=True)
                         for work in (self._write, self._read)]  # fmt: skip
        for thread in self._threads:
            thread.start()

    @property
    def name(self) -> str:
        return self.client.name

    def send(self, kind: str, about: Mapping[str, Any] | None = None, arrays: Mapping[str, Any] | None = None) -> None:
        """Say something, as soon as what was said before is on its way."""
        self._outbox.put(Parcel(kind, about or {}, arrays or {}))

    def close(self) -> None:
        """Hang up, whatever is under way; a node that is there gets to end its side first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._outbox.put(None)
        deadline = time.monotonic() + GOODBYE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            with contextlib.suppress(pa.ArrowException, OSError):
                self._reader.cancel()
            for thread in self._threads:
                thread.join(timeout=GOODBYE_S)
        with contextlib.suppress(pa.ArrowException, OSError, StopIteration):
            self._writer.close()  # or Arrow prints what it thinks of a writer that nobody has closed

    def _write(self) -> None:
        try:
            self._writer.begin(SCHEMA)
            while (parcel := self._outbox.get()) is not None:
                batch, metadata = parcel.to_batch()
                self._writer.write_with_metadata(batch, pa.py_buffer(metadata))
                self.sent_bytes += batch.nbytes + len(metadata)
                self.moved = time.monotonic()
            self._writer.done_writing()
        except Exception as error:
            self._failed(error)

    def _read(self) -> None:
        try:
            while True:
                item = self._reader.read_chunk()
                self.heard = time.monotonic()
                said = item.app_metadata.to_pybytes() if item.app_metadata else b""
                parcel = Parcel.from_batch(item.data, said)
                self.received_bytes += len(said) + item.data.nbytes  # of a batch that was found to be whole
                if parcel.kind == "error":
                    raise self._theirs(parcel)
                if parcel.kind != "beat":
                    self.moved = self.heard
                    self._events.put((self, parcel))
        except Exception as error:
            self._failed(error)

    def _theirs(self, parcel: Parcel) -> HeadwaterError:
        said = parcel.about.get("error")
        found = wire.error_from_wire(said.encode(errors="replace") if isinstance(said, str) else None)
        if found is None:
            return DamagedError(f"{self.name} sent an error that can't be read")
        if isinstance(found, UnreachableError | RefusedError):
            return type(found)(f"{self.name}: {found}")
        return found

    def _failed(self, error: Exception) -> None:
        with self._lock:
            if self._closed:
                return
        if isinstance(error, StopIteration):
            error = UnreachableError(f"{self.name} has ended the session")
        plain = error if isinstance(error, HeadwaterError) else self.client.in_words(error)
        self._events.put((self, plain))
