"""How a row's tensors are written on the wire.

Owns the table of codecs. A codec turns an array of rows into columns and back; integer tensors (pixels, token ids)
always go as they are. Adding one takes a file here and a line in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from headwater.core.codecs.bf16 import Bf16
from headwater.core.codecs.fp16 import Fp16
from headwater.core.codecs.int8 import Int8
from headwater.core.codecs.raw import Raw
from headwater.core.spec import Boundary, TensorSpec
from headwater.errors import ConfigError

Array = npt.NDArray[Any]


class Codec(Protocol):
    """Turns floating-point rows into columns and back."""

    name: str
    error: str  # what it costs, in words; "exact" if nothing

    def columns(self, spec: TensorSpec) -> Boundary:
        """What one tensor becomes on the wire."""

    def encode(self, rows: Array, spec: TensorSpec) -> list[Array]:
        """Rows (batch first) to one array per column."""

    def decode(self, columns: Sequence[Array], spec: TensorSpec) -> Array:
        """The way back; the result has the spec's shape and element type."""


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Raw(), Fp16(), Bf16(), Int8())}
_RAW = CODECS["raw"]


def codec_for(name: str, spec: TensorSpec) -> Codec:
    """The codec that this tensor travels with when the plan says `name`."""
    if name not in CODECS:
        raise ConfigError(f"codec {name!r} is not one of {', '.join(CODECS)}")
    return CODECS[name] if spec.dtype in ("float32", "float64") else _RAW


def wire_columns(name: str, boundary: Boundary) -> Boundary:
    """Every column that a row of this boundary becomes."""
    return tuple(column for spec in boundary for column in codec_for(name, spec).columns(spec))


def wire_row_bytes(name: str, boundary: Boundary) -> int:
    """Bytes of one encoded row."""
    return sum(column.row_bytes for column in wire_columns(name, boundary))


def encode(name: str, tensors: Sequence[Array], boundary: Boundary) -> list[Array]:
    """Rows of every tensor of a boundary to columns, in the order of `wire_columns`."""
    return [
        column
        for rows, spec in zip(tensors, boundary, strict=True)
        for column in codec_for(name, spec).encode(rows, spec)
    ]


def decode(name: str, columns: Sequence[Array], boundary: Boundary) -> list[Array]:
    """The way back from `encode`."""
    tensors, start = [], 0
    for spec in boundary:
        codec = codec_for(name, spec)
        stop = start + len(codec.columns(spec))
        tensors.append(codec.decode(columns[start:stop], spec))
        start = stop
    return tensors
