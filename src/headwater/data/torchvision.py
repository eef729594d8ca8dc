"""Reads the transforms people already have: torchvision's (v1, v2, the weights' presets) and timm's.

Owns `from_torchvision` and `as_transforms`. Goes by class name and attributes and imports neither library nor torch, so
it runs where they are not installed. What it can't read exactly, it does not read: a step that would give other numbers
on pictures than it gives on tensors stays with the trainer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from headwater.data.transforms import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    HorizontalFlip,
    Normalize,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transforms,
    VerticalFlip,
)
from headwater.data.transforms.op import INTERPOLATIONS, Op, PictureOp
from headwater.errors import TransformError

_LIBRARIES = ("torchvision", "timm")
_FLOAT = "a ToTensor(), or v2.ToImage() and v2.ToDtype(torch.float32, scale=True)"


class _UnreadableError(Exception):
    """A step that has no exact counterpart; the text says why."""


def from_torchvision(compose: Any) -> tuple[Transforms, list[Any]]:
    """(the transforms that could be read, the callables after them that could not).

    `compose` is a Compose of torchvision (v1 or v2) or timm, or `weights.transforms()`. TransformError if nothing in
    it makes float tensors, or if what can be read is no chain.

    The remaining callables must run on the trainer: on float tensors if the transforms are `is_float`, else on PIL
    pictures. A warning names the first one that could not be read. There can only be a remainder if what was read ends
    in a fixed size.
    """
    steps = list(_flatten(compose))
    ops: list[Op] = []
    # Where the walk is: "picture" (PIL), "bytes" (a uint8 tensor) or "float".
    form = "picture"
    to_bytes: list[Any] = []
    for place, step in enumerate(steps):
        try:
            found, after = _read(step, form)
        except _UnreadableError as error:
            # What was read ends in a picture, so the step that makes a tensor of it stays in front of the remainder.
            rest = [*(to_bytes if form == "bytes" else ()), *steps[place:]]
            return _with_rest(ops, rest, f"{_name(step)}: {error}"), rest
        if (form, after) == ("picture", "bytes"):
            to_bytes = [step]
        form = after
        ops += found
    transforms = Transforms(ops)
    if not transforms.is_float:
        raise TransformError(f"{_name(compose)} has no step that makes float tensors; add {_FLOAT}")
    return transforms, []


def as_transforms(x: Any) -> Transforms:
    """Transforms from themselves, from a list of steps (objects or JSON), or from a Compose that is read whole."""
    if isinstance(x, Transforms):
        return x
    if isinstance(x, list | tuple) and all(isinstance(step, Op | dict) for step in x):
        return Transforms.from_json([step if isinstance(step, dict) else step.to_json() for step in x])
    transforms, rest = from_torchvision(x)
    if rest:
        raise TransformError(
            f"{_name(rest[0])} can't run near the data; use from_torchvision() and run what remains on the trainer"
        )
    return transforms


def _with_rest(ops: list[Op], rest: list[Any], why: str) -> Transforms:
    transforms = Transforms(ops)
    try:
        size = "×".join(map(str, transforms.pixel_spec.shape[:2]))
    except TransformError:
        raise TransformError(
            f"{why}; and the steps before it leave pictures of different sizes, which can't be sent in batches: "
            "put CenterCrop, RandomResizedCrop or Resize((height, width)) on pictures before it"
        ) from None
    warnings.warn(
        f"{why}; it and what follows ({len(rest)} steps) stay on the trainer, after {size} pixels from the nodes",
        stacklevel=3,
    )
    return transforms


def _name(step: Any) -> str:
    return str(getattr(step, "__name__", type(step).__name__))


def _library(step: Any) -> str:
    return type(step).__module__.partition(".")[0]


def _flatten(step: Any) -> Iterable[Any]:
    """The steps of nested Compose and Sequential objects, and of the weights' preset, in order."""
    if isinstance(step, list | tuple):
        for inner in step:
            yield from _flatten(inner)
    elif type(step).__name__ == "Compose" and _library(step) in _LIBRARIES:
        yield from _flatten(list(step.transforms))
    elif type(step).__name__ == "Sequential" and _library(step) == "torch":
        yield from _flatten(list(step))
    elif callable(step):
        yield step
    else:
        raise TransformError(f"{step!r} is not a transform; give a Compose, weights.transforms() or Transforms([…])")


def _read(step: Any, form: str) -> tuple[list[Op], str]:
    """The counterparts of one step, and the form of the data after it."""
    name = _name(step)
    if _library(step) not in _LIBRARIES or name not in _READERS:
        raise _UnreadableError("is not a transform that can be read")
    try:
        ops, after = _READERS[name](step, form)
    except TransformError as error:  # a setting that only torchvision has
        raise _UnreadableError(str(error)) from None
    if name == "Normalize" and form != "float":
        raise TransformError(f"{name} needs a float tensor and gets {form}; put {_FLOAT} before it")
    for op in ops:
        if isinstance(op, PictureOp) and form == "bytes" and not isinstance(op, _SAME_ON_TENSORS):
            raise _UnreadableError("gives other numbers on tensors than on pictures; put it before the tensor step")
        if isinstance(op, PictureOp) and form == "float":
            raise _UnreadableError("comes after the step that makes floats; put it before")
    return ops, after or form


# Steps that move whole pixels: a uint8 tensor gets the same numbers from them as a picture.
_SAME_ON_TENSORS = (CenterCrop, RandomCrop, HorizontalFlip, VerticalFlip, Pad)


def _is_v2(step: Any) -> bool:
    return "v2" in type(step).__module__.split(".")


def _interpolation(value: Any) -> str:
    if isinstance(value, tuple | list):
        raise _UnreadableError("draws its interpolation at random; give it one")
    if isinstance(value, int):
        value = next((name for name, mode in INTERPOLATIONS.items() if mode == value), value)
    name = str(getattr(value, "value", value))
    return "nearest" if name == "nearest-exact" else name


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(float(part) for part in (value.tolist() if hasattr(value, "tolist") else value))


def _pair(value: Any) -> Any:
    """A size as an int or a pair: torchvision keeps some as lists of one."""
    parts = [value] if isinstance(value, int) else list(value)
    return int(parts[0]) if len(parts) == 1 else tuple(int(part) for part in parts)


def _fill(value: Any) -> Any:
    if value is None:
        return 0
    if isinstance(value, int | float):
        return int(value)
    if isinstance(value, tuple | list):
        return tuple(int(part) for part in value) if len(value) == 3 else int(value[0])
    raise _UnreadableError(f"fills with {type(value).__name__}; give one colour")


def _resize(step: Any, form: str) -> tuple[list[Op], str]:
    if step.size is None:
        raise _UnreadableError("has no size; give it one")
    return [Resize(_pair(step.size), _interpolation(step.interpolation), step.max_size)], ""


def _random_resized_crop(step: Any, form: str) -> tuple[list[Op], str]:
    scale, ratio = _numbers(step.scale), _numbers(step.ratio)
    return [RandomResizedCrop(_pair(step.size), scale, ratio, _interpolation(step.interpolation))], ""  # type: ignore[arg-type]


def _random_crop(step: Any, form: str) -> tuple[list[Op], str]:
    if step.pad_if_needed:
        raise _UnreadableError("has pad_if_needed; give it padding, or resize before it")
    padding: Any = step.padding or 0
    if _is_v2(step) and step.padding:
        left, right, top, bottom = step.padding  # v2 keeps another order than its arguments have
        padding = (left, top, right, bottom)
    return [RandomCrop(_pair(step.size), _sides(padding), _fill(step.fill), step.padding_mode)], ""


def _sides(padding: Any) -> Any:
    sides = [padding] if isinstance(padding, int) else list(padding)
    return sides[0] if len(sides) == 1 else tuple(sides)


def _pad(step: Any, form: str) -> tuple[list[Op], str]:
    return [Pad(_sides(step.padding), _fill(step.fill), step.padding_mode)], ""


def _jitter(step: Any, form: str) -> tuple[list[Op], str]:
    return [ColorJitter(step.brightness, step.contrast, step.saturation, step.hue)], ""


def _to_tensor(step: Any, form: str) -> tuple[list[Op], str]:
    if form != "picture":
        raise _UnreadableError("gets a tensor already; drop it")
    if _library(step) == "timm" and _name(step) == "ToTensor":
        _check_float(step.dtype)
        return [ToFloat("none")], "float"
    return [ToFloat("div")], "float"


def _to_bytes(step: Any, form: str) -> tuple[list[Op], str]:
    return [], "bytes" if form == "picture" else form


def _check_float(dtype: Any) -> None:
    if str(dtype) != "torch.float32":
        raise _UnreadableError(f"converts to {dtype}; only torch.float32 can be sent")


def _to_dtype(step: Any, form: str) -> tuple[list[Op], str]:
    _check_float(step.dtype)
    if form == "picture":
        raise _UnreadableError("leaves pictures as they are; put v2.ToImage() before it")
    if form == "float":
        return [], form
    # Only v1's ConvertImageDtype divides.
    if _name(step) == "ConvertImageDtype":
        return [ToFloat("mul" if _is_v2(step) else "div")], "float"
    return [ToFloat("mul" if step.scale else "none")], "float"


def _normalize(step: Any, form: str) -> tuple[list[Op], str]:
    return [Normalize(_numbers(step.mean), _numbers(step.std))], ""


def _preset(step: Any, form: str) -> tuple[list[Op], str]:
    if form != "picture":
        raise _UnreadableError("gives other numbers on tensors than on pictures; put it first")
    resize = Resize(_pair(step.resize_size), _interpolation(step.interpolation))
    normalize = Normalize(_numbers(step.mean), _numbers(step.std))
    return [resize, CenterCrop(_pair(step.crop_size)), ToFloat("div"), normalize], "float"


_Reader = Callable[[Any, str], tuple[list[Op], str]]
_READERS: dict[str, _Reader] = {
    "Resize": _resize,
    "CenterCrop": lambda step, form: ([CenterCrop(_pair(step.size))], ""),
    "RandomResizedCrop": _random_resized_crop,
    "RandomResizedCropAndInterpolation": _random_resized_crop,
    "RandomCrop": _random_crop,
    "Pad": _pad,
    "RandomHorizontalFlip": lambda step, form: ([HorizontalFlip(step.p)], ""),
    "RandomVerticalFlip": lambda step, form: ([VerticalFlip(step.p)], ""),
    "ColorJitter": _jitter,
    "Grayscale": lambda step, form: ([Grayscale(step.num_output_channels)], ""),
    "ToTensor": _to_tensor,
    "MaybeToTensor": _to_tensor,
    "ToImage": _to_bytes,
    "PILToTensor": _to_bytes,
    "MaybePILToTensor": _to_bytes,
    "ToPureTensor": lambda step, form: ([], ""),
    "Identity": lambda step, form: ([], ""),
    "RGB": lambda step, form: ([], ""),
    "ToDtype": _to_dtype,
    "ConvertImageDtype": _to_dtype,
    "Normalize": _normalize,
    "ImageClassification": _preset,
}
