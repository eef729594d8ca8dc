"""The Flight service: what a node answers on the wire.

Owns the server class. Requests are parsed by `data.wire`; work is done by `data.extract`; this file joins them, checks
that a request stays within the node's roots, and turns errors into statuses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.flight as flight

from headwater.core import codecs
from headwater.core.access import Grant, confirm
from headwater.core.places import Places
from headwater.core.turns import Turns
from headwater.data import tablewire, tokenizerfile, wire
from headwater.data.cores import machine, usable_cores
from headwater.data.extract import NEAR_READERS, NUM_READERS, SIGN_OF_LIFE_S, Extractor
from headwater.data.handover import Handed, Outbox
from headwater.data.layouts import list_samples
from headwater.data.memory import give_back, held_bytes, page_cache_bytes
from headwater.data.room import ROOM
from headwater.data.samples import Samples
from headwater.data.secrets import redact
from headwater.data.store import Store, full_url, open_store
from headwater.errors import ConfigError, HeadwaterError, RefusedError
from headwater.node import engines
from headwater.node.cache import Cache
from headwater.node.calibrations import FORMAT as INT8_FORMAT
from headwater.node.calls import Asked, Calls, tenant_of
from headwater.node.child import Children
from headwater.node.circle import Aggregator
from headwater.node.door import KEY, Door, grant_of
from headwater.node.exchange import Exchange, GoneError
from headwater.node.hanging import Hanging
from headwater.node.metrics import Shown, may_see, shown
from headwater.node.prefixes import Prefixes, Wanted
from headwater.node.quantise import has_vnni
from headwater.node.quotas import Quotas
from headwater.node.rooms import Room
from headwater.node.roots import is_below
from headwater.node.session import Session
from headwater.node.tables import Tables
from headwater.node.tenants import TIMES_MODEL, TRIAL_ROWS, Tenants, node_bytes, picture_bytes
from headwater.node.tls import Tls
from headwater.node.tokens import OneToken, TokensFile
from headwater.version import VERSION

MAX_CHUNKS = 16  # worked on at once; further ones wait their turn
STALLED_S = 10.0  # a stream whose trainer has read nothing for so long no longer counts
MAX_STORES = 64  # connections kept open; the oldest is dropped
MAX_LISTINGS = 4  # of one place at once; further ones wait
CHILD_ENDS_WITHIN_S = 5.0  # once nobody waits for it
PROBE_WITHIN_S = 600.0  # a measurement takes seconds; on a node with a hundredth of a core some minutes
# What has a say in the numbers of a row beside the request: rows of another version are made anew, not served.
_MAKER = f"headwater {VERSION}, pillow {PIL.__version__}"


class Sign(Protocol):
    """Tells a trainer that its upload is worked on: with its place where others use the memory that this needs."""

    def __call__(self, place: tuple[int, int] | None = None) -> None: ...


class Node(flight.FlightServerBase):
    """A storage node. Start it with `serve()`, stop it with `shutdown()` and `close()`."""

    def __init__(
        self,
        listen: str,
        roots: tuple[str, ...],
        *,
        state: Path,
        num_threads: int | None = None,
        max_upload_bytes: int = 2 << 30,
        cache: Cache | None = None,
        drain_s: float = 0.0,
        tokens: Path | OneToken | None = None,
        tls: Tls | None = None,
        is_wary: bool = True,
        max_memory_bytes: int | None = None,
        adapt: bool = True,
        is_far: bool = False,
        hand_over: Path | None = None,
        tables: Tables | None = None,
        aggregator: Aggregator | None = None,
    ) -> None:
        """`cache` keeps rows that were made; it is closed with the node. None keeps nothing.

        `drain_s` is what requests under way get when the node is told to stop. With `tokens` (a file, or one token)
        only calls with one of them are answered; without, all are. `is_wary`: uploads may be a stranger's. Jobs share
        `max_memory_bytes`, or what the machine has (docs/tenants.md); `adapt=False` gives each groups as large as it
        asks for, and runs them whole. `is_far` from the store: behind a link that others need, too. `hand_over` is a
        folder that trainers may see, too: rows are left there for those who do. `tables` are embedding tables; they are
        closed with the node. On `aggregator` nodes that train a prefix may add up among themselves.
        """
        self.roots = tuple(full_url(root) for root in roots)
        known = TokensFile(tokens, self.roots) if isinstance(tokens, Path) else tokens
        self.grants = None if known is None else known.grants  # the tokens in force, on a node that asks for one
        middleware = {} if known is None else {KEY: Door(known)}
        tls_options = {} if tls is None else tls.server_options()
        self.num_threads = num_threads or len(os.sched_getaffinity(0))
        self._prefixes = Prefixes(state / "prefixes", max_upload_bytes, self.num_threads, in_pieces=adapt,
                                  is_wary=is_wary)  # fmt: skip
        self._quotas = Quotas(state / "prefixes", state / "tokenizers")
        self._tokenizers = state / "tokenizers"
        tokenizerfile.look_in(self._tokenizers)
        self._max_memory_bytes = max_memory_bytes
        self._tenants = Tenants(self._prefixes, self.num_threads, max_memory_bytes, adapt)
        ROOM.allow(picture_bytes(max_memory_bytes, self.num_threads))
        tokenizerfile.KEPT.allow(node_bytes(max_memory_bytes) // tokenizerfile.KEPT_PART, at_least=0)
        self._children = Children()
        self._slow = ThreadPoolExecutor(MAX_CHUNKS, "slow")  # what takes a while, and needs signs of life meanwhile
        # Reads of one root, or of one tenant where there is one root, must not take what others need: a disk may hang.
        tenants = {grant.tenant for grant in self.grants()} if self.grants is not None else set()
        are_places = not is_far and (len(self.roots) > 1 or len(tenants) > 1)
        self._extractor = Extractor(self.num_threads, NUM_READERS if is_far else NEAR_READERS, is_far=is_far,
                                    are_places=are_places)  # fmt: skip
        self._hanging = Hanging(self._extractor, Places(MAX_LISTINGS, are_several=are_places))
        self.cache = cache
        self._tables = tables or Tables(None)
        self._outbox = None if hand_over is None else Outbox(hand_over)
        self.aggregator = aggregator
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._turns = Turns(MAX_CHUNKS, STALLED_S)
        self._room = threading.Condition()  # a turn was given back
        self.calls = Calls(drain_s)
        self.http_port: int | None = None  # of its pages, if it has any
        self.num_turned_away: Callable[[], int] = lambda: 0  # from these
        super().__init__(listen, middleware=middleware, **tls_options)

    def stop(self, within_s: float) -> None:
        """Cut running streams off, end the server and its threads."""
        self._stopping = True
        self._tenants.rooms.close()
        self._prefixes.close()
        self._children.close()
        self._slow.shutdown(wait=False, cancel_futures=True)
        ending = threading.Thread(target=self.shutdown, daemon=True)
        ending.start()
        ending.join(within_s)
        self._extractor.close()
        if self.cache is not None:
            self.cache.close()
        if self._outbox is not None:
            self._outbox.close()
        self._tables.close()

    def hello(self, grant: Grant | None = None) -> dict[str, Any]:
        """Who this is and what it can do; for a tenant, what concerns it."""
        roots, max_upload_bytes, prefixes = self.roots, self._prefixes.max_bytes, self._prefixes.in_use()
        if grant is not None:
            roots, prefixes = grant.roots or roots, self._quotas.shown(grant, prefixes)
            max_upload_bytes = grant.quota.upload_bytes(max_upload_bytes)
        memory = self._tenants.rooms.to_json()
        if grant is not None:
            memory["tenants"] = [each for each in memory["tenants"] if each["tenant"].startswith(f"{grant.tenant}/")]
        return {
            "headwater": VERSION,
            "protocol": wire.PROTOCOL,
            "roots": [redact(root) for root in roots],
            "num_threads": self.num_threads,
            "cores": min(float(self.num_threads), usable_cores()),
            "machine": machine(),
            "memory_bytes": node_bytes(self._max_memory_bytes),
            "memory": memory,
            "max_upload_bytes": max_upload_bytes,
            "codecs": list(codecs.CODECS),
            "precisions": list(engines.precisions()),
            "precision_faults": engines.precision_faults(),
            "engines": list(engines.available()),
            "engine_versions": engines.versions(),
            "prefixes": prefixes,
            "busy": {**self._extractor.busy.to_json(), **(self.cache.to_json() if self.cache else {})},
            "cache_fault": None if self.cache is None else self.cache.why_off,
            "at_s": time.time(),
            "cpu_s": time.process_time(),
            "resident_bytes": held_bytes(),
            "page_cache_bytes": page_cache_bytes(),
            "draining": not self.calls.is_serving,
            "hanging": self._hanging.look(),
            "hand_over": None if self._outbox is None else self._outbox.to_json(),
            "chunks": self._chunks(),
            "prefix_files": self._prefixes.files(),
            "tables": self._tables.to_json(),
            "adds_up": self.aggregator is not None,
        }

    def why_not_ready(self) -> str:
        """Nothing if it takes requests."""
        return self._hanging.fault() if self.calls.is_serving else "draining"

    def shown(self, num_turned_away: int = 0) -> Shown:
        """One look at all of it: every number of /metrics, and what else is told to whom."""
        hello = self.hello()

        def about(grant: Grant | None) -> dict[str, Any]:
            if grant is None or grant.is_operator:
                return {**hello, "faults": self.calls.faults()}
            return {**self.hello(grant), "faults": self.calls.faults(grant.tenant)}

        return Shown(shown(hello, self.calls, num_turned_away), about)

    def _status(self, grant: Grant | None) -> dict[str, Any]:
        """What whoever has this grant may see of the node at this moment."""
        found = self.shown(self.num_turned_away())
        about, numbers = found.about(grant), found.numbers()
        if grant is not None and not grant.is_operator:
            may = may_see(grant.tenant, about)
            numbers = {key: value for key, value in numbers.items() if may(key)}
        return {"about": about, "numbers": [[key[0], list(key[1:]), value] for key, value in numbers.items()]}

    def _chunks(self) -> dict[str, int]:
        """That are worked on; that wait for their trainers, and no longer count; and how many may be worked on."""
        with self._room:
            working, held = self._turns.num_working(time.monotonic()), self._turns.num_held
        return {"working": working, "stalled": held - working, "limit": MAX_CHUNKS}

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterable[bytes]:
        if action.type == tablewire.ACTION:
            return self._table(context, action.body)
        with self.calls.watched(Asked("action", tenant_of(context))), _as_status():
            if action.type == "hello":
                return [json.dumps(self.hello(grant_of(context))).encode()]
            if action.type == "has-tokenizer":
                digest = _digest(action.body.to_pybytes().decode(errors="replace"))
                return [json.dumps((self._tokenizers / f"{digest}.json").exists()).encode()]
            if action.type == "status":
                return [json.dumps(self._status(grant_of(context))).encode()]
            if action.type == "has-prefix":
                digest = _digest(action.body.to_pybytes().decode(errors="replace"))
                return [json.dumps(digest in self._prefixes).encode()]
            raise ConfigError(f"no action {action.type[:40]!r}; there are {', '.join(name for name, _ in _ACTIONS)}")

    def _table(self, context: flight.ServerCallContext, body: pa.Buffer) -> Iterator[bytes]:
        tenant = tenant_of(context)
        with _as_status(), self.calls.under_way(Asked("table", tenant)):
            yield from self._tables.call(body, tenant, grant_of(context))

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return _ACTIONS

    def do_put(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor, reader: Any, writer: Any
    ) -> None:
        """Receive a prefix: batches of one binary column, in order; the descriptor's command is its digest."""
        is_blob = descriptor.command == b"blob"
        asked = Asked("blob" if is_blob else "upload", tenant_of(context))
        with _as_status(), self.calls.under_way(asked):
            if is_blob:
                for _ in _bounded(_items(reader), 2 * wire.MAX_BLOB_BYTES):  # only the way it took matters
                    pass
                return
            grant = grant_of(context)

            def sign(place: tuple[int, int] | None = None) -> None:
                try:
                    writer.write(pa.py_buffer(wire.pack_waiting(place) or b"waiting"))
                except (pa.ArrowException, OSError):  # the trainer has hung up, which no disk is to blame for
                    raise _ended() from None

            if (command := descriptor.command or b"").startswith(_TOKENIZER):
                digest = _digest(command.removeprefix(_TOKENIZER).decode(errors="replace"))
                pieces = self._quotas.pieces(grant, _pieces(reader), tokenizerfile.MAX_BYTES)
                self._put_tokenizer(digest, pieces, sign, grant)
                self._quotas.uploaded(grant, digest, is_tokenizer=True)
                return
            digest = _digest(command.decode(errors="replace"))
            pieces = self._quotas.pieces(grant, self.calls.received(asked, _pieces(reader)), self._prefixes.max_bytes)
            self._prefixes.put(digest, pieces, partial(self._room_to_look, sign), sign, partial(self._look, sign))
            self._quotas.uploaded(grant, digest)

    def _put_tokenizer(self, digest: str, pieces: Iterator[bytes], sign: Sign, grant: Grant | None) -> None:
        data = bytearray()
        for piece in pieces:
            data += piece
            if len(data) > tokenizerfile.MAX_BYTES:
                raise RefusedError(f"the tokenizer has more than {tokenizerfile.MAX_BYTES:,} bytes, the limit of nodes")
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise RefusedError(f"{len(data)} bytes arrived with sha256 {found}, not {digest}; upload it again")

        def keep() -> None:  # all of them, where a tenant's quota says which go
            tokenizerfile.keep(bytes(data), self._tokenizers, all_of_them=grant is not None)

        with self._room_to_look(sign, len(data), tokenizerfile.LOADING_TIMES):
            self._look(sign, keep)

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        tenant = tenant_of(context)
        with self.calls.watched(Asked("unreadable", tenant)), _as_status():
            request = wire.loads(ticket.ticket)
        asked = Asked.of(request, tenant)
        if isinstance(request, wire.Chunk):
            request = replace(request, job=_job(request.job, grant_of(context)))
        with self.calls.watched(asked), _as_status():
            self.calls.check_serving()
            if isinstance(request, wire.Blob):
                return self._stream(asked, context, wire.BLOB_SCHEMA, wire.blob_batches(request.num_bytes))
            if isinstance(request, wire.Listing):
                self._check_root(request.url, grant_of(context))
                return self._stream(asked, context, wire.LISTING_SCHEMA, self._listing(request, context))
            chunk = request if isinstance(request, wire.Chunk) else request.chunk
            self._check_root(chunk.extraction.url, grant_of(context))
            self._quotas.uses(grant_of(context), chunk.extraction.prefix)
            if chunk.extraction.transforms.text is not None:
                tokenizerfile.path_of(chunk.extraction.transforms.text.needs)
            if isinstance(request, wire.Probe):
                return self._stream(asked, context, wire.BLOB_SCHEMA, self._probe(request, context))
            if isinstance(request, wire.Calibrate):
                return self._stream(asked, context, wire.BLOB_SCHEMA, self._calibrate(request, context))
            if request.extraction.prefix:  # refuse now rather than in the middle of the stream
                self._prefixes.check(Wanted.of(request.extraction))
            schema = wire.rows_schema(request.extraction.codec, request.extraction.boundary)
            compression = None if request.extraction.compression == "none" else request.extraction.compression
            options = pa.ipc.IpcWriteOptions(compression=compression)
            rows = self._rows(request, schema, context)
            return self._stream(asked, context, schema, rows, len(request.samples), options=options)

    def do_exchange(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor, reader: Any, writer: Any
    ) -> None:
        """A trainer's session: rows of its batches, up to a cut whose prefix may be trained here
        (docs/partition.md)."""
        asked = Asked("training", tenant_of(context))
        with _as_status(), self.calls.under_way(asked):
            if descriptor.command != b"train":
                raise ConfigError("an exchange has the command train")
            host = _SessionHost(self, asked, grant_of(context))
            exchange = Exchange(reader, writer, lambda: self._stopping, context.is_cancelled)
            try:
                exchange.carry(lambda exchange: Session(exchange, host).run())
            except GoneError:
                raise _ended() from None

    def _stream(
        self,
        asked: Asked,
        context: flight.ServerCallContext,
        schema: pa.Schema,
        batches: Iterator[tuple[pa.RecordBatch, bytes]],
        num_rows: int = 0,
        **options: Any,
    ) -> flight.GeneratorStream:
        """The batches, counted, as fast as the caller's quota allows; under way for as long as somebody takes them."""
        grant = None if asked.kind == "blob" else grant_of(context)

        def abandoned() -> bool:
            return self._stopping or context.is_cancelled()

        def allowed() -> Iterator[tuple[pa.RecordBatch, bytes]]:
            with _as_status():
                if grant is None:
                    yield from self.calls.stream(asked, batches)
                else:
                    yield from self.calls.stream(
                        asked, self._quotas.stream(grant, schema, batches, abandoned, num_rows)
                    )

        return flight.GeneratorStream(schema, allowed(), **options)

    def _rows(
        self, chunk: wire.Chunk, schema: pa.Schema, context: flight.ServerCallContext
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        want = chunk.extraction

        def abandoned() -> bool:
            return self._stopping or context.is_cancelled()

        with _as_status(), ExitStack() as cleanup:
            run, at_once, maker, turn = None, None, _MAKER, None
            if want.transforms.text is not None:
                maker += f", tokenizers {tokenizerfile.version()}"
            grant = grant_of(context)
            weight = grant.quota.weight if grant is not None else 1.0
            room = cleanup.enter_context(self._tenants.open(chunk, weight))
            # Before a turn is taken: others whose engines are there need not wait for this one's.
            coming = self._tenants.enter(chunk, room, self._start, partial(self._while, abandoned=abandoned),
                                         SIGN_OF_LIFE_S, abandoned, weight)  # fmt: skip
            engine = yield from _signs(coming, schema)
            if abandoned():
                raise _ended()
            if want.transforms.text is not None:
                want.transforms.text.loaded()  # the room holds it: only its length is looked at
            if engine is not None:
                run, at_once = partial(engine.run, boundary=want.boundary), engine.batch
                maker += f", {engine.name} {engines.version(engine.name)}"
                if want.precision == "int8":
                    maker += f", {INT8_FORMAT} by {want.calibration}, {'8' if has_vnni() else '7'}-bit weights"
            while (turn := self._take_turn(chunk.job)) is None:
                if abandoned():
                    raise _ended()
                yield pa.RecordBatch.from_pylist([], schema=schema), b""
            begun, spans = time.perf_counter(), list[tuple[str, str, float, float]]()

            def note(stage: str, start: float, end: float) -> None:
                spans.append((stage, threading.current_thread().name, start, end - start))

            try:
                kept = self.cache.look_up(chunk, maker) if self.cache is not None else None
                if kept is not None:
                    for ids, columns in kept.pieces():
                        start = time.perf_counter()
                        handed = self._handed(chunk, ids, columns)
                        with self._sending(turn):
                            if handed is not None:
                                yield pa.RecordBatch.from_pylist([], schema=schema), wire.pack_bad((), handed)
                            else:
                                yield wire.pack_columns(want.codec, want.boundary, ids, columns), b""
                        self._extractor.busy.add(send_s=time.perf_counter() - start)
                        if chunk.trace:
                            note("send", start, time.perf_counter())
                        if abandoned():
                            raise _ended()
                    chunk = replace(chunk, samples=tuple(chunk.samples[place] for place in kept.missing()))
                store, place = None, self._place(want.url, grant)
                if chunk.samples:  # by a reader: a disk that hangs must not hold up more than its readers
                    opening = self._extractor.start(partial(self._store, want.url), chunk.job, weight, place)
                    cleanup.callback(opening.cancel)
                    for _ in self._while(opening, abandoned):
                        self._hanging.look()
                        yield pa.RecordBatch.from_pylist([], schema=schema), b""
                    store = opening.result()
                options: dict[str, Any] = {"note": note} if chunk.trace else {}
                for part in () if store is None else self._extractor.rows(store, chunk, run, abandoned, at_once=at_once,
                                                                          gate=room, weight=weight, place=place,
                                                                          **options):  # fmt: skip
                    if not len(part.ids):  # for a while nothing came
                        self._hanging.look()
                    columns = codecs.encode(want.codec, part.tensors, want.boundary)
                    if kept is not None:
                        kept.keep(part.ids, columns)
                    handed = self._handed(chunk, part.ids, part.tensors)
                    said = wire.pack_bad(part.bad, handed)
                    if not said and not len(part.ids) and not room.is_in:  # it was measured, and has to wait again
                        said = wire.pack_waiting(room.place)
                    with self._sending(turn):
                        if handed is not None:
                            empty = pa.RecordBatch.from_pylist([], schema=schema)
                            yield empty, said
                        else:
                            packed = wire.pack_columns(want.codec, want.boundary, part.ids, columns)
                            yield packed, said
                if abandoned():
                    raise _ended()
                if chunk.trace:
                    told = wire.Spans(begun, time.perf_counter(), tuple(spans))
                    yield pa.RecordBatch.from_pylist([], schema=schema), wire.pack_spans(told)
            finally:
                with self._room:
                    self._turns.give_back(turn)
                    self._room.notify_all()  # turns are counted by job, and any job's request may wait first

    def _handed(self, chunk: wire.Chunk, ids: np.ndarray, tensors: Sequence[np.ndarray]) -> Handed | None:
        """These rows in a file, where the trainer asked for that; None if they have to take the wire."""
        if self._outbox is None or not chunk.hand_over or chunk.extraction.codec != "raw" or not len(ids):
            return None
        return self._outbox.leave(ids, tensors, chunk.extraction.boundary)

    @contextmanager
    def _room_to_look(self, sign: Sign, num_bytes: int, times: int = TIMES_MODEL) -> Iterator[None]:
        """Memory to load an upload for a moment, with signs of life while that has to be waited for."""
        with self._tenants.errand("upload", times * num_bytes) as room:
            for place in self._tenants.wait(room, SIGN_OF_LIFE_S, lambda: self._stopping):
                sign(place)
            if self._stopping:
                raise _ended()
            yield
            give_back()

    def _look(self, sign: Sign, work: Callable[[], None]) -> None:
        """Carry this out, with signs of life meanwhile: gRPC hangs up on a call that is silent for 30 s."""
        looking = self._start(work)
        for _ in self._while(looking, lambda: self._stopping):
            sign()
        looking.result()

    def _take_turn(self, job: str) -> int | None:
        """A second's wait for a turn at most: meanwhile somebody may be found to have stalled."""
        deadline = time.monotonic() + 1.0
        with self._room:
            while (turn := self._turns.take(time.monotonic(), job)) is None:
                if not self._room.wait(timeout=max(0.0, deadline - time.monotonic())):
                    return self._turns.take(time.monotonic(), job)
            return turn

    @contextmanager
    def _sending(self, turn: int) -> Iterator[None]:
        """While the wire takes what was made."""
        with self._room:
            self._turns.waits(turn, time.monotonic())
        try:
            yield
        finally:
            with self._room:
                self._turns.goes_on(turn)

    def _start(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Begin something slow."""
        try:
            return self._slow.submit(work, *args)
        except RuntimeError:  # the pool is closed: the node is stopping
            raise _ended() from None

    def _while(self, slow: Future[Any], abandoned: Callable[[], bool]) -> Iterator[None]:
        """Says when to give a sign of life, until the work is done."""
        heard = time.monotonic()
        while not slow.done():
            if abandoned():
                raise _ended()
            with contextlib.suppress(TimeoutError, CancelledError):
                slow.exception(timeout=0.25)
            if time.monotonic() - heard > SIGN_OF_LIFE_S:
                yield
                heard = time.monotonic()
        if slow.cancelled():
            raise _ended()

    def _calibrate(
        self, request: wire.Calibrate, context: flight.ServerCallContext
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Signs of life while ranges are found; then an empty batch that says so."""

        def abandoned() -> bool:
            return self._stopping or context.is_cancelled()

        digest = request.chunk.extraction.prefix
        with _as_status(), self._tenants.child("calibration", digest, TRIAL_ROWS) as room:
            for place in self._tenants.wait(room, SIGN_OF_LIFE_S, abandoned):
                yield wire.blob_batch(b""), wire.pack_waiting(place)
            gone = threading.Event()  # the context is of this call and must not be asked after it
            work = self._start(self._prefixes.calibrate, request, gone.is_set)
            try:
                for _ in self._while(work, abandoned):
                    yield wire.blob_batch(b""), b""
            finally:
                gone.set()
                work.cancel()
                wait([work], timeout=CHILD_ENDS_WITHIN_S)  # its memory is in the room
            work.result()
            yield wire.blob_batch(b""), b"{}"

    def _listing(
        self, request: wire.Listing, context: flight.ServerCallContext
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Signs of life while the store is listed, then the samples; the last batch's metadata belongs to them all."""
        counts: queue.SimpleQueue[int | Samples | HeadwaterError] = queue.SimpleQueue()
        gone = threading.Event()
        place = self._place(request.url, grant_of(context))

        def on_page(heard: Callable[[], None], count: int) -> None:
            if gone.is_set():
                raise RefusedError("nobody waits for this listing any more")
            heard()
            counts.put(count)

        def work() -> None:
            with self._hanging.listing(place) as heard:
                try:
                    counts.put(
                        list_samples(
                            request.url,
                            request.layout,
                            path_column=request.path_column,
                            label_column=request.label_column,
                            text_column=request.text_column,
                            on_page=partial(on_page, heard),
                        )
                    )
                except HeadwaterError as error:
                    counts.put(error)
                except Exception as error:
                    counts.put(HeadwaterError(f"unexpected {type(error).__name__}: {error}"))

        with _as_status():
            while not self._hanging.may_list(place, SIGN_OF_LIFE_S):
                if self._stopping or context.is_cancelled():
                    raise _ended()
                self._hanging.look()
                yield wire.listing_progress(0)
            threading.Thread(target=work, name="listing", daemon=True).start()
            found: int | Samples | HeadwaterError = 0
            try:
                while isinstance(found, int):
                    yield wire.listing_progress(found)
                    try:
                        found = counts.get(timeout=SIGN_OF_LIFE_S)
                    except queue.Empty:
                        self._hanging.look()
                        if self._stopping or context.is_cancelled():
                            raise _ended() from None
            finally:
                gone.set()
            if isinstance(found, HeadwaterError):
                raise found
            yield from wire.listing_batches(found)

    def _probe(self, request: wire.Probe, context: flight.ServerCallContext) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Signs of life while a child process measures, then what it found as the metadata of an empty batch."""

        def abandoned() -> bool:
            return self._stopping or context.is_cancelled()

        with _as_status(), ExitStack() as cleanup:
            want = request.chunk.extraction
            text = want.transforms.text
            more_bytes = 0 if text is None else tokenizerfile.LOADING_TIMES * tokenizerfile.size_of(text.needs)
            room = cleanup.enter_context(self._tenants.child("probe", want.prefix, want.node_batch, more_bytes))
            for place in self._tenants.wait(room, SIGN_OF_LIFE_S, abandoned):
                yield wire.blob_batch(b""), wire.pack_waiting(place)
            how: dict[str, Any] = {}
            if want.prefix:
                wanted = Wanted.of(want)
                self._prefixes.check(wanted)
                finding = self._start(self._prefixes.way, wanted, room.granted_bytes)
                cleanup.callback(finding.cancel)
                for _ in self._while(finding, abandoned):
                    yield wire.blob_batch(b""), b""
                path, outputs, way = finding.result()
                how = {"path": str(path), "outputs": outputs, "way": vars(way)}
            asked = json.dumps({"request": request.dumps().decode(), "how": how, "picture_bytes": ROOM.most_bytes,
                                "tokenizers": str(self._tokenizers)}).encode()  # fmt: skip
            gone = threading.Event()  # the context is of this call and must not be asked after it
            measuring = self._start(self._children.run, "headwater.node.probe", asked, PROBE_WITHIN_S, gone.is_set)
            try:
                for _ in self._while(measuring, abandoned):
                    yield wire.blob_batch(b""), b""
            finally:
                gone.set()
            try:
                ended = measuring.result()
            except OSError as error:
                raise RefusedError(f"the measurement can't be started: {error}; make room there, or name a cut "
                                   "(cut=…), which measures nothing") from None  # fmt: skip
            if ended.code != 0:
                raise RefusedError(f"the measurement {ended}; give the node more memory, or name a cut (cut=…), which "
                                   "measures nothing")  # fmt: skip
            yield wire.blob_batch(b""), ended.said.splitlines()[-1]  # an engine may have had words of its own before

    def _store(self, url: str) -> Store:
        # Not under the lock: a disk that hangs should hold up those alone who want it.
        store = self._stores.get(url)
        if store is None or not store.is_current:
            store = open_store(url)
            with self._lock:
                self._stores.pop(url, None)
                if len(self._stores) >= MAX_STORES:
                    del self._stores[next(iter(self._stores))]
                self._stores[url] = store
        return store

    def _place(self, url: str, grant: Grant | None) -> str:
        """What hangs together: the root that this is below, by its text alone; or whose it is, where there is one."""
        if len(self.roots) == 1:
            return "" if grant is None else grant.tenant
        above = [root for root in self.roots if f"{full_url(url)}/".startswith(f"{root.rstrip('/')}/")]
        return redact(max(above, key=len, default=""))

    def _check_root(self, url: str, grant: Grant | None) -> None:
        wanted = full_url(url)
        roots = self.roots if grant is None else grant.roots or self.roots
        if any(is_below(wanted, root) for root in roots):
            return
        shown = ", ".join(map(redact, roots))
        if grant is None:
            raise RefusedError(f"{redact(wanted)} is not below what this node serves ({shown}); start it with "
                               "`headwater serve` and that URL")  # fmt: skip
        raise RefusedError(f"{redact(wanted)} is not below what tenant {grant.tenant} may read ({shown}); ask whoever "
                           "runs the node for more")  # fmt: skip


class _SessionHost:
    """What a session sees of its node."""

    def __init__(self, node: Node, asked: Asked, grant: Grant | None) -> None:
        self._node, self._asked = node, asked
        self._grant = grant  # as it is in force
        self._url = ""  # that the session is about, once it has said so
        self.num_threads = node.num_threads
        self.extractor = node._extractor
        self.store = node._store

    @property
    def aggregator(self) -> Aggregator | None:
        return self._node.aggregator

    @property
    def tenant(self) -> str:
        return self._asked.tenant

    @property
    def max_weight_bytes(self) -> int:
        most = self._node._prefixes.max_bytes
        return most if self._grant is None else self._grant.quota.upload_bytes(most)

    @property
    def weight(self) -> float:
        return 1.0 if self._grant is None else self._grant.quota.weight

    def check_serving(self) -> None:
        self._node.calls.check_serving()

    def check_root(self, url: str) -> None:
        self._url = url
        self._node._check_root(url, self._grant)

    def job(self, name: str) -> str:
        return _job(name, self._grant)

    def where(self, url: str) -> str:
        return self._node._place(url, self._grant)

    def check_allowed(self) -> None:
        """A session may last for days, and what its token allows change meanwhile."""
        if self._grant is None or self._node.grants is None:
            return
        found = confirm(self._node.grants(), self._grant, time.time())
        if found != self._grant:
            self._grant = found
            if self._url:
                self.check_root(self._url)

    def place(self, waits: Callable[[], None]) -> AbstractContextManager[None]:
        return self._node._quotas.session(self._grant, waits)

    def room(self, num_bytes: int) -> Room:
        return self._node._tenants.errand("training", num_bytes)

    def pause_s(self, num_rows: int) -> float:
        return self._node._quotas.pause_s(self._grant, num_rows)

    def sent(self, num_rows: int, num_bytes: int) -> None:
        self._node.calls.sent(self._asked, num_rows, num_bytes)


_ACTIONS = [
    ("hello", "who the node is and what it can do"),
    ("status", "every number of /metrics and what else there is to look at, as far as it concerns the caller"),
    ("has-prefix", "does it hold the prefix of this digest?"),
    ("has-tokenizer", "does it hold the tokenizer of this digest?"),
    (tablewire.ACTION, "a message about an embedding table"),
]
_TOKENIZER = b"tokenizer "  # what the command of its upload begins with


def _signs(
    coming: Iterator[tuple[int, int] | None], schema: pa.Schema
) -> Generator[tuple[pa.RecordBatch, bytes], None, Any]:
    """Empty batches, one for each sign of life; what the generator says in the end."""
    while True:
        try:
            place = next(coming)
        except StopIteration as end:
            return end.value
        yield pa.RecordBatch.from_pylist([], schema=schema), wire.pack_waiting(place)  # see data.extract


def _job(name: str, grant: Grant | None) -> str:
    """Memory, threads and turns are shared by job: nobody can take part as another tenant's, whatever it says."""
    return name if grant is None else f"{grant.tenant}/{name}"


def _ended() -> flight.FlightError:
    return flight.FlightUnavailableError("the node is stopping, or nobody waits for these rows")


def _digest(text: str) -> str:
    if not wire.is_digest(text):
        raise ConfigError(f"{text[:80]!r} is not a sha256 in hexadecimal")
    return text


def _items(reader: Any) -> Iterator[pa.RecordBatch]:
    """What was sent, found to be whole: Arrow itself takes the offsets of a batch on trust, and would follow them."""
    try:
        for item in reader:
            if item.data is None:
                raise ConfigError("an upload came with words and no bytes")
            item.data.validate(full=True)
            _ = item.data.columns  # their names are text, or an error
            yield item.data
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise ConfigError(f"an upload can't be read: {str(error)[:200]}") from None


def _bounded(items: Iterator[pa.RecordBatch], max_bytes: int) -> Iterator[pa.RecordBatch]:
    total = 0
    for batch in items:
        total += batch.nbytes
        if total > max_bytes:
            raise ConfigError(f"a blob of more than {max_bytes} bytes")
        yield batch


def _pieces(reader: Any) -> Iterator[bytes]:
    for batch in _items(reader):
        for column in batch.columns:
            if not pa.types.is_binary(column.type):
                raise ConfigError("a prefix is uploaded as one binary column")
            for piece in column:
                yield piece.as_py() or b""


@contextmanager
def _as_status() -> Iterator[None]:
    """Our errors as Flight statuses that carry their class; anything else without its insides."""
    try:
        yield
    except HeadwaterError as error:
        raise _status(error) from error
    except (flight.FlightError, GeneratorExit):
        raise
    except Exception as error:
        raise _status(HeadwaterError(f"unexpected {type(error).__name__} on the node; its log has more")) from error


def _status(error: HeadwaterError) -> flight.FlightServerError:
    # The whole text is in the extra bytes: what a call's trailers hold is limited, and a longer status is lost whole.
    # It may quote half a character, which no status holds.
    said = redact(str(error))[:100].encode(errors="replace").decode()
    return flight.FlightServerError(f"{type(error).__name__}: {said}", wire.error_to_wire(error))
