"""Pad: a border of one colour."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.transforms.op import PictureOp, Size, check_constant, check_fill, check_padding, expand


@dataclass(frozen=True)
class Pad(PictureOp):
    """A border of the colour `fill` (an int, or red, green and blue). `padding` is an int, (left and right, top and
    bottom), or (left, top, right, bottom)."""

    padding: int | tuple[int, ...]
    fill: int | tuple[int, int, int] = 0
    padding_mode: str = "constant"

    def __post_init__(self) -> None:
        check_padding(self)
        check_fill(self)
        check_constant(self)

    def size_after(self, size: Size | None) -> Size | None:
        assert isinstance(self.padding, tuple)
        left, top, right, bottom = self.padding
        return None if size is None else (size[0] + top + bottom, size[1] + left + right)

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        assert isinstance(self.padding, tuple)
        return expand(image, self.padding, self.fill)
