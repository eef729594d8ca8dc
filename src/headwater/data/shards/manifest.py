"""What a packed set says about itself: `manifest.json`, the index, and the note of a pack that is not finished.

Owns the names of a set's objects, their formats, and whether a job's transforms fit. docs/shards.md tells the format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from headwater.core.form import shown
from headwater.data.parquetfile import read_parquet
from headwater.data.samples import Samples
from headwater.data.shards.record import WAY_OUT
from headwater.data.store import Store, redact
from headwater.data.transforms import Transforms
from headwater.data.transforms.op import Op
from headwater.errors import BadSampleError, DataError, TransformError

FORMAT = "headwater-shards"
VERSION = 1
MANIFEST = "manifest.json"  # written last: without it a set is not finished
NOTE = "packing.json"  # written first, gone when the set is finished
INDEX = "index.parquet"
SHARDS = "shards"
PARTS = "parts"  # one index for each finished shard, until the set is finished
START = f'{{"format":"{FORMAT}"'.encode()  # of both JSON files, without blanks: it tells them from anyone else's

# One row for each sample of the source, in its order. `length` is 0 where a sample was left out; `fault` says why.
INDEX_SCHEMA = pa.schema(
    {
        "key": pa.large_string(),
        "source_offset": pa.int64(),
        "source_length": pa.int64(),
        "source_size": pa.int64(),
        "source_etag": pa.large_string(),
        "label": pa.int64(),
        "shard": pa.int32(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "height": pa.int32(),
        "width": pa.int32(),
        "crc32": pa.uint32(),
        "fault": pa.large_string(),
    }
)
SOURCE_COLUMNS = ("key", "source_offset", "source_length", "source_size", "source_etag", "label")


MAX_NUMBER = 2**31 - 1  # of a shard: the index has 32 bits for it


def shard_key(number: int) -> str:
    """Names sort as numbers do, so samples in shards sort as those of the source."""
    return f"{SHARDS}/{number:08d}.hws"


def part_key(number: int) -> str:
    return f"{PARTS}/{number:08d}.parquet"


def is_own(key: str) -> bool:
    """Whether an object of a set, finished or not, is called so."""
    return key in (MANIFEST, NOTE, INDEX) or any(
        re.fullmatch(rf"{folder}/\d{{8,}}\.{end}", key) for folder, end in ((SHARDS, "hws"), (PARTS, "parquet"))
    )


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Shard:
    """One shard file."""

    number: int
    num_samples: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Note:
    """What a pack is of; the same in a finished set's manifest."""

    source: str  # URL, without secrets
    source_fingerprint: str
    steps: list[dict[str, Any]]  # of the transforms, done
    shard_bytes: int  # aimed at
    samples_per_shard: int

    def dumps(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1).encode()

    @classmethod
    def loads(cls, data: bytes, where: str) -> Note:
        return cls(**_fields(cls, data, where))


@dataclass(frozen=True)
class Manifest:
    """A finished set."""

    note: Note
    fingerprint: str  # the source's; where samples were left out, that of the source without them
    num_samples: int
    classes: list[str]
    left_out: list[list[str]]  # [key, why]
    index_bytes: int
    index_sha256: str
    shards: list[Shard]
    made_with: dict[str, str] = field(default_factory=dict)  # versions of what decoded

    def dumps(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1).encode()

    @classmethod
    def loads(cls, data: bytes, where: str) -> Manifest:
        """Read and check; a DataError says what is wrong and what to do."""
        fields = _fields(cls, data, where)
        try:
            Transforms.from_json(fields["note"].get("steps"))
        except TransformError as error:
            raise _damaged(where, str(error)) from None
        shards = [Shard(**_typed(Shard, shard, where)) for shard in fields["shards"]]
        if bad := [shard.number for shard in shards if not 0 <= shard.number <= MAX_NUMBER]:
            raise _damaged(where, f"it has a shard number {shown(bad[0])}")
        return cls(**{
            **fields,
            "note": Note(**_typed(Note, fields["note"], where)),
            "shards": shards,
        })  # fmt: skip


def _fields(kind: type, data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"it is not JSON ({error})") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise _damaged(where, f'its "format" is not "{FORMAT}"')
    version = fields.pop("version", None)
    if version != VERSION:
        raise DataError(
            f"{where} is of format version {shown(version)}, and this Headwater reads {VERSION}; install the Headwater "
            "that wrote it, or pack the source again into another folder"
        )
    return _typed(kind, fields, where)


def _typed(kind: type, fields: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass, each of its type."""
    kinds = {"int": int, "str": str, "list": list, "dict": dict, "Note": dict}
    for name, hint in kind.__annotations__.items():
        wanted = kinds[str(hint).partition("[")[0]]
        if not isinstance(fields, dict) or type(fields.get(name)) is not wanted:
            raise _damaged(where, f"its {name!r} is not {wanted.__name__}")
    return {name: fields[name] for name in kind.__annotations__}


def _damaged(where: str, what: str) -> DataError:
    return DataError(f"{where} is damaged: {what}; empty the folder and pack the source again, or use another folder")


def read_manifest(store: Store) -> Manifest:
    return Manifest.loads(bytes(store.read(MANIFEST)), f"{redact(store.url)}/{MANIFEST}")


def read_index(store: Store, manifest: Manifest) -> pa.Table:
    """The index, after its checksum was found to be the manifest's."""
    where = f"{redact(store.url)}/{INDEX}"
    try:
        data = store.read_whole(INDEX)
    except BadSampleError as error:
        raise DataError(f"{error}; {WAY_OUT}") from None
    if sha256(data) != manifest.index_sha256:
        raise DataError(f"{where} is damaged: {len(data):,} bytes of {manifest.index_bytes:,}, or others than were "
                        f"written; {WAY_OUT}")  # fmt: skip
    return table_of(data, where)


def table_of(data: Any, where: str) -> pa.Table:
    try:
        table = read_parquet(data)
    except ValueError as error:
        raise _damaged(where, str(error)) from None
    if table.schema.remove_metadata() != INDEX_SCHEMA:
        raise _damaged(where, f"it has columns {table.schema.names}")
    if empty := [name for name in table.column_names if name != "fault" and table[name].null_count]:
        raise _damaged(where, f"cells of {empty[0]} are empty")
    return table


def table_bytes(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def check_transforms(samples: Samples, transforms: Transforms) -> None:
    """TransformError if these samples were packed with other steps than the transforms begin with."""
    if samples.packed is None:
        return
    done: Sequence[Op] = Transforms.from_json(json.loads(samples.packed.steps)).ops
    where = f"{redact(samples.url)} is a packed set"
    way_out = (
        "pack the source again with this job's transforms (headwater pack SRC DST --job job.toml), or train on SRC"
    )
    for place, op in enumerate(done):
        if place >= len(transforms.ops):
            raise TransformError(f"{where} with step {place}, {op!r}, done; the transforms end before it; {way_out}")
        if transforms.ops[place] != op:
            raise TransformError(
                f"{where} with {op!r} done as step {place}; the transforms have {transforms.ops[place]!r} there; "
                f"{way_out}"
            )
