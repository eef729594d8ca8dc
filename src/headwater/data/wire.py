"""What trainer and node say to each other: requests, row streams, and errors.

Owns the protocol's version, its messages and their checks; both sides import it, neither defines its own. Everything a
stranger could send is parsed here, into plain data or a ConfigError; nothing is ever unpickled or executed.

A rows stream is Arrow record batches. Column `sample` has the ids; the others are the codec's columns of the boundary,
flattened to fixed-size lists. A batch's metadata is JSON: samples that could not be read ride there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from headwater import errors
from headwater.core import codecs
from headwater.core.form import shown
from headwater.core.plan import COMPRESSIONS, LIMITS, PRECISIONS
from headwater.core.spec import ITEM_BYTES, Boundary, TensorSpec
from headwater.core.tuning import ENGINE_CHOICES
from headwater.core.unpacked import most_values
from headwater.data.handover import Handed
from headwater.data.samples import SCHEMA, SampleRef, Samples
from headwater.data.secrets import redact
from headwater.data.transforms import Transforms
from headwater.errors import ConfigError, DamagedError

PROTOCOL = 4
MAX_REQUEST_BYTES = 64 << 20
MAX_REQUEST_VALUES = 8 << 20  # in it: seven for each of as many samples as a chunk may have, and some
MAX_ROW_BYTES = 1 << 30
MAX_BLOB_BYTES = 1 << 28
MAX_PROBE_SAMPLES = 256
MAX_TENSORS = 256  # of a row; the widest boundary of a DenseNet has about 60
MAX_ERROR_BYTES = 3000  # an error travels in the trailers of a call, which hold 8 KB, in base64
UNKNOWN_PREFIX = "unknown prefix"  # in the text of a RefusedError: upload it, then ask again
UNKNOWN_CALIBRATION = "unknown calibration"  # the same: calibrate, then ask again
MIN_CALIBRATION = 16  # samples; fewer say too little about the range of values that a model meets

_ARROW: Mapping[str, pa.DataType] = {
    "bool": pa.uint8(),
    "uint8": pa.uint8(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float16": pa.float16(),
    "bfloat16": pa.uint16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
}


@dataclass(frozen=True)
class Bad:
    """A sample that could not be read or decoded."""

    sample: int
    key: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """Ask a node which samples a data set has."""

    url: str
    layout: str = "auto"
    path_column: str | int | None = None
    label_column: str | int | None = None
    text_column: str | int | None = None

    def dumps(self) -> bytes:
        return json.dumps({"kind": "listing", "protocol": PROTOCOL, **vars(self)}).encode()


@dataclass(frozen=True)
class Extraction:
    """What a row is: everything that determines its values, but for the sample, the epoch and the seed."""

    url: str
    transforms: Transforms
    # sha256 of the ONNX file; None leaves the model to the trainer and sends pixels, or the floats that it takes
    prefix: str | None
    boundary: Boundary
    precision: str = "fp32"
    codec: str = "raw"
    compression: str = "none"
    node_batch: int = 32
    outputs: tuple[str, ...] | None = None  # which of the file's outputs the boundary is; None: all, in their order
    engine: str = "auto"
    calibration: str | None = None  # of an int8 prefix: see `Calibrate`

    @property
    def sends_input(self) -> bool:
        """Are rows what the model takes, its floats made near the data, instead of the pixels they are made of?"""
        return self.prefix is None and self.boundary[0].dtype == "float32"

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in ("transforms", "boundary")}
        return {
            **plain,
            "transforms": self.transforms.to_json(),
            "boundary": [spec.to_json() for spec in self.boundary],
        }

    @classmethod
    def from_json(cls, data: Any) -> Extraction:
        _require(data, url=str, transforms=list, boundary=list)
        _require(data, precision=str, codec=str, compression=str, node_batch=int)
        check_url(data["url"])
        prefix = data.get("prefix")
        if prefix is not None and not is_digest(prefix):
            raise ConfigError(f"prefix {shown(prefix)} is not a sha256 in hexadecimal")
        boundary = tuple(TensorSpec.from_json(spec) for spec in data["boundary"])
        engine, calibration = data.get("engine", "auto"), data.get("calibration")
        _require({"engine": engine}, engine=str)
        if calibration is not None and not is_digest(calibration):
            raise ConfigError(f"calibration {shown(calibration)} is not a sha256 in hexadecimal")
        data = {**data, "engine": engine}
        allowed = {"precision": PRECISIONS, "codec": tuple(codecs.CODECS), "compression": COMPRESSIONS,
                   "engine": ENGINE_CHOICES}  # fmt: skip
        for name, values in allowed.items():
            if data[name] not in values:
                raise ConfigError(f"{name} is {data[name][:40]!r}; it must be one of {', '.join(values)}")
        low, high = LIMITS["node_batch"]
        if not low <= data["node_batch"] <= high:
            raise ConfigError(f"node_batch is {data['node_batch']}; it must lie between {low} and {high}")
        if not 0 < len(boundary) <= MAX_TENSORS or any(spec.num_items == 0 for spec in boundary):
            raise ConfigError(f"a row has 1 to {MAX_TENSORS} tensors, none of them empty")
        if sum(spec.row_bytes for spec in boundary) > MAX_ROW_BYTES:
            raise ConfigError(f"a row has at most {MAX_ROW_BYTES} bytes; cut elsewhere")
        outputs = data.get("outputs")
        if outputs is not None and (
            not isinstance(outputs, list) or not all(isinstance(name, str) for name in outputs)
            or len(outputs) != len(boundary) or len(set(outputs)) != len(outputs)
        ):  # fmt: skip
            raise ConfigError(f"outputs must name each of the row's {len(boundary)} tensors once")
        transforms = Transforms.from_json(data["transforms"])
        whole = (transforms.pixel_spec, transforms.output_spec)  # the same in a chain that ends in pixels
        if prefix is None and all([_kind(spec)] != [_kind(each) for each in boundary] for spec in whole):
            raise ConfigError(f"without a prefix rows are the pixels {whole[0]} or the input {whole[1]}; the boundary "
                              "is another")  # fmt: skip
        return cls(data["url"], transforms, prefix, boundary, data["precision"], data["codec"], data["compression"],
                   data["node_batch"], None if outputs is None else tuple(outputs), engine, calibration)  # fmt: skip


def _kind(spec: TensorSpec) -> tuple[tuple[int, ...], str]:
    return spec.shape, spec.dtype


@dataclass(frozen=True)
class Chunk:
    """Ask a node for the rows of these samples."""

    extraction: Extraction
    job: str
    seed: int
    epoch: int
    index: int
    samples: tuple[SampleRef, ...]
    reuse: bool = True  # a node may send rows that it kept, and keep these
    trace: bool = False  # tell in the end what was done when
    hand_over: bool = False  # rows may be left in the folder that both see (`data.handover`)

    def dumps(self) -> bytes:
        return json.dumps(
            {
                "kind": "rows",
                "protocol": PROTOCOL,
                "job": self.job,
                "seed": self.seed,
                "epoch": self.epoch,
                "index": self.index,
                "reuse": self.reuse,
                **({"trace": True} if self.trace else {}),
                **({"hand_over": True} if self.hand_over else {}),
                "extraction": self.extraction.to_json(),
                "samples": [ref.to_json() for ref in self.samples],
            },
            separators=(",", ":"),
        ).encode()


@dataclass(frozen=True)
class Probe:
    """Ask a node what the work on these samples costs there."""

    chunk: Chunk

    def dumps(self) -> bytes:
        return json.dumps({**json.loads(self.chunk.dumps()), "kind": "probe"}, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Calibrate:
    """Ask a node to find the ranges of values in a prefix on these samples; an int8 prefix is made with them."""

    chunk: Chunk

    @property
    def digest(self) -> str:
        """Names the calibration: the samples, and what is done to them before the prefix."""
        chunk = self.chunk
        said = [chunk.extraction.url, chunk.extraction.transforms.to_json(), chunk.seed, chunk.epoch,
                [ref.to_json() for ref in chunk.samples]]  # fmt: skip
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def dumps(self) -> bytes:
        return json.dumps({**json.loads(self.chunk.dumps()), "kind": "calibrate"}, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Blob:
    """Ask a node for some bytes that mean nothing, to measure the way they take."""

    num_bytes: int

    def dumps(self) -> bytes:
        return json.dumps({"kind": "blob", "protocol": PROTOCOL, "num_bytes": self.num_bytes}).encode()


def loads(ticket: bytes) -> Listing | Chunk | Probe | Calibrate | Blob:
    """Read a request from whoever sent it."""
    if len(ticket) > MAX_REQUEST_BYTES:
        raise ConfigError(f"a request of {len(ticket)} bytes; the limit is {MAX_REQUEST_BYTES}; lower chunk_rows")
    if (num := most_values(ticket)) > MAX_REQUEST_VALUES:
        raise ConfigError(f"a request of up to {num:,} values; the limit is {MAX_REQUEST_VALUES:,}; lower chunk_rows")
    try:
        data = json.loads(ticket)
    except (ValueError, RecursionError) as error:
        raise ConfigError("the request is not JSON") from error
    _require(data, kind=str, protocol=int)
    if data["protocol"] != PROTOCOL:
        raise ConfigError(f"the request speaks protocol {data['protocol']}; this node speaks {PROTOCOL}")
    if data["kind"] == "listing":
        _require(data, url=str, layout=str)
        check_url(data["url"])
        columns = [data.get(name) for name in ("path_column", "label_column", "text_column")]
        for column in columns:
            if column is not None and type(column) not in (int, str):
                raise ConfigError(f"a column is named by text or number, not {shown(column)}")
        return Listing(data["url"], data["layout"], *columns)
    if data["kind"] == "blob":
        _require(data, num_bytes=int)
        if not 0 < data["num_bytes"] <= MAX_BLOB_BYTES:
            raise ConfigError(f"a blob of {data['num_bytes']} bytes; it has 1 to {MAX_BLOB_BYTES}")
        return Blob(data["num_bytes"])
    if data["kind"] in ("rows", "probe", "calibrate"):
        _require(data, job=str, seed=int, epoch=int, index=int, extraction=dict, samples=list)
        for name in ("seed", "epoch", "index"):
            if not 0 <= data[name] < 2**63:
                raise ConfigError(f"{name} is {data[name]}; it must lie between 0 and 2**63 - 1")
        if not 0 < len(data["samples"]) <= LIMITS["chunk_rows"][1]:
            raise ConfigError(f"a chunk of {len(data['samples'])} samples; the limit is {LIMITS['chunk_rows'][1]}")
        samples = tuple(SampleRef.from_json(item) for item in data["samples"])
        if len({ref.id for ref in samples}) != len(samples):
            raise ConfigError("a chunk names the same sample twice")
        extraction = Extraction.from_json(data["extraction"])
        flags = {"reuse": data.get("reuse", True), "trace": data.get("trace", False),
                 "hand_over": data.get("hand_over", False)}  # fmt: skip
        _require(flags, reuse=bool, trace=bool, hand_over=bool)
        chunk = Chunk(extraction, data["job"], data["seed"], data["epoch"], data["index"], samples, **flags)
        if data["kind"] == "rows":
            return chunk
        if len(samples) > MAX_PROBE_SAMPLES:
            raise ConfigError(f"a {data['kind']} of {len(samples)} samples; the limit is {MAX_PROBE_SAMPLES}")
        return Probe(chunk) if data["kind"] == "probe" else Calibrate(chunk)
    raise ConfigError(f"a request of kind {data['kind'][:40]!r}; it must be listing, rows, probe, calibrate or blob")


def rows_schema(codec: str, boundary: Boundary) -> pa.Schema:
    """The Arrow schema of a rows stream."""
    fields = [pa.field("sample", pa.int64(), nullable=False)]
    for column in codecs.wire_columns(codec, boundary):
        kind = _ARROW[column.dtype]
        fields.append(pa.field(column.name, pa.list_(kind, column.num_items) if column.shape else kind, nullable=False))
    return pa.schema(fields)


def pack_rows(codec: str, boundary: Boundary, ids: np.ndarray, tensors: Sequence[np.ndarray]) -> pa.RecordBatch:
    """Rows as a record batch, without copying what the codec leaves as it is."""
    return pack_columns(codec, boundary, ids, codecs.encode(codec, tensors, boundary))


def pack_columns(codec: str, boundary: Boundary, ids: np.ndarray, columns: Sequence[np.ndarray]) -> pa.RecordBatch:
    """The same of rows that the codec has already made columns of."""
    schema = rows_schema(codec, boundary)
    arrays: list[pa.Array] = [pa.array(ids, pa.int64())]
    for column, values in zip(codecs.wire_columns(codec, boundary), columns, strict=True):
        plain = values.view(np.uint8) if values.dtype == np.bool_ else values
        flat = pa.array(plain.reshape(-1), _ARROW[column.dtype])
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, column.num_items) if column.shape else flat)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def unpack_rows(codec: str, boundary: Boundary, batch: pa.RecordBatch) -> tuple[np.ndarray, list[np.ndarray]]:
    """Ids and tensors of a record batch; DamagedError if it is not what was asked for."""
    if not batch.schema.equals(rows_schema(codec, boundary), check_metadata=False):
        raise DamagedError(f"rows came in other columns than those of the boundary {list(map(str, boundary))}")
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise DamagedError(f"rows came damaged: {error}") from error
    if any(column.null_count for column in batch.columns):
        raise DamagedError("rows came with missing values")
    columns = []
    for spec, column in zip(codecs.wire_columns(codec, boundary), batch.columns[1:], strict=True):
        values = (column.flatten() if spec.shape else column).to_numpy(zero_copy_only=True)
        assert values.itemsize == ITEM_BYTES[spec.dtype]
        columns.append(values.view(np.bool_) if spec.dtype == "bool" else values)
    return batch.column(0).to_numpy(), codecs.decode(codec, columns, boundary)


def pack_bad(bad: Sequence[Bad], handed: Handed | None = None) -> bytes:
    """Samples without a row, as a batch's metadata; and rows that were left in a file."""
    if not bad and handed is None:
        return b""
    said: dict[str, Any] = {"bad": [[each.sample, each.key, redact(each.reason)] for each in bad]}
    return json.dumps(said if handed is None else {**said, "handed": handed.to_json()}).encode()


def unpack_handed(metadata: bytes) -> Handed | None:
    """Rows that were left in a file, if a batch came with any."""
    try:
        said = json.loads(metadata).get("handed")
    except (ValueError, AttributeError, RecursionError):
        return None
    return None if said is None else Handed.from_json(said)


MEMORY, QUOTA = "memory", "quota"  # what a request may wait for on a node


@dataclass(frozen=True)
class Waiting:
    """What a request waits for; for memory also its place among those that do, and how many they are."""

    reason: str
    place: tuple[int, int] | None = None


def pack_waiting(place: tuple[int, int] | None, reason: str = MEMORY) -> bytes:
    """As a sign of life's metadata. For memory without a place: the request is in, and waits for nothing."""
    if place is None:
        return b"" if reason == MEMORY else json.dumps({"bad": [], "waits_for": reason}).encode()
    return json.dumps({"bad": [], "waits_for": reason, "waiting": list(place)}).encode()


def unpack_waiting(metadata: bytes) -> Waiting | None:
    """The way back from `pack_waiting`; None if that is not what a batch came with, or the reason is none we know."""
    try:
        said = json.loads(metadata)
        if said.get("waits_for", MEMORY) == QUOTA:
            return Waiting(QUOTA)
        if said.get("waits_for", MEMORY) != MEMORY:
            return None
        place, count = said["waiting"]
        return Waiting(MEMORY, (int(place), int(count)))
    except (ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(frozen=True)
class Spans:
    """What a node did for a chunk, on its own clock; of each span its stage, thread, start and seconds."""

    begun_s: float
    ended_s: float
    spans: tuple[tuple[str, str, float, float], ...]


def pack_spans(found: Spans) -> bytes:
    """As the metadata of a chunk's last batch."""
    return json.dumps({"bad": [], "spans": found.spans, "clock": [found.begun_s, found.ended_s]}).encode()


def unpack_spans(metadata: bytes) -> Spans | None:
    """The way back from `pack_spans`; None if that is not what a batch came with."""
    try:
        said = json.loads(metadata)
        begun_s, ended_s = map(float, said["clock"])
        spans = tuple((str(name), str(lane), float(start), float(taken)) for name, lane, start, taken in said["spans"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    numbers = [begun_s, ended_s, *(number for _, _, *pair in spans for number in pair)]
    return Spans(begun_s, ended_s, spans) if all(map(math.isfinite, numbers)) else None


def unpack_bad(metadata: bytes) -> list[Bad]:
    """The way back from `pack_bad`."""
    try:
        return [Bad(int(sample), str(key), str(reason)) for sample, key, reason in json.loads(metadata)["bad"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedError("rows came with metadata that can't be read") from error


LISTING_SCHEMA = pa.schema(SCHEMA)
BLOB_SCHEMA = pa.schema([pa.field("bytes", pa.binary())])


def blob_batch(data: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], schema=BLOB_SCHEMA)


def blob_batches(num_bytes: int, piece_bytes: int = 1 << 16) -> Iterator[pa.RecordBatch]:
    """That many bytes in pieces. They don't compress, in case a link does."""
    noise = np.random.default_rng(0).bytes(piece_bytes)
    for start in range(0, num_bytes, piece_bytes):
        yield blob_batch(noise[: min(piece_bytes, num_bytes - start)])


def listing_progress(num_samples: int) -> tuple[pa.RecordBatch, bytes]:
    """A sign of life: this many samples were listed so far."""
    return _empty(LISTING_SCHEMA), json.dumps({"listed": num_samples}).encode()


def listing_batches(samples: Samples) -> Iterator[tuple[pa.RecordBatch, bytes]]:
    """The samples, then what belongs to all of them as the metadata of an empty batch."""
    table = samples.to_table()
    for batch in table.replace_schema_metadata(None).to_batches(max_chunksize=50_000):
        yield batch, b""
    whole = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    yield _empty(LISTING_SCHEMA), json.dumps({"whole": whole}).encode()


def listing_result(batches: Sequence[pa.RecordBatch], whole: Mapping[str, str]) -> Samples:
    """The way back from `listing_batches`; DamagedError if it is not a listing."""
    try:
        table = pa.Table.from_batches(list(batches), schema=LISTING_SCHEMA)
        return Samples.from_table(table.replace_schema_metadata(dict(whole)))
    except (ConfigError, pa.ArrowException, TypeError, ValueError) as error:
        raise DamagedError(f"the listing can't be read: {error}") from error


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


def error_to_wire(error: errors.HeadwaterError) -> bytes:
    """An error as the extra bytes of a Flight status; a text that is too long for it loses its middle."""
    texts = {"text": redact(str(error))}
    if isinstance(error, errors.BadSampleError):
        texts = {"text": "", "key": error.key, "reason": redact(error.reason)}
    short = {name: _shorten(text, MAX_ERROR_BYTES // len(texts)) for name, text in texts.items()}
    return json.dumps({"error": type(error).__name__, **short}).encode()


def _shorten(text: str, max_bytes: int) -> str:
    begin, end = text, ""
    while len(json.dumps(begin + end)) > max_bytes:
        keep = len(begin + end) * 3 // 8
        begin, end = f"{text[:keep]} … ", text[len(text) - keep :]
    return begin + end


def error_from_wire(extra: bytes | None) -> errors.HeadwaterError | None:
    """The error that a node sent, as the same class here; None if the bytes say nothing."""
    try:
        data = json.loads(extra or b"")
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("text"), str):
        return None
    kind = getattr(errors, name, None) if isinstance(name := data.get("error"), str) and name.isascii() else None
    if kind is errors.BadSampleError:
        key, reason = (value if isinstance(value, str) else "?" for value in (data.get("key"), data.get("reason")))
        return errors.BadSampleError(key, reason)
    if kind is errors.PlanError:
        return errors.PlanError([data["text"]])
    if not (isinstance(kind, type) and issubclass(kind, errors.HeadwaterError)):
        return errors.RefusedError(data["text"])
    return kind(data["text"])


def _require(data: Any, **kinds: type) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"a request is a JSON object, not {type(data).__name__}")
    for name, kind in kinds.items():
        if type(data.get(name)) is not kind:
            raise ConfigError(f"{name} must be {kind.__name__}, not {shown(data.get(name))}")


def check_url(url: str) -> None:
    """Parsers of URLs drop tabs and line ends, so ".<tab>." would become ".." behind the check that looks for it."""
    if any(letter < " " or letter == "\x7f" or "\ud800" <= letter <= "\udfff" for letter in url):
        raise ConfigError(f"{url[:200]!r} has control characters or lone surrogates; write them as %XX")
    if "\0" in unquote(url):
        raise ConfigError(f"{url[:200]!r} has a NUL in it, which no name has")


def is_digest(text: object) -> bool:
    """Is this a sha256 in lower-case hexadecimal?"""
    return isinstance(text, str) and len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
