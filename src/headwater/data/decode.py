"""From the bytes of a picture to RGB pixels.

Owns which formats are read and what becomes of grey, CMYK, palettes, alpha, 16 bits and EXIF rotation. The result for
8-bit pictures is that of torchvision's folder loader, `Image.open(f).convert("RGB")`. May import `headwater.errors` and
`headwater.data.room`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

# Importing a plugin registers its format, so that no thread has to do it later.
from PIL import (
    BmpImagePlugin,  # noqa: F401
    GifImagePlugin,  # noqa: F401
    Image,
    ImageOps,
    JpegImagePlugin,  # noqa: F401
    MpoImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    PpmImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

from headwater.data.room import ROOM
from headwater.errors import BadSampleError

# Only these are tried: Pillow knows further formats, and some of them start other programs (EPS).
# MPO (a camera's several JPEGs in one) is opened as JPEG; Pillow has no opener of that name.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
_STRIP = 64  # lines
# Of a picture while it is worked on, at most: Pillow takes 4 for RGB, and as much after the first transform; a
# progressive JPEG has 6 beside the first 4 while it is read. WebP's own buffers come to more, and so do CMYK's and
# what we did not measure. By hand, 24 megapixels, the peak of the process: JPEG 8.2, progressive 10.0, PNG 8.2, WebP
# 16.3. ColorJitter at full size takes 20 (28 of a WebP).
PIXEL_BYTES, MOST_PIXEL_BYTES = 10, 16
_USUAL = ("JPEG", "MPO", "PNG")
MAX_PIXELS = 178_956_970  # where Pillow itself refuses: twice its Image.MAX_IMAGE_PIXELS


def is_picture(key: str) -> bool:
    """Whether the key ends like a picture that `decode` reads."""
    dot = key.rfind(".")
    return dot >= 0 and key[dot:].lower() in SUFFIXES


def decode(data: Any, key: str, *, exif: bool = False, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The first frame of a picture as RGB, at full size (JPEGs are never decoded in draft mode: it changes pixels).

    - Grey becomes three equal channels; CMYK is converted without a colour profile (Adobe's inverted JPEGs included).
    - Alpha is dropped and the colour below it kept, as torchvision's loader does; nothing is blended.
    - 16-bit grey is scaled to 8 bits (65535 becomes 255), where Pillow's own conversion would clip it to white.
      32-bit integers are taken as 16-bit values in a wider type. Floats are clipped to 0 … 255.
    - `exif=True` turns the picture upright; the default leaves it as stored, as torchvision's loader does.

    What can't be read, or has more than `max_pixels`, or more than there is memory for, is a BadSampleError.
    """
    with decoded(data, key, exif=exif, max_pixels=max_pixels) as image:
        return image


@contextmanager
def decoded(data: Any, key: str, *, exif: bool = False, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """The same for a block, after which the large picture is not needed any more: it waits until there is room."""
    with _faults(data, key):
        image = _open(data, key, max_pixels)
    with ROOM.of(image.width * image.height * _pixel_bytes(image)):
        with _faults(data, key):
            image.load()
            image = _to_rgb(ImageOps.exif_transpose(image) if exif else image)
        yield image


def _open(data: Any, key: str, max_pixels: int) -> Image.Image:
    """Its header alone: nothing is decoded yet."""
    image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        raise BadSampleError(
            key,
            f"{width}×{height} is {width * height:,} pixels, the limit is {max_pixels:,}; "
            "shrink the picture, or raise Decode(max_pixels=…)",
        )
    most = ROOM.most_bytes // _pixel_bytes(image)
    if width * height > most:
        raise BadSampleError(
            key,
            f"{width}×{height} is {width * height:,} pixels, and the memory here is for {most:,} at a time; "
            "shrink the picture, or decode it where there is more (a node: `headwater serve --memory`)",
        )
    return image


def _pixel_bytes(image: Image.Image) -> int:
    return PIXEL_BYTES if image.format in _USUAL and image.mode != "CMYK" else MOST_PIXEL_BYTES


@contextmanager
def _faults(data: Any, key: str) -> Iterator[None]:
    """Whatever Pillow makes of bad bytes, as a BadSampleError."""
    try:
        yield
    except (BadSampleError, MemoryError):  # no room is no fault of the picture
        raise
    except UnidentifiedImageError:
        start = bytes(memoryview(data)[:8])
        raise BadSampleError(
            key, f"not a picture ({len(data)} bytes, begins with {start!r}); read are {', '.join(FORMATS)}"
        ) from None
    except Exception as error:  # Pillow's parsers raise almost anything on damaged bytes
        raise BadSampleError(
            key, f"can't be decoded ({len(data)} bytes): {type(error).__name__}: {error}; replace it"
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # I;16, I;16B, I;16L, I
        values = np.asarray(image)
        grey = np.empty(values.shape, np.uint8)
        for start in range(0, len(values), _STRIP):  # a whole picture of wide numbers would take much memory
            strip = values[start : start + _STRIP].astype(np.int64)
            grey[start : start + _STRIP] = (np.clip(strip, 0, 65535) + 128) // 257
        image = Image.fromarray(grey)
    # Without this Pillow warns about palettes with alpha; the RGB values are the same either way.
    image.info.pop("transparency", None)
    return image.convert("RGB")
