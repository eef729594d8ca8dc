"""A chain of transforms: from the bytes of a picture to the model's input.

Owns `Transforms`: the order in which steps may stand, what comes out (known without running), and the running itself,
which holds no state that threads could share. The picture part gives uint8 pixels; the value part is arithmetic on them
in float32, step by step, as torchvision does it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from headwater.core.draw import Draw
from headwater.core.form import shown
from headwater.core.spec import TensorSpec
from headwater.data import transforms as table
from headwater.data.decode import decoded
from headwater.data.shards.record import WAY_OUT, is_record, read_record
from headwater.data.transforms.decodestep import Decode
from headwater.data.transforms.op import Op, PictureOp, Size, TextOp, ValueOp
from headwater.data.transforms.tofloat import ToFloat
from headwater.errors import BadSampleError, ConfigError, TransformError

_MAX_OPS = 100  # a chain comes over the wire; nobody writes one this long


class Transforms:
    """Decode, then picture steps, then ToFloat and Normalize; or a step for texts alone. Immutable; equal if their JSON
    is equal.

    A chain without ToFloat ends in uint8 pixels (`is_float` is False): the rest of the work is then the trainer's.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        steps = tuple(ops)
        self.text: TextOp | None = None
        if any(isinstance(op, TextOp) for op in steps):
            if len(steps) > 1 or not isinstance(steps[0], TextOp):
                raise TransformError(f"{' and '.join(type(op).__name__ for op in steps[:3])}: a step for texts stands "
                                     "alone; leave the others out")  # fmt: skip
            self.text = steps[0]
            self.ops = steps
            self._pictures: tuple[tuple[int, PictureOp], ...] = ()
            self._values: tuple[ValueOp, ...] = ()
            self._starts: dict[int, bytes] = {}
            return
        if not steps or not isinstance(steps[0], Decode):
            steps = (Decode(), *steps)
        self.ops = steps
        for place, op in enumerate(steps):
            self._check_place(place, op)
        assert isinstance(steps[0], Decode)
        self._decode = steps[0]
        self._pictures = tuple((step, op) for step, op in enumerate(steps) if isinstance(op, PictureOp))
        self._values = tuple(op for op in steps if isinstance(op, ValueOp))
        self._starts = {}

    def _check_place(self, place: int, op: Op) -> None:
        name, before = type(op).__name__, self.ops[:place]
        if not isinstance(op, Decode | PictureOp | ValueOp):
            raise TransformError(f"step {place} is {op!r}; it must be one of {', '.join(table.OPS)}")
        if isinstance(op, Decode) and place:
            raise TransformError(f"{name} is step {place}; it can only be the first one")
        if isinstance(op, PictureOp) and any(isinstance(earlier, ValueOp) for earlier in before):
            raise TransformError(f"{name} is step {place}, after {type(before[-1]).__name__}; move it before ToFloat")
        has_float = any(isinstance(earlier, ToFloat) for earlier in before)
        if isinstance(op, ToFloat) and has_float:
            raise TransformError(f"{name} is step {place} for the second time; keep one of them")
        if isinstance(op, ValueOp) and not isinstance(op, ToFloat) and not has_float:
            raise TransformError(f"{name} is step {place} and needs floats; put ToFloat() before it")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transforms) and self.ops == other.ops

    def __hash__(self) -> int:
        return hash(self.ops)

    def __repr__(self) -> str:
        return f"Transforms({list(self.ops)!r})"

    def to_json(self) -> list[dict[str, Any]]:
        return [op.to_json() for op in self.ops]

    @classmethod
    def from_json(cls, data: object) -> Transforms:
        """From plain data that anyone may have written: every field is checked."""
        if not isinstance(data, list) or len(data) > _MAX_OPS:
            raise TransformError(f"transforms are a list of at most {_MAX_OPS} steps, not {shown(data)}")
        ops = []
        for place, item in enumerate(data):
            name = item.get("op") if isinstance(item, Mapping) else None
            if not isinstance(item, Mapping) or not isinstance(name, str) or name not in table.OPS:
                known = ", ".join(table.OPS)
                raise TransformError(f'step {place} is {_step(item)}; it must be {{"op": …}} with one of {known}')
            ops.append(table.OPS[name].from_json({key: value for key, value in item.items() if key != "op"}))
        return cls(ops)

    @cached_property
    def digest(self) -> str:
        """sha256 of the JSON form."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def fixed_part(self) -> Transforms:
        """The leading steps that give the same pixels every time: up to the first that is random or makes floats."""
        if self.text is not None:
            return self
        ops: list[Op] = [self._decode]
        for op in self.ops[1:]:
            if not isinstance(op, PictureOp) or op.is_random:
                break
            ops.append(op)
        return Transforms(ops)

    def start_digest(self, num_steps: int) -> bytes:
        """16 bytes that stand for the first steps, as a record of a shard names them."""
        if num_steps not in self._starts:
            text = json.dumps(self.to_json()[:num_steps], sort_keys=True, separators=(",", ":"))
            self._starts[num_steps] = hashlib.sha256(text.encode()).digest()[:16]
        return self._starts[num_steps]

    @property
    def is_random(self) -> bool:
        return any(op.is_random for _, op in self._pictures)

    @property
    def is_float(self) -> bool:
        """Whether the chain ends in floats; if not, it ends in pixels, or in tokens."""
        return bool(self._values)

    @property
    def is_whole(self) -> bool:
        """Whether the chain ends in what a model takes."""
        return self.is_float or self.text is not None

    def inputs_of(self, values: Any) -> tuple[Any, ...]:
        """The model's inputs, of what `finish` gives for a batch (an array or a tensor)."""
        if self.text is None or self.text.num_inputs == 1:
            return (values,)
        return tuple(values[:, number] for number in range(self.text.num_inputs))

    @cached_property
    def fixed_size(self) -> Size | None:
        """Height and width that every picture has afterwards; None if they differ."""
        size: Size | None = None
        for _, op in self._pictures:
            size = op.size_after(size)
        return size

    @cached_property
    def pixel_spec(self) -> TensorSpec:
        """What the picture part gives: uint8 height × width × 3; of a text, its tokens."""
        if self.text is not None:
            return self.text.spec
        size = self.fixed_size
        if size is None:
            names = ", ".join(type(op).__name__ for _, op in self._pictures) or "no step"
            raise TransformError(
                f"the pictures keep different sizes after {names}, so they can't form a batch; "
                "end with CenterCrop(size), RandomResizedCrop(size) or Resize((height, width))"
            )
        return TensorSpec("pixels", (*size, 3), "uint8")

    @cached_property
    def output_spec(self) -> TensorSpec:
        """What `apply` gives: float32 3 × height × width, or the pixels of a chain without ToFloat."""
        if self.text is not None:
            return TensorSpec("input", self.text.spec.shape, "int64")
        if not self.is_float:
            return self.pixel_spec
        height, width, channels = self.pixel_spec.shape
        return TensorSpec("input", (channels, height, width), "float32")

    def pixels(
        self, data: Any, key: str, draw: Draw | None = None, on_decoded: Callable[[], None] = lambda: None
    ) -> np.ndarray:
        """The picture part: from bytes (or an RGB picture) to uint8 height × width × 3.

        The bytes are a picture's file, or a record of a shard: then its steps are done, and the others follow.
        `on_decoded` is called before the first transform.
        """
        if self.text is not None:
            on_decoded()
            return self._tokens(data, key)
        if draw is None:
            if self.is_random:
                raise ConfigError(f"{key}: the transforms are random; give the sample's Draw(seed, epoch, id)")
            draw = Draw(0, 0, 0)
        left = self._pictures
        if isinstance(data, Image.Image):
            image = data.convert("RGB")
        elif is_record(data):
            record = read_record(data, key)
            if record.digest != self.start_digest(record.num_steps):
                raise TransformError(
                    f"{key} was packed with other transforms than these, which begin with "
                    f"{', '.join(type(op).__name__ for op in self.ops[: record.num_steps])}; pack the source again "
                    "with the transforms that you train with"
                )
            left = tuple((step, op) for step, op in left if step >= record.num_steps)
            if not left:
                self._check_size(record.pixels, key)
                return record.pixels
            image = Image.fromarray(record.pixels)
        else:
            with decoded(data, key, exif=self._decode.exif, max_pixels=self._decode.max_pixels) as image:
                on_decoded()
                return self._transformed(image, left, key, draw)
        on_decoded()
        return self._transformed(image, left, key, draw)

    def _tokens(self, data: Any, key: str) -> np.ndarray:
        assert self.text is not None
        try:
            return self.text.apply(bytes(data).decode())
        except ValueError as error:
            raise BadSampleError(key, f"{type(self.text).__name__}: {error}") from error

    def _transformed(
        self, image: Image.Image, left: Sequence[tuple[int, PictureOp]], key: str, draw: Draw
    ) -> np.ndarray:
        for step, op in left:
            try:
                image = op.apply(image, draw.stream(step))
            except (ValueError, ArithmeticError) as error:
                raise BadSampleError(key, f"{type(op).__name__}: {error}") from error
        return np.asarray(image)

    def _check_size(self, pixels: np.ndarray, key: str) -> None:
        """A record says by itself how large it is; NumPy would make a single pixel fit anywhere."""
        height, width = self.fixed_size or pixels.shape[:2]
        if pixels.shape != (height, width, 3):
            raise BadSampleError(
                key, f"a record of {pixels.shape[1]}×{pixels.shape[0]} pixels, where the transforms give "
                f"{width}×{height}: the shard is not of these transforms; {WAY_OUT}"
            )  # fmt: skip

    def finish(self, pixels: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The value part: uint8 [batch ×] height × width × 3 to float32 [batch ×] 3 × height × width."""
        if self.text is not None:
            if out is None:
                return pixels.astype(np.int64)
            np.copyto(out, pixels)
            return out
        if not self.is_float:
            raise TransformError("the transforms end in pixels; add ToFloat(), and Normalize(…) if the model needs it")
        if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or pixels.shape[-1] != 3:
            raise ConfigError(f"finish takes uint8 [batch ×] height × width × 3, not {pixels.dtype} {pixels.shape}")
        shape = (*pixels.shape[:-3], 3, *pixels.shape[-3:-1])
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32:
            raise ConfigError(f"finish writes float32 {shape}; out is {out.dtype} {out.shape}")
        # One picture and channel at a time stays in the cache: 0.14 ms for 224×224 where a table lookup took 0.17, and
        # 0.21 where it took 0.32 with others on the machine (measured).
        for picture, target in zip(pixels, out, strict=True) if pixels.ndim == 4 else ((pixels, out),):
            for channel in range(3):
                values = target[channel]
                np.copyto(values, picture[..., channel])
                for op in self._values:
                    op.apply(values, channel)
        return out

    def apply(self, data: Any, key: str, draw: Draw | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """All of it: `pixels`, then `finish` if the chain is a float one."""
        pixels = self.pixels(data, key, draw)
        if self.is_whole:
            return self.finish(pixels, out)
        if out is None:
            return pixels
        np.copyto(out, pixels)
        return out


def _step(item: object) -> str:
    """What a step that is none looks like."""
    return f"an object whose op is {shown(item.get('op'))}" if isinstance(item, Mapping) else shown(item)
