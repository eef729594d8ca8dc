"""Rows as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.spec import Boundary, TensorSpec


class Raw:
    """The bits themselves."""

    name = "raw"
    error = "exact"

    def columns(self, spec: TensorSpec) -> Boundary:
        return (spec,)

    def encode(self, rows: npt.NDArray[Any], spec: TensorSpec) -> list[npt.NDArray[Any]]:
        return [np.ascontiguousarray(rows)]

    def decode(self, columns: Sequence[npt.NDArray[Any]], spec: TensorSpec) -> npt.NDArray[Any]:
        return columns[0].reshape(-1, *spec.shape)
