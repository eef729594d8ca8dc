"""Decode: from bytes to a picture. The first step of every chain; it is put there if it is not written."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.data.decode import MAX_PIXELS
from headwater.data.transforms.op import Op, is_int


@dataclass(frozen=True)
class Decode(Op):
    """How pictures are decoded; see `headwater.data.decode.decode`.

    `exif=False` leaves a picture as it is stored, as torchvision's ImageFolder does; True turns it upright.
    """

    exif: bool = False
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if not isinstance(self.exif, bool):
            raise self.fault("exif", "true or false")
        if not is_int(self.max_pixels, 1, MAX_PIXELS):
            raise self.fault("max_pixels", f"an int from 1 to {MAX_PIXELS:,}, where Pillow refuses")
