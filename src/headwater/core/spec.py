"""What crosses a boundary: names, shapes, element types, bytes.

Owns `TensorSpec`. A spec is known before anything runs, so a plan can be checked and costed without data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        try:
            return cls(str(data["name"]), tuple(int(size) for size in data["shape"]), str(data["dtype"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a tensor spec (name, shape, dtype): {data!r}") from error

    def __str__(self) -> str:
        return f"{self.name}[{'×'.join(map(str, self.shape)) or 'scalar'}] {self.dtype}"


Boundary = tuple[TensorSpec, ...]


def row_bytes(boundary: Boundary) -> int:
    """Bytes that one row of the boundary takes, uncompressed."""
    return sum(spec.row_bytes for spec in boundary)
