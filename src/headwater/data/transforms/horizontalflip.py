"""HorizontalFlip: swap left and right, sometimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.transforms.op import PictureOp, check_probability


@dataclass(frozen=True)
class HorizontalFlip(PictureOp):
    """Left and right swapped, with probability `p`."""

    is_random: ClassVar[bool] = True

    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability(self)

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.uniform() < self.p else image
