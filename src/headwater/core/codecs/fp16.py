"""Rows as IEEE half precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.spec import Boundary, TensorSpec
from headwater.errors import ConfigError


class Fp16:
    """Half the bytes; refuses values that half precision can't hold."""

    name = "fp16"
    error = "relative error up to 2^-11, for values from 6.1e-5 to 65504"

    def columns(self, spec: TensorSpec) -> Boundary:
        return (TensorSpec(spec.name, spec.shape, "float16"),)

    def encode(self, rows: npt.NDArray[Any], spec: TensorSpec) -> list[npt.NDArray[Any]]:
        largest = float(np.max(np.abs(rows), initial=0.0))
        if not np.isfinite(largest):  # infinity and NaN travel as they are, and must not hide what is beside them
            largest = float(np.max(np.abs(rows), initial=0.0, where=np.isfinite(rows)))
        if largest > 65504.0:
            raise ConfigError(f"{spec.name}: {largest:.3g} is more than fp16 can hold (65504); use codec bf16 or raw")
        return [np.ascontiguousarray(rows, dtype=np.float16)]

    def decode(self, columns: Sequence[npt.NDArray[Any]], spec: TensorSpec) -> npt.NDArray[Any]:
        return columns[0].astype(spec.dtype).reshape(-1, *spec.shape)
