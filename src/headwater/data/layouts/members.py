"""The members of a tar: names, sizes and places, read from its headers alone.

Owns the reading of ustar, GNU and pax headers. Python's `tarfile` reads more kinds, and versions of it that are in use
take time with the square of a pax header's length: 13 s for 80 KB (Python 3.11.7, measured). This takes no longer for a
header than for so many bytes, always moves on, and refuses what it can't place (sparse files, sizes below zero).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 512
MAX_EXTRA_BYTES = 1 << 20  # of a name or of pax records that stand in front of a header
_END = bytes(BLOCK)
_FILE, _OLD_FILE, _CONTIGUOUS = b"0", b"\0", b"7"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL, _SOLARIS_PAX = b"L", b"K", b"x", b"g", b"X"
_SPARSE = b"S"
_NO_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes: whatever size they state


@dataclass(frozen=True)
class Member:
    """A plain file in a tar: its bytes are `size` from `offset`."""

    name: str
    offset: int
    size: int


def read_members(file: BinaryIO, num_bytes: int) -> Iterator[Member]:
    """Every plain file of a tar of so many bytes. ValueError says in a few words what is wrong with it."""
    place, is_first = 0, True
    for_all: dict[str, str] = {}
    extra: dict[str, str] = {}
    while place < num_bytes:
        head = _read(file, place, BLOCK, num_bytes)
        if head == _END:
            break
        kind, size = _check(head, place)
        size = _number(extra["size"]) if "size" in extra and kind not in (_LONG_NAME, _LONG_LINK, _PAX) else size
        data = place + BLOCK
        length = 0 if kind in _NO_DATA else size
        if length > num_bytes - data:
            raise ValueError(f"the member at byte {place:,} has {length:,} bytes, more than are left")
        place = data + length + -length % BLOCK
        is_first = False
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL, _SOLARIS_PAX):
            if length > MAX_EXTRA_BYTES:
                raise ValueError(f"a header of {length:,} bytes; the limit is {MAX_EXTRA_BYTES:,}")
            text = _read(file, data, length, num_bytes)
            if kind == _LONG_NAME:
                extra["path"] = _text(text)
            elif kind == _PAX_FOR_ALL:
                for_all |= _records(text)
            elif kind != _LONG_LINK:
                extra |= _records(text)
            continue
        about: Mapping[str, str] = {**for_all, **extra}
        if kind == _SPARSE or any(name.startswith("GNU.sparse") for name in about):
            raise ValueError(f"the member at byte {data - BLOCK:,} is a sparse file, whose bytes are not in one piece")
        if kind in (_FILE, _OLD_FILE, _CONTIGUOUS):
            name = about.get("path") or _name(head)
            if not (kind == _OLD_FILE and name.endswith("/")):  # a folder, in the oldest form
                yield Member(name.rstrip("/"), data, size)
        extra = {}
    if is_first and num_bytes < BLOCK:
        raise ValueError("it is shorter than a header")


def _read(file: BinaryIO, place: int, length: int, num_bytes: int) -> bytes:
    if place + length > num_bytes:
        raise ValueError(f"it ends in the middle of a header at byte {place:,}")
    file.seek(place)
    data = file.read(length)
    if len(data) != length:
        raise ValueError(f"it ends at byte {place + len(data):,}")
    return data


def _check(head: bytes, place: int) -> tuple[bytes, int]:
    """The kind and the size that a header states, if its checksum is right."""
    written = _octal(head[148:156])
    plain = head[:148] + b" " * 8 + head[156:]
    total = sum(plain)
    if written != total and written != total - 256 * sum(byte > 127 for byte in plain):  # as some old writers counted
        raise ValueError(f"no header at byte {place:,} (its checksum is wrong)")
    field = head[124:136]
    size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)
    return head[156:157], size


def _octal(field: bytes) -> int:
    text = field.split(b"\0", 1)[0].strip() or b"0"
    if not text.isdigit() or max(text) > ord("7"):
        raise ValueError(f"a header has {field!r} for a number")
    return int(text, 8)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"a header has {text[:30]!r} for a size")
    return int(text)


def _name(head: bytes) -> str:
    name, prefix = _text(head[:100]), _text(head[345:500])
    is_posix = head[257:263] == b"ustar\0"  # GNU's own form has times there
    return f"{prefix}/{name}" if prefix and is_posix else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _records(text: bytes) -> dict[str, str]:
    """Pax records, "LENGTH KEY=VALUE\\n" each; the length counts all of it."""
    found, place = {}, 0
    while place < len(text) and text[place]:  # padding with NULs is met
        blank = text.find(b" ", place, place + 20)
        if blank <= place:  # no length: it would be read again, for ever
            raise ValueError("a pax header is damaged")
        stop = place + _number(text[place:blank].decode("ascii", "replace"))
        if not blank < stop <= len(text) or text[stop - 1 : stop] != b"\n":
            raise ValueError("a pax header is damaged")
        key, equals, value = text[blank + 1 : stop - 1].partition(b"=")
        if not equals:
            raise ValueError("a pax header is damaged")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        place = stop
    return found
