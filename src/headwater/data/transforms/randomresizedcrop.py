"""RandomResizedCrop: a random part of a picture, brought to a fixed size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.transforms.op import (
    INTERPOLATIONS,
    PictureOp,
    Size,
    check_interpolation,
    check_range,
    check_size,
)

_TRIES = 10  # torchvision's number
_MAX = 1e6  # of scale and ratio: what is beyond gives no part of any picture


@dataclass(frozen=True)
class RandomResizedCrop(PictureOp):
    """A random part with a share of the area within `scale` and an aspect within `ratio`, resized to `size`."""

    is_random: ClassVar[bool] = True

    size: int | Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        check_size(self)
        check_range(self, "scale", 0.0, _MAX)
        check_range(self, "ratio", 1 / _MAX, _MAX)
        check_interpolation(self)

    def size_after(self, size: Size | None) -> Size | None:
        assert isinstance(self.size, tuple)
        return self.size

    def box(self, height: int, width: int, draw: Draw) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the part: ten tries with a log-uniform aspect, then the middle."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_TRIES):
            area = height * width * draw.uniform(*self.scale)
            aspect = math.exp(draw.uniform(low, high))
            box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < box_width <= width and 0 < box_height <= height:
                top = draw.integer(0, height - box_height + 1)
                left = draw.integer(0, width - box_width + 1)
                return top, left, box_height, box_width
        box_height, box_width = height, width
        if width / height < self.ratio[0]:
            box_height = max(1, round(width / self.ratio[0]))
        elif width / height > self.ratio[1]:
            box_width = max(1, round(height * self.ratio[1]))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        assert isinstance(self.size, tuple)
        top, left, height, width = self.box(image.height, image.width, draw)
        # Crop first: resize(box=…) would let pixels outside of the box into the filter.
        part = image.crop((left, top, left + width, top + height))
        if part.size == self.size[::-1]:
            return part
        return part.resize(self.size[::-1], INTERPOLATIONS[self.interpolation])
