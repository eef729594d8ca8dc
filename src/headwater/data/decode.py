"""From the bytes of a picture to RGB pixels.

Owns which formats are read and what becomes of grey, CMYK, palettes, alpha, 16 bits and EXIF rotation. The result for
8-bit pictures is that of torchvision's folder loader, `Image.open(f).convert("RGB")`. May import `headwater.errors`.
"""

from __future__ import annotations

import io
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

from headwater.errors import BadSampleError

# Only these are tried: Pillow knows further formats, and some of them start other programs (EPS).
# MPO (a camera's several JPEGs in one) is opened as JPEG; Pillow has no opener of that name.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
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

    What can't be read, or has more than `max_pixels`, is a BadSampleError.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise BadSampleError(
                key,
                f"{width}×{height} is {width * height:,} pixels, the limit is {max_pixels:,}; "
                "shrink the picture, or raise Decode(max_pixels=…)",
            )
        image.load()
        if exif:
            image = ImageOps.exif_transpose(image)
        return _to_rgb(image)
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
        values = np.asarray(image).astype(np.int64)
        grey = (np.clip(values, 0, 65535) + 128) // 257
        image = Image.fromarray(grey.astype(np.uint8))
    # Without this Pillow warns about palettes with alpha; the RGB values are the same either way.
    image.info.pop("transparency", None)
    return image.convert("RGB")
