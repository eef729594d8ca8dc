"""What a transform is: a frozen dataclass whose fields are plain data.

Owns the kinds, `PictureOp` (picture to picture, before the numbers), `ValueOp` (0 … 255 to a float, one channel at a
time) and `TextOp` (text to whole numbers), their JSON form, and the checks of fields that several of them share. May
import `headwater.errors`, `headwater.core` and `headwater.data.decode`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageOps

from headwater.core.draw import Draw
from headwater.core.form import shown
from headwater.core.spec import TensorSpec
from headwater.data.decode import MAX_PIXELS
from headwater.errors import TransformError

Size = tuple[int, int]  # height, width

MAX_SIDE = 65_500  # the longest side a JPEG can have
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "lanczos": Image.Resampling.LANCZOS,
}


class Op:
    """The JSON form of a transform: its class name under "op", then its fields."""

    def to_json(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {"op": type(self).__name__} | {field.name: _plain(getattr(self, field.name)) for field in fields}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Op:
        known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in fields:
            if name not in known:
                allowed = ", ".join(known) or "no field"
                raise TransformError(f"{cls.__name__}: unknown field {str(name)[:50]!r}; it has {allowed}")
        for name, field in known.items():
            if name not in fields and field.default is dataclasses.MISSING:
                raise TransformError(f"{cls.__name__}: field {name!r} is missing")
        return cls(**fields)

    def fault(self, field: str, allowed: str) -> TransformError:
        """The error for a field with a value that is not allowed."""
        value = getattr(self, field)
        is_flat = isinstance(value, list | tuple) and len(value) <= 8
        found = f"({', '.join(map(shown, value))})" if is_flat else shown(value)
        return TransformError(f"{type(self).__name__}: {field} is {found}; it must be {allowed}")


class PictureOp(Op):
    """A step from RGB picture to RGB picture."""

    is_random: ClassVar[bool] = False

    def size_after(self, size: Size | None) -> Size | None:
        """Height and width after this step, if they are the same for every picture."""
        return size

    def apply(self, image: Image.Image, draw: Draw) -> Image.Image:
        """The new picture. Raises ValueError if this picture can't be transformed."""
        raise NotImplementedError


class TextOp(Op):
    """A step from text to whole numbers. A chain for texts is one of these and no other step."""

    @property
    def spec(self) -> TensorSpec:
        """What one text becomes: int32, with the inputs of the model along the first axis if there are several."""
        raise NotImplementedError

    @property
    def num_inputs(self) -> int:
        """That the model has."""
        raise NotImplementedError

    @property
    def num_ids(self) -> int:
        """How many different numbers there are."""
        raise NotImplementedError

    @property
    def needs(self) -> str:
        """The sha256 of the tokenizer that it needs beside its fields."""
        raise NotImplementedError

    def loaded(self) -> Any:
        """That, in memory, for as long as it is held. RefusedError if it is not on this machine; may take a moment."""
        raise NotImplementedError

    def apply(self, text: str) -> np.ndarray:
        """The numbers. Raises ValueError if this text can't be transformed."""
        raise NotImplementedError


class ValueOp(Op):
    """A step from numbers to numbers, the same for every pixel of a channel."""

    def apply(self, values: np.ndarray, channel: int) -> None:
        """Change the float32 values of one channel where they are."""
        raise NotImplementedError


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def is_int(value: Any, low: int, high: int = MAX_SIDE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any, low: float, high: float = math.inf) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return low <= value <= high and abs(value) <= sys.float_info.max  # NaN is not, nor a whole number beyond floats


def set_field(op: Op, name: str, value: Any) -> None:
    """Write the normal form of a field while a frozen dataclass is being made."""
    object.__setattr__(op, name, value)


def check_size(op: Op, name: str = "size") -> None:
    """Bring a size to (height, width): an int is a square."""
    value = getattr(op, name)
    pair = (value, value) if isinstance(value, int) else value
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(is_int(side, 1) for side in pair):
        raise op.fault(name, f"an int or (height, width), each from 1 to {MAX_SIDE:,}")
    if pair[0] * pair[1] > MAX_PIXELS:
        raise op.fault(name, f"at most {MAX_PIXELS:,} pixels")
    set_field(op, name, tuple(pair))


def check_interpolation(op: Op) -> None:
    if getattr(op, "interpolation", None) not in tuple(INTERPOLATIONS):
        raise op.fault("interpolation", f"one of {', '.join(INTERPOLATIONS)}")


def check_range(op: Op, name: str, low: float, high: float = math.inf) -> None:
    """Bring a field to (min, max) floats within low … high."""
    value = getattr(op, name)
    is_pair = isinstance(value, tuple | list) and len(value) == 2 and all(is_number(end, low, high) for end in value)
    if not is_pair or value[0] > value[1]:
        raise op.fault(name, f"(min, max) with {low} ≤ min ≤ max ≤ {high}")
    set_field(op, name, (float(value[0]), float(value[1])))


def check_probability(op: Op) -> None:
    if not is_number(getattr(op, "p", None), 0, 1):
        raise op.fault("p", "a number from 0 to 1")
    set_field(op, "p", float(op.p))  # type: ignore[attr-defined]


def check_fill(op: Op) -> None:
    """Bring a fill colour to (red, green, blue)."""
    value = op.fill  # type: ignore[attr-defined]
    colour = (value,) * 3 if is_int(value, 0, 255) else value
    if not isinstance(colour, tuple | list) or len(colour) != 3 or not all(is_int(part, 0, 255) for part in colour):
        raise op.fault("fill", "an int from 0 to 255 or three of them (red, green, blue)")
    set_field(op, "fill", tuple(colour))


def check_padding(op: Op) -> None:
    """Bring padding to (left, top, right, bottom): an int is all four, two are (left and right, top and bottom)."""
    value = op.padding  # type: ignore[attr-defined]
    sides = (value,) * 4 if isinstance(value, int) else value
    if isinstance(sides, tuple | list) and len(sides) == 2:
        sides = (*sides, *sides)
    if not isinstance(sides, tuple | list) or len(sides) != 4 or not all(is_int(side, 0) for side in sides):
        raise op.fault("padding", "an int, 2 or 4 ints (left, top, right, bottom), each 0 or more")
    set_field(op, "padding", tuple(sides))


def expand(image: Image.Image, padding: tuple[int, ...], fill: Any) -> Image.Image:
    """The picture with a border of (left, top, right, bottom)."""
    left, top, right, bottom = padding
    width, height = image.width + left + right, image.height + top + bottom
    if width * height > MAX_PIXELS:
        raise ValueError(f"padded to {width}×{height} it has more than {MAX_PIXELS:,} pixels; pad less")
    return ImageOps.expand(image, border=padding, fill=fill)


def check_constant(op: Op) -> None:
    if op.padding_mode != "constant":  # type: ignore[attr-defined]
        raise op.fault("padding_mode", "'constant', the only one there is")
