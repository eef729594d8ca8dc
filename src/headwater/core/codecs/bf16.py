"""Rows as bfloat16: the upper half of a float32, rounded to nearest even."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.spec import Boundary, TensorSpec


class Bf16:
    """Half the bytes and the full range of float32."""

    name = "bf16"
    error = "relative error up to 2^-8"

    def columns(self, spec: TensorSpec) -> Boundary:
        return (TensorSpec(spec.name, spec.shape, "bfloat16"),)

    def encode(self, rows: npt.NDArray[Any], spec: TensorSpec) -> list[npt.NDArray[Any]]:
        """The bits as uint16, since NumPy has no bfloat16."""
        bits = np.ascontiguousarray(rows, dtype=np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # Rounding up may carry a NaN's payload into infinity; a quiet NaN stays one.
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return [np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)]

    def decode(self, columns: Sequence[npt.NDArray[Any]], spec: TensorSpec) -> npt.NDArray[Any]:
        bits = columns[0].astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).astype(spec.dtype, copy=False).reshape(-1, *spec.shape)
