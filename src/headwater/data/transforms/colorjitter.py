"""ColorJitter: random brightness, contrast, saturation and hue, in random order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image, ImageEnhance

from headwater.core.draw import Draw
from headwater.data.transforms.op import PictureOp, check_range, is_number, set_field

Range = tuple[float, float] | None


@dataclass(frozen=True)
class ColorJitter(PictureOp):
    """Brightness, contrast, saturation and hue changed by random factors, in random order. Each is a range of factors
    (min, max), or one number x for 1 - x … 1 + x (hue: -x … x); None leaves it as it is."""

    is_random: ClassVar[bool] = True

    brightness: float | Range = None
    contrast: float | Range = None
    saturation: float | Range = None
    hue: float | Range = None

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            self._normal(name, centre=1.0)
        self._normal("hue", centre=0.0)

    def _normal(self, name: str, centre: float) -> None:
        value = getattr(self, name)
        low, high = (0.0, float("inf")) if centre else (-0.5, 0.5)
        if is_number(value, 0):
            set_field(self, name, (max(centre - value, 0.0) if centre else -float(value), centre + value))
        if getattr(self, name) is not None:
            check_range(self, name, low, high)
        if getattr(self, name) == (centre, centre):
            set_field(self, name, None)

    def factors(self, draw: Draw) -> tuple[list[int], list[float | None]]:
        """The order of the four changes, then their factors. None: not asked for."""
        order = draw.permutation(4)
        ranges = (self.brightness, self.contrast, self.saturation, self.hue)
        return order, [draw.uniform(*span) if isinstance(span, tuple) else None for span in ranges]

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        order, factors = self.factors(draw)
        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for change in order:
            factor = factors[change]
            if factor is not None:
                image = _turn_hue(image, factor) if change == 3 else enhancers[change](image).enhance(factor)
        return image


def _turn_hue(image: Image.Image, factor: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    # The hue is a circle of 256 steps: adding wraps around.
    turned = np.asarray(hue) + np.int32(factor * 255).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
