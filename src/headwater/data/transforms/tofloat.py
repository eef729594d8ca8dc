"""ToFloat: from 0 … 255 to floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.data.transforms.op import ValueOp


@dataclass(frozen=True)
class ToFloat(ValueOp):
    """`scale` says how 0 … 255 becomes 0 … 1, for the two ways differ in the last bit:

    "div" divides by 255 (torchvision's ToTensor, the weights' presets, v1 ConvertImageDtype); "mul" multiplies by
    1/255 (v2.ToDtype(scale=True)); "none" keeps 0 … 255 (v2.ToDtype(scale=False), timm's own ToTensor).
    """

    scale: str = "div"

    def __post_init__(self) -> None:
        if self.scale not in ("div", "mul", "none"):
            raise self.fault("scale", '"div" (÷ 255), "mul" (× 1/255) or "none"')

    def apply(self, values: np.ndarray, channel: int) -> None:
        if self.scale == "div":
            np.divide(values, np.float32(255), out=values)
        elif self.scale == "mul":
            np.multiply(values, np.float32(1 / 255), out=values)
