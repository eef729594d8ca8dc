"""Resize: to a given height and width, or the short side to a given length."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.decode import MAX_PIXELS
from headwater.data.transforms.op import (
    INTERPOLATIONS,
    MAX_SIDE,
    PictureOp,
    Size,
    check_interpolation,
    check_size,
    is_int,
)


@dataclass(frozen=True)
class Resize(PictureOp):
    """torchvision's Resize on pictures, which is always antialiased.

    An int is the length of the short side, and the long one follows; it is then held to `max_size` if that is given.
    """

    size: int | Size
    interpolation: str = "bilinear"
    max_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, int):
            if not is_int(self.size, 1):
                raise self.fault("size", f"from 1 to {MAX_SIDE:,}")
        else:
            check_size(self)
        check_interpolation(self)
        if self.max_size is not None:
            if not isinstance(self.size, int):
                raise self.fault("max_size", "left out where both height and width are given")
            if not is_int(self.max_size, self.size + 1):
                raise self.fault("max_size", f"an int above size ({self.size}) and at most {MAX_SIDE:,}")

    def size_after(self, size: Size | None) -> Size | None:
        if not isinstance(self.size, int):
            return self.size
        return None if size is None else self.target(*size)

    def target(self, height: int, width: int) -> Size:
        """The new (height, width) of a picture. Rounds as torchvision does: down."""
        if not isinstance(self.size, int):
            return self.size
        short, long = min(height, width), max(height, width)
        new_short, new_long = self.size, int(self.size * long / short)
        if self.max_size is not None and new_long > self.max_size:
            new_short, new_long = int(self.max_size * new_short / new_long), self.max_size
        return (new_long, new_short) if width <= height else (new_short, new_long)

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        height, width = self.target(image.height, image.width)
        if not 0 < height * width <= MAX_PIXELS:
            raise ValueError(
                f"{image.width}×{image.height} would become {width}×{height} pixels (limit {MAX_PIXELS:,}); "
                "give Resize both height and width, or a max_size"
            )
        if (width, height) == image.size:
            return image
        return image.resize((width, height), INTERPOLATIONS[self.interpolation])
