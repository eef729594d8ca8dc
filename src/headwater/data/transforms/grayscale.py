"""Grayscale: three equal channels."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.transforms.op import PictureOp


@dataclass(frozen=True)
class Grayscale(PictureOp):
    """Grey by Pillow's weights (ITU-R 601-2). Rows always have three channels, so only 3 is allowed."""

    num_output_channels: int = 3

    def __post_init__(self) -> None:
        if self.num_output_channels != 3:
            raise self.fault("num_output_channels", "3: rows have three channels; take the first one in the model")

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        grey = image.convert("L")
        return Image.merge("RGB", (grey, grey, grey))
