"""Normalize: subtract a mean and divide by a deviation, for each channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.data.transforms.op import ValueOp, is_number, set_field


@dataclass(frozen=True)
class Normalize(ValueOp):
    """(value - mean) / std in float32, in this order, as torchvision does. One number stands for three."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            three = (value,) * 3 if isinstance(value, int | float) else value
            if isinstance(three, tuple | list) and len(three) == 1:
                three = tuple(three) * 3
            is_three = isinstance(three, tuple | list) and len(three) == 3
            if not is_three or not all(is_number(part, -3.4e38, 3.4e38) for part in three):
                raise self.fault(name, "three finite numbers (red, green, blue)")
            set_field(self, name, tuple(float(part) for part in three))
        if not all(np.float32(part) > 0 for part in self.std):
            raise self.fault("std", "above 0")

    def apply(self, values: np.ndarray, channel: int) -> None:
        np.subtract(values, np.float32(self.mean[channel]), out=values)
        np.divide(values, np.float32(self.std[channel]), out=values)
