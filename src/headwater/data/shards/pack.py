"""Packing: decode a data set and do the fixed part of its transforms once, into shards.

Owns `pack`: what is kept of an earlier, interrupted pack, what is made, and in which order things are written, so that
nothing that is half done looks whole:

    packing.json → (a shard, then its part of the index) … → index.parquet → manifest.json

A shard counts once its part of the index is there. Which samples a shard holds depends on the source and the settings
alone, so an interrupted pack goes on with any number of threads.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.compute as pc

from headwater.data.layouts import list_samples
from headwater.data.layouts.listing import Listing, list_store, some
from headwater.data.layouts.shards import is_ours, is_packed
from headwater.data.samples import SampleRef, Samples
from headwater.data.shards.manifest import (
    INDEX,
    INDEX_SCHEMA,
    MANIFEST,
    NOTE,
    PARTS,
    SHARDS,
    SOURCE_COLUMNS,
    Manifest,
    Note,
    Shard,
    is_own,
    part_key,
    read_index,
    read_manifest,
    sha256,
    shard_key,
    table_bytes,
    table_of,
)
from headwater.data.shards.record import header_of, padding, record_bytes
from headwater.data.shards.verify import AT_ONCE, verify_set
from headwater.data.store import Store, full_url, make_folder, open_store, redact
from headwater.data.transforms import Transforms
from headwater.errors import (
    BadSampleError,
    ChangedError,
    ConfigError,
    DataError,
    EmptyDataError,
    StoreError,
    TransformError,
)

NUM_READERS = 16  # pictures read at once
SHARD_BYTES = 64_000_000
_LOOKED_AT = 16  # pictures decoded to learn their size where it is not the same for all
_ABOUT, _MADE_WITH = b"headwater", b"pillow"  # what a part says of its shard, in its schema's metadata
# Errors that say nothing about a set's own bytes, such as a store that does not answer: no reason to make them again.
_NO_DAMAGE = (StoreError, ChangedError, TransformError)

Tell = Callable[[str, int], None]  # what is being done, and how many pictures or shards are


@dataclass(frozen=True)
class Packing:
    """What came of a pack."""

    manifest: Manifest
    num_made: int  # shards written now
    num_kept: int  # shards of an earlier pack, found whole
    damaged: tuple[str, ...] = ()  # shards that were not, and why
    touched: tuple[str, ...] = ()  # pictures with another etag than a finished set has them with


@dataclass(frozen=True)
class _Part:
    """A finished shard: its rows of the index, and the file's own size and checksum."""

    table: pa.Table
    shard: Shard
    made_with: str = PIL.__version__  # the decoder's version, which has a say in the pixels

    def dumps(self) -> pa.Buffer:
        about = {_ABOUT: json.dumps(vars(self.shard)).encode(), _MADE_WITH: self.made_with.encode()}
        return table_bytes(self.table.replace_schema_metadata(about))

    @classmethod
    def loads(cls, data: Any, where: str) -> _Part | None:
        """None if these bytes are no part, or not all of one."""
        try:
            table = table_of(data, where)
            shard = Shard(**json.loads(table.schema.metadata[_ABOUT]))
            made_with = table.schema.metadata[_MADE_WITH].decode()
        except (DataError, KeyError, TypeError, ValueError):
            return None
        return cls(table.replace_schema_metadata(None), shard, made_with)


def pack(
    source: str,
    target: str,
    transforms: Transforms,
    *,
    layout: str = "auto",
    path_column: str | int | None = None,
    label_column: str | int | None = None,
    shard_bytes: int = SHARD_BYTES,
    num_threads: int = 1,
    on_bad_sample: str = "raise",
    verify: bool = False,
    tell: Tell = lambda what, count: None,
) -> Packing:
    """Pack the data set at `source` into the folder `target`, or go on with it.

    `verify` looks at every shard of a finished set, too, and makes those again that are damaged.
    """
    if shard_bytes < 1 or num_threads < 1:
        raise ConfigError(f"shard_bytes {shard_bytes} and num_threads {num_threads} must both be at least 1")
    if on_bad_sample not in ("raise", "skip"):
        raise ConfigError(f'on_bad_sample is {on_bad_sample!r}; it must be "raise" or "skip"')
    if transforms.text is not None or layout == "text":
        raise ConfigError("packing is for pictures; a file of texts is read as it is, and rows made of it are kept by "
                          "nodes (docs/cache.md)")  # fmt: skip
    samples = list_samples(source, layout, path_column=path_column, label_column=label_column,
                           on_page=lambda count: tell("listing the source", count))  # fmt: skip
    if samples.packed is not None:
        raise ConfigError(f"{redact(samples.url)} is a packed set itself; pack the set that it was made from")
    steps = transforms.fixed_part()
    make_folder(target)
    store = open_store(target)
    with store.alone():
        return _pack(store, target, source, samples, steps, shard_bytes, num_threads, on_bad_sample, verify, tell)


def _pack(
    store: Store,
    target: str,
    source: str,
    samples: Samples,
    steps: Transforms,
    shard_bytes: int,
    num_threads: int,
    on_bad_sample: str,
    verify: bool,
    tell: Tell,
) -> Packing:
    found = list_store(store)
    present = set(found.keys.to_pylist())
    note = Note(redact(full_url(source)), samples.fingerprint, steps.to_json(), shard_bytes, 0)
    others = present | {key for key in _unlisted(store) if not _is_torn(key)}
    if others and not is_packed(found):
        raise ConfigError(f"{redact(store.url)} has {len(others):,} objects that are not of a pack "
                          f"({some(sorted(others))}); choose an empty folder")  # fmt: skip
    if is_ours(found, MANIFEST):
        manifest = _finished(store, note)
        damaged = _missing(manifest, found)
        if verify:
            damaged = _verified(target, tell)
        if not damaged:
            store.delete([key for key in present if key == NOTE or (key.startswith(f"{PARTS}/") and is_own(key))])
            etags = read_index(store, manifest)["source_etag"].combine_chunks()
            touched = samples.keys.filter(pc.not_equal(etags, samples.etags)).to_pylist()
            return Packing(manifest, 0, len(manifest.shards), touched=tuple(touched))
        _reopen(store, manifest)
        note = manifest.note
    else:
        note = _begin(store, note, present, lambda: _per_shard(steps, samples, shard_bytes))
        damaged = []
    work = _Work(samples, steps, store, note, num_threads, on_bad_sample == "skip", tell)
    return replace(work.run(), damaged=tuple(damaged))


def _unlisted(store: Store) -> list[str]:
    return [key for folder in ("", PARTS, SHARDS) for key in store.unlisted(folder)]


def _is_torn(key: str) -> bool:
    """Whether a pack that was killed has left this: what it was writing, under the name that it would have got."""
    return is_own(key.rpartition("#")[0])


def _finished(store: Store, wanted: Note) -> Manifest:
    """The manifest, if it is of what is to be packed."""
    manifest = read_manifest(store)
    if fault := _difference(manifest.note, wanted):
        raise ConfigError(f"{redact(store.url)} is a finished set, and another one: {fault}; choose another folder")
    if manifest.note.source_fingerprint != wanted.source_fingerprint:
        raise ConfigError(
            f"{redact(store.url)} is a finished set of {wanted.source} as it was then: files were added, removed or "
            "changed in size since; pack it into another folder"
        )
    return manifest


def _verified(target: str, tell: Tell) -> list[str]:
    try:
        return verify_set(target, lambda count: tell("checking shards", count))
    except _NO_DAMAGE:
        raise
    except DataError as error:  # the index: all shards are made again
        return [str(error)]


def _missing(manifest: Manifest, found: Listing) -> list[str]:
    """Shards that are not there, or not as long as they were: what a listing shows."""
    sizes = dict(zip(found.keys.to_pylist(), found.sizes.tolist(), strict=True))
    wanted = {INDEX: manifest.index_bytes} | {shard_key(shard.number): shard.num_bytes for shard in manifest.shards}
    return [
        f"{key} has {sizes.get(key, 0):,} bytes of {size:,}" for key, size in wanted.items() if sizes.get(key) != size
    ]


def _reopen(store: Store, manifest: Manifest) -> None:
    """Make an unfinished set of a finished one: then there is one way to go on."""
    shards = {shard.number: shard for shard in manifest.shards}
    try:
        index = read_index(store, manifest)
    except _NO_DAMAGE:
        raise
    except DataError:
        index = INDEX_SCHEMA.empty_table()  # nothing tells what is in the shards
    for number in pc.unique(index["shard"]).to_pylist():
        rows = index.filter(pc.equal(index["shard"], number))
        shard = shards.get(number, Shard(number, 0, 0, ""))
        store.write(part_key(number), _Part(rows, shard, manifest.made_with.get("pillow", "")).dumps())
    store.write(NOTE, manifest.note.dumps())
    store.delete([MANIFEST])


def _begin(store: Store, note: Note, present: set[str], per_shard: Callable[[], int]) -> Note:
    """Write the note of a new pack, or find that of the pack that goes on here."""
    where = redact(store.url)
    if NOTE in present:
        begun = Note.loads(bytes(store.read(NOTE)), f"{where}/{NOTE}")
        if fault := _difference(begun, note):
            raise ConfigError(f"{where} has another pack that is not finished: {fault}; finish that one with the "
                              "command that began it, or choose another folder")  # fmt: skip
        note = replace(note, samples_per_shard=begun.samples_per_shard)
    else:
        note = replace(note, samples_per_shard=per_shard())
    store.write(NOTE, note.dumps())
    return note


def _difference(begun: Note, wanted: Note) -> str:
    """Why these can't be one pack; empty if they can."""
    if begun.source != wanted.source and begun.source_fingerprint != wanted.source_fingerprint:
        return f"it is of {begun.source}, not of {wanted.source}"
    for place in range(max(len(begun.steps), len(wanted.steps))):
        theirs, ours = (each.steps[place] if place < len(each.steps) else None for each in (begun, wanted))
        if theirs != ours:
            return f"its step {place} is {theirs or 'none'}, here it is {ours or 'none'}"
    if begun.shard_bytes != wanted.shard_bytes:
        return f"its shards have {begun.shard_bytes / 1e6:g} MB (--shard-size), here it is {wanted.shard_bytes / 1e6:g}"
    return ""


def _per_shard(steps: Transforms, samples: Samples, shard_bytes: int) -> int:
    """How many samples a shard gets: records that together have about `shard_bytes`."""
    try:
        height, width, _ = steps.pixel_spec.shape
        size = float(record_bytes(height, width))
    except TransformError:  # pictures keep different sizes: look at some of them
        store, sizes = open_store(samples.url), []
        for ref in samples.take(range(0, len(samples), max(1, len(samples) // _LOOKED_AT))):
            try:
                height, width, _ = steps.pixels(_read(store, ref), ref.key).shape
            except BadSampleError:
                continue  # it is met in its turn
            sizes.append(record_bytes(height, width))
        size = float(np.mean(sizes)) if sizes else shard_bytes
    return max(1, int(shard_bytes // size))


def _read(store: Store, ref: SampleRef) -> Any:
    try:
        return store.read(ref.key, ref.offset, None if ref.length < 0 else ref.length, ref.etag)
    except ChangedError:
        raise ChangedError(
            f"{ref.key} in {redact(store.url)} changed while it was packed; run the same command again once nobody "
            "writes there: shards whose pictures did not change are kept"
        ) from None


class _Work:
    """One pack, from its note to its manifest."""

    def __init__(
        self, samples: Samples, steps: Transforms, store: Store, note: Note, num_threads: int, skips: bool, tell: Tell
    ) -> None:
        self._samples = samples
        self._source = open_store(samples.url)
        self._steps = steps
        self._store = store
        self._note = note
        self._skips = skips
        self._tell = tell
        self._num_threads = num_threads
        self._turns = threading.BoundedSemaphore(num_threads)  # to decode; reading is waiting
        self._rows = pa.table(
            [samples.keys, samples.offsets, samples.lengths, samples.sizes, samples.etags, samples.labels],
            schema=pa.schema([INDEX_SCHEMA.field(name) for name in SOURCE_COLUMNS]),
        )

    def run(self) -> Packing:
        self._store.drop_unlisted([key for key in _unlisted(self._store) if _is_torn(key)])
        num_shards = -(-len(self._samples) // self._note.samples_per_shard)
        parts = self._kept(num_shards)
        todo = [number for number in range(num_shards) if number not in parts]
        num_kept = len(parts)
        for part in self._made(todo, sum(len(part.table) for part in parts.values())):
            parts[part.shard.number] = part
        manifest = self._finish([parts[number] for number in range(num_shards)])
        return Packing(manifest, len(todo), num_kept)

    def _range(self, number: int) -> range:
        size = self._note.samples_per_shard
        return range(number * size, min((number + 1) * size, len(self._samples)))

    # What an earlier run has left

    def _kept(self, num_shards: int) -> dict[int, _Part]:
        """Shards that are whole, and of the samples as they are now."""
        found = list_store(self._store)
        sizes = dict(zip(found.keys.to_pylist(), found.sizes.tolist(), strict=True))
        kept: dict[int, _Part] = {}
        numbers = [number for number in range(num_shards) if part_key(number) in sizes]
        with ThreadPoolExecutor(min(self._num_threads, AT_ONCE)) as pool:
            for number, part in zip(numbers, pool.map(lambda number: self._keep(number, sizes), numbers), strict=True):
                if part is not None:
                    kept[number] = part
                self._tell("checking shards of the earlier run", len(kept))
        known = {f(number) for number in range(num_shards) for f in (shard_key, part_key)} | {NOTE, MANIFEST, INDEX}
        self._store.delete([key for key in sizes if key not in known and is_own(key)])
        return kept

    def _keep(self, number: int, sizes: dict[str, int]) -> _Part | None:
        part = _Part.loads(self._store.read(part_key(number)), part_key(number))
        if part is None or part.shard.number != number or part.made_with != PIL.__version__:
            return None
        span = self._range(number)
        if not part.table.select(SOURCE_COLUMNS).equals(self._rows.slice(span.start, len(span))):
            return None  # a picture of it was replaced, or others came before it
        if not self._skips and part.shard.num_samples != len(span):
            return None  # pictures were left out then, and must not be now
        if part.shard.num_samples == 0:
            return part
        key = shard_key(number)
        if sizes.get(key) != part.shard.num_bytes or sha256(self._store.read_whole(key)) != part.shard.sha256:
            return None
        return part

    # What is made now

    def _made(self, todo: list[int], num_done: int) -> Iterator[_Part]:
        refs = ((number, ref) for number in todo for ref in self._samples.take(self._range(number)))
        ahead = NUM_READERS + self._num_threads
        pending: deque[Future[np.ndarray | BadSampleError]] = deque()
        writing: Future[_Part] | None = None
        pool = ThreadPoolExecutor(NUM_READERS + self._num_threads, "pack")
        writer = ThreadPoolExecutor(1, "write")
        try:
            for number in todo:
                building = _Building(number, self._steps)
                for _ in self._range(number):
                    while len(pending) < ahead and (job := next(refs, None)) is not None:
                        pending.append(pool.submit(self._picture, job[1]))
                    building.add(pending.popleft().result())
                    num_done += 1
                    self._tell("packing", num_done)
                if writing is not None:
                    yield writing.result()
                writing = writer.submit(self._write, building)
            if writing is not None:
                yield writing.result()
        finally:
            pool.shutdown(cancel_futures=True)
            writer.shutdown()

    def _picture(self, ref: SampleRef) -> np.ndarray | BadSampleError:
        """Its pixels; or why there are none, if those are left out."""
        try:
            data = _read(self._source, ref)
            with self._turns:
                return np.ascontiguousarray(self._steps.pixels(data, ref.key))
        except BadSampleError as error:
            if self._skips:
                return error
            raise BadSampleError(
                error.key, f"{error.reason}; repair or remove it, or leave it out of the set: --on-bad-sample skip"
            ) from error

    def _write(self, building: _Building) -> _Part:
        """The shard, then its part: in this order, a part stands for a whole shard."""
        span = self._range(building.number)
        part = building.part(self._rows.slice(span.start, len(span)))
        if part.shard.num_samples:
            self._store.write(shard_key(building.number), memoryview(building.data))
        self._store.write(part_key(building.number), part.dumps())
        return part

    # The end

    def _finish(self, parts: list[_Part]) -> Manifest:
        index = pa.concat_tables([part.table for part in parts])
        good = pc.greater(index["length"], 0)
        left = index.filter(good)
        if not len(left):
            first = index["fault"][0].as_py()
            raise EmptyDataError(f"none of the {len(index):,} samples can be packed; the first: {first}")
        gone = index.filter(pc.invert(good))
        data = table_bytes(index)
        manifest = Manifest(
            note=self._note,
            fingerprint=self._samples.fingerprint if not len(gone) else _fingerprint(self._samples, good),
            num_samples=len(left),
            classes=list(self._samples.classes),
            left_out=[list(row) for row in zip(gone["key"].to_pylist(), gone["fault"].to_pylist(), strict=True)],
            index_bytes=data.size,
            index_sha256=sha256(data),
            shards=[part.shard for part in parts if part.shard.num_samples],
            made_with={"pillow": PIL.__version__},
        )
        self._store.write(INDEX, data)
        self._store.write(MANIFEST, manifest.dumps())
        self._store.delete([part_key(part.shard.number) for part in parts] + [NOTE])
        return manifest


def _fingerprint(samples: Samples, good: pa.ChunkedArray) -> str:
    """That of the source as it would be without the samples that were left out."""
    rows = np.flatnonzero(good.to_numpy())
    return Samples.build(
        samples.url,
        samples.classes,
        keys=samples.keys.take(pa.array(rows)),
        offsets=samples.offsets[rows],
        lengths=samples.lengths[rows],
        sizes=samples.sizes[rows],
        etags=samples.etags.take(pa.array(rows)),
        labels=samples.labels[rows],
    ).fingerprint


class _Building:
    """A shard in memory."""

    def __init__(self, number: int, steps: Transforms) -> None:
        self.number = number
        self.data = bytearray()
        self._num_steps = len(steps.ops)
        self._digest = steps.start_digest(self._num_steps)
        self._columns: dict[str, list[Any]] = {
            name: [] for name in INDEX_SCHEMA.names if name not in SOURCE_COLUMNS and name != "shard"
        }
        self._num_good = 0

    def add(self, found: np.ndarray | BadSampleError) -> None:
        """The next sample's record; a bad one has a row of the index, and no record."""
        if isinstance(found, BadSampleError):
            self._note(0, 0, 0, 0, 0, found.reason)
            return
        header, checksum = header_of(found, self._num_steps, self._digest)
        offset, length = len(self.data), record_bytes(*found.shape[:2])
        self.data += header
        self.data += found.data.cast("B")
        self.data += bytes(padding(length))
        self._note(offset, length, found.shape[0], found.shape[1], checksum, "")
        self._num_good += 1

    def _note(self, *values: int | str) -> None:
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def part(self, rows: pa.Table) -> _Part:
        """What the index says of this shard."""
        columns = {name: rows[name] for name in SOURCE_COLUMNS}
        columns |= {"shard": pa.array([self.number] * len(rows), pa.int32())}
        columns |= {name: pa.array(values, INDEX_SCHEMA.field(name).type) for name, values in self._columns.items()}
        table = pa.table([columns[name] for name in INDEX_SCHEMA.names], schema=INDEX_SCHEMA)
        return _Part(table, Shard(self.number, self._num_good, len(self.data), sha256(self.data)))
