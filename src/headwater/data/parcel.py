"""Messages with tensors: what goes both ways while a prefix is trained on nodes.

Owns `Parcel`: a kind, some words as JSON, and named arrays, each as one value of a binary column. Both sides read what
the other sends as a stranger's: kinds, names, shapes and bytes are checked before anything is made of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.core import codecs
from headwater.core.form import shown
from headwater.core.spec import ITEM_BYTES, Boundary, TensorSpec
from headwater.core.unpacked import most_values
from headwater.errors import ConfigError, DamagedError, RefusedError

TRAINING = 1  # the version of what is said in these messages
MAX_PARCEL_BYTES = (1 << 31) - (1 << 20)  # Flight sends no message of more than 2 GiB
MAX_ARRAYS = 20_000

SCHEMA = pa.schema([pa.field("values", pa.large_binary(), nullable=False)])
_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"([a-z]{1,40})"')  # how the words of a message begin


@dataclass(frozen=True)
class Words:
    """How many words a message may have. What they take in memory is bounded by their values, not by their bytes."""

    max_bytes: int
    max_values: int


PLAIN = Words(1 << 20, 1 << 14)  # of any message but those that are named
OPENING = Words(16 << 20, 1 << 20)  # the graph of a prefix
_AN_ARRAY = Words(1 << 10, 32)  # more for each array: its name, type and shape


@dataclass(frozen=True)
class Parcel:
    """One message."""

    kind: str
    about: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.arrays.values())

    def to_batch(self) -> tuple[pa.RecordBatch, bytes]:
        """As the wire has it; a single array is not copied. RefusedError if it is too large for the wire."""
        if self.num_bytes > MAX_PARCEL_BYTES:
            raise RefusedError(f"{self.kind}: {self.num_bytes / 1e9:.2f} GB in one message, and the wire takes "
                               f"{MAX_PARCEL_BYTES / 1e9:.2f} GB; use smaller batches, more micro_batches or nodes, or "
                               "a cut that less crosses")  # fmt: skip
        arrays = {name: np.ascontiguousarray(each) for name, each in self.arrays.items()}
        specs = [TensorSpec(name, each.shape, str(each.dtype)).to_json() for name, each in arrays.items()]
        said = {"kind": self.kind, "about": self.about, "arrays": specs}
        pieces = [each.reshape(-1).view(np.uint8) for each in arrays.values()]
        ends = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=np.int64)
        data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
        column = pa.Array.from_buffers(pa.large_binary(), len(pieces), [None, pa.py_buffer(ends), pa.py_buffer(data)])
        return pa.RecordBatch.from_arrays([column], schema=SCHEMA), json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch | None, metadata: bytes, words: Mapping[str, Words] = {}) -> Parcel:
        """The way back; DamagedError if it is no parcel. Arrays look into the batch, and can't be written to. `words`
        are those that messages of some kinds may have; others are `PLAIN`."""
        if batch is None or not batch.schema.equals(SCHEMA, check_metadata=False):
            raise DamagedError("a message came in another form than that of a parcel")
        begins = _check_words(metadata, batch.num_rows, words)
        try:
            said = json.loads(metadata)
            kind, about, listed = said["kind"], said["about"], said["arrays"]
            batch.validate(full=True)
        except (ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
            raise DamagedError(f"a message can't be read: {str(error)[:200]}") from error
        if not isinstance(kind, str) or not isinstance(about, dict) or not isinstance(listed, list):
            raise DamagedError("a message has no kind, or no words")
        if begins in words and kind != begins:
            raise DamagedError(f"a message is of kind {shown(kind)} and began as {begins}")
        column = batch.column(0)
        if column.null_count or not len(listed) == len(column) <= MAX_ARRAYS:
            raise DamagedError(f"a message names {len(listed)} arrays and has {len(column)}")
        arrays: dict[str, np.ndarray] = {}
        for place, each in enumerate(listed):
            try:
                spec = TensorSpec.from_json(each)
            except ConfigError as error:
                raise DamagedError(f"a message's array {place}: {error}") from None
            value = column[place].as_buffer()
            if spec.name in arrays or spec.dtype == "bfloat16" or value.size != spec.row_bytes:
                raise DamagedError(f"a message's array {shown(spec.name)} has {value.size:,} bytes; {spec} has "
                                   f"{spec.row_bytes:,}")  # fmt: skip
            try:
                arrays[spec.name] = np.frombuffer(value, spec.dtype).reshape(spec.shape)
            except ValueError:  # beside a size of 0 the others may be anything
                raise DamagedError(f"a message's array {shown(spec.name)} has a shape that no array has") from None
        return cls(kind, about, arrays)

    def number(self, name: str, low: int = 0, high: int = 2**63 - 1) -> int:
        """A whole number that it must have among its words."""
        value = self.about.get(name)
        if type(value) is not int or not low <= value <= high:
            raise DamagedError(f"{self.kind}: {name} is {shown(value)}; it must be a whole number from {low} to {high}")
        return value

    def array(self, name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
        """An array that it must have, of this form."""
        found = self.arrays.get(name)
        if found is None or found.shape != tuple(shape) or str(found.dtype) != dtype:
            form = "missing" if found is None else f"{list(found.shape)} {found.dtype}"
            raise DamagedError(f"{self.kind}: {name} is {form}; it must be {list(shape)} {dtype}")
        return found


def _check_words(metadata: bytes, num_arrays: int, words: Mapping[str, Words]) -> str:
    """The kind that a message begins with; DamagedError if it has more words than one of that kind may have. Before
    these are read."""
    found = _KIND.match(metadata[:256])
    kind = found[1].decode() if found else ""
    most, num_arrays = words.get(kind, PLAIN), min(num_arrays, MAX_ARRAYS)
    max_bytes = most.max_bytes + num_arrays * _AN_ARRAY.max_bytes
    max_values = most.max_values + num_arrays * _AN_ARRAY.max_values
    if len(metadata) > max_bytes or (num := most_values(metadata)) > max_values:
        has = f"{len(metadata):,} bytes" if len(metadata) > max_bytes else f"up to {num:,} values"
        raise DamagedError(f"a message that begins as {shown(kind)} has words of {has}; {max_bytes:,} bytes and "
                           f"{max_values:,} values are the limit: use smaller batches, more micro_batches or an "
                           "earlier cut")  # fmt: skip
    return kind


def pack_rows(codec: str, boundary: Boundary, tensors: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Rows of a boundary as arrays of a parcel."""
    columns = codecs.encode(codec, tensors, boundary)
    return {f"{place}": each.view(np.int16) if each.dtype == np.uint16 else each for place, each in enumerate(columns)}


def unpack_rows(codec: str, boundary: Boundary, parcel: Parcel, num_rows: int) -> list[np.ndarray]:
    """The way back; DamagedError if these are other rows."""
    columns = []
    for place, spec in enumerate(codecs.wire_columns(codec, boundary)):
        dtype = "int16" if spec.dtype == "bfloat16" else spec.dtype  # NumPy has no bfloat16: its bits
        found = parcel.arrays.get(f"{place}")
        wanted = num_rows * math.prod(spec.shape)
        if (
            found is None
            or str(found.dtype) != dtype
            or found.size != wanted
            or (found.ndim and len(found) != num_rows)
        ):
            raise DamagedError(f"{parcel.kind}: rows came in another form than {num_rows} of {spec}")
        assert found.itemsize == ITEM_BYTES[spec.dtype]
        columns.append(found.view(np.uint16) if spec.dtype == "bfloat16" else found)
    return [np.asarray(each).reshape(num_rows, *spec.shape)
            for each, spec in zip(codecs.decode(codec, columns, boundary), boundary, strict=True)]  # fmt: skip


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Of named arrays: equal only if all of them are, bit by bit."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        each = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {each.dtype} {list(each.shape)}\n".encode())
        total.update(each.reshape(-1).view(np.uint8).data)
    return total.hexdigest()
