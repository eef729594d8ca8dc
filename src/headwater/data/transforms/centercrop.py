"""CenterCrop: the middle of a picture."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from headwater.core.draw import Draw
from headwater.data.transforms.op import PictureOp, Size, check_size, expand


@dataclass(frozen=True)
class CenterCrop(PictureOp):
    """The middle `size` (an int, or height and width). A smaller picture is padded with black, as in torchvision."""

    size: int | Size

    def __post_init__(self) -> None:
        check_size(self)

    def size_after(self, size: Size | None) -> Size | None:
        assert isinstance(self.size, tuple)
        return self.size

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        assert isinstance(self.size, tuple)
        height, width = self.size
        across, down = max(width - image.width, 0), max(height - image.height, 0)
        if across or down:
            border = (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2)
            image = expand(image, border, (0, 0, 0))
        # round() takes halves to the even number, and torchvision takes them there too.
        top, left = round((image.height - height) / 2), round((image.width - width) / 2)
        return image.crop((left, top, left + width, top + height))
