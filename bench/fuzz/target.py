"""What a target is, and the scratch folder that it works in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

Harness = Callable[[bytes], None]
SECRET = b"headwater-fuzz-secret"  # in every file that no input may lead to


@dataclass(frozen=True)
class Room:
    """A folder of its own: `root` is served, `state` is the node's, and what is `outside` nobody may open."""

    root: Path
    state: Path
    outside: Path

    @classmethod
    def make(cls, folder: Path) -> Room:
        room = cls(folder / "root", folder / "state", folder / "outside")
        for each in (room.root / "a", room.root / "b", room.state, room.outside):
            each.mkdir(parents=True)
        pixels = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
        for name in ("a/0.jpg", "a/1.png", "b/2.jpg"):
            Image.fromarray(pixels).save(room.root / name)
        (room.root / "b" / "3.jpg").write_bytes(b"no picture")
        for name in ("secret.jpg", "secret.csv", "secret.onnx"):
            (room.outside / name).write_bytes(SECRET)
        return room

    def fill_in(self, data: bytes) -> bytes:
        """Inputs name the folders by words, so that they mean the same in every room."""
        return data.replace(b"@ROOT@", str(self.root).encode()).replace(b"@OUTSIDE@", str(self.outside).encode())


@dataclass(frozen=True)
class Target:
    """A parser that strangers' bytes reach.

    name       of the target, and of its folder in the corpus
    about      what it is, in a few words
    make       the harness, in a room: bytes in, nothing out, and no error but those `allowed`
    seeds      good inputs, which others are made from
    kind       of mutation, beside plain bytes
    allowed    the plain errors that an input may meet; their subclasses, too
    share      how many of a thousand inputs it gets
    contained  it runs in a child process in the product as well, so what breaks there ends no node
    """

    name: str
    about: str
    make: Callable[[Room], Harness]
    seeds: Callable[[], Sequence[bytes]]
    allowed: tuple[type[Exception], ...]
    share: int
    kind: str = "bytes"
    contained: bool = False


def join(*parts: bytes) -> bytes:
    """Several parts in one input; all but the last are led by their length."""
    return b"".join(struct.pack(">H", len(part)) + part for part in parts[:-1]) + parts[-1]


def split(data: bytes, count: int) -> list[bytes]:
    """The way back, whatever the bytes."""
    parts = []
    for _ in range(count - 1):
        size = int.from_bytes(data[:2], "big")
        parts.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [*parts, data]
