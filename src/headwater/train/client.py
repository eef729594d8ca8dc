"""A node as seen from the trainer: one connection, and its errors in our words.

Owns `NodeClient`, a `Worker` over Arrow Flight.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from headwater.core.form import shown
from headwater.data import tokenizerfile, wire
from headwater.data.answers import check_hello, check_probe, check_status
from headwater.data.handover import Inbox
from headwater.data.samples import Samples
from headwater.data.secrets import redact
from headwater.data.tokenizerfile import UNKNOWN_TOKENIZER
from headwater.data.wire import Chunk, Listing
from headwater.errors import (
    ConfigError,
    DamagedError,
    HeadwaterError,
    RefusedError,
    StoreError,
    UnreachableError,
    VersionError,
)
from headwater.train.access import TLS, Access
from headwater.train.reply import QUIET_S, SILENT_TIMES, Gathering, Heard, Reply
from headwater.train.trace import Trace
from headwater.version import VERSION

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 5.0
_PIECE_BYTES = 1 << 20
_NOT_OURS = "is it a Headwater node (`headwater serve`)?"
# A link that silently drops everything is noticed within about twenty seconds, however long an answer takes.
# A node that comes back is found within a second or two: gRPC by itself waits up to two minutes between two tries.
_OPTIONS = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1_000)]  # fmt: skip


class NodeClient:
    """One node. `prefix` is the ONNX file it must hold before rows can be asked for."""

    def __init__(self, address: str, access: Access | None = None, place: str | None = None) -> None:
        """`place` is what a timeline calls it, instead of its address."""
        self.name = address
        self._place = place or address
        self._prefix: tuple[str, Path] | None = None  # what it needs now
        self._files: dict[str, Path] = {}  # what it may need to be sent again, by digest
        self._calibrations: dict[str, wire.Calibrate] = {}  # what it may need to be asked again
        self.received_bytes = 0  # of rows, as they come in
        self._heard: dict[int, Heard] = {}  # of chunks under way, by the id() of the request
        self._mended: set[int] = set()  # of these, the ones for which the node is sent what it lacks
        self._waits: dict[object, str] = {}  # call under way → what for, by the node's own word
        self._knows_quota = False  # that there is one, which most chunks may wait for: it is said once
        self.trace: Trace | None = None  # what is told of chunks that ask for it
        self._readers: dict[flight.FlightStreamReader, threading.Event | None] = {}
        self._lock = threading.RLock()  # the garbage collector may end a stream anywhere, also in here
        self._mending = threading.Lock()
        self._wants_folder = False
        self._inbox: Inbox | None = None
        with self._plain_errors():
            self._client = (access or Access()).connect(address, _OPTIONS)

    def hello(self) -> dict[str, Any]:
        """Who answers; VersionError if it speaks another protocol."""
        answer = self._act("hello")
        if not isinstance(answer, dict) or answer.get("protocol") != wire.PROTOCOL:
            found = answer.get("protocol") if isinstance(answer, dict) else None
            named = answer.get("headwater") if isinstance(answer, dict) else None
            version = named if isinstance(named, str) else shown(named)
            raise VersionError(
                f"{self.name} runs Headwater {version} (protocol {shown(found)}), this trainer {VERSION} "
                f"(protocol {wire.PROTOCOL}); install the same version on both: pip install headwater=={VERSION}"
            )
        check_hello(answer, self.name)
        return answer

    def status(self) -> dict[str, Any]:
        """Every number of the node's /metrics, and what else it shows of itself to us: {"numbers", "about"}."""
        answer = self._act("status")
        check_status(answer, self.name)
        return dict(answer)

    def finds_folder(self) -> bool:
        """Does this machine see the folder in which the node leaves rows?"""
        self._wants_folder = True
        self._inbox = Inbox.found(self.hello().get("hand_over"))
        return self._inbox is not None

    def needs(self, digest: str, path: Path) -> None:
        """The prefix that `prepare` makes sure of from now on."""
        self._prefix = (digest, path)
        self._files[digest] = path

    def take_over(self, other: NodeClient) -> None:
        """Know what another node of the same job knows: what it must hold before it is asked for rows."""
        self._prefix, self._files = other._prefix, dict(other._files)
        self._calibrations = dict(other._calibrations)
        self._wants_folder, self.trace = other._wants_folder, other.trace

    def has_prefix(self) -> bool:
        """Is what it needs on the node already?"""
        return self._prefix is None or bool(self._act("has-prefix", self._prefix[0].encode()))

    def prepare(self) -> None:
        said = self.hello()
        if self._wants_folder:  # it may be back on another machine
            self._inbox = Inbox.found(said.get("hand_over"))
        if said.get("draining"):
            raise UnreachableError(f"{self.name} is being stopped; start it again, or name other nodes")
        if self._prefix and not self.has_prefix():
            self.upload(*self._prefix)

    def calibrate_again(self) -> None:
        """Have it make what other nodes of the job were asked to make; no more than a question where it has that."""
        for request in list(self._calibrations.values()):
            self.calibrate(request)

    def upload(self, digest: str, path: Path) -> None:
        """Send a prefix, piece by piece."""
        self._send(digest.encode(), path, "prefix")

    def _send(self, command: bytes, path: Path, what: str) -> None:
        schema = pa.schema([("piece", pa.binary())])
        try:
            file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"the {what} in {path} can't be read ({error.strerror}), and {self.name} needs it; start "
                              "the job again, which writes it anew") from None  # fmt: skip
        with file, self._plain_errors(), self._listening() as hear:
            writer, signs = self._client.do_put(flight.FlightDescriptor.for_command(command), schema)
            try:
                while piece := file.read(_PIECE_BYTES):
                    writer.write_batch(pa.record_batch([pa.array([piece], pa.binary())], schema=schema))
                writer.done_writing()
                while (said := signs.read()) is not None:
                    hear(said)
            finally:
                writer.close()

    def calibrate(self, request: wire.Calibrate) -> None:
        """Make it ready for the int8 form of a prefix that it has; takes a while the first time."""
        self._calibrations[request.digest] = request
        with self._plain_errors(), self._listening() as hear, self._reading(request.dumps()) as reader:
            for item in reader:
                hear(item.app_metadata)

    def list_samples(
        self,
        listing: Listing,
        on_progress: Callable[[int], None] = lambda count: None,
        patience_s: float = math.inf,
    ) -> Samples:
        """The data set as the node sees it. A node that gets no further for ten times `patience_s` is given up."""
        batches, whole, listed = [], None, 0
        patience_s = patience_s or QUIET_S
        since = told = time.monotonic()
        with self._plain_errors(), self._listening() as hear, self._reading(listing.dumps()) as reader:
            for item in reader:
                now = time.monotonic()
                if hear(item.app_metadata):
                    since = told = now
                    continue
                if now - since > SILENT_TIMES * patience_s:
                    raise StoreError(f"{self.name} has got no further than {listed:,} samples of "
                                     f"{redact(listing.url)} for {now - since:.0f} s, though it answers; can it read "
                                     "the data (a store or a disk that hangs)? Its log may say more")  # fmt: skip
                if now - told > patience_s:
                    told = now
                    log.warning("%s: listing %s: no further than %s samples for %.0f s, though it answers", self.name,
                                redact(listing.url), f"{listed:,}", now - since)  # fmt: skip
                about = self._json(item.app_metadata.to_pybytes(), "a listing") if item.app_metadata else {}
                if not isinstance(about, dict):
                    raise DamagedError(f"{self.name}: the listing of {listing.url} can't be read: {shown(about)}")
                if type(about.get("listed")) is int:
                    if about["listed"] != listed:
                        listed, since, told = about["listed"], now, now
                    on_progress(listed)
                elif "whole" in about:
                    whole = about["whole"]
                else:
                    batches.append(item.data)
        if whole is None:
            raise DamagedError(f"{self.name}: the listing of {listing.url} ended too early; ask again")
        return wire.listing_result(batches, whole)

    def probe(self, chunk: Chunk) -> dict[str, Any]:
        """What the work on this chunk costs on the node; takes a few seconds."""
        try:
            return self._probe(chunk)
        except RefusedError as error:
            if not self._mend(chunk, str(error)):
                raise
            return self._probe(chunk)

    def _probe(self, chunk: Chunk) -> dict[str, Any]:
        said = b""
        with self._plain_errors(), self._listening() as hear, self._reading(wire.Probe(chunk).dumps()) as reader:
            for item in reader:
                if not hear(item.app_metadata) and item.app_metadata:
                    said = item.app_metadata.to_pybytes()
        found = self._json(said, "a probe")
        if not isinstance(found, dict):
            raise DamagedError(f"{self.name}: the answer to a probe is not an object; ask again")
        if "error" in found:
            told = shown(found["error"]) if not isinstance(found["error"], str) else found["error"]
            raise wire.error_from_wire(told.encode(errors="replace")) or RefusedError(f"{self.name}: {told}")
        check_probe(found, chunk.extraction.prefix is not None, self.name)
        return found

    def measure_link(self, at_least_s: float = 1.0) -> tuple[float, float, float]:
        """(bytes/s from the node, bytes/s to the node, seconds one way), each from transfers that get longer."""
        with self._plain_errors():
            trips = []
            for _ in range(5):
                start = time.perf_counter()
                self.hello()
                trips.append(time.perf_counter() - start)
            return self._rate(self.download, at_least_s), self._rate(self._upload, at_least_s), min(trips) / 2

    def _rate(self, move: Callable[[int], None], at_least_s: float) -> float:
        """Bytes a second of a transfer that took long enough to trust; a short one doubles. A first one, of hardly any
        bytes, does not count: what it takes is not the link's."""
        move(1 << 10)
        num_bytes = 1 << 16
        while True:
            start = time.perf_counter()
            move(num_bytes)
            taken_s = time.perf_counter() - start
            if taken_s >= at_least_s or num_bytes == wire.MAX_BLOB_BYTES:
                return num_bytes / taken_s
            num_bytes = min(wire.MAX_BLOB_BYTES, max(2 * num_bytes, int(1.2 * num_bytes * at_least_s / taken_s)))

    def download(self, num_bytes: int) -> None:
        """Fetch bytes that mean nothing."""
        with self._plain_errors(), self._reading(wire.Blob(num_bytes).dumps()) as reader:
            for _ in reader:
                pass

    def _upload(self, num_bytes: int) -> None:
        writer, _ = self._client.do_put(flight.FlightDescriptor.for_command(b"blob"), wire.BLOB_SCHEMA)
        for batch in wire.blob_batches(num_bytes):
            writer.write_batch(batch)
        writer.close()

    def rows(self, chunk: Chunk, stopped: threading.Event) -> Reply:
        self._heard[id(chunk)] = heard = Heard(len(chunk.samples))
        try:
            return self._rows(chunk, stopped, heard)
        except RefusedError as error:
            self._mended.add(id(chunk))
            if not self._mend(chunk, str(error)):
                raise
            self._mended.discard(id(chunk))
            return self._rows(chunk, stopped, heard)
        finally:
            self._mended.discard(id(chunk))
            self._heard.pop(id(chunk), None)

    def heard(self, chunk: Chunk) -> Heard | None:
        """Takes no lock: whoever asks holds one of its own."""
        heard = self._heard.get(id(chunk))
        if heard is None or id(chunk) not in self._mended:
            return heard
        sends = [reason for call, reason in tuple(self._waits.items()) if not isinstance(call, Heard)]
        return replace(heard, waits_for=sends[0]) if sends else heard

    def _mend(self, chunk: Chunk, said: str) -> bool:
        """The node lost its disk, or made room for others: send again what it lacks. False if it is not that.

        All chunks that are under way there are refused together; one of them sends it.
        """
        digest, calibration = chunk.extraction.prefix, chunk.extraction.calibration
        if UNKNOWN_TOKENIZER in said and (text := chunk.extraction.transforms.text) is not None:
            with self._mending:
                if not self._act("has-tokenizer", text.needs.encode()):
                    self._send(b"tokenizer " + text.needs.encode(), tokenizerfile.path_of(text.needs), "tokenizer")
            return True
        if digest in self._files and wire.UNKNOWN_PREFIX in said:
            with self._mending:
                if not self._act("has-prefix", digest.encode()):
                    self.upload(digest, self._files[digest])
            return True
        if calibration in self._calibrations and wire.UNKNOWN_CALIBRATION in said:
            with self._mending:
                self.calibrate(self._calibrations[calibration])  # no more than a question where it is there by now
            return True
        return False

    def _rows(self, chunk: Chunk, stopped: threading.Event, heard: Heard) -> Reply:
        want = chunk.extraction
        gathering = Gathering(chunk, want.boundary)
        inbox = self._inbox if chunk.hand_over else None
        ticket, asked_s, spans = replace(chunk, hand_over=inbox is not None).dumps(), time.perf_counter(), None
        num_bytes = len(ticket)
        # Arrow's buffers can't be written to, which torch wants to be able to; of pixels, other arrays are made.
        is_pixels = want.prefix is None and not want.sends_input
        with self._plain_errors(), self._listening(heard) as hear, self._reading(ticket, stopped) as reader:
            for item in reader:
                hear(item.app_metadata)
                if item.data is None:
                    raise DamagedError(f"{self.name} sent words without rows")
                num_bytes += item.data.nbytes
                with self._lock:
                    self.received_bytes += item.data.nbytes
                gathering.add(*wire.unpack_rows(want.codec, want.boundary, item.data), keep=is_pixels)
                if item.app_metadata:
                    num_bytes += item.app_metadata.size
                    said = item.app_metadata.to_pybytes()
                    gathering.add_bad(wire.unpack_bad(said))
                    if inbox is not None and (handed := wire.unpack_handed(said)) is not None:
                        if len(handed.ids) > len(chunk.samples):  # memory is taken for as many as are told
                            raise DamagedError(f"{self.name} handed over {len(handed.ids):,} rows; it was asked for "
                                               f"{len(chunk.samples):,}")  # fmt: skip
                        gathering.add(*inbox.take(handed, want.boundary))
                    spans = wire.unpack_spans(said) if chunk.trace else None
                heard.came(gathering.num_seen)
        if spans is not None and self.trace is not None:
            self.trace.add_far(self._place, chunk.index, asked_s, time.perf_counter(), spans)
        return gathering.reply(num_bytes)

    @contextmanager
    def _listening(self, heard: Heard | None = None) -> Iterator[Callable[[pa.Buffer | None], bool]]:
        """Of one call: whether it waits there, as told by what came last. It is over with the call, however that ends.

        `heard` is that of the chunk that it asks for.
        """
        call = heard or object()

        def hear(said: pa.Buffer | None) -> bool:
            waiting = wire.unpack_waiting(said.to_pybytes()) if said else None
            self._tell_wait(call, waiting)
            if heard is not None:
                heard.waits_for = waiting.reason if waiting else ""
            return waiting is not None

        try:
            yield hear
        finally:
            hear(None)

    def _tell_wait(self, call: object, waiting: wire.Waiting | None) -> None:
        """The log says once that one of them waits, however many do."""
        with self._lock:
            if waiting is None:
                self._waits.pop(call, None)
                return
            is_quota = waiting.reason == wire.QUOTA
            is_known = self._knows_quota if is_quota else waiting.reason in self._waits.values()
            self._waits[call] = waiting.reason
            self._knows_quota |= is_quota
        if is_known:
            return
        if waiting.place is None:
            log.warning("%s: waiting for the quota of this token there (max_chunks or rows_per_second, docs/access.md)",
                        self.name)  # fmt: skip
        else:
            log.warning("%s: waiting for memory there: place %d of %d; others use it now", self.name, *waiting.place)

    def stop(self, stopped: threading.Event) -> None:
        with self._lock:
            readers = [reader for reader, event in self._readers.items() if event is stopped]
        for reader in readers:
            reader.cancel()

    def exchange(self) -> tuple[Any, Any]:
        """A call with messages both ways: (writer, reader). Whoever uses them puts errors in words with `in_words`."""
        with self._plain_errors():
            found: tuple[Any, Any] = self._client.do_exchange(flight.FlightDescriptor.for_command(b"train"))
            return found

    def in_words(self, error: BaseException) -> HeadwaterError:
        """What went wrong on the way to the node, as an error of ours."""
        try:
            with self._plain_errors():
                raise error
        except HeadwaterError as plain:
            return plain
        except Exception:
            log.debug("%s", self.name, exc_info=True)
            return DamagedError(f"{self.name} sent what can't be read ({type(error).__name__}); {_NOT_OURS}")

    def tell(self, kind: str, body: bytes) -> Iterator[pa.Buffer]:
        """The answers to an action, as they come."""
        with self._plain_errors():
            for result in self._client.do_action(flight.Action(kind, body)):
                yield result.body

    @property
    def is_busy(self) -> bool:
        """Does somebody wait for rows, or for another answer that comes bit by bit?"""
        with self._lock:
            return bool(self._readers or self._heard)

    def close(self) -> None:
        """Hang up, also on whoever still waits for an answer."""
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.cancel()
        self._client.close()

    def _act(self, kind: str, body: bytes = b"") -> Any:
        with self._plain_errors():
            options = flight.FlightCallOptions(timeout=ANSWER_WITHIN_S)
            results = list(self._client.do_action(flight.Action(kind, body), options))
            if len(results) != 1:
                raise DamagedError(f"{self.name} gave {len(results)} answers to {kind}; {_NOT_OURS}")
            return self._json(results[0].body.to_pybytes(), kind)

    def _json(self, data: bytes, what: str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{self.name}: the answer to {what} is not JSON; {_NOT_OURS}") from error

    @contextmanager
    def _reading(self, ticket: bytes, stopped: threading.Event | None = None) -> Iterator[flight.FlightStreamReader]:
        reader = self._client.do_get(flight.Ticket(ticket))
        with self._lock:
            self._readers[reader] = stopped
        try:
            if stopped is not None and stopped.is_set():  # set before `stop` could see this reader
                reader.cancel()
            yield reader
        finally:
            with self._lock:
                del self._readers[reader]
            reader.cancel()

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Flight's errors as ours."""
        try:
            yield
        except HeadwaterError:
            raise
        except flight.FlightServerError as error:
            found = wire.error_from_wire(error.extra_info) or RefusedError(f"{self.name}: {_short(error)}")
            if isinstance(found, UnreachableError):  # it says so itself: see `node.calls`
                found = UnreachableError(f"{self.name}: {found}")
            raise found from None
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError) as error:
            raise RefusedError(f"{self.name} lets nobody in without a token of its own: {_short(error)}") from None
        except (flight.FlightInternalError, pa.ArrowInvalid, UnicodeError) as error:
            raise DamagedError(f"{self.name} sent what can't be read ({_short(error)}); {_NOT_OURS}") from None
        except (flight.FlightError, pa.ArrowException, OSError, StopIteration) as error:
            raise UnreachableError(
                f"{self.name} does not answer ({_short(error)}); is the node running (`headwater serve`), "
                f"is the address right, can this machine reach it, and {self._about_tls}?"
            ) from None

    @property
    def _about_tls(self) -> str:
        if not self.name.startswith(f"{TLS}://"):
            return "does it want TLS (grpc+tls://)"
        return "do certificates fit: is its one signed by tls_ca, and does it want one from you (tls_cert, tls_key)"


def _short(error: BaseException) -> str:
    """The first sentence of a gRPC error, without its debug context."""
    return redact(str(error).split(". gRPC client debug context")[0].split(". Detail: ")[0].split("\n")[0])[:300]
