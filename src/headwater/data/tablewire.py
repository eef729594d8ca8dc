"""What trainer and node say to each other about embedding tables: one message form, its limits and its checks.

Owns the form: the length of a header, the header (JSON), then arrays one after the other. The header's `arrays` names
them with type and shape. A message is read without copying, into plain data or a ConfigError.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headwater.core.bags import Bags
from headwater.core.form import shown
from headwater.core.spec import ITEM_BYTES
from headwater.core.table import TableSpec
from headwater.data.wire import PROTOCOL
from headwater.errors import ConfigError

ACTION = "table"  # of Flight
UNKNOWN_BATCH = "unknown batch"  # in the text of a RefusedError: stage it again, then ask again
UNKNOWN_TABLE = "unknown table"  # the same: open it again
MAX_MESSAGE_BYTES = 256 << 20
MAX_IDS = 1 << 21  # of one message
MAX_POOLED_BYTES = 1 << 30  # of the vectors behind its ids, which lie side by side while they are added up
_LENGTH = struct.Struct("<I")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_HEADER_BYTES = 1 << 16
_DTYPES = ("int32", "int64", "float32", "float64")


def pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """A message."""
    given = {name: np.ascontiguousarray(each) for name, each in (arrays or {}).items()}
    listed = [[name, each.dtype.name, list(each.shape)] for name, each in given.items()]
    head = json.dumps({"protocol": PROTOCOL, **header, "arrays": listed}, separators=(",", ":")).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % 8)  # arrays begin where they may be read in place
    return b"".join([_LENGTH.pack(len(head)), head, *(each.data.cast("B") if each.size else b""
                                                      for each in given.values())])  # fmt: skip


def unpack(message: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a message that anybody may have sent."""
    data = memoryview(message)
    if not _LENGTH.size <= len(data) <= MAX_MESSAGE_BYTES:
        raise ConfigError(f"a message about a table has {len(data):,} bytes; the limit is {MAX_MESSAGE_BYTES:,}: use "
                          "smaller batches")  # fmt: skip
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    if length > min(_MAX_HEADER_BYTES, len(data) - _LENGTH.size):
        raise ConfigError(f"the header of a message about a table has {length:,} bytes, more than there are, or may be")
    try:
        header = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    except (ValueError, RecursionError) as error:
        raise ConfigError("the header of a message about a table is not JSON") from error
    if not isinstance(header, dict) or header.get("protocol") != PROTOCOL:
        found = header.get("protocol") if isinstance(header, dict) else header
        raise ConfigError(f"a message about a table speaks protocol {shown(found)}; this is {PROTOCOL}")
    listed, arrays, place = header.pop("arrays", None), {}, _LENGTH.size + length
    if not isinstance(listed, list) or len(listed) > 8:
        raise ConfigError("a message about a table lists its arrays, 8 at most")
    for entry in listed:
        name, dtype, shape = _array(entry)
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if num_bytes > len(data) - place:
            raise ConfigError(f"array {name} is cut short: {num_bytes:,} bytes, and {len(data) - place:,} are there")
        arrays[name] = np.frombuffer(data[place : place + num_bytes], dtype).reshape(shape)
        place += num_bytes
    if place != len(data):
        raise ConfigError(f"a message about a table has {len(data) - place:,} bytes too many")
    return header, arrays


def _array(entry: object) -> tuple[str, str, tuple[int, ...]]:
    if isinstance(entry, list) and len(entry) == 3:
        name, dtype, shape = entry
        sizes = shape if isinstance(shape, list) and len(shape) <= 2 else [None]
        right = all(type(size) is int and 0 <= size <= MAX_MESSAGE_BYTES for size in sizes)
        if isinstance(name, str) and dtype in _DTYPES and right:
            return name[:40], dtype, tuple(sizes)
    raise ConfigError(f"an array of a message about a table is named with type and shape, not {shown(entry)}")


def whole(header: Mapping[str, Any], name: str, low: int = 0, high: int = 2**62) -> int:
    """A whole number that a message must have."""
    value = header.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number from {low} to {high}")
    return value


def number(header: Mapping[str, Any], name: str, most: float) -> float:
    """A number of which only the size is limited."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -most <= value <= most:  # NaN fails, too
        raise ConfigError(f"{name} is {shown(value)}; it must be a number between -{most:g} and {most:g}")
    return float(value)


def text(header: Mapping[str, Any], name: str) -> str:
    """A name: it becomes part of files' names."""
    value = header.get(name)
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{name} is {shown(value)}; it must be a name of letters, digits, '.', '_' and '-', at most 64"
        )
    return value


def bags_arrays(bags: Bags) -> dict[str, np.ndarray]:
    """Bags as arrays of a message, in 32 bits where that is enough."""
    small = not len(bags.ids) or int(bags.ids.max()) < 2**31
    arrays = {"lengths": bags.lengths.astype(np.int32), "ids": bags.ids.astype(np.int32) if small else bags.ids}
    return arrays if bags.weights is None else {**arrays, "weights": bags.weights}


def bags_of(arrays: Mapping[str, np.ndarray], spec: TableSpec, part: int) -> Bags:
    """Bags from a message, found to be of this part of the table."""
    ids, lengths = (places(arrays, name) for name in ("ids", "lengths"))
    # Each by itself before their sum, which may run over; NumPy would repeat a bag that often, wherever that ends.
    right = not len(lengths) or (lengths.min() >= 1 and lengths.max() <= len(ids))
    if len(ids) > MAX_IDS or not right or lengths.sum() != len(ids):
        raise ConfigError(f"{len(lengths):,} bags and {len(ids):,} ids don't fit; no bag is empty, and there are "
                          f"{MAX_IDS:,} ids at most: use smaller batches")  # fmt: skip
    if (num_bytes := len(ids) * spec.vector_bytes) > MAX_POOLED_BYTES:
        raise ConfigError(f"{len(ids):,} ids in one message stand for {num_bytes / 1e9:,.3g} GB of vectors; the limit "
                          f"is {MAX_POOLED_BYTES / 1e9:,.3g} GB: use smaller batches")  # fmt: skip
    check_places(ids, spec, part)
    weights = arrays.get("weights")
    if weights is not None and (weights.dtype != spec.dtype or weights.shape != ids.shape):
        raise ConfigError(f"weights are {weights.dtype} {weights.shape}; there must be one {spec.dtype} for each id")
    return Bags(ids, lengths, weights)


def places(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A list of whole numbers."""
    values = arrays.get(name)
    if values is None or values.ndim != 1 or values.dtype.kind != "i":
        raise ConfigError(f"a message about a table lacks {name}, a list of whole numbers")
    return values.astype(np.int64, copy=False)


def check_places(ids: np.ndarray, spec: TableSpec, part: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < spec.num_in(part)):
        raise ConfigError(
            f"places {ids.min()} to {ids.max()} were asked for; this part has {spec.num_in(part):,} vectors"
        )


def vectors_of(arrays: Mapping[str, np.ndarray], name: str, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Numbers of one type and shape."""
    values = arrays.get(name)
    if values is None or values.shape != tuple(shape) or values.dtype != dtype:
        found = "none" if values is None else f"{values.dtype} {values.shape}"
        raise ConfigError(f"{name} must be {dtype} {tuple(shape)}, and came as {found}")
    return values
