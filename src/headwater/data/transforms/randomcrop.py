"""RandomCrop: a part of fixed size at a random place, after padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.transforms.op import PictureOp, Size, check_constant, check_fill, check_padding, check_size, expand


@dataclass(frozen=True)
class RandomCrop(PictureOp):
    """A part of `size` at a random place, after padding. `padding` is an int, (left and right, top and bottom), or
    (left, top, right, bottom)."""

    is_random: ClassVar[bool] = True

    size: int | Size
    padding: int | tuple[int, ...] = 0
    fill: int | tuple[int, int, int] = 0
    padding_mode: str = "constant"

    def __post_init__(self) -> None:
        check_size(self)
        check_padding(self)
        check_fill(self)
        check_constant(self)

    def size_after(self, size: Size | None) -> Size | None:
        assert isinstance(self.size, tuple)
        return self.size

    def corner(self, height: int, width: int, draw: Draw) -> tuple[int, int]:
        """(top, left) of the part in a padded picture."""
        assert isinstance(self.size, tuple)
        if height < self.size[0] or width < self.size[1]:
            raise ValueError(
                f"the picture has {width}×{height} pixels with its padding, the crop {self.size[1]}×{self.size[0]}; "
                "resize first, or pad more"
            )
        if (height, width) == self.size:
            return 0, 0
        return draw.integer(0, height - self.size[0] + 1), draw.integer(0, width - self.size[1] + 1)

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        assert isinstance(self.size, tuple)
        assert isinstance(self.padding, tuple)
        if any(self.padding):
            image = expand(image, self.padding, self.fill)
        top, left = self.corner(image.height, image.width, draw)
        return image.crop((left, top, left + self.size[1], top + self.size[0]))
