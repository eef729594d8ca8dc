"""VerticalFlip: swap top and bottom, sometimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.transforms.op import PictureOp, check_probability


@dataclass(frozen=True)
class VerticalFlip(PictureOp):
    """Mirrored with probability `p`."""

    is_random: ClassVar[bool] = True

    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability(self)

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if draw.uniform() < self.p else image
