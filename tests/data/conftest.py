"""Small pictures and data sets for the tests of `headwater.data`."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakePicture = Callable[..., Image.Image]
Encode = Callable[..., bytes]


def _picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def _encode(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def picture() -> MakePicture:
    """picture(width, height, seed): an RGB picture with some structure."""
    return _picture


@pytest.fixture(scope="session")
def encode() -> Encode:
    """encode(image, form, **options): the picture as the bytes of a file."""
    return _encode


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    """Two classes, three pictures, one of them deeper down."""
    root = tmp_path / "set"
    for number, name in enumerate(("cat/1.png", "cat/deep/2.PNG", "dog/3.png")):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_encode(_picture(seed=number)))
    return root


@pytest.fixture
def make_tar() -> Callable[[Path, dict[str, bytes]], bytes]:
    """make_tar(path, members): write a tar and return its bytes."""

    def make(path: Path, members: dict[str, bytes]) -> bytes:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return path.read_bytes()

    return make
