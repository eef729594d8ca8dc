"""Rows as signed bytes with one scale a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.spec import Boundary, TensorSpec
from headwater.errors import ConfigError


class Int8:
    """A quarter of the bytes."""

    name = "int8"
    error = "absolute error up to 1/254 of the row's largest magnitude"

    def columns(self, spec: TensorSpec) -> Boundary:
        return (TensorSpec(spec.name, spec.shape, "int8"), TensorSpec(f"{spec.name}.scale", (), "float32"))

    def encode(self, rows: npt.NDArray[Any], spec: TensorSpec) -> list[npt.NDArray[Any]]:
        flat = np.asarray(rows, dtype=np.float32).reshape(len(rows), spec.num_items)
        largest = np.max(np.abs(flat), axis=1, initial=0.0)
        if not np.all(np.isfinite(largest)):
            raise ConfigError(f"{spec.name}: int8 has no infinity and no NaN; use codec raw")
        # A denormal scale would divide to infinity; such rows are zero for any practical purpose.
        scale = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny).astype(np.float32)
        return [np.rint(flat / scale[:, None]).astype(np.int8), scale]

    def decode(self, columns: Sequence[npt.NDArray[Any]], spec: TensorSpec) -> npt.NDArray[Any]:
        values, scale = columns
        with np.errstate(over="ignore", invalid="ignore"):  # whoever sent such a scale; no encoder of ours does
            flat = values.reshape(len(scale), spec.num_items).astype(np.float32)
            flat *= scale.reshape(-1, 1)
        return flat.astype(spec.dtype, copy=False).reshape(-1, *spec.shape)
