"""From samples to rows: the real reads, decodes and inferences behind `core.ring`.

Owns `Extractor`. A node runs it with an engine, a trainer without one (pixels only); the pixels are the same because
the code is. May not import torch, `node` or `train`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from headwater.core.draw import Draw
from headwater.core.places import Places
from headwater.core.reads import Reads
from headwater.core.ring import Decision, Decode, Infer, Read, Ring, Send
from headwater.core.spec import TensorSpec
from headwater.data.pool import Pool
from headwater.data.shards.reading import is_mapped, read_sample
from headwater.data.store import Store
from headwater.data.wire import Bad, Chunk
from headwater.errors import BadSampleError, HeadwaterError

Run = Callable[[np.ndarray], Sequence[np.ndarray]]
Note = Callable[[str, float, float], None]  # a stage, and when it began and ended (time.perf_counter), in its thread

# Concurrent requests to the store: of a node beside it, and of a trainer across a link. Many at once cost a store less
# CPU each: SeaweedFS on a node's core took 0.25 ms a picture with 48, 0.29 with 16 and 0.35 with 4 (a few epochs
# of MobileNetV3-small at 10 Mbit/s on the rig of bench offload, by hand; no benchmark repeats it). Across a link, 16
# fill it.
NEAR_READERS, NUM_READERS = 48, 16
SLOTS = 3  # one group being sent, one inferred, one decoded
_POLL_S = 0.25  # how soon an abandoned request is noticed
# A stream that is silent for longer gets an empty part: gRPC servers hang up on a client that pings (to notice a dead
# link) three times, here 30 s, without hearing anything.
SIGN_OF_LIFE_S = 5.0
_INFER_FIRST, _DECODE_NEXT = 0, 1
_OPEN_FIRST = -1
# Floats of a piece are made where those of the piece before were: memory that is fetched anew is cleared by the
# kernel first, and in no cache. Larger pieces than this are not kept for the next one.
_KEPT_FLOATS = 16 << 20


@dataclass(frozen=True)
class Part:
    """Some of a chunk's rows, and the samples found bad since the part before."""

    ids: np.ndarray
    tensors: Sequence[np.ndarray]
    bad: tuple[Bad, ...]


class Gate(Protocol):
    """Who says when a group may begin, and how large it may be: where several share a machine's memory."""

    def take(self, most: int) -> int | None:
        """The rows that the next group may have, no more than `most`; None if it has to wait."""

    def give(self, rows: int) -> None:
        """A group of so many rows is sent, and its memory free."""

    def when_worth_asking(self, ask: Callable[[], None]) -> None:
        """Call this when a group that had to wait may begin."""


class Open:
    """A gate that lets everyone through, in groups of so many rows."""

    def __init__(self, group_rows: int) -> None:
        self._group_rows = group_rows

    def take(self, most: int) -> int | None:
        return min(self._group_rows, most)

    def give(self, rows: int) -> None:
        pass

    def when_worth_asking(self, ask: Callable[[], None]) -> None:
        pass


@dataclass
class Busy:
    """Seconds that threads spent in each stage, and what came out; measured."""

    read_s: float = 0.0
    decode_s: float = 0.0
    infer_s: float = 0.0
    send_s: float = 0.0  # until the wire has taken what was made: the codec, and the wait for a slow link
    num_rows: int = 0
    num_bad: int = 0
    read_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        with self.lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def to_json(self) -> dict[str, float]:
        with self.lock:
            return {name: value for name, value in vars(self).items() if name != "lock"}


class Extractor:
    """Threads that turn chunks into rows; one per process, shared by all requests."""

    def __init__(
        self, num_threads: int, num_readers: int = NUM_READERS, *, is_far: bool = False, are_places: bool = False
    ) -> None:
        """`is_far` from the store, behind a link that others need, too: reads that crowd it become fewer. With
        `are_places` there are twice as many readers, and reads of one place have half of them (`core.places`)."""
        assert not (is_far and are_places)
        self._compute = Pool(num_threads, "compute")
        self._readers = Pool(num_readers, "read", Places(num_readers, are_several=are_places))
        self._reads = Reads(num_readers) if is_far else None
        self._floats = threading.local()
        self.busy = Busy()

    @property
    def num_threads(self) -> int:
        return self._compute.num_threads

    @property
    def num_readers(self) -> int:
        return self._readers.num_threads

    def hanging(self, for_s: float) -> Counter[str]:
        """Reads that have taken longer than that, by place."""
        return self._readers.running_for(for_s)

    def start(self, work: Callable[[], Any], tenant: str, weight: float = 1.0, place: str = "") -> Future[Any]:
        """Carry out something that waits for the store, in a reader's thread, before other reads of this tenant."""
        found: Future[Any] = Future()

        def task() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(work())
            except Exception as error:
                found.set_exception(error)

        self._readers.submit(_OPEN_FIRST, task, tenant, weight, place)
        return found

    def rows(
        self,
        store: Store,
        chunk: Chunk,
        run: Run | None,
        abandoned: Callable[[], bool] = lambda: False,
        *,
        at_once: int | None = None,
        gate: Gate | None = None,
        weight: float = 1.0,
        note: Note = lambda stage, start, end: None,
        place: str = "",
    ) -> Iterator[Part]:
        """The chunk's rows in parts, as they get ready. Bad samples are reported, anything else raises.

        `run` gets at most `at_once` rows, or a whole group. A group waits for it as pixels, a quarter of the bytes.
        `gate` says when groups begin and how large they are; without it they are as large as was asked for. `weight` is
        the job's among those that share the threads. `note` is told of every stage of every sample and group.
        `place` is where samples are read.
        """
        gate = gate or Open(chunk.extraction.node_batch)
        passage = _Passage(self, store, chunk, run, at_once, gate, weight, note, place)
        try:
            yield from passage.parts(abandoned)
        finally:
            passage.stop()

    def room(self, num_rows: int, spec: TensorSpec) -> np.ndarray:
        """Room for so many rows, until this thread asks again."""
        if spec.dtype != "float32":
            return np.empty((num_rows, *spec.shape), spec.dtype)
        row_shape, size = spec.shape, num_rows * spec.num_items
        kept: np.ndarray | None = getattr(self._floats, "kept", None)
        if kept is None or len(kept) < size:
            kept = np.empty(size, np.float32)
            if kept.nbytes <= _KEPT_FLOATS:
                self._floats.kept = kept
        return kept[:size].reshape(num_rows, *row_shape)

    def has_read(self, seconds: float, num_bytes: int) -> None:
        """A sample was read."""
        self.busy.add(read_s=seconds, read_bytes=num_bytes)
        if self._reads is not None:
            with self.busy.lock:
                at_once = self._reads.took(seconds, num_bytes)
            self._readers.allow(at_once)

    def close(self) -> None:
        self._readers.close()
        self._compute.close()


@dataclass
class _Pieces:
    """A group on its way through the engine: what is left of it, and what came out so far."""

    ids: np.ndarray
    pixels: list[np.ndarray]
    bad: tuple[Bad, ...]
    parts: list[Sequence[np.ndarray]] = field(default_factory=list)


class _Passage:
    """One chunk on its way through the stages."""

    def __init__(
        self,
        extractor: Extractor,
        store: Store,
        chunk: Chunk,
        run: Run | None,
        at_once: int | None,
        gate: Gate,
        weight: float,
        note: Note = lambda stage, start, end: None,
        place: str = "",
    ) -> None:
        self._extractor = extractor
        self._place_read = place
        self._weight = weight
        self._note = note
        self._store = store
        self._chunk = chunk
        self._run = run
        self._at_once = at_once or chunk.extraction.node_batch
        self._transforms = chunk.extraction.transforms
        self._lock = threading.Lock()
        self._ring = Ring(len(chunk.samples), slots=SLOTS)
        self._gate = gate
        self._buffers: dict[int, dict[int, np.ndarray]] = {}  # group → sample → its pixels
        self._pieces: dict[int, _Pieces] = {}  # by group
        self._data: dict[int, Any] = {}
        self._bad: dict[int, Bad] = {}
        self._num_bad: Counter[int] = Counter()  # per group
        self._told: set[int] = set()
        self._ready: queue.SimpleQueue[tuple[int, Part] | Exception | None] = queue.SimpleQueue()
        self._stopped = False
        self._is_mapped = all(is_mapped(store, ref) for ref in chunk.samples)

    def parts(self, abandoned: Callable[[], bool]) -> Iterator[Part]:
        self._gate.when_worth_asking(self._guard(self._go_on, 0))
        self._go_on()
        heard = time.monotonic()
        while True:
            try:
                item = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                if abandoned():
                    return
                if time.monotonic() - heard > SIGN_OF_LIFE_S:
                    yield self._nothing()
                    heard = time.monotonic()
                continue
            if item is None:
                break
            if abandoned():
                return
            if isinstance(item, Exception):
                raise item
            group, part = item
            start = time.perf_counter()
            yield part
            end = time.perf_counter()
            self._extractor.busy.add(send_s=end - start)
            self._note("send", start, end)
            del item, part
            heard = time.monotonic()
            self._tell(self._ring.sent, group)
            self._gate.give(len(self._ring.samples_of(group)))
            self._go_on()
        if rest := self._new_bad():
            yield self._nothing(rest)

    def stop(self) -> None:
        """Whatever is still queued for this chunk does nothing."""
        self._stopped = True

    def _nothing(self, bad: tuple[Bad, ...] = ()) -> Part:
        """A part without rows."""
        tensors = [np.empty((0, *spec.shape), spec.dtype) for spec in self._chunk.extraction.boundary]
        return Part(np.empty(0, np.int64), tensors, bad)

    def _new_bad(self) -> tuple[Bad, ...]:
        new = tuple(bad for sample, bad in self._bad.items() if sample not in self._told)
        self._told |= {bad.sample for bad in new}
        return new

    def _tell(self, event: Callable[..., list[Decision]], *args: int) -> None:
        """Feed the ring an event and start what it decides."""
        with self._lock:
            decisions = event(*args)
            done = self._ring.done
        self._carry_out(decisions)
        if done:
            self._ready.put(None)

    def _go_on(self, _: int = 0) -> None:
        """Begin as many groups as there are slots and room for."""
        decisions: list[Decision] = []
        with self._lock:
            while self._ring.may_begin and (rows := self._gate.take(self._ring.num_left)) is not None:
                decisions += self._ring.begin(rows)
        self._carry_out(decisions)

    def _carry_out(self, decisions: list[Decision]) -> None:
        if self._is_mapped:
            reads = [decision.sample for decision in decisions if isinstance(decision, Read)]
            for group, _ in groupby(reads, self._ring.group_of):
                self._read_by(self._look_at, group)
        for decision in decisions:
            match decision:
                case Read(sample) if not self._is_mapped:
                    self._read_by(self._read, sample)
                case Decode(sample):
                    self._compute(_DECODE_NEXT, self._decode, sample)
                case Infer(group):
                    self._compute(_INFER_FIRST, self._infer, group)
                case Read() | Send():
                    pass  # _look_at reads; _infer has queued the part

    def _read_by(self, task: Callable[[int], None], number: int) -> None:
        guarded = self._guard(task, number)
        self._extractor._readers.submit(0, guarded, self._chunk.job, self._weight, self._place_read)

    def _compute(self, urgency: int, task: Callable[[int], None], number: int) -> None:
        self._extractor._compute.submit(urgency, self._guard(task, number), self._chunk.job, self._weight)

    def _guard(self, task: Callable[[int], None], number: int) -> Callable[[], None]:
        """A task that skips itself once the chunk is abandoned, and hands any error to whoever waits for the rows."""

        def guarded() -> None:
            if self._stopped:
                return
            try:
                task(number)
            except Exception as error:
                self._stopped = True
                self._ready.put(error if isinstance(error, HeadwaterError) else _surprise(error))

        return guarded

    def _look_at(self, group: int) -> None:
        """Read a whole group in this thread, and have it decoded in another: where little is done, tasks only cost."""
        for number in self._ring.samples_of(group):
            if (data := self._fetch(number)) is not None:
                self._data[number] = data
        self._compute(_DECODE_NEXT, self._decode_all, group)

    def _decode_all(self, group: int) -> None:
        """What could be read of a group."""
        for number in self._ring.samples_of(group):
            if number in self._data:
                self._decode(number)

    def _read(self, number: int) -> None:
        if (data := self._fetch(number)) is not None:
            self._data[number] = data
            self._tell(self._ring.read, number)

    def _decode(self, number: int) -> None:
        self._place(number, self._data.pop(number))

    def _fetch(self, number: int) -> Any:
        """The sample's bytes; None if it is bad, which is noted."""
        start = time.perf_counter()
        try:
            data = read_sample(self._store, self._chunk.samples[number])
        except BadSampleError as error:
            self._give_up_on(number, error)
            return None
        end = time.perf_counter()
        self._extractor.has_read(end - start, len(data))
        self._note("read", start, end)
        return data

    def _place(self, number: int, data: Any) -> None:
        """Put the sample's pixels into its group's buffer."""
        ref = self._chunk.samples[number]
        start = decoded = time.perf_counter()

        def on_decoded() -> None:
            nonlocal decoded
            decoded = time.perf_counter()

        draw = Draw(self._chunk.seed, self._chunk.epoch, ref.id)
        try:
            pixels = self._transforms.pixels(data, ref.key, draw, on_decoded)
        except BadSampleError as error:
            self._give_up_on(number, error)
            return
        with self._lock:
            self._buffers.setdefault(self._ring.group_of(number), {})[number] = pixels
        end = time.perf_counter()
        self._extractor.busy.add(decode_s=end - start)
        self._note("decode", start, decoded)
        self._note("augment", decoded, end)
        self._tell(self._ring.decoded, number)

    def _give_up_on(self, number: int, error: BadSampleError) -> None:
        ref, group = self._chunk.samples[number], self._ring.group_of(number)
        with self._lock:
            self._bad[ref.id] = Bad(ref.id, ref.key, error.reason)
            self._num_bad[group] += 1
            members = len(self._ring.samples_of(group))
            is_empty = self._num_bad[group] == members
            if is_empty:
                self._buffers.pop(group, None)  # nothing in it will be inferred
        self._extractor.busy.add(num_bad=1)
        self._tell(self._ring.bad, number)
        if is_empty:
            self._gate.give(members)
        self._go_on()  # whoever tells the ring of a group's last sample has freed its slot; that may be any of them

    def _infer(self, group: int) -> None:
        with self._lock:
            found = self._buffers.pop(group)
            bad = self._new_bad()
        numbers = sorted(found)
        ids = np.array([self._chunk.samples[number].id for number in numbers], np.int64)
        pixels = [found.pop(number) for number in numbers]
        if self._run is None:
            rows = self._input(pixels) if self._chunk.extraction.sends_input else np.stack(pixels)
            self._inferred(group, Part(ids, [rows], bad))
            return
        self._pieces[group] = _Pieces(ids, pixels, bad)
        self._run_piece(group)

    def _input(self, pixels: Sequence[np.ndarray]) -> np.ndarray:
        """What the model takes, where nothing of the model runs here."""
        start = time.perf_counter()
        rows = np.empty((len(pixels), *self._transforms.output_spec.shape), np.float32)
        for each, row in zip(pixels, rows, strict=True):
            self._transforms.finish(each, row)
        end = time.perf_counter()
        self._extractor.busy.add(decode_s=end - start)
        self._note("augment", start, end)
        return rows

    def _run_piece(self, group: int) -> None:
        """The next rows of a group: the floats of a piece are made right before they are used. Each piece is a task, so
        that others come in between whose turn it is."""
        run, pieces, spec = self._run, self._pieces[group], self._transforms.output_spec
        assert run is not None
        piece = pieces.pixels[: self._at_once]
        del pieces.pixels[: self._at_once]
        start = time.perf_counter()
        rows = self._extractor.room(len(piece), spec)
        for each, row in zip(piece, rows, strict=True):
            self._transforms.finish(each, row)
        made = time.perf_counter()
        pieces.parts.append([each.copy() if np.may_share_memory(each, rows) else each for each in run(rows)])
        end = time.perf_counter()
        self._extractor.busy.add(decode_s=made - start, infer_s=end - made)
        self._note("augment", start, made)
        self._note("infer", made, end)
        if pieces.pixels:
            self._compute(_INFER_FIRST, self._run_piece, group)
            return
        del self._pieces[group]
        parts = pieces.parts
        tensors = parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]
        self._inferred(group, Part(pieces.ids, tensors, pieces.bad))

    def _inferred(self, group: int, part: Part) -> None:
        self._extractor.busy.add(num_rows=len(part.ids))
        self._ready.put((group, part))
        self._tell(self._ring.inferred, group)


def _surprise(error: Exception) -> HeadwaterError:
    """An error nobody foresaw, said plainly; the traceback stays on this side."""
    wrapped = HeadwaterError(f"unexpected {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
