"""A long call with messages both ways: what a trainer whose prefix is trained here says, and what it is answered.

Owns `Exchange`: the thread that works while this one reads, the order of what is written, and signs of life. What is
done with the messages is `node.training`'s, which needs torch and is imported when the first such call comes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from headwater.core.unpacked import most_bytes
from headwater.data import wire
from headwater.data.extract import SIGN_OF_LIFE_S
from headwater.data.parcel import OPENING, SCHEMA, Parcel, Words
from headwater.errors import DamagedError, HeadwaterError, UnreachableError

MAX_PENDING = 256  # messages that have come and nobody has looked at; the wire holds back further ones
MAX_PENDING_BYTES = 128 << 20  # of them, their words as they are in memory, unless it is one alone
MAX_PENDING_BYTES_AT_FIRST = 1 << 20  # until the session is let in: any number of them may wait for that


class GoneError(Exception):
    """The other side has hung up, or the node ends."""


class Exchange:
    """Both directions of one call."""

    def __init__(
        self, reader: Any, writer: Any, stopping: Callable[[], bool], is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """`stopping`: the node ends. `is_cancelled`: the other side has gone without a word."""
        self._reader = reader
        self._writer = writer
        self._stopping = stopping
        self._is_cancelled = is_cancelled
        self._writing = threading.Lock()
        self._inbox: queue.Queue[tuple[Parcel | HeadwaterError | None, int]] = queue.Queue(MAX_PENDING)
        self._pending_bytes = 0
        self._max_pending_bytes = min(MAX_PENDING_BYTES_AT_FIRST, MAX_PENDING_BYTES)
        self._words: Mapping[str, Words] = {"open": OPENING}
        self._fault: Exception | None = None  # what ended the work
        self._taken = threading.Condition()
        self._put_off: list[Parcel] = []
        self._wanted = threading.Event()  # somebody has asked for a message
        self._is_over = False  # nothing will come after what was taken
        self._gone = threading.Event()
        self._asking = threading.Lock()  # the call itself may be asked only as long as there is one
        self._said = time.monotonic()
        self.received_bytes = self.sent_bytes = 0

    @property
    def is_gone(self) -> bool:
        if self._stopping():
            return True
        with self._asking:
            return self._gone.is_set() or self._is_cancelled()

    def admit(self, words: Mapping[str, Words]) -> None:
        """The session is let in, and may be told more at once; messages of these kinds may have so many words."""
        with self._taken:
            self._words, self._max_pending_bytes = words, MAX_PENDING_BYTES
            self._taken.notify_all()

    def rest(self, seconds: float) -> bool:
        """Do nothing for a while; whether the other side has gone."""
        return self._gone.wait(seconds) or self.is_gone

    def send(self, parcel: Parcel) -> None:
        """Say something; GoneError if nobody listens any more."""
        batch, metadata = parcel.to_batch()
        try:
            with self._writing:
                self._said = time.monotonic()
                self._writer.write_with_metadata(batch, pa.py_buffer(metadata))
                self._said = time.monotonic()
                self.sent_bytes += batch.nbytes + len(metadata)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self._gone.set()
            raise GoneError from error

    def take(self) -> Parcel:
        """The next message; GoneError if there will be none. None is read before the first is asked for: whoever waits
        to be let in takes no memory."""
        self._wanted.set()
        if self._put_off:
            return self._put_off.pop(0)
        while not self._is_over:
            try:
                found, num_bytes = self._inbox.get(timeout=0.5)
            except queue.Empty:
                if self.is_gone:
                    raise GoneError from None
                continue
            with self._taken:
                self._pending_bytes -= num_bytes
                self._taken.notify_all()
            if isinstance(found, HeadwaterError):
                raise found
            if found is not None:
                return found
            self._is_over = True
            self._gone.set()
        raise GoneError

    def has_come(self, *kinds: str) -> bool:
        """Is there a message of one of these kinds among those that nobody has taken yet?"""
        with self._inbox.mutex:
            waiting = [each for each, _ in self._inbox.queue]
        return any(isinstance(each, Parcel) and each.kind in kinds for each in (*waiting, *self._put_off))

    def put_off(self, parcels: list[Parcel]) -> None:
        """These have come too early: `take` gives them first."""
        self._put_off += parcels

    def carry(self, work: Callable[[Exchange], None]) -> None:
        """Read until the other side hangs up, while `work` runs in a thread of its own.

        What ended that work is raised, after the other side was told of it; GoneError where nobody was there to be told
        any more, or the node ends.
        """
        self._writer.begin(SCHEMA)
        worker = threading.Thread(target=self._work, args=(work,), name="training", daemon=True)
        beats = threading.Thread(target=self._beat, name="training-beat", daemon=True)
        worker.start()
        beats.start()
        try:
            while not self._wanted.wait(0.5) and not self.is_gone:
                pass
            while True:
                try:
                    item = self._reader.read_chunk()
                except StopIteration:
                    break
                except (flight.FlightError, pa.ArrowException, OSError):
                    break
                num_bytes = 0
                try:
                    said = item.app_metadata.to_pybytes() if item.app_metadata else b""
                    parcel: Parcel | HeadwaterError = Parcel.from_batch(item.data, said, self._words)
                    num_bytes = len(said) + item.data.nbytes  # only now: Arrow follows offsets that nobody has checked
                    self.received_bytes += num_bytes
                    num_bytes += most_bytes(said)
                except HeadwaterError as error:
                    parcel = error
                except Exception as error:  # Arrow's own, of bytes that are none of its
                    parcel = DamagedError(f"a message can't be read: {type(error).__name__}")
                self._put(parcel, num_bytes)
                del item, parcel
        finally:
            with self._asking:
                self._gone.set()
            self._put(None)
            worker.join()
            beats.join()
        if self._fault is not None:
            raise self._fault
        if self._stopping() or self._is_cancelled():
            raise GoneError

    def _put(self, item: Parcel | HeadwaterError | None, num_bytes: int = 0) -> None:
        with self._taken:
            while self._pending_bytes and self._pending_bytes + num_bytes > self._max_pending_bytes:
                if self._stopping() or self._is_cancelled():
                    return
                self._taken.wait(0.5)
            self._pending_bytes += num_bytes
        while not (self._stopping() or self._is_cancelled()):
            with contextlib.suppress(queue.Full):
                self._inbox.put((item, num_bytes), timeout=0.5)
                return

    def _work(self, work: Callable[[Exchange], None]) -> None:
        try:
            work(self)
        except GoneError:
            pass
        except Exception as error:
            if not (isinstance(error, UnreachableError) and self.is_gone):  # what was given up for want of a listener
                self._fault = error
            if not isinstance(error, HeadwaterError):
                error = HeadwaterError(f"unexpected {type(error).__name__} on the node; its log has more")
            self._tell(error)
        with contextlib.suppress(GoneError):  # what else comes is read, whatever it is, so that the call can end
            while True:
                with contextlib.suppress(HeadwaterError):
                    self.take()

    def _tell(self, error: HeadwaterError) -> None:
        with contextlib.suppress(GoneError):
            self.send(Parcel("error", {"error": wire.error_to_wire(error).decode()}))

    def _beat(self) -> None:
        """gRPC hangs up on a call that is silent for 30 s while the other side asks whether it is there."""
        while not self._gone.wait(1.0):
            if time.monotonic() - self._said > SIGN_OF_LIFE_S:
                with contextlib.suppress(GoneError):
                    self.send(Parcel("beat"))
