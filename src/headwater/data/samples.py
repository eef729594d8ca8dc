"""What a data set consists of: one row a sample, held in columns.

Owns `Samples` (the whole listing) and `SampleRef` (one row of it, small enough for a ticket). May import
`headwater.errors` and `headwater.data.store` for the rule about keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.core.form import shown
from headwater.data.store import key_fault, redact
from headwater.errors import ConfigError

WHOLE = -1  # the length that means "the whole object"
_INT64_MAX = 2**63 - 1
SCHEMA = {
    "key": pa.large_string(),
    "offset": pa.int64(),
    "length": pa.int64(),
    "size": pa.int64(),
    "etag": pa.large_string(),
    "label": pa.int64(),
}


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where one sample lies: `length` bytes from `offset` of the object `key`, or all of it if `length` is -1.

    `size` is how many bytes the sample has: every layout knows it from its listing, so none is unknown, and 0 is an
    empty one. Nodes set memory aside by it, and don't read more. `etag` is that of the object; in a packed set it also
    names the sample's record (`data.shards.reading`).
    """

    id: int
    key: str
    offset: int
    length: int
    size: int
    etag: str

    def to_json(self) -> list[Any]:
        return [self.id, self.key, self.offset, self.length, self.size, self.etag]

    @classmethod
    def from_json(cls, data: object) -> SampleRef:
        """From a list that another machine sent: everything about it is checked."""
        if not isinstance(data, list) or len(data) != 6:
            raise ConfigError(f"a sample is a list [id, key, offset, length, size, etag], not {shown(data)}")
        number, key, offset, length, size, etag = data
        lows = {"id": (number, 0), "offset": (offset, 0), "length": (length, WHOLE), "size": (size, 0)}
        for name, (value, low) in lows.items():
            if type(value) is not int or not low <= value <= _INT64_MAX:
                raise ConfigError(
                    f"sample {shown(key)}: {name} is {shown(value)}; it must be an int from {low} to 2**63 - 1"
                )
        if fault := key_fault(key):
            raise ConfigError(f"sample {number}: {shown(key)} is not a key: {fault}")
        if not isinstance(etag, str) or len(etag) > 1024:
            raise ConfigError(f"sample {number}: the etag is not a text of at most 1,024 characters")
        if length == WHOLE and offset != 0:
            raise ConfigError(f"sample {number}: a whole object (length -1) begins at offset 0, not {offset}")
        if offset + max(length, 0) > _INT64_MAX:
            raise ConfigError(f"sample {number}: offset {offset} + length {length} is beyond 2**63")
        return cls(number, key, offset, length, size, etag)


@dataclass(frozen=True)
class Packed:
    """What a packed set stands for: its source's fingerprint, and the steps of the transforms already done."""

    fingerprint: str
    steps: str  # JSON, as of Transforms

    def to_json(self) -> str:
        return json.dumps([self.fingerprint, self.steps])

    @classmethod
    def from_json(cls, text: str) -> Packed:
        data = json.loads(text)
        if not isinstance(data, list) or len(data) != 2 or not all(isinstance(part, str) for part in data):
            raise ValueError("packed must be [fingerprint, steps]")
        if not isinstance(json.loads(data[1]), list):
            raise ValueError("the steps of a packed set are a list")
        return cls(*data)


@dataclass(frozen=True, eq=False)
class Samples:
    """An immutable listing, sorted by (key, offset): a sample's id is its index.

    `keys` and `etags` are Arrow columns, the others NumPy, so ten million samples take about a gigabyte and not ten.
    `sizes` are the bytes of each sample. `num_ignored` counts the objects that were seen and are not samples.
    `packed` is there for samples in serialized shards: they count as those of the set they were made from.
    """

    url: str
    classes: tuple[str, ...]
    keys: pa.LargeStringArray
    offsets: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray
    etags: pa.LargeStringArray
    labels: np.ndarray
    num_ignored: int = 0
    packed: Packed | None = None

    @classmethod
    def build(
        cls,
        url: str,
        classes: Sequence[str],
        *,
        keys: Any,
        sizes: Any,
        etags: Any,
        labels: Any,
        offsets: Any = None,
        lengths: Any = None,
        num_ignored: int = 0,
        packed: Packed | None = None,
    ) -> Samples:
        """Samples from columns in any order (lists, NumPy or Arrow). Without offsets each sample is a whole object."""
        return cls.build_from(url, classes, keys=keys, sizes=sizes, etags=etags, labels=labels, offsets=offsets,
                              lengths=lengths, num_ignored=num_ignored, packed=packed)[0]  # fmt: skip

    @classmethod
    def build_from(
        cls,
        url: str,
        classes: Sequence[str],
        *,
        keys: Any,
        sizes: Any,
        etags: Any,
        labels: Any,
        offsets: Any = None,
        lengths: Any = None,
        num_ignored: int = 0,
        packed: Packed | None = None,
    ) -> tuple[Samples, np.ndarray]:
        """The same, and for each row of the columns the id that it has become."""
        count = len(keys)
        table = pa.table(
            {
                "key": keys,
                "offset": np.zeros(count, np.int64) if offsets is None else offsets,
                "length": np.full(count, WHOLE, np.int64) if lengths is None else lengths,
                "size": sizes,
                "etag": etags,
                "label": labels,
            },
            schema=pa.schema(SCHEMA),
        )
        # The label makes the order total: it matters only where a manifest names one file twice.
        order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in ("key", "offset", "label")])
        ids = np.empty(count, np.int64)
        ids[order.to_numpy()] = np.arange(count)
        return cls._of(table.take(order), url, tuple(classes), num_ignored, packed), ids

    @classmethod
    def _of(
        cls, table: pa.Table, url: str, classes: tuple[str, ...], num_ignored: int, packed: Packed | None
    ) -> Samples:
        def text(name: str) -> pa.LargeStringArray:
            column = table[name].combine_chunks()
            return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

        def numbers(name: str) -> np.ndarray:
            column = np.array(table[name].to_numpy(), dtype=np.int64)
            column.flags.writeable = False
            return column

        return cls(
            url=url,
            classes=classes,
            keys=text("key"),
            offsets=numbers("offset"),
            lengths=numbers("length"),
            sizes=numbers("size"),
            etags=text("etag"),
            labels=numbers("label"),
            num_ignored=num_ignored,
            packed=packed,
        )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Equal for the same data in another store, and for a packed set and its source."""
        return self.packed.fingerprint if self.packed else self.digest

    @cached_property
    def digest(self) -> str:
        """sha256 of keys, offsets, sizes and labels."""
        digest = hashlib.sha256(b"headwater samples 1\n")
        ends = np.frombuffer(self.keys.buffers()[1] or b"", "<i8")[self.keys.offset :][: len(self) + 1]
        digest.update(np.diff(ends).tobytes())
        if len(self):
            digest.update(memoryview(self.keys.buffers()[2])[ends[0] : ends[-1]])
        spans = np.where(self.lengths == WHOLE, self.sizes, self.lengths)
        for column in (self.offsets, spans, self.labels):
            digest.update(column.astype("<i8").tobytes())
        return digest.hexdigest()

    def take(self, ids: Iterable[int]) -> list[SampleRef]:
        """The rows with these ids, in the order asked for."""
        rows = np.fromiter(ids, np.int64)
        for sample in rows[(rows < 0) | (rows >= len(self))][:1]:
            raise ConfigError(f"sample {sample} is not among the {len(self)} of {redact(self.url)}")
        columns = (
            rows.tolist(),
            self.keys.take(pa.array(rows)).to_pylist(),
            self.offsets[rows].tolist(),
            self.lengths[rows].tolist(),
            self.sizes[rows].tolist(),
            self.etags.take(pa.array(rows)).to_pylist(),
        )
        return [SampleRef(*row) for row in zip(*columns, strict=True)]

    def to_table(self) -> pa.Table:
        """The listing as one Arrow table; classes, url and fingerprint go in the schema's metadata."""
        about = {
            "classes": json.dumps(self.classes),
            "url": self.url,
            "fingerprint": self.digest,
            "num_ignored": str(self.num_ignored),
        }
        if self.packed is not None:
            about["packed"] = self.packed.to_json()
        columns = [self.keys, self.offsets, self.lengths, self.sizes, self.etags, self.labels]
        return pa.table(columns, schema=pa.schema(SCHEMA, metadata=about))

    @classmethod
    def from_table(cls, table: pa.Table) -> Samples:
        """The listing from a table that another machine sent: a damaged one is a ConfigError."""
        if table.schema.remove_metadata() != pa.schema(SCHEMA):
            raise ConfigError(f"not a listing of samples: its columns are others than the expected {', '.join(SCHEMA)}")
        try:
            table.validate(full=True)
        except pa.ArrowException as error:
            raise ConfigError(f"not a listing of samples: {error}") from error
        try:
            about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            classes = json.loads(about["classes"])
            url, fingerprint, num_ignored = about["url"], about["fingerprint"], int(about["num_ignored"])
            packed = Packed.from_json(about["packed"]) if "packed" in about else None
        except (KeyError, ValueError, RecursionError) as error:
            raise ConfigError(f"not a listing of samples: bad or missing metadata ({error!r})") from error
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ConfigError("not a listing of samples: the classes are not a list of names")
        if any(column.null_count for column in table.columns):
            raise ConfigError("not a listing of samples: a column has empty cells")
        samples = cls._of(table, url, tuple(classes), num_ignored, packed)
        if samples.digest != fingerprint:
            raise ConfigError(
                f"the listing of {redact(url)} was damaged on its way: fingerprint {samples.digest[:12]}…, "
                f"sent as {fingerprint[:12]}…; send it again"
            )
        return samples
