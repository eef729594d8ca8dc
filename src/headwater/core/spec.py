"""What crosses a boundary: names, shapes, element types, bytes.

Owns `TensorSpec`. A spec is known before anything runs, so a plan can be checked and costed without data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.core.form import shown
from headwater.errors import ConfigError

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}

MAX_DIMS = 32  # NumPy's limit before 2.0, beyond any model's
MAX_SIDE = 2**31 - 1
MAX_NAME = 500  # characters
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON has them, no text does


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one row: `shape` leaves the batch dimension out."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"{self.name}: element type {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise ConfigError(f"{self.name}: shape {self.shape} has a negative size")

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, uncompressed."""
        return self.num_items * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        """From data that another machine sent: everything about it is checked."""
        if isinstance(data, Mapping):
            name, shape, dtype = (data.get(field) for field in ("name", "shape", "dtype"))
            sizes: Any = shape if isinstance(shape, list | tuple) and len(shape) <= MAX_DIMS else [None]
            whole = all(type(size) is int and size <= MAX_SIDE for size in sizes)
            if isinstance(name, str) and isinstance(dtype, str) and whole and not _SURROGATE.search(name):
                return cls(name[:MAX_NAME], tuple(sizes), dtype[:MAX_NAME])
        raise ConfigError(f"not a tensor spec (name in text, shape of at most {MAX_DIMS} sizes, dtype): {shown(data)}")

    def __str__(self) -> str:
        return f"{self.name}[{'×'.join(map(str, self.shape)) or 'scalar'}] {self.dtype}"


Boundary = tuple[TensorSpec, ...]


def row_bytes(boundary: Boundary) -> int:
    """Bytes that one row of the boundary takes, uncompressed."""
    return sum(spec.row_bytes for spec in boundary)
