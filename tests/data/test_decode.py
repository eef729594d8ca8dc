"""Decoding of what real folders contain."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headwater.data.decode import FORMATS, decode, is_picture
from headwater.errors import BadSampleError

Encode = Callable[..., bytes]


@pytest.fixture
def rgb(picture: Callable[..., Image.Image]) -> Image.Image:
    return picture(40, 30)


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "TIFF", "PPM", "WEBP", "JPEG"])
def test_every_format_gives_what_torchvisions_loader_gives(rgb: Image.Image, encode: Encode, form: str) -> None:
    data = encode(rgb, form)
    got = decode(data, "x")
    assert got.mode == "RGB"
    assert got.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        ("1", "PNG"),
        ("L", "PNG"),
        ("L", "JPEG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("P", "GIF"),
        ("RGBA", "PNG"),
        ("RGBA", "WEBP"),
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
        ("LAB", "TIFF"),
        ("YCbCr", "JPEG"),
    ],
)
def test_every_8_bit_mode_gives_what_torchvisions_loader_gives(
    rgb: Image.Image, encode: Encode, mode: str, form: str
) -> None:
    source = rgb.convert("RGB")
    if mode == "LAB":
        source = Image.frombytes("LAB", rgb.size, rgb.tobytes())
    data = encode(source.convert(mode) if mode != "LAB" else source, form)
    assert decode(data, "x").tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_an_adobe_cmyk_jpeg_is_not_a_negative(encode: Encode) -> None:
    data = encode(Image.new("RGB", (16, 16), (250, 240, 10)).convert("CMYK"), "JPEG", quality=95)
    assert b"Adobe" in data
    assert np.abs(np.asarray(decode(data, "x")).astype(int) - (250, 240, 10)).max() < 12


@pytest.mark.filterwarnings("error")
def test_a_palette_with_alpha_keeps_its_colours_and_warns_of_nothing(rgb: Image.Image, encode: Encode) -> None:
    palette = rgb.quantize(16)
    data = encode(palette, "PNG", transparency=bytes([0, 128] + [255] * 14))
    assert decode(data, "x").tobytes() == palette.convert("RGB").tobytes()


def test_alpha_is_dropped_and_the_colour_below_kept(encode: Encode) -> None:
    data = encode(Image.new("RGBA", (2, 2), (10, 20, 30, 0)))
    assert decode(data, "x").getpixel((0, 0)) == (10, 20, 30)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_and_not_clipped_to_white(encode: Encode, form: str) -> None:
    values = np.array([[0, 257, 32896, 65535], [128, 129, 300, 65278]], np.uint16)
    got = np.asarray(decode(encode(Image.fromarray(values), form), "x"))
    assert got[..., 0].tolist() == [[0, 1, 128, 255], [0, 1, 1, 254]]
    assert (got == got[..., :1]).all()


def test_big_endian_16_bit_tiff_is_scaled_too(encode: Encode) -> None:
    values = np.array([[0, 65535]], np.uint16)
    image = Image.frombytes("I;16B", (2, 1), values.astype(">u2").tobytes())
    assert np.asarray(decode(encode(image, "TIFF"), "x"))[..., 0].tolist() == [[0, 255]]


def test_exif_rotation_is_applied_only_if_asked_for(encode: Encode, rgb: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right to see it upright
    data = encode(rgb, "JPEG", exif=exif)
    assert decode(data, "x").size == (40, 30)
    upright = decode(data, "x", exif=True)
    assert upright.size == (30, 40)
    assert upright.tobytes() == decode(data, "x").transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("form", ["GIF", "WEBP", "TIFF"])
def test_an_animation_gives_its_first_frame(encode: Encode, form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encode(
        frames[0], form, save_all=True, append_images=frames[1:], **({"lossless": True} if form == "WEBP" else {})
    )
    assert decode(data, "x").getpixel((4, 4))[0] > 250  # type: ignore[index]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_picture_is_a_bad_sample(picture: Callable[..., Image.Image], encode: Encode, form: str) -> None:
    data = encode(picture(100, 80), form)
    with pytest.raises(BadSampleError, match=r"^cat/1: ") as caught:
        decode(data[: len(data) // 2], "cat/1")
    assert caught.value.key == "cat/1"


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"not a picture at all", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\0" * 100])
def test_what_is_no_picture_is_a_bad_sample_that_says_what_is_read(data: bytes) -> None:
    with pytest.raises(BadSampleError, match=r"x: (not a picture|can't be decoded)"):
        decode(data, "x")
    assert "EPS" not in FORMATS


def test_a_picture_bomb_is_refused_before_it_is_decoded(encode: Encode) -> None:
    bomb = bytearray(encode(Image.new("L", (8, 8))))
    bomb[16:24] = struct.pack(">2I", 60_000, 60_000)  # the header says 3.6 thousand million pixels
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    with pytest.raises(BadSampleError, match=r"3600000000 pixels|3,600,000,000 pixels"):
        decode(bytes(bomb), "x")
    with pytest.raises(BadSampleError, match=r"8×8 is 64 pixels, the limit is 63; .*max_pixels"):
        decode(encode(Image.new("L", (8, 8))), "x", max_pixels=63)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"]), st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_bytes_give_a_picture_or_a_bad_sample_and_nothing_else(form: str, place: int, value: int) -> None:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((20, 20)).convert("RGB").save(buffer, form)
    data = bytearray(buffer.getvalue())
    data[place % len(data)] = value
    with contextlib.suppress(BadSampleError):
        assert decode(bytes(data), "x", max_pixels=10**6).mode == "RGB"


def test_pictures_are_known_by_their_ending() -> None:
    assert is_picture("a/b.JPEG")
    assert is_picture("x.tar/y.webp")
    assert not is_picture("a/b.txt")
    assert not is_picture("jpg")
